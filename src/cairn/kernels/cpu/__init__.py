"""The CPU backend: packed oneDNN products, and loops that numba compiles, over torch's own threads."""

from cairn.kernels.checkpoint_files import copy_pages
from cairn.kernels.cpu.attention import attention, write_kv
from cairn.kernels.cpu.checkpoint_files import load_states, pack_state_spans, store_states
from cairn.kernels.cpu.conv import conv
from cairn.kernels.cpu.elementwise import gelu_mul, rope, sigmoid_mul, silu_mul, softcap, squared_relu
from cairn.kernels.cpu.experts import clamped_experts, experts, gated_experts, gelu_experts
from cairn.kernels.cpu.gdn import gdn
from cairn.kernels.cpu.graphs import CpuGraphs as step_graphs
from cairn.kernels.cpu.int4 import pack_int4
from cairn.kernels.cpu.int8 import pack_int8
from cairn.kernels.cpu.metadata import build_metadata
from cairn.kernels.cpu.norms import add_rms_norm, gated_rms_norm, rms_norm, rms_norm_then_gate
from cairn.kernels.cpu.products import embed, lays_out, linear, lm_head, pack, pack_stored, packed_dtype
from cairn.kernels.cpu.routers import sigmoid_router, softmax_router
from cairn.kernels.cpu.ssd import ssd
from cairn.kernels.cpu.threads import begin_step
from cairn.kernels.cpu.warm_up import warm_up
from cairn.kernels.sampling.logits_processors import TorchTokenCounts as token_counts
from cairn.kernels.sampling.logprobs import compute_logprobs as logprobs
from cairn.kernels.sampling.sampler import TorchSampler as sampler
from cairn.kernels.sampling.sampler import sampling_bytes
