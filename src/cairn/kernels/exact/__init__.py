"""Fixed shapes and orders, in plain torch: a row has the same bits whatever the batch that it is in.

That holds for float32 and float64 where this machine's BLAS lets it (`products.find_dependent_height`); in bfloat16 the
products are free, and nothing is promised.
"""

from cairn.kernels.checkpoint_files import copy_pages, load_states, pack_state_spans, store_states
from cairn.kernels.exact.attention import attention, write_kv
from cairn.kernels.exact.conv import conv
from cairn.kernels.exact.elementwise import (
    add_rms_norm,
    gated_rms_norm,
    gelu_mul,
    rms_norm,
    rms_norm_then_gate,
    rope,
    sigmoid_mul,
    silu_mul,
    softcap,
    squared_relu,
)
from cairn.kernels.exact.experts import (
    clamped_experts,
    experts,
    gated_experts,
    gelu_experts,
    sigmoid_router,
    softmax_router,
)
from cairn.kernels.exact.gdn import gdn
from cairn.kernels.exact.metadata import build_metadata
from cairn.kernels.exact.products import find_dependent_height, linear, lm_head, pack_int4, pack_int8
from cairn.kernels.exact.ssd import ssd
from cairn.kernels.graphs import no_step_graphs as step_graphs
from cairn.kernels.plain_weights import begin_step, embed, lays_out, pack, pack_stored, packed_dtype, warm_up
from cairn.kernels.sampling.logits_processors import TorchTokenCounts as token_counts
from cairn.kernels.sampling.logprobs import compute_logprobs as logprobs
from cairn.kernels.sampling.sampler import TorchSampler as sampler
from cairn.kernels.sampling.sampler import sampling_bytes
