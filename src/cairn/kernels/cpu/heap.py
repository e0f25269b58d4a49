"""The C library's heap, which the activations of a step come from and go back to."""

import ctypes

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
"""Names of `mallopt`, of glibc's malloc.h."""

_LARGEST_BLOCK = 32 << 20
"""Of the heap, in bytes; glibc takes no more."""

_MOST_KEPT = 256 << 20
"""Free bytes at the heap's end that stay with the process."""


def keep_freed_memory() -> None:
    """Let blocks of activations, 4 to 15 MB each, stay with the process when they are freed. glibc would give them back
    to the system, and the next layer would wait for pages that are cleared anew."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_MMAP_THRESHOLD, _LARGEST_BLOCK)
        mallopt(_TRIM_THRESHOLD, _MOST_KEPT)
