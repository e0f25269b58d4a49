"""The CUDA kernels in fixed shapes and orders, in float32: a row has the same bits whatever the batch that it is in.

All of them but the products are `cairn.kernels.cuda`'s. What makes them fit, one by one:

- every kernel: what it is compiled for (tile, warps, alignment of operands) depends on the model and the GPU alone, so
  that all batches run the same code; `operands` sees to it for operands by row, and numbers that differ from step to
  step are not specialized (`cuda.device.VARYING`). There are no atomics, and no tuning by measurement.
- `embed`, `write_kv`, copies of states, pages and tokens: numbers are moved. `rope`, `silu_mul`, `gelu_mul`,
  `sigmoid_mul`, `squared_relu`, `softcap`: number by number.
- norms: a row is summed up within one program, in a tile that its width gives. Routers: a program a row.
- `conv`: taps of a channel are added oldest first. Whether they come out of the state or out of rows makes no
  difference: a program that has rows of both adds a zero for the ones that a row does not have there.
- `ssd`, `gdn`: a program has a chunk of a sequence's own grid, of which a row always has the same place, or carries one
  sequence's state from chunk to chunk. Rows of the chunk that do not count are zeros; products of chunks are made
  without tensor cores here (`Precision`), where a zero changes no sum and the order of the terms is that of the rows,
  so that a snapshot is the state of a pass that ends there. Decodes: a program a sequence.
- `conv`, `ssd`, `gdn` of decodes, verifies and folds: one kernel, which has a loop over a sequence's tokens.
- `attention`: prefill tiles lie on the sequence's own grid and add up keys block by block from position 0 on: as it is.
  A decode is cut into parts of `FIXED_SPLIT` keys from position 0 on, also where it has but one, and the parts are
  put together in their order, a fixed number at a time; there is no choice by the batch. A verify's tokens are decodes.
  Of a limited reach both begin at the block of the first key, which follows from the position; blocks of which a row
  sees nothing leave its sums as they are.
- `experts` of all kinds: blocks of one height, of which a row is a chain of fused multiply-adds;
  the form for few tokens is not taken. A token's terms are added by one program in ascending order of the experts.
  Sorting gives the same order by counting and by torch's stable sort.
- the sampler: weights are whole numbers, whose sums depend on no order.
- `linear`, `lm_head`: by a kernel of this package. cuBLAS chooses its algorithm by the number of rows.

Decode rows and prefill rows need not agree with each other: see `Origin`. `find_dependent_height` tries products out
on the GPU at the start.
"""

from dataclasses import replace

from cairn.kernels import cuda
from cairn.kernels.batch import HostBatch
from cairn.kernels.cuda import (
    copy_pages,
    load_states,
    logprobs,
    pack_int4,
    pack_int8,
    pack_state_spans,
    sampler,
    sampling_bytes,
    store_states,
    token_counts,
    warm_up,
)
from cairn.kernels.cuda.metadata import CudaMetadata
from cairn.kernels.cuda_exact.operands import with_rows_laid_out
from cairn.kernels.cuda_exact.products import find_dependent_height, linear, lm_head
from cairn.kernels.graphs import no_step_graphs as step_graphs
from cairn.kernels.plain_weights import begin_step, embed, lays_out, pack, pack_stored, packed_dtype
from cairn.kernels.staging import Staging

add_rms_norm = with_rows_laid_out(cuda.add_rms_norm, "x")
attention = with_rows_laid_out(cuda.attention, "q")
clamped_experts = with_rows_laid_out(cuda.clamped_experts, "x")
conv = with_rows_laid_out(cuda.conv, "x")
experts = with_rows_laid_out(cuda.experts, "x")
gated_experts = with_rows_laid_out(cuda.gated_experts, "x")
gated_rms_norm = with_rows_laid_out(cuda.gated_rms_norm, "x", "gate")
gdn = with_rows_laid_out(cuda.gdn, "q", "k", "v", "beta", "dt")
gelu_experts = with_rows_laid_out(cuda.gelu_experts, "x")
gelu_mul = with_rows_laid_out(cuda.gelu_mul, "gate", "x")
rms_norm = with_rows_laid_out(cuda.rms_norm, "x")
rms_norm_then_gate = with_rows_laid_out(cuda.rms_norm_then_gate, "x", "gate")
rope = with_rows_laid_out(cuda.rope, "x", "cos", "sin")
sigmoid_mul = with_rows_laid_out(cuda.sigmoid_mul, "x", "gate")
sigmoid_router = with_rows_laid_out(cuda.sigmoid_router, "logits")
silu_mul = with_rows_laid_out(cuda.silu_mul, "gate", "x")
softcap = with_rows_laid_out(cuda.softcap, "x")
softmax_router = with_rows_laid_out(cuda.softmax_router, "logits")
squared_relu = with_rows_laid_out(cuda.squared_relu, "x")
ssd = with_rows_laid_out(cuda.ssd, "x", "dt", "b", "c")
write_kv = with_rows_laid_out(cuda.write_kv, "k", "v")


def build_metadata(host: HostBatch, staging: Staging) -> CudaMetadata:
    """See `Kernels.build_metadata`."""
    return replace(cuda.build_metadata(host, staging), exact=True)
