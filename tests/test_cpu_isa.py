"""The switch that forces what lesser processors run."""

import os
import subprocess
import sys

import llvmlite.binding
import pytest

from cairn.cpu_isa import limit_libraries, max_cpu_isa
from cairn.errors import ConfigError
from cairn.kernels.cpu import features

FEATURES = ("avx2", "fma", "avx512f", "avx512vl", "avx512bf16", "avx512vnni", "amx-int8", "avxvnni", "avxvnniint8")


@pytest.mark.parametrize(("asked", "of_onednn"), [("AVX2", "AVX2"), ("avx_vnni", "AVX2_VNNI")])
def test_the_libraries_are_told_in_their_own_words(asked: str, of_onednn: str) -> None:
    environ = {"CAIRN_MAX_CPU_ISA": asked, "PATH": "/bin"}
    limit_libraries(environ)
    assert environ == {
        "CAIRN_MAX_CPU_ISA": asked,
        "PATH": "/bin",
        "ATEN_CPU_CAPABILITY": "avx2",
        "ONEDNN_MAX_CPU_ISA": of_onednn,
        "MKL_ENABLE_INSTRUCTIONS": "AVX2",
    }
    assert max_cpu_isa(environ) == asked.lower()


@pytest.mark.parametrize("environ", [{}, {"CAIRN_MAX_CPU_ISA": ""}])
def test_without_it_all_is_as_it_was(environ: dict[str, str]) -> None:
    before = dict(environ)
    limit_libraries(environ)
    assert environ == before and max_cpu_isa(environ) is None


def test_another_word_is_refused_and_changes_nothing() -> None:
    environ = {"CAIRN_MAX_CPU_ISA": "avx3"}
    limit_libraries(environ)
    assert environ == {"CAIRN_MAX_CPU_ISA": "avx3"}
    with pytest.raises(
        ConfigError, match=r"^CAIRN_MAX_CPU_ISA: must be one of avx2, avx_vnni, avx512, avx512_bf16, not 'avx3'"
    ):
        max_cpu_isa(environ)


@pytest.mark.parametrize(
    ("limit", "left"),
    [
        ("avx2", {"avx2", "fma"}),
        ("avx_vnni", {"avx2", "fma", "avxvnni"}),
        ("avx512", {"avx2", "fma", "avx512f", "avx512vl"}),
        ("avx512_bf16", {"avx2", "fma", "avx512f", "avx512vl", "avx512bf16", "avx512vnni"}),
        ("", set(FEATURES)),
    ],
)
def test_compiled_code_has_no_more(monkeypatch: pytest.MonkeyPatch, limit: str, left: set[str]) -> None:
    monkeypatch.setenv("CAIRN_MAX_CPU_ISA", limit)
    monkeypatch.setattr(llvmlite.binding, "get_host_cpu_features", lambda: dict.fromkeys(FEATURES, True))
    found = features.cpu_features.__wrapped__()
    assert {name for name, there in found.items() if there} == left and set(found) == set(FEATURES)


@pytest.mark.parametrize(
    ("limit", "missing"),
    [("avx2", "avx2"), ("avx_vnni", "avxvnni"), ("avx512", "avx512f"), ("avx512_bf16", "avx512bf16")],
)
def test_a_limit_that_the_processor_does_not_reach_is_refused(monkeypatch, limit: str, missing: str) -> None:
    there = dict.fromkeys(FEATURES, True) | {missing: False}
    monkeypatch.setenv("CAIRN_MAX_CPU_ISA", limit)
    monkeypatch.setattr(llvmlite.binding, "get_host_cpu_features", lambda: there)
    with pytest.raises(ConfigError, match=f"^CAIRN_MAX_CPU_ISA={limit}: this processor has no {limit}; unset it"):
        features.cpu_features.__wrapped__()


@pytest.mark.parametrize(("given", "left"), [(True, {"avx2", "amx-tile", "amx-bf16"}), (False, {"avx2"})])
def test_a_matrix_unit_that_the_system_does_not_give_is_not_there(monkeypatch, given: bool, left: set[str]) -> None:
    monkeypatch.delenv("CAIRN_MAX_CPU_ISA", raising=False)
    monkeypatch.setattr(features, "_may_use_tiles", lambda: given)
    there = dict.fromkeys(("avx2", "amx-tile", "amx-bf16"), True)
    monkeypatch.setattr(llvmlite.binding, "get_host_cpu_features", lambda: there)
    assert {name for name, found in features.cpu_features.__wrapped__().items() if found} == left


@pytest.mark.more
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


QUANTIZED = """
import hashlib, torch
from cairn.kernels import cpu
from cairn.kernels.cpu import int4, int8, products, tiles
from cairn.kernels.int4 import quantize_int4
digest = hashlib.sha256()
for inputs in (96, 1184, 1152):
    weight = torch.randn(70, inputs, generator=torch.manual_seed(1)) * torch.logspace(-3, 3, 70)[:, None]
    x = torch.randn(40, inputs, generator=torch.manual_seed(2)) * torch.logspace(-3, 3, 40)[:, None]
    weight[:, 8:40], x[:, 24:56] = weight[:, 8:9], x[:, 24:25].abs()
    for packed in (cpu.pack_int8(weight), cpu.pack_int4(quantize_int4(weight))):
        assert packed.layout == "panels"
        for rows in (1, 2, 3, 4, 6, 7, 11, 12, 40):
            digest.update(products.multiply(x[:rows], packed).numpy().tobytes())
print(tiles._FORMS[int8._ROWS, tiles.I32].name, tiles._int4_form().name, tiles._int4_form().lanes, digest.hexdigest())
"""


@pytest.mark.more
@pytest.mark.timeout(900)  # up to five processes that compile
@pytest.mark.skipif(
    not any(llvmlite.binding.get_host_cpu_features().get(name) for name in ("avx512bw", "avxvnni")),
    reason="has no other instructions for them than AVX2's",
)
def test_quantized_products_have_the_same_bits_by_all_instructions() -> None:
    has = llvmlite.binding.get_host_cpu_features().get
    forms = {"avx2": ["int8.widened", "int4.widened", "8"]}
    if has("avxvnni"):
        forms["avx_vnni"] = ["int8", "int4", "8"]
    if has("avx512bw"):
        forms["avx512"] = ["int8.widened", "int4.widened", "16"]
    if has("avx512bf16"):
        forms["avx512_bf16"] = ["int8", "int4", "16"]
    if has("amx-int8"):
        forms[""] = ["int8", "int4", "16"]
    digests = set()
    for limit, form in forms.items():
        environ = os.environ | {"CAIRN_MAX_CPU_ISA": limit, "OMP_NUM_THREADS": "1"}
        asked = [sys.executable, "-c", QUANTIZED]
        done = subprocess.run(asked, env=environ, capture_output=True, text=True, timeout=300, check=True)
        *found, digest = done.stdout.split()
        assert found == form
        digests.add(digest)
    assert len(digests) == 1


def test_a_server_says_what_is_wrong_with_it(tmp_path) -> None:
    command = [sys.executable, "-m", "cairn", "serve", str(tmp_path), "--port", "0"]
    environment = {**os.environ, "CAIRN_MAX_CPU_ISA": "sse"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2 and "CAIRN_MAX_CPU_ISA: must be one of" in done.stderr
