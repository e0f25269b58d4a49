"""The CUDA backend: Triton kernels, and cuBLAS's products."""

from cairn.kernels.cuda.attention import attention
from cairn.kernels.cuda.checkpoint_files import copy_pages, copy_tokens, load_states, pack_state_spans, store_states
from cairn.kernels.cuda.conv import conv
from cairn.kernels.cuda.elementwise import gelu_mul, rope, sigmoid_mul, silu_mul, softcap, squared_relu
from cairn.kernels.cuda.experts import clamped_experts, experts, gated_experts, gelu_experts
from cairn.kernels.cuda.fp8 import pack_stored
from cairn.kernels.cuda.gdn import gdn
from cairn.kernels.cuda.logprobs import logprobs
from cairn.kernels.cuda.metadata import build_metadata
from cairn.kernels.cuda.norms import add_rms_norm, gated_rms_norm, rms_norm, rms_norm_then_gate
from cairn.kernels.cuda.products import embed, linear, lm_head, pack, pack_int4, pack_int8, packed_dtype, warm_up
from cairn.kernels.cuda.routers import sigmoid_router, softmax_router
from cairn.kernels.cuda.sampling import CudaSampler as sampler
from cairn.kernels.cuda.sampling import CudaTokenCounts as token_counts
from cairn.kernels.cuda.ssd import ssd
from cairn.kernels.cuda.write_kv import write_kv
from cairn.kernels.cuda_support import sampling_bytes
from cairn.kernels.graphs import no_step_graphs as step_graphs

__all__ = [
    "add_rms_norm",
    "attention",
    "build_metadata",
    "clamped_experts",
    "conv",
    "copy_pages",
    "copy_tokens",
    "embed",
    "experts",
    "gated_experts",
    "gated_rms_norm",
    "gdn",
    "gelu_experts",
    "gelu_mul",
    "linear",
    "lm_head",
    "load_states",
    "logprobs",
    "pack",
    "pack_int4",
    "pack_int8",
    "pack_state_spans",
    "pack_stored",
    "packed_dtype",
    "rms_norm",
    "rms_norm_then_gate",
    "rope",
    "sampler",
    "sampling_bytes",
    "sigmoid_mul",
    "sigmoid_router",
    "silu_mul",
    "softcap",
    "softmax_router",
    "squared_relu",
    "ssd",
    "step_graphs",
    "store_states",
    "token_counts",
    "warm_up",
    "write_kv",
]  # fmt: skip
