"""The slow readable truth: one token, one head, one tap at a time, in any float dtype.

Where the contract says float32, a float64 model has float64.
"""

from cairn.kernels.reference.attention import attention, write_kv
from cairn.kernels.reference.conv import conv
from cairn.kernels.reference.elementwise import rope, sigmoid_mul, silu_mul, squared_relu
from cairn.kernels.reference.experts import experts, gated_experts
from cairn.kernels.reference.gdn import gdn
from cairn.kernels.reference.int8 import pack_int8
from cairn.kernels.reference.norms import add_rms_norm, gated_rms_norm, head_norm_gate, rms_norm
from cairn.kernels.reference.products import embed, linear, lm_head, pack, prepare, warm_up
from cairn.kernels.reference.routers import sigmoid_router, softmax_router
from cairn.kernels.reference.ssd import ssd

__all__ = [
    "add_rms_norm",
    "attention",
    "conv",
    "embed",
    "experts",
    "gated_experts",
    "gated_rms_norm",
    "gdn",
    "head_norm_gate",
    "linear",
    "lm_head",
    "pack",
    "pack_int8",
    "prepare",
    "rms_norm",
    "rope",
    "sigmoid_mul",
    "sigmoid_router",
    "silu_mul",
    "softmax_router",
    "squared_relu",
    "ssd",
    "warm_up",
    "write_kv",
]
