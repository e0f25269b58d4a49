"""Copies that are made as late as they may be, and found out when that is too late."""

import torch
from torch import Tensor

__all__ = ["LateCopyStream"]


class LateCopyStream:
    """Implements `CopyStream` on the host's memory. A copy is made when it is waited for, and no sooner; fresh memory
    holds no number that anybody would want. `buffers`: those that were made, of `buffer_bytes` each. `num_waits`: for
    copies that were not made yet. `num_pending`: these now."""

    device = torch.device("cpu")

    def __init__(self, buffer_bytes: int = 1 << 16) -> None:
        self.buffer_bytes = buffer_bytes
        self.buffers: list[Tensor] = []
        self.num_waits = 0
        self._asked: list[tuple[Tensor, Tensor, Tensor | None]] = []
        self._made = 0

    @property
    def num_pending(self) -> int:
        return len(self._asked)

    def make_buffer(self) -> Tensor:
        self.buffers.append(torch.full((self.buffer_bytes,), 0xEE, dtype=torch.uint8))
        return self.buffers[-1]

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        made = torch.empty(shape, dtype=dtype)
        made.view(-1).view(torch.uint8).fill_(0xFE)  # large and negative in each of the dtypes
        return made

    def copy(self, target: Tensor, source: Tensor) -> None:
        in_buffer = any(source.untyped_storage().data_ptr() == one.data_ptr() for one in self.buffers)
        assert not in_buffer or source.dtype == target.dtype, "the host would cast"
        assert not in_buffer or (source.is_contiguous() and target.is_contiguous()), "the host would gather"
        self._asked.append((target, source, source.clone() if in_buffer else None))

    def record(self) -> int:
        return self._made + len(self._asked)

    def wait(self, event: int) -> None:
        self.num_waits += event > self._made
        while self._made < event:
            target, source, as_it_was = self._asked.pop(0)
            if as_it_was is not None:
                assert torch.equal(source.view(torch.uint8), as_it_was.view(torch.uint8)), (
                    "written before it was copied"
                )
            target.copy_(source)
            self._made += 1

    def join(self) -> None:
        self.wait(self.record())
