"""The switch that forces what lesser processors run."""

import os
import subprocess
import sys

import llvmlite.binding
import pytest

from cairn.cpu_isa import limit_libraries, max_cpu_isa
from cairn.errors import ConfigError
from cairn.kernels.cpu import features


def test_the_libraries_are_told_in_their_own_words() -> None:
    environ = {"CAIRN_MAX_CPU_ISA": "AVX2", "PATH": "/bin"}
    limit_libraries(environ)
    assert environ == {
        "CAIRN_MAX_CPU_ISA": "AVX2",
        "PATH": "/bin",
        "ATEN_CPU_CAPABILITY": "avx2",
        "ONEDNN_MAX_CPU_ISA": "AVX2",
        "MKL_ENABLE_INSTRUCTIONS": "AVX2",
    }
    assert max_cpu_isa(environ) == "avx2"


@pytest.mark.parametrize("environ", [{}, {"CAIRN_MAX_CPU_ISA": ""}])
def test_without_it_all_is_as_it_was(environ: dict[str, str]) -> None:
    before = dict(environ)
    limit_libraries(environ)
    assert environ == before and max_cpu_isa(environ) is None


def test_another_word_is_refused_and_changes_nothing() -> None:
    environ = {"CAIRN_MAX_CPU_ISA": "avx3"}
    limit_libraries(environ)
    assert environ == {"CAIRN_MAX_CPU_ISA": "avx3"}
    with pytest.raises(ConfigError, match=r"^CAIRN_MAX_CPU_ISA: must be one of avx2, avx512, not 'avx3'; unset it"):
        max_cpu_isa(environ)


@pytest.mark.parametrize(
    ("limit", "left"),
    [
        ("avx2", {"avx2", "fma"}),
        ("avx512", {"avx2", "fma", "avx512f", "avx512vl"}),
        ("", {"avx2", "fma", "avx512f", "avx512vl", "avx512bf16", "avx512vnni", "amx-int8", "avxvnni"}),
    ],
)
def test_compiled_code_has_no_more(monkeypatch: pytest.MonkeyPatch, limit: str, left: set[str]) -> None:
    names = ("avx2", "fma", "avx512f", "avx512vl", "avx512bf16", "avx512vnni", "amx-int8", "avxvnni")
    monkeypatch.setenv("CAIRN_MAX_CPU_ISA", limit)
    monkeypatch.setattr(llvmlite.binding, "get_host_cpu_features", lambda: dict.fromkeys(names, True))
    found = features.cpu_features.__wrapped__()
    assert {name for name, there in found.items() if there} == left and set(found) == set(names)


def test_torch_and_compiled_code_obey_in_a_process_of_their_own() -> None:
    code = (
        "import cairn, torch, numba; from cairn.kernels import cpu; from cairn.kernels.cpu import vectors; "
        "print(torch.backends.cpu.get_cpu_capability(), vectors.TILE_ROWS, '+avx512f' in numba.config.CPU_FEATURES, "
        "cpu.pack(torch.zeros(4, 4).bfloat16()).layout)"
    )
    environment = {**os.environ, "CAIRN_MAX_CPU_ISA": "avx2"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120, check=True
    )
    assert done.stdout.split() == ["AVX2", "2", "False", "panels"]


def test_a_server_says_what_is_wrong_with_it(tmp_path) -> None:
    command = [sys.executable, "-m", "cairn", "serve", str(tmp_path), "--port", "0"]
    environment = {**os.environ, "CAIRN_MAX_CPU_ISA": "sse"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2 and "CAIRN_MAX_CPU_ISA: must be one of" in done.stderr
