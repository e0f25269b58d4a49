"""The CPU backend: packed oneDNN products, and loops that numba compiles, over torch's own threads."""

from cairn.kernels.cpu.warm_up import warm_up

__all__ = ["warm_up"]
