"""Where the bytes of pages lie in the caller's memory, without copying any."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from gdsstore.errors import ArgumentError
from gdsstore.layout import ALIGNMENT

U64 = npt.NDArray[np.uint64]
I64 = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Pieces:
    """Pages given as raw memory: page i is the bytes at `address[i, 0]`, then those at `address[i, 1]`, and so on.

    `address`: (n, k) or (n,); `length` in bytes: (n, k), (k,) for pages that are all alike, or one number. `owner` is kept
    alive until the call is over. Addresses are trusted: a wrong one crashes the process, as it would in C.
    """

    address: npt.ArrayLike
    length: npt.ArrayLike
    owner: object = None


Pages: TypeAlias = Any
"""`Pieces`, a numpy array or a CPU torch tensor whose first dimension counts pages, or a sequence of arrays, one a page."""


class Ready(Protocol):
    """Somebody's work on memory, which must end before ours begins."""

    def wait(self, timeout_s: float) -> bool:
        """Wait for its end, at most `timeout_s`; whether it came. Raises DeviceError where the work failed."""


@dataclass(frozen=True, slots=True)
class PageMemory:
    """n pages of k pieces each. `address`: uint64 (n, k); `length` in bytes: int64 (n, k)."""

    address: U64
    length: I64
    owner: object
    ready: Ready | None = None  # None: now

    def __len__(self) -> int:
        return len(self.address)

    @property
    def page_bytes(self) -> I64:
        """Payload bytes of each page, shape (n,)."""
        return np.asarray(self.length.sum(axis=1), np.int64)

    def take(self, index: npt.NDArray[np.intp]) -> PageMemory:
        return PageMemory(self.address[index], self.length[index], self.owner, self.ready)

    def direct(self, memory_alignment: int) -> npt.NDArray[np.bool_]:
        """Which pages the drive can read and write in place: every piece aligned, in whole blocks. Shape (n,)."""
        aligned = (self.address % np.uint64(memory_alignment) == 0) & (self.length % ALIGNMENT == 0)
        return np.asarray(aligned.all(axis=1), np.bool_)


def describe(pages: Pages, count: int, page_bytes: int, *, writable: bool) -> PageMemory:
    """The memory of `count` pages of `page_bytes` bytes. Raises ArgumentError where they are not that, or not usable."""
    return checked(_describe(pages, writable), count, page_bytes)


def checked(memory: PageMemory, count: int, page_bytes: int) -> PageMemory:
    """`memory`, if it is that of `count` pages of `page_bytes` bytes. Raises ArgumentError where it is not."""
    if len(memory) != count:
        raise ArgumentError(f"{count} keys, but memory for {len(memory)} pages")
    if (memory.length <= 0).any():
        raise ArgumentError("a piece of a page has no bytes")
    wrong = np.flatnonzero(memory.page_bytes != page_bytes)
    if len(wrong):
        raise ArgumentError(
            f"page {wrong[0]} has {memory.page_bytes[wrong[0]]} bytes, the namespace's layout says {page_bytes}"
        )
    return memory


def refuse_shared(memory: PageMemory) -> None:
    """Raises ArgumentError where a page is to be loaded to where another one goes, too: the one that comes first would be taken for
    damaged, and dropped."""
    first = np.sort(memory.address[:, 0])
    if (first[1:] == first[:-1]).any():
        raise ArgumentError(
            "two pages are to be loaded into the same memory: give each page memory of its own"
        )


def _describe(pages: Pages, writable: bool) -> PageMemory:
    if isinstance(pages, Pieces):
        return pieces_memory(pages.address, pages.length, pages.owner)
    if isinstance(pages, np.ndarray):
        return _array(pages, writable)
    if is_tensor(pages):
        if pages.device.type != "cpu":
            raise ArgumentError(
                f"tensors on {pages.device} cannot be moved by the host path; copy them to the CPU first"
            )
        return tensor_memory(pages, writable)
    if is_sequence(pages):
        return joined([_describe(one_page(page), writable) for page in pages], list(pages))
    raise ArgumentError(f"pages must be arrays, a CPU tensor or gdsstore.Pieces, not {type(pages).__name__}")


