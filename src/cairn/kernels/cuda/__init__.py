"""The CUDA backend: Triton kernels, and cuBLAS's products."""

from cairn.kernels.cuda.attention import attention
from cairn.kernels.cuda.checkpoint_files import copy_pages, load_states, pack_state_spans, store_states
from cairn.kernels.cuda.conv import conv
from cairn.kernels.cuda.elementwise import gelu_mul, rope, sigmoid_mul, silu_mul, softcap, squared_relu
from cairn.kernels.cuda.experts import clamped_experts, experts, gated_experts, gelu_experts
from cairn.kernels.cuda.fp8 import pack_stored
from cairn.kernels.cuda.gdn import gdn
from cairn.kernels.cuda.logprobs import logprobs
from cairn.kernels.cuda.metadata import build_metadata
from cairn.kernels.cuda.norms import add_rms_norm, gated_rms_norm, rms_norm, rms_norm_then_gate
from cairn.kernels.cuda.products import linear, lm_head, pack_int4, pack_int8, warm_up
from cairn.kernels.cuda.routers import sigmoid_router, softmax_router
from cairn.kernels.cuda.sampling import CudaSampler as sampler
from cairn.kernels.cuda.sampling import CudaTokenCounts as token_counts
from cairn.kernels.cuda.ssd import ssd
from cairn.kernels.cuda.write_kv import write_kv
from cairn.kernels.cuda_support import sampling_bytes
from cairn.kernels.graphs import no_step_graphs as step_graphs
from cairn.kernels.plain_weights import begin_step, embed, lays_out, pack, packed_dtype
