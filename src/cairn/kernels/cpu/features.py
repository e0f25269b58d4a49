"""Which instructions compiled code may use: this processor's, within the limit of CAIRN_MAX_CPU_ISA."""

import ctypes
import os
import platform
from collections.abc import Collection, Mapping
from functools import cache
from types import MappingProxyType

import llvmlite.binding

from cairn.cpu_isa import VARIABLE, max_cpu_isa
from cairn.errors import ConfigError

_BEYOND_AVX2 = ("avx512", "avx10", "amx", "avxvnni", "avxneconvert", "avxifma", "evex512", "egpr")
_NEEDED = MappingProxyType({"avx2": "avx2", "avx_vnni": "avxvnni", "avx512": "avx512f", "avx512_bf16": "avx512bf16"})
_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA = 158, 0x1023, 18
_SKYLAKE = ("avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl", "evex512")
_KEPT: Mapping[str, Collection[str]] = MappingProxyType(
    {"avx2": (), "avx_vnni": ("avxvnni",), "avx512": _SKYLAKE, "avx512_bf16": (*_SKYLAKE, "avx512bf16", "avx512vnni")}
)


@cache
def cpu_features() -> Mapping[str, bool]:
    """By LLVM's names, such as avx512bf16. Raises ConfigError for a wrong limit, and for one that this processor does
    not reach: what it would be like there cannot be tried here."""
    limit, features = max_cpu_isa(os.environ), dict(llvmlite.binding.get_host_cpu_features())
    if limit is not None:
        if not features.get(_NEEDED[limit]):
            raise ConfigError(f"{VARIABLE}={limit}: this processor has no {limit}; unset it")
        features |= {name: False for name in features if name.startswith(_BEYOND_AVX2) and name not in _KEPT[limit]}
    if features.get("amx-tile") and not _may_use_tiles():
        features |= {name: False for name in features if name.startswith("amx")}
    return features


@cache
def shifts_beside_products() -> bool:
    """Whether what shifts vectors does not multiply, too, and what blends them does: AMD's Zen, not Intel."""
    return str(llvmlite.binding.get_host_cpu_name()).startswith("znver")


def _may_use_tiles() -> bool:
    """Linux gives a process the room for the matrix unit's tiles on request: Documentation/arch/x86/xstate.rst."""
    if platform.system() != "Linux":
        return False
    return bool(ctypes.CDLL(None).syscall(_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA) == 0)


@cache
def features_text() -> str:
    """As LLVM takes them: +avx2,-avx512f,..."""
    return ",".join(f"{'+' if there else '-'}{name}" for name, there in sorted(cpu_features().items()))
