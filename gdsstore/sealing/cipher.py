"""Sealing pages: AES-256-GCM under keys of a store's own. docs/format.md says byte for byte what a sealed page is.

One key may seal 2^32 pages with random nonces (NIST SP 800-38D, 8.3), which a busy node writes within days. So each process seals
under a key of its own, derived with a random salt that stands in front of the page.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections import OrderedDict
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from gdsstore.errors import MissingExtraError
from gdsstore.memory.copying import zero_ranges

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

U8 = npt.NDArray[np.uint8]
U64 = npt.NDArray[np.uint64]

SEALED_VERSION = 1
CIPHER = "AES-256-GCM"
SALT_BYTES, NONCE_BYTES, TAG_BYTES = 16, 12, 16
HEAD_BYTES = SALT_BYTES + NONCE_BYTES
OVERHEAD_BYTES = HEAD_BYTES + TAG_BYTES
STORE_INFO, KEY_ID_INFO, PAGE_INFO = b"gdsstore pages v1", b"gdsstore key id v1", b"gdsstore page key v1"
KEY_ID_BYTES = 8
AAD_TAG = b"gdsstore sealed page 1"
PAGES_A_KEY = 1 << 31  # half of what is allowed: calls under way may go over it
KEYS_KEPT = 256  # of other processes and earlier runs


def derive(key: bytes, salt: bytes, info: bytes, nbytes: int = 32) -> bytes:
    """HKDF-SHA256 (RFC 5869). Raises MissingExtraError."""
    try:
        from cryptography.hazmat.primitives.hashes import SHA256
        from cryptography.hazmat.primitives.kdf.hkdf import HKDF
    except ImportError:
        raise MissingExtraError("cryptography", "encryption", "encryption_key_file") from None
    return HKDF(SHA256(), nbytes, salt, info).derive(key)


class PageCipher:
    """Seals and opens the pages of one store. Thread-safe. `key_id`: says which key it is, and nothing of the key."""

    def __init__(self, master: bytes, store_uuid: bytes) -> None:
        """Raises MissingExtraError."""
        self._key = derive(master, store_uuid, STORE_INFO)
        self.key_id = derive(master, store_uuid, KEY_ID_INFO, KEY_ID_BYTES).hex()
        from cryptography.exceptions import InvalidTag
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM

        if not hasattr(AESGCM, "decrypt_into"):
            raise MissingExtraError("a newer cryptography", "encryption", "encryption_key_file")
        self._make: Any = AESGCM
        self._wrong: type[Exception] = InvalidTag
        self._lock = threading.Lock()
        self._opening: OrderedDict[bytes, AESGCM] = OrderedDict()
        self._salt, self._left = b"", 0

    def seal(self, digest: bytes, keys: U8, source: U64, nbytes: int, target: U64) -> None:
        """Seal n pages of `nbytes` bytes at the addresses `source`; each takes OVERHEAD_BYTES more at `target`.

        `digest`: of their namespace; `keys`: uint8 (n, 32). Both are authenticated with the page.
        """
        salt, cipher = self._for_sealing(len(keys))
        nonces = os.urandom(NONCE_BYTES * len(keys))
        prefix = AAD_TAG + digest
        for i, (clear, sealed) in enumerate(zip(source.tolist(), target.tolist(), strict=True)):
            nonce = nonces[i * NONCE_BYTES : (i + 1) * NONCE_BYTES]
            view = _bytes_at(sealed, nbytes + OVERHEAD_BYTES)
            view[:HEAD_BYTES] = salt + nonce
            cipher.encrypt_into(
                nonce, _bytes_at(clear, nbytes), prefix + keys[i].tobytes(), view[HEAD_BYTES:]
            )

    def open(self, digest: bytes, keys: U8, source: U64, nbytes: int, target: U64) -> npt.NDArray[np.bool_]:
        """The inverse. Which pages are what was sealed under these names, shape (n,); of the others `target` is zeros."""
        good = np.ones(len(keys), np.bool_)
        prefix = AAD_TAG + digest
        for i, (sealed, clear) in enumerate(zip(source.tolist(), target.tolist(), strict=True)):
            view = _bytes_at(sealed, nbytes + OVERHEAD_BYTES)
            cipher = self._for_opening(bytes(view[:SALT_BYTES]))
            nonce = bytes(view[SALT_BYTES:HEAD_BYTES])
            try:
                cipher.decrypt_into(
                    nonce, view[HEAD_BYTES:], prefix + keys[i].tobytes(), _bytes_at(clear, nbytes)
                )
            except self._wrong:
                good[i] = False
        wrong = target[~good]
        if len(wrong):  # the library has written there before it saw the tag
            zero_ranges(wrong, np.full(len(wrong), nbytes, np.int64))
        return good

    def _for_sealing(self, pages: int) -> tuple[bytes, AESGCM]:
        with self._lock:
            if self._left < pages:
                self._salt, self._left = os.urandom(SALT_BYTES), PAGES_A_KEY
            self._left -= pages
            salt = self._salt
        return salt, self._for_opening(salt)

    def _for_opening(self, salt: bytes) -> AESGCM:
        with self._lock:
            cipher = self._opening.get(salt)
            if cipher is None:
                cipher = self._make(derive(self._key, salt, PAGE_INFO))
                self._opening[salt] = cipher
                if len(self._opening) > KEYS_KEPT:
                    self._opening.popitem(last=False)
            self._opening.move_to_end(salt)
            return cipher


def _bytes_at(address: int, nbytes: int) -> memoryview:
    return memoryview((ctypes.c_ubyte * nbytes).from_address(address)).cast("B")
