"""The CPU backend: packed oneDNN products, and loops that numba compiles, over torch's own threads."""

from cairn.kernels.cpu.conv import conv
from cairn.kernels.cpu.gdn import gdn
from cairn.kernels.cpu.ssd import ssd
from cairn.kernels.cpu.warm_up import warm_up

__all__ = ["conv", "gdn", "ssd", "warm_up"]
