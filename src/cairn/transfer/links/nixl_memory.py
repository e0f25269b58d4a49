"""Memory as NIXL knows it: what a peer is told of a region, and tables of pages and byte ranges.

A description is a peer's word: its numbers are checked here, the metadata by NIXL itself.
"""

import msgspec
import numpy as np
from numpy.typing import NDArray

from cairn.transfer.links.contract import Descriptors, LinkError, Region

_MAX_METADATA = 1 << 20


class Description(msgspec.Struct, frozen=True, tag="nixl1"):
    """What a peer must know: plain numbers, and NIXL's own metadata, which it checks itself."""

    name: str
    metadata: bytes
    address: int
    num_pages: int
    page_bytes: int
    device: int | None


def read_description(description: bytes) -> Description:
    """Raises LinkError for what no NIXL link of this version says of itself."""
    try:
        about = msgspec.msgpack.decode(description, type=Description)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise LinkError("the peer's description is none of a NIXL link of this version") from error
    size = about.num_pages * about.page_bytes
    if not (
        about.num_pages in range(1, 1 << 24)
        and about.page_bytes in range(1, 1 << 40)
        and 0 < about.address < 1 << 64
        and about.address + size < 1 << 64
        and about.device in (None, *range(1024))
        and 0 < len(about.metadata) <= _MAX_METADATA
        and 0 < len(about.name) <= 256
    ):
        raise LinkError("the peer's description has a number out of range")
    return about


def kind(device: int | None) -> str:
    """NIXL's word for host memory, and for that of an accelerator."""
    return "DRAM" if device is None else "VRAM"


def page_table(region: Region) -> NDArray[np.uint64]:
    """All pages as one strided row (address, length, device, stride, count), shape [1, 5]."""
    row = (region.address, region.page_bytes, region.device or 0, region.page_bytes, region.num_pages)
    return np.array([row], np.uint64)


def range_table(address: NDArray[np.int64], num_bytes: NDArray[np.int64], device: int | None) -> NDArray[np.uint64]:
    """Rows (address, length, device), the form that NIXL takes without a Python loop."""
    rows = np.empty((len(address), 3), np.uint64)
    rows[:, 0], rows[:, 1], rows[:, 2] = address, num_bytes, device or 0
    return rows


def is_whole(descriptors: Descriptors, remote_page_bytes: int, local_page_bytes: int) -> bool:
    """Whether pages are read whole, so that lists of pages serve."""
    return bool(
        remote_page_bytes == local_page_bytes
        and (descriptors.num_bytes == local_page_bytes).all()
        and not descriptors.remote_offset.any()
        and not descriptors.local_offset.any()
    )
