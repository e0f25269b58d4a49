"""The CPU backend: packed oneDNN products, and loops that numba compiles, over torch's own threads."""

__all__ = ["warm_up"]
