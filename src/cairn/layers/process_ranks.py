"""Ranks that are processes, over torch.distributed: gloo for tensors in host memory, NCCL for those of a GPU.

The group belongs to this module alone: torch's process-wide default group is not touched. Tensors travel as bytes, so a
backend need not know their dtype.
"""

from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Protocol, cast

import torch
import torch.distributed as dist
from torch import Tensor

from cairn.errors import EngineDead


class GatherGroup(Protocol):
    """The one collective used of a torch process group. It times out by itself."""

    def allgather(self, output_tensors: list[list[Tensor]], input_tensors: list[Tensor], /) -> dist.Work: ...


class ProcessRank:
    """Implements `Communicator` on a process group whose operations end after `seconds` at the latest. Tensors have to
    be in host memory for gloo and on the rank's GPU for NCCL."""

    def __init__(self, group: GatherGroup, rank: int, size: int, seconds: float) -> None:
        self._group = group
        self._rank = rank
        self._size = size
        self._seconds = seconds

    @property
    def rank(self) -> int:
        return self._rank

    @property
    def size(self) -> int:
        return self._size

    def gather_add(self, partial: Tensor) -> Tensor:
        return sum_in_order(self._gather(partial))

    def gather_columns(self, part: Tensor) -> Tensor:
        return torch.cat(self._gather(part), dim=-1)

    def broadcast(self, numbers: Tensor) -> Tensor:
        return self._gather(numbers)[0]

    def _gather(self, part: Tensor) -> list[Tensor]:
        """Every rank's `part`, in rank order."""
        flat = part.contiguous().view(-1).view(torch.uint8)
        parts = [torch.empty_like(flat) for _ in range(self._size)]
        try:
            self._group.allgather([parts], [flat]).wait()
        except RuntimeError as error:
            raise EngineDead(
                f"rank {self._rank} of {self._size} has lost another rank, or waited {self._seconds:g} s for it: "
                f"{_reason(error)}"
            ) from error
        return [each.view(part.dtype).view(part.shape) for each in parts]


def join_gloo_ranks(rendezvous: Path, rank: int, size: int, *, join_seconds: float, seconds: float) -> ProcessRank:
    """Join the ranks of this machine; returns when all are there.

    `rendezvous`: a file that does not exist yet, in a folder that only this user can enter: who can write it can join.
    gloo's sockets are opened on the loopback interface alone, because gloo does not authenticate peers.
    Raises EngineDead when not all ranks come within `join_seconds`. Later waits end after `seconds`.
    """
    try:
        # FileStore waits for missing entries, at most that long.
        store = dist.FileStore(str(rendezvous), size)  # type: ignore[attr-defined]
        store.set_timeout(timedelta(seconds=join_seconds))
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._timeout = timedelta(seconds=seconds)
        options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
        group = dist.ProcessGroupGloo(store, rank, size, options)
    except RuntimeError as error:
        raise EngineDead(
            f"rank {rank} of {size} has not found the others within {join_seconds:g} s: {_reason(error)}"
        ) from error
    # torch's stubs leave a backend's collectives out.
    return ProcessRank(cast(GatherGroup, group), rank, size, seconds)


def _reason(error: RuntimeError) -> str:
    """torch's text without the place in its source before it and the advice behind it."""
    text = str(error)
    if text.startswith("["):
        text = text.partition("] ")[2]
    return text.partition(". This is typically")[0]


def sum_in_order(parts: Sequence[Tensor]) -> Tensor:
    """((parts[0] + parts[1]) + parts[2]) + ..., in float32 or wider, rounded to their dtype once."""
    dtype = parts[0].dtype
    total = parts[0].to(torch.promote_types(dtype, torch.float32), copy=True)
    for part in parts[1:]:
        total.add_(part)
    return total.to(dtype)
