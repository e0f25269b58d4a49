"""The slow readable truth: one token, one head, one tap at a time, in any float dtype.

Where the contract says float32, a float64 model has float64.
"""

from cairn.kernels.graphs import no_step_graphs as step_graphs
from cairn.kernels.plain_weights import begin_step, lays_out, pack, pack_stored, packed_dtype, warm_up
from cairn.kernels.plain_weights import pack as pack_int4
from cairn.kernels.reference.attention import attention, write_kv
from cairn.kernels.reference.checkpoint_files import (
    copy_pages,
    load_states,
    pack_state_spans,
    store_states,
)
from cairn.kernels.reference.elementwise import (
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
from cairn.kernels.reference.experts import (
    clamped_experts,
    experts,
    gated_experts,
    gelu_experts,
    sigmoid_router,
    softmax_router,
)
from cairn.kernels.reference.products import build_metadata, embed, linear, lm_head, pack_int8
from cairn.kernels.reference.recurrences import conv, gdn, ssd
from cairn.kernels.sampling.logits_processors import TorchTokenCounts as token_counts
from cairn.kernels.sampling.logprobs import compute_logprobs as logprobs
from cairn.kernels.sampling.sampler import TorchSampler as sampler
from cairn.kernels.sampling.sampler import sampling_bytes
