"""The CPU backend in plain torch."""

from cairn.kernels.cpu.attention import attend_decode, attend_prefill, write_kv
from cairn.kernels.cpu.conv import conv_prefill, conv_update
from cairn.kernels.cpu.dense import experts, gated_experts, linear
from cairn.kernels.cpu.elementwise import sigmoid, softplus
from cairn.kernels.cpu.gdn import gdn_prefill, gdn_update
from cairn.kernels.cpu.norm import gated_rms_norm, rms_norm
from cairn.kernels.cpu.ssd import ssd_prefill, ssd_update

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
