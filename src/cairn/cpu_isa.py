"""The most instructions of this processor that may be used: CAIRN_MAX_CPU_ISA=avx2, avx_vnni (AVX2 and AVX-VNNI),
avx512 (without its BF16 and VNNI, AVX-VNNI and AMX), or avx512_bf16 (with these two, without AMX). Unset, all are.

For what runs on a lesser processor to be tried on a better one. torch, oneDNN and MKL read variables of their own when
they are loaded or first used, so these are set when `cairn` is imported.
"""

from collections.abc import Mapping, MutableMapping
from types import MappingProxyType

from cairn.errors import ConfigError

VARIABLE = "CAIRN_MAX_CPU_ISA"

_OF_LIBRARIES: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        "avx2": {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2", "MKL_ENABLE_INSTRUCTIONS": "AVX2"},
        "avx_vnni": {
            "ATEN_CPU_CAPABILITY": "avx2",
            "ONEDNN_MAX_CPU_ISA": "AVX2_VNNI",
            "MKL_ENABLE_INSTRUCTIONS": "AVX2",
        },
        "avx512": {
            "ATEN_CPU_CAPABILITY": "avx512",
            "ONEDNN_MAX_CPU_ISA": "AVX512_CORE",
            "MKL_ENABLE_INSTRUCTIONS": "AVX512",
        },
        "avx512_bf16": {
            "ATEN_CPU_CAPABILITY": "avx512",
            "ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16",
            "MKL_ENABLE_INSTRUCTIONS": "AVX512",
        },
    }
)


def max_cpu_isa(environ: Mapping[str, str]) -> str | None:
    """One of the words above; None where all instructions may be used. Raises ConfigError for another value."""
    asked = _asked(environ)
    if asked and asked not in _OF_LIBRARIES:
        raise ConfigError(f"{VARIABLE}: must be one of {', '.join(_OF_LIBRARIES)}, not {asked!r}; unset it for all")
    return asked or None


def limit_libraries(environ: MutableMapping[str, str]) -> None:
    """Set what the libraries read, in the environment of this process and of its children. A value that is none of the
    switch's changes nothing: the command line refuses it."""
    environ.update(_OF_LIBRARIES.get(_asked(environ), {}))


def _asked(environ: Mapping[str, str]) -> str:
    return environ.get(VARIABLE, "").lower()
