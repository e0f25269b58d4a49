"""The slow readable truth: one token, one head, one tap at a time."""

from cairn.kernels.reference.attention import attend_decode, attend_prefill, write_kv
from cairn.kernels.reference.conv import conv_prefill, conv_update
from cairn.kernels.reference.dense import experts, gated_experts, linear
from cairn.kernels.reference.elementwise import sigmoid, softplus
from cairn.kernels.reference.gdn import gdn_prefill, gdn_update
from cairn.kernels.reference.norm import gated_rms_norm, rms_norm
from cairn.kernels.reference.ssd import ssd_prefill, ssd_update

__all__ = [
    "attend_decode",
    "attend_prefill",
    "conv_prefill",
    "conv_update",
    "experts",
    "gated_experts",
    "gated_rms_norm",
    "gdn_prefill",
    "gdn_update",
    "linear",
    "rms_norm",
    "sigmoid",
    "softplus",
    "ssd_prefill",
    "ssd_update",
    "write_kv",
]
