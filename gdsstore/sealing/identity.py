"""What a namespace is on the drives when its pages are sealed: another one, for each key."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from gdsstore.layout import PageLayout
from gdsstore.namespace import Namespace, digest_of
from gdsstore.sealing.cipher import CIPHER, OVERHEAD_BYTES, SEALED_VERSION


@dataclass(frozen=True, slots=True)
class SealedNamespace:
    """`layout`: of the sealed pages. `key_id`: see PageCipher; with another key, pages are in another namespace and miss.

    Raises ArgumentError for pages that are too large when they are sealed.
    """

    namespace: Namespace
    key_id: str
    digest: bytes = field(init=False)
    layout: PageLayout = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "digest", digest_of(self.describe()))
        sealed_bytes = self.namespace.layout.page_bytes + OVERHEAD_BYTES
        object.__setattr__(self, "layout", PageLayout.opaque(sealed_bytes))

    def describe(self) -> dict[str, Any]:
        """The versioned struct that the digest covers. `layout` in it is that of the pages in the clear."""
        sealed = {"version": SEALED_VERSION, "cipher": CIPHER, "key": self.key_id}
        return {**self.namespace.describe(), "sealed": sealed}
