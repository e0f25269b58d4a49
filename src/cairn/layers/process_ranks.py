"""Ranks that are processes, over torch.distributed: NCCL for tensors of GPUs, gloo for those of the host.

The group belongs to this module alone: torch's process-wide default group is not touched. What is only moved travels as
bytes, so a backend need not know its dtype.

NCCL's operations are kernels in the stream that computes: the host never waits for one, and learns of a rank that is
lost from its process. gloo's are done by the host, which waits.
"""

import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import AllgatherOptions, AllreduceOptions, BroadcastOptions, Store

from cairn.errors import EngineDead

_NCCL_EXTRA_SECONDS = 60.0
"""NCCL's watchdog ends the process (SIGABRT) so long after an operation was to be over: whoever waits for the step says
before that which rank is missing, and this is for a host that is stuck itself."""


class CollectiveGroup(Protocol):
    """The collectives used of a torch process group. They give None where all is done in the current stream."""

    def allreduce(self, tensors: list[Tensor], options: AllreduceOptions, /) -> dist.Work | None: ...

    def _allgather_base(self, output: Tensor, part: Tensor, options: AllgatherOptions, /) -> dist.Work | None: ...

    def broadcast(self, tensors: list[Tensor], options: BroadcastOptions, /) -> dist.Work | None: ...


class ProcessRank:
    """Implements `Communicator` on a process group whose operations end after `seconds` at the latest. Tensors have to
    be in host memory for gloo and on the rank's GPU for NCCL. `in_order`: partial sums are gathered and added in rank
    order, in float32 or wider; otherwise the group adds them as it likes, in their own dtype."""

    def __init__(self, group: CollectiveGroup, rank: int, size: int, seconds: float, in_order: bool = True) -> None:
        self._group = group
        self.rank = rank
        self.size = size
        self._seconds = seconds
        self._in_order = in_order
        self._sum = _in_current_stream(AllreduceOptions())
        self._gathering = _in_current_stream(AllgatherOptions())
        self._from_rank_zero = _in_current_stream(BroadcastOptions())
        self._from_rank_zero.rootRank = 0

    def all_reduce(self, partial: Tensor) -> Tensor:
        if self._in_order:
            return sum_in_order(self._gather(partial).unbind())
        total = partial.contiguous()
        self._finish(lambda: self._group.allreduce([total], self._sum))
        return total

    def gather_columns(self, part: Tensor) -> Tensor:
        return torch.cat(self._gather(part).unbind(), dim=-1)

    def broadcast(self, numbers: Tensor) -> Tensor:
        whole = numbers.contiguous()
        flat = whole.view(-1).view(torch.uint8)
        self._finish(lambda: self._group.broadcast([flat], self._from_rank_zero))
        return whole

    def _gather(self, part: Tensor) -> Tensor:
        """Every rank's `part`, [size, *part.shape] in rank order."""
        flat = part.contiguous().view(-1).view(torch.uint8)
        gathered = flat.new_empty(self.size * len(flat))
        self._finish(lambda: self._group._allgather_base(gathered, flat, self._gathering))
        return gathered.view(part.dtype).view(self.size, *part.shape)

    def _finish(self, begin: Callable[[], dist.Work | None]) -> None:
        try:
            work = begin()
            if work is not None:
                work.wait()
        except RuntimeError as error:
            raise EngineDead(
                f"rank {self.rank} of {self.size} has lost another rank, or waited {self._seconds:g} s for it: "
                f"{_reason(error)}"
            ) from error


def join_ranks(
    rendezvous: Path,
    rank: int,
    size: int,
    device: torch.device,
    *,
    join_seconds: float,
    seconds: float,
    exact: bool = True,
) -> ProcessRank:
    """Join the ranks of this machine; returns when all are there.

    `rendezvous`: a file that does not exist yet, in a folder that only this user can enter: who can write it can join.
    `device`: where this rank's tensors lie; NCCL for a GPU of its own, else gloo, whose sockets are opened on the
    loopback interface alone, because gloo does not authenticate peers. `exact`: see `ProcessRank.in_order`, which gloo
    always is. Raises EngineDead when not all ranks come within `join_seconds`. Later waits of the host end after
    `seconds`.
    """
    by_host = device.type == "cpu"
    connect = _connect_gloo if by_host else _connect_nccl
    try:
        # FileStore waits for missing entries, at most that long.
        store = dist.FileStore(str(rendezvous), size)  # type: ignore[attr-defined]
        store.set_timeout(timedelta(seconds=join_seconds))
        group = connect(store, rank, size, seconds)
        # torch's stubs leave a backend's collectives out.
        joined = ProcessRank(cast(CollectiveGroup, group), rank, size, seconds, exact or by_host)
        if not by_host:
            _meet(joined, device, join_seconds)
    except RuntimeError as error:
        raise EngineDead(
            f"rank {rank} of {size} has not found the others within {join_seconds:g} s: {_reason(error)}"
        ) from error
    return joined


def _connect_gloo(store: Store, rank: int, size: int, seconds: float) -> object:
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._timeout = timedelta(seconds=seconds)
    options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
    return dist.ProcessGroupGloo(store, rank, size, options)


def _connect_nccl(store: Store, rank: int, size: int, seconds: float) -> object:
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=seconds + _NCCL_EXTRA_SECONDS)
    return dist.ProcessGroupNCCL(store, rank, size, options)


def _meet(joined: ProcessRank, device: torch.device, seconds: float) -> None:
    """NCCL finds the others at the first operation, and the host waits there for as long as that takes. Raises
    RuntimeError after `seconds`."""
    errors: list[Exception] = []

    def exchange() -> None:
        try:
            if device.type == "cuda":
                torch.cuda.set_device(device)  # a thread begins with the first GPU
            joined.broadcast(torch.zeros(1, device=device)).cpu()  # returns when all have come
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=exchange, name="cairn-join-ranks", daemon=True)
    thread.start()
    thread.join(seconds)
    if thread.is_alive():
        raise RuntimeError("NCCL still waits for one")
    if errors:
        raise errors[0]


def _in_current_stream(options: Any) -> Any:
    """Options of a collective that is carried out in the stream that computes. Before torch 2.8 there is no such choice
    for all of them: then it has a stream of its own, which the other one waits for, and the host does not."""
    if hasattr(options, "asyncOp"):
        options.asyncOp = False
    return options


def _reason(error: RuntimeError) -> str:
    """torch's text without the place in its source before it and the advice after it."""
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
