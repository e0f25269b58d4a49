"""The most instructions of this processor that may be used: CAIRN_MAX_CPU_ISA=avx2, or avx512 (without its BF16, VNNI
and AMX). Unset, all of them are.

For what runs on a lesser processor to be tried on a better one. torch, oneDNN and MKL read variables of their own when
they are loaded or first used, so these are set when `cairn` is imported.
"""

from collections.abc import Mapping, MutableMapping
from types import MappingProxyType
from typing import Literal

from cairn.errors import ConfigError

CpuIsa = Literal["avx2", "avx512"]

VARIABLE = "CAIRN_MAX_CPU_ISA"

_OF_LIBRARIES: Mapping[CpuIsa, Mapping[str, str]] = MappingProxyType(
    {
        "avx2": {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2", "MKL_ENABLE_INSTRUCTIONS": "AVX2"},
        "avx512": {
            "ATEN_CPU_CAPABILITY": "avx512",
            "ONEDNN_MAX_CPU_ISA": "AVX512_CORE",
            "MKL_ENABLE_INSTRUCTIONS": "AVX512",
        },
    }
)


def max_cpu_isa(environ: Mapping[str, str]) -> CpuIsa | None:
    """None where all instructions may be used. Raises ConfigError for a value that is none of them."""
    asked = environ.get(VARIABLE, "").lower()
    if not asked:
        return None
    for isa in _OF_LIBRARIES:
        if asked == isa:
            return isa
    raise ConfigError(f"{VARIABLE}: must be one of {', '.join(_OF_LIBRARIES)}, not {asked!r}; unset it for all")


def limit_libraries(environ: MutableMapping[str, str]) -> None:
    """Set what the libraries read, in the environment of this process and of its children. A value that is none of the
    switch's changes nothing: the command line refuses it."""
    asked = environ.get(VARIABLE, "").lower()
    for isa, variables in _OF_LIBRARIES.items():
        if asked == isa:
            environ.update(variables)
