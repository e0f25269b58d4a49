"""Attention by flashinfer: its FlashAttention-2 and -3 kernels (arXiv 2501.01005) over the pages as they lie.

flashinfer divides the work of a step among multiprocessors on the host: `FlashInferAttention.plan` does that once a
step, from lengths that the host knows. It reads no page numbers for it; these are brought from the block tables, which
are on the device, into its form by a kernel in front of the first layer.

Written against flashinfer-python 0.7.2: `BatchPrefillWithPagedKVCacheWrapper` and `BatchDecodeWithPagedKVCacheWrapper`
with kv_layout "HND" take (keys, values) [page, Hk, token, D] with any strides, as long as both have the same, read
nothing after a sequence's end, and align a causal mask with the ends of queries and keys.
"""

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray
from torch import Tensor

from cairn.kernels.batch import Batch, HostBatch
from cairn.kernels.cuda.device import kernel
from cairn.kernels.staging import StagedArray, Staging

_WORKSPACE_BYTES = 128 << 20
"""For parts of sequences that are split, as flashinfer recommends. Steps follow one another on the device, so that all
of them may have the same."""

_INDICES = 256
"""Page numbers that a program copies."""


class Wrapper(Protocol):
    """One of flashinfer's two: `plan` on the host, then `run` in every layer."""

    def plan(self, *arguments: Any, **options: Any) -> None: ...

    def run(self, q: Tensor, paged_kv_cache: tuple[Tensor, Tensor], *, out: Tensor) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """What all attention layers of a model have in common on this rank; `page_size` in tokens."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    page_size: int
    dtype: torch.dtype


@dataclass(slots=True)
class AttentionPlan:
    """One step's. `decode`, `prefill`: what has planned the decodes and the prefills, None where there are none.
    `page_indptr` int32 [B + 1]: the first of each sequence's entries in `page_indices` int32, the numbers of all pages
    in use; `most_pages` of one sequence. `filled_group`: the attention group whose pages stand there."""

    decode: Wrapper | None
    prefill: Wrapper | None
    page_indptr: StagedArray
    page_indices: Tensor
    most_pages: int
    filled_group: int | None = None


@kernel
def _page_indices_kernel(table, slots, page_indptr, page_indices, table_row, BLOCK: tl.constexpr):
    sequence = tl.program_id(0)
    begin = tl.load(page_indptr + sequence)
    count = tl.load(page_indptr + sequence + 1) - begin
    entries = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    sequence_table = table + tl.load(slots + sequence).to(tl.int64) * table_row
    pages = tl.load(sequence_table + entries, mask=entries < count, other=0)
    tl.store(page_indices + begin.to(tl.int64) + entries, pages, mask=entries < count)


class FlashInferAttention:
    """Takes the place of `attention`, in a model of one `AttentionShape`."""

    def __init__(self, library: Any, shape: AttentionShape, device: torch.device, steps_in_flight: int) -> None:
        """`library`: the module flashinfer. `steps_in_flight`: for how many steps plans may be under way: each of them
        has buffers of its own, since the host writes a plan before the device has read the one before."""
        self.shape = shape
        self._device = device
        workspace = torch.zeros(_WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        # FlashAttention-3 has no split of keys, which decodes need; and only tensor cores take any number of heads.
        self._wrappers: list[tuple[Wrapper, Wrapper]] = [
            (
                library.BatchDecodeWithPagedKVCacheWrapper(workspace, "HND", use_tensor_cores=True, backend="fa2"),
                library.BatchPrefillWithPagedKVCacheWrapper(workspace, "HND", backend="auto"),
            )
            for _ in range(steps_in_flight)
        ]
        self._num_steps = 0

    def plan(self, host: HostBatch, staging: Staging) -> AttentionPlan | None:
        """Divides a step's work; nothing in it waits for the device. Call it once a step, in the order of the steps.
        None for a batch with verifies, whose tokens have the bits of decodes with cairn's kernels alone."""
        if host.num_verifies:
            return None
        shape, num_decodes = self.shape, host.num_decodes
        decode, prefill = self._wrappers[self._num_steps % len(self._wrappers)]
        self._num_steps += 1
        pages = -(-host.seq_lens // shape.page_size)
        page_indptr = np.concatenate([[0], np.cumsum(pages)]).astype(np.int32)
        last_page_len = ((host.seq_lens - 1) % shape.page_size + 1).astype(np.int32)
        indices = torch.empty(int(page_indptr[-1]), dtype=torch.int32, device=self._device)
        first = int(page_indptr[num_decodes])
        sizes = (shape.num_heads, shape.num_kv_heads, shape.head_dim, shape.page_size)
        dtypes = {"q_data_type": shape.dtype, "kv_data_type": shape.dtype}
        if num_decodes:
            arrays = self._to_torch(page_indptr[: num_decodes + 1], last_page_len[:num_decodes])
            decode.plan(arrays[0], indices[:first], arrays[1], *sizes, **dtypes)
        if host.num_seqs > num_decodes:
            arrays = self._to_torch(
                host.cu_seqlens[num_decodes:] - host.cu_seqlens[num_decodes],
                page_indptr[num_decodes:] - page_indptr[num_decodes],
                last_page_len[num_decodes:],
            )
            prefill.plan(arrays[0], arrays[1], indices[first:], arrays[2], *sizes, causal=True, **dtypes)
        return AttentionPlan(
            decode=decode if num_decodes else None,
            prefill=prefill if host.num_seqs > num_decodes else None,
            page_indptr=staging.add(page_indptr),
            page_indices=indices,
            most_pages=int(pages.max(initial=0)),
        )

    def attend(self, plan: AttentionPlan, q: Tensor, keys: Tensor, values: Tensor, group: int, batch: Batch) -> Tensor:
        """See `Kernels.attention`."""
        num_decodes = batch.host.num_decodes
        if plan.filled_group != group and batch.host.num_seqs:
            table = batch.block_tables[group]
            _page_indices_kernel[(batch.host.num_seqs, triton.cdiv(plan.most_pages, _INDICES))](
                *(table, batch.slots, plan.page_indptr.tensor, plan.page_indices, table.stride(0)),
                BLOCK=_INDICES,
                num_warps=4,
            )
            plan.filled_group = group
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        if plan.decode is not None:
            plan.decode.run(q[:num_decodes], (keys, values), out=out[:num_decodes])
        if plan.prefill is not None:
            plan.prefill.run(q[num_decodes:], (keys, values), out=out[num_decodes:])
        return out

    def _to_torch(self, *arrays: NDArray[np.int32]) -> list[Tensor]:
        """On the host, from where a copy to the device does not wait until it has been made."""
        tensors = [torch.from_numpy(np.ascontiguousarray(array)) for array in arrays]
        return [tensor.pin_memory() for tensor in tensors] if self._device.type == "cuda" else tensors
