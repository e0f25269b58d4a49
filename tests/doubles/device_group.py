"""A process group of NCCL's kind whose ranks are threads: its collectives take tensors of one device alone, and are
done in the stream that computes."""

from collections.abc import Callable

import torch
from torch import Tensor

from doubles.thread_ranks import Meeting

__all__ = ["DeviceGroup"]


class DeviceGroup:
    """One rank's door to a `Meeting` of all. `calls`: the collectives so far, with the dtype and the shape of what was
    given. Whoever gives it a tensor that is elsewhere than on `device`, or asks for a stream of its own, fails."""

    def __init__(self, meeting: Meeting, rank: int, device: torch.device) -> None:
        self.calls: list[tuple[str, torch.dtype, tuple[int, ...]]] = []
        self._meeting = meeting
        self._rank = rank
        self._device = device

    def allreduce(self, tensors: list[Tensor], options) -> None:
        (total,) = tensors
        self._check("allreduce", options, total)
        self._exchange(total, lambda parts: sum(parts[1:], parts[0].clone()), total)

    def _allgather_base(self, output: Tensor, part: Tensor, options) -> None:
        self._check("allgather", options, part, output)
        self._exchange(part, torch.cat, output)

    def broadcast(self, tensors: list[Tensor], options) -> None:
        (numbers,) = tensors
        self._check("broadcast", options, numbers)
        self._exchange(numbers, lambda parts: parts[options.rootRank].clone(), numbers)

    def _check(self, name: str, options, *tensors: Tensor) -> None:
        assert not options.asyncOp, f"{name}: in a stream of its own"
        for each in tensors:
            assert each.device == self._device, (
                f"{name}: a tensor on {each.device}, and the rank's are on {self._device}"
            )
            assert each.is_contiguous(), f"{name}: a tensor with strides"
        self.calls.append((name, tensors[0].dtype, tuple(tensors[0].shape)))

    def _exchange(self, part: Tensor, combine: Callable[[list[Tensor]], Tensor], into: Tensor) -> None:
        into.copy_(self._meeting.exchange(self._rank, part, combine))
