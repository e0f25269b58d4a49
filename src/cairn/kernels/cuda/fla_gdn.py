"""The gated delta rule's prefill by flash-linear-attention (fla), for sequences that it can take.

fla's `chunk_gated_delta_rule` cuts a sequence into chunks of 64 tokens from its first row on, gives a state out at its
end only, and keeps those inside in the model's dtype. So it gets prefills that begin at the end of a chunk of their own
grid, and of which no state is wanted but the last one; all other sequences of the batch go to cairn's kernels in the
same call. Its states have no slots: they are gathered before and scattered after. Batches with verifies are left to
cairn's kernels.

Written against fla-core 0.6.0.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec
import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from cairn.kernels.batch import CHUNK, Batch, HostBatch
from cairn.kernels.cuda.gdn import gdn
from cairn.kernels.cuda.metadata import CudaMetadata, build_metadata
from cairn.kernels.staging import StagedArray, Staging

IntArray = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class DeltaRuleShape:
    """What all layers of a model have in common on this rank."""

    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class SubBatch:
    """Some sequences of a batch, in its order. `host`: their lengths, as those of a batch of their own. On the device,
    int64: `rows` of the whole batch, `seqs` its sequences, `snapshots` its snapshots; int32: `cu_seqlens`."""

    host: HostBatch
    rows: StagedArray
    seqs: StagedArray
    snapshots: StagedArray
    cu_seqlens: StagedArray

    @staticmethod
    def of(host: HostBatch, seqs: IntArray, staging: Staging) -> "SubBatch":
        counts = np.diff(host.cu_seqlens)[seqs]
        cu_seqlens = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
        rows = np.arange(cu_seqlens[-1]) + np.repeat(host.cu_seqlens[seqs] - cu_seqlens[:-1], counts)
        snapshots = np.flatnonzero(np.isin(host.snapshot_seqs, seqs))
        host_part = HostBatch(
            num_decodes=int((seqs < host.num_decodes).sum()),
            cu_seqlens=cu_seqlens,
            slots=host.slots[seqs],
            seq_starts=host.seq_starts[seqs],
            seq_lens=host.seq_lens[seqs],
            kv_write_from=host.kv_write_from[seqs],
            snapshot_seqs=np.searchsorted(seqs, host.snapshot_seqs[snapshots]).astype(np.int32),
            snapshot_offsets=host.snapshot_offsets[snapshots],
        )
        on_device = [staging.add(array.astype(np.int64)) for array in (rows, seqs, snapshots)]
        return SubBatch(host_part, on_device[0], on_device[1], on_device[2], staging.add(cu_seqlens))


@dataclass(frozen=True, slots=True)
class DeltaRulePlan:
    """Which sequences of a step go where. `fla_batch`: those of fla, with `chunk_indices` int64 [chunks, 2], the
    sequence and the number within it of each chunk, and `snapshot_seqs` int64, the sequence of each snapshot.
    `other_batch`: all others, with the metadata of their batch; None where there are none."""

    fla_batch: SubBatch
    chunk_indices: StagedArray
    snapshot_seqs: StagedArray
    other_batch: SubBatch | None
    metadata: CudaMetadata | None


def fitting_sequences(host: HostBatch) -> IntArray:
    """The prefills that fla can take."""
    counts, snapshot_seqs = np.diff(host.cu_seqlens), host.snapshot_seqs
    is_fit = (np.arange(host.num_seqs) >= host.num_decodes) & (host.seq_starts % CHUNK == 0)
    is_inside = host.snapshot_offsets < counts[snapshot_seqs]
    is_fit[snapshot_seqs[is_inside]] = False
    return np.flatnonzero(is_fit)


class FlaDeltaRule:
    """Takes the place of `gdn`."""

    def __init__(self, library: Any) -> None:
        """`library`: the module fla.ops.gated_delta_rule."""
        self._chunk_gated_delta_rule: Callable[..., tuple[Tensor, Tensor]] = library.chunk_gated_delta_rule

    def plan(self, host: HostBatch, staging: Staging) -> DeltaRulePlan | None:
        """None for a batch of which no sequence is for fla."""
        if host.num_verifies:
            return None
        fitting = fitting_sequences(host)
        if not len(fitting):
            return None
        fla_batch = SubBatch.of(host, fitting, staging)
        num_chunks = -(-np.diff(fla_batch.host.cu_seqlens) // CHUNK)
        chunk_seqs = np.repeat(np.arange(len(fitting)), num_chunks)
        within = np.arange(len(chunk_seqs)) - np.repeat(np.cumsum(num_chunks) - num_chunks, num_chunks)
        others = np.setdiff1d(np.arange(host.num_seqs), fitting)
        other_batch = SubBatch.of(host, others, staging) if len(others) else None
        return DeltaRulePlan(
            fla_batch,
            staging.add(np.stack([chunk_seqs, within], axis=1).astype(np.int64)),
            staging.add(fla_batch.host.snapshot_seqs.astype(np.int64)),
            other_batch,
            None if other_batch is None else build_metadata(other_batch.host, staging),
        )

    def scan(
        self, plan: DeltaRulePlan, q: Tensor, k: Tensor, v: Tensor, beta: Tensor, dt: Tensor, a: Tensor,
        dt_bias: Tensor, states: Tensor, batch: Batch, beta_scale: float = 1.0,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """See `Kernels.gdn`."""
        y = torch.empty(v.shape, dtype=v.dtype, device=v.device)
        snapshots = torch.empty((batch.host.num_snapshots, *states.shape[1:]), dtype=states.dtype, device=states.device)
        if plan.other_batch is not None:
            part = plan.other_batch
            rows = partial(torch.index_select, dim=0, index=part.rows.tensor)
            batch_part = _batch_of(part, batch, plan.metadata)
            out, kept = gdn(rows(q), rows(k), rows(v), rows(beta), rows(dt), a, dt_bias, states, batch_part, beta_scale)
            y.index_copy_(0, part.rows.tensor, out)
            snapshots.index_copy_(0, part.snapshots.tensor, kept)

        part = plan.fla_batch
        rows = partial(torch.index_select, dim=0, index=part.rows.tensor)
        slots = batch.state_slots[part.seqs.tensor].long()
        begun = (batch.seq_starts[part.seqs.tensor] > 0)[:, None, None, None]
        wide = rows(dt).float()
        out, final = self._chunk_gated_delta_rule(
            *(rows(each)[None] for each in (q, k, v)),
            g=(a * F.softplus(wide + dt_bias))[None],
            beta=beta_scale * torch.sigmoid(rows(beta).float())[None],
            # what lies in the slot of a new sequence is an earlier one's, or NaN
            initial_state=torch.where(begun, states[slots], 0.0),
            output_final_state=True,
            use_qk_l2norm_in_kernel=True,
            cu_seqlens=part.cu_seqlens.tensor,
            chunk_indices=plan.chunk_indices.tensor,
        )
        y.index_copy_(0, part.rows.tensor, out[0].to(y.dtype))
        states.index_copy_(0, slots, final)
        snapshots.index_copy_(0, part.snapshots.tensor, final[plan.snapshot_seqs.tensor])
        return y, snapshots


def _batch_of(part: SubBatch, batch: Batch, metadata: CudaMetadata | None) -> Batch:
    """As much of a batch of a part's sequences as the delta rule reads."""
    seqs = part.seqs.tensor
    return msgspec.structs.replace(
        batch,
        cu_seqlens=part.cu_seqlens.tensor,
        state_slots=batch.state_slots[seqs],
        seq_starts=batch.seq_starts[seqs],
        host=part.host,
        metadata=metadata,
    )