def is_tensor(pages: Any) -> bool:
    return type(pages).__module__.partition(".")[0] == "torch"


def is_sequence(pages: Any) -> bool:
    return isinstance(pages, Sequence) and not isinstance(pages, (bytes, bytearray, str))


def joined(parts: list[PageMemory], owner: object) -> PageMemory:
    """The pages of all parts, in order."""
    if not parts:
        return PageMemory(np.zeros((0, 1), np.uint64), np.zeros((0, 1), np.int64), owner)
    return PageMemory(
        np.concatenate([part.address for part in parts]),
        np.concatenate([part.length for part in parts]),
        owner,
    )


def one_page(page: Any) -> Any:
    """An element of a sequence of pages, as pages of its own. Raises ArgumentError where it is no array."""
    try:
        return page[None]
    except (TypeError, IndexError):
        raise ArgumentError(
            f"a sequence of pages must hold arrays or tensors, not {type(page).__name__}"
        ) from None


def pieces_memory(addresses: npt.ArrayLike, lengths: npt.ArrayLike, owner: object) -> PageMemory:
    """See `Pieces` for the shapes."""
    address = np.asarray(addresses)
    if address.dtype.kind not in "iu" or address.ndim not in (1, 2):
        raise ArgumentError("Pieces.address must be integers of shape (n,) or (n, k)")
    address = address.astype(np.uint64)
    address = address[:, None] if address.ndim == 1 else address
    length = np.asarray(lengths)
    if length.dtype.kind not in "iu":
        raise ArgumentError("Pieces.length must be integers, in bytes")
    if length.shape == (len(address),) and address.shape[1] == 1:
        length = length[:, None]  # one piece a page, each of its own length
    try:
        length = np.broadcast_to(length.astype(np.int64), address.shape)
    except ValueError:
        raise ArgumentError(
            f"Pieces.length of shape {length.shape} does not fit addresses of shape {address.shape}"
        ) from None
    if (address == 0).any():
        raise ArgumentError("a piece has address 0")
    return PageMemory(address, np.ascontiguousarray(length), owner)


def _array(pages: npt.NDArray[Any], writable: bool) -> PageMemory:
    if pages.ndim == 0:
        raise ArgumentError("pages must have a first dimension that counts them")
    if pages.dtype.hasobject:
        raise ArgumentError("pages of Python objects have no bytes to store")
    if writable and not pages.flags.writeable:
        raise ArgumentError("cannot load into a read-only array")
    if len(pages) and not pages[0].flags.c_contiguous:
        raise ArgumentError("each page must be contiguous; describe scattered ones with gdsstore.Pieces")
    nbytes = pages[0].nbytes if len(pages) else 0
    return strided(pages.ctypes.data, len(pages), pages.strides[0], nbytes, pages, writable)


def tensor_memory(pages: Any, writable: bool) -> PageMemory:
    """A torch tensor's memory, wherever it is."""
    if pages.dim() == 0 or (len(pages) and not pages[0].is_contiguous()):
        raise ArgumentError(
            "each page of a tensor must be contiguous; describe scattered ones with gdsstore.Pieces"
        )
    nbytes = pages[0].numel() * pages.element_size() if len(pages) else 0
    return strided(
        pages.data_ptr(), len(pages), pages.stride(0) * pages.element_size(), nbytes, pages, writable
    )


def strided(base: int, count: int, stride: int, nbytes: int, owner: object, writable: bool) -> PageMemory:
    """`count` pages of `nbytes` bytes, each `stride` bytes after the one before."""
    if writable and count > 1 and abs(stride) < nbytes:  # numpy's sliding windows, torch's expand
        raise ArgumentError(
            "two pages are to be loaded into the same memory: give each page memory of its own"
        )
    offsets = np.arange(count, dtype=np.int64) * stride
    address = (np.int64(base) + offsets).astype(np.uint64)
    return PageMemory(address.reshape(-1, 1), np.full((count, 1), nbytes, np.int64), owner)
