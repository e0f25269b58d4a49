"""A link moves bytes from a peer's registered memory region into the own one.

One per rank. No method waits: one owner calls them again and again.
"""

from dataclasses import dataclass
from enum import Enum
from typing import NewType, Protocol

import numpy as np
from numpy.typing import NDArray

from cairn.errors import CairnError

ReadHandle = NewType("ReadHandle", int)


class LinkError(CairnError):
    """A link cannot read: the peer is unreachable, its description is broken, or a range is out of bounds."""


class ReadState(Enum):
    """State of a read. Bytes may arrive only while it is READING."""

    READING = "reading"
    DONE = "done"
    """All bytes have landed."""
    FAILED = "failed"
    """The link has given up; nothing more will arrive."""
    CANCELLED = "cancelled"
    """It was cancelled; nothing more will arrive."""


@dataclass(frozen=True, slots=True)
class Region:
    """The memory of all pages of one rank: `num_pages` x `page_bytes` bytes from `address` on.

    `owner` is whatever must stay alive for the memory to stay valid. `device`: number of the accelerator whose
    memory it is, None for host memory.
    """

    address: int
    num_pages: int
    page_bytes: int
    owner: object
    device: int | None = None

    @classmethod
    def of(cls, pool: NDArray[np.uint8]) -> "Region":
        """Host memory of shape [num_pages, page_bytes], contiguous."""
        if pool.ndim != 2 or not pool.flags.c_contiguous:
            raise ValueError(f"a region is one contiguous array [num_pages, page_bytes], not {pool.shape}")
        return cls(pool.ctypes.data, pool.shape[0], pool.shape[1], pool)


@dataclass(frozen=True, slots=True)
class Descriptors:
    """Byte ranges to read, one per entry of the int64 arrays, all of shape [n]. No range crosses a page's end."""

    remote_page: NDArray[np.int64]
    remote_offset: NDArray[np.int64]
    local_page: NDArray[np.int64]
    local_offset: NDArray[np.int64]
    num_bytes: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.num_bytes)

    def take(self, start: int, stop: int) -> "Descriptors":
        """Entries [start, stop), as views."""
        columns = self.remote_page, self.remote_offset, self.local_page, self.local_offset, self.num_bytes
        return Descriptors(*(column[start:stop] for column in columns))

    def check(self, *, remote_pages: int, remote_page_bytes: int, local: Region) -> None:
        """Raises LinkError unless every range lies within one page of either side."""
        for what, page, offset, num_pages, page_bytes in (
            ("remote", self.remote_page, self.remote_offset, remote_pages, remote_page_bytes),
            ("local", self.local_page, self.local_offset, local.num_pages, local.page_bytes),
        ):
            inside = (page >= 0) & (page < num_pages) & (offset >= 0) & (self.num_bytes > 0)
            inside &= (offset < page_bytes) & (self.num_bytes <= page_bytes - offset)
            if not inside.all():
                at = int(np.argmin(inside))
                raise LinkError(
                    f"{what} range is outside its page: page {page[at]} of {num_pages}, bytes {offset[at]} + "
                    f"{self.num_bytes[at]} of {page_bytes}"
                )


class Link(Protocol):
    """Reads from peers. One owner calls all methods; none waits for the peer.

    A peer is named by the string that `connect` returned. A read stays READING for as long as a byte of it may still be
    written: the quarantine relies on that.
    """

    def register(self, region: Region) -> None:
        """Register this memory, for peers to read and to read into. Once per link, before anything else."""

    def describe(self) -> bytes:
        """The description that a peer needs to read from here. It grants access: send it to authenticated peers
        only."""

    def connect(self, description: bytes) -> str:
        """Add a peer; returns its name, the same for the same description. Raises LinkError."""

    def disconnect(self, peer: str) -> None:
        """Remove a peer, and cancel its open reads."""

    def read(self, peer: str, descriptors: Descriptors) -> ReadHandle:
        """Start a read of at least one descriptor. Raises LinkError if nothing was started."""

    def poll(self, handle: ReadHandle) -> ReadState:
        """Drive a read; returns its state. Once that is not READING, the handle is unknown. Raises LinkError for
        unknown ones."""

    def cancel(self, handle: ReadHandle) -> None:
        """Cancel a read; go on polling until it is not READING. Does nothing for unknown handles."""

    def progress(self) -> None:
        """Serve the peers that read from here. Call it while a lease is active."""

    def close(self) -> int:
        """Release everything. Returns the number of reads that may still write; the region must outlive those."""
