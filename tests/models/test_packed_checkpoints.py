"""Checkpoints in codes are served as the numbers they hold: bit for bit as a plain checkpoint of the same numbers."""

import io
import json
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file, save_file
from torch import Tensor

from cairn.check.report import CheckSettings, check, render
from cairn.cli import main
from cairn.errors import ModelError
from cairn.kernels import gpu_codes
from cairn.kernels.cpu.int4 import PackedInt4
from cairn.kernels.cpu.packed_codes import PackedCodes
from cairn.kernels.cpu.panels import has_panels
from cairn.kernels.int4 import Int4Weight, quantize_int4
from cairn.models import rank_weights
from cairn.models.registry import open_model
from cairn.models.sharding import TensorShard
from cairn.models.weights.loader import WeightReader
from cairn.models.weights.tensor_headers import read_headers
from doubles.thread_ranks import thread_ranks
from kernels.test_int4 import NEEDS_INT4
from kernels.test_int8 import bytes_of
from models.covered import PACKED
from models.packed_checkpoints import FORMATS, write_packed
from models.test_device_copy import check_model
from models.test_served_int8 import Served, distance, parts_of
from runner.harness import left_of
from tiers import first, more

Pair = tuple[str, Path, Path]


TRIED = ("W4A16 actorder", "W8A8", "mixed", "AWQ", "GPTQ desc_act", "MIXED_PRECISION", "MXFP4")
"""Formats in which all is tried; the others are for `make test-more`, but that every number of theirs is right."""


@pytest.fixture(scope="module")
def write_pair(made_model: Any, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Pair]:
    """A format's name -> a checkpoint in it, and the same numbers in float32."""

    @cache
    def write(name: str) -> Pair:
        folder = tmp_path_factory.mktemp("packed")
        form = FORMATS[name]
        write_packed(made_model(PACKED.families[form.stacks]), folder / "codes", folder / "same", form)
        return name, folder / "codes", folder / "same"

    return write


@pytest.fixture(params=FORMATS)
def any_pair(request: pytest.FixtureRequest, write_pair: Callable[[str], Pair]) -> Pair:
    return write_pair(request.param)


@pytest.fixture(params=[name if name in TRIED else more(name) for name in FORMATS])
def pair(request: pytest.FixtureRequest, write_pair: Callable[[str], Pair]) -> Pair:
    return write_pair(request.param)


def test_every_tensor_is_accounted_for(any_pair: Pair) -> None:
    name, codes, same = any_pair
    report = check(codes)
    assert report.ok, report.accounting.problems[:3]
    assert report.parameters == check(same).parameters
    forms = report.accounting.forms
    assert sum(forms.values()) >= 8 and not check(same).accounting.forms
    assert (set(forms) == {"FP8"}) is (FORMATS[name].fp8 == "all")
    assert ("FP8" in forms) is (FORMATS[name].fp8 != "none")


def test_every_number_is_the_published_rules(any_pair: Pair) -> None:
    """Whole, and in shards that are cut anywhere."""
    _, codes, same = any_pair
    opened, plain = open_model(codes), open_model(same)
    expected = plain.tensors(read_headers(same))
    assert opened.quantization is not None
    with (
        WeightReader(codes, torch.float32, (), opened.quantization) as reader,
        WeightReader(same, torch.float32) as wanted,
    ):
        for name, shape in expected.items():
            whole = wanted.load(name, shape)
            assert torch.equal(reader.load(name, shape), whole), name
            if len(shape) > 1:
                for dim in (len(shape) - 2, len(shape) - 1):
                    end = shape[dim]
                    for run in (((0, end // 2),), ((end // 2, end), (1, 4)), ((3, 3),)):
                        shard = TensorShard(dim, tuple((min(a, end), min(b, end)) for a, b in run))
                        assert torch.equal(reader.load(name, shape, shard), left_of(whole, shard)), (name, shard)


@pytest.mark.parametrize("dtype", [more("float32"), "bfloat16"])
def test_a_model_of_kept_codes_is_the_same(pair: Pair, dtype: Any) -> None:
    """Joined, reordered and stacked as they are stored: the reference dequantizes them after that."""
    _, codes, same = pair
    opened = open_model(codes, dtype, keeps="codes")
    assert opened.quantization is not None and opened.served_quantization == opened.quantization.method
    models = [each.build(exact=False, backend="reference") for each in (opened, open_model(same, dtype))]
    tensors, wanted = (parts_of(model, Tensor) for model in models)
    assert len(tensors) == len(wanted) > 30
    assert all(torch.equal(a, b) for a, b in zip(tensors, wanted, strict=True))


@pytest.mark.parametrize("num_ranks", [more(1), 2])
def test_they_are_copied_to_a_device_as_they_are_read(pair: Pair, num_ranks: int, caplog: Any) -> None:
    """Part by part as was announced, and dequantized there."""
    assert check_model(pair[1], "bfloat16", num_ranks, caplog)


@pytest.mark.parametrize("keeps", [None, "codes", "gpu_codes"])
def test_every_share_is_that_of_the_same_numbers(pair: Pair, keeps: Any) -> None:
    _, codes, same = pair
    ranks = [
        [opened.build(exact=False, backend="reference", communicator=each) for each in thread_ranks(2)]
        for opened in (open_model(codes, keeps=keeps), open_model(same))
    ]
    for built, wanted in zip(*ranks, strict=True):
        pairs = zip(parts_of(built, Tensor), parts_of(wanted, Tensor), strict=True)
        assert all(torch.equal(a, b) for a, b in pairs)


def test_formats_are_other_weights(made_model: Any, pair: Pair, tmp_path: Path) -> None:
    """Two servers exchange pages only if both have the same stored weights."""
    _, codes, same = pair
    facts = [open_model(folder).transfer_facts() for folder in (codes, same)]
    assert {key for key in facts[0] if facts[0][key] != facts[1][key]} == {"weights"}
    assert facts[0] == open_model(codes, keeps="codes").transfer_facts()
    assert json.loads((codes / "config.json").read_text())["model_type"]


def test_check_says_what_is_kept(pair: Pair) -> None:
    _, codes, _ = pair
    console = Console(width=200)
    for gpu_memory in (None, 1 << 34):
        report = check(codes, CheckSettings(dtype="bfloat16", gpu_memory_bytes=gpu_memory))
        with console.capture() as capture:
            console.print(render(report))
        row = next(line for line in capture.get().splitlines() if "quantized" in line)
        assert "kept as stored" in row and "dequantized" not in row, row


def test_what_gpus_have_no_products_with_is_dequantized(
    write_pair: Any, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    """As `check` says, with the bytes that it counts; a warning names the form. FP8 beside it stays."""
    _, codes, _ = write_pair("mixed")
    counted = {}
    for least in (16, 64):
        monkeypatch.setattr(gpu_codes, "LEAST_GROUP", least)
        report = check(codes, CheckSettings(dtype="bfloat16", gpu_memory_bytes=1 << 34))
        counted[least] = report.weight_bytes
        console = Console(width=300, record=True, file=io.StringIO())
        console.print(render(report))
        row = next(line for line in console.export_text().splitlines() if "quantized" in line)
        assert row.count("dequantized") == (least == 64) and row.count("kept as stored") == (3 if least == 16 else 2)
    opened = open_model(codes, "bfloat16", keeps="gpu_codes")
    with WeightReader(codes, torch.bfloat16, (), opened.quantization) as reader:
        load = opened._kept(reader.load_stored, reader.load_codes, gpu_codes.warn_dequantized)
        assert load is not None
        shapes = opened.tensors(reader.names)
        kept = {each: load(each, shape) for each, shape in shapes.items() if len(shape) == 2}
        stored = {each: reader.load_stored(each, shapes[each]) for each in kept}
    lost = [each for each, rows in stored.items() if rows is not None and kept[each] is None]
    assert lost and any(rows is not None for rows in kept.values())
    assert counted[64] - counted[16] == sum(2 * stored[each].shape.numel() - stored[each].nbytes for each in lost)
    assert "no products on GPUs with groups of 16 inputs" in caplog.text


# -- served on the CPU -------------------------------------------------------------------------------------------------

SERVED = ("compressed NVFP4", "mixed", "GPTQ", "MXFP4")
"""Those that are served, the others for `make test-more`: FP4, several kinds in one product, integers, stacks."""


@pytest.mark.parametrize("name", [name if name in SERVED else more(name) for name in FORMATS])
def test_logits_and_bytes_are_those_of_the_checkpoint(name: str, write_pair: Any) -> None:
    """Bit for bit the answers of the same numbers in bfloat16, in the memory that the codes take."""
    _, in_codes, plain_folder = write_pair(name)
    codes, same = Served(in_codes, "bfloat16", keeps="codes"), Served(plain_folder, "bfloat16")
    if has_panels(torch.bfloat16) and name not in ("GPTQ desc_act", "W4A16 actorder"):
        assert torch.equal(codes.logits(), same.logits())
    else:  # sums in another order
        assert distance(codes.logits(), same.logits()) < 0.02
    model = codes.models[False]
    loaded = bytes_of(*parts_of(model, Tensor))
    assert check(in_codes, CheckSettings(dtype="bfloat16")).weight_bytes == pytest.approx(loaded, rel=0.02)
    kept = bytes_of(*parts_of(tuple(parts_of(model, PackedCodes)), Tensor))
    stored, plain = (load_file(folder / "model.safetensors") for folder in (in_codes, plain_folder))
    in_file = sum(each.nbytes for key, each in stored.items() if key not in plain or each.element_size() == 1)
    # NVFP4's factor, once a matrix in the file, is there for each row: 2.8 % of rows as short as these.
    most = 1.06 if "NVFP4" in name or name in ("mixed", "MIXED_PRECISION") else 1.03
    assert 0.97 * in_file < kept < most * in_file


@pytest.mark.parametrize("family", first(1, PACKED.families[2:]))
@pytest.mark.parametrize("name", ["ModelOpt NVFP4", more("W4A16")])
def test_every_family_answers_from_codes(name: str, family: str, made_model: Any, tmp_path: Path) -> None:
    """Bit for bit as from the same numbers in bfloat16."""
    write_packed(made_model(family), tmp_path / "codes", tmp_path / "same", FORMATS[name])
    assert check(tmp_path / "codes").accounting.forms
    codes, same = Served(tmp_path / "codes", "bfloat16", keeps="codes"), Served(tmp_path / "same", "bfloat16")
    if has_panels(torch.bfloat16):
        assert torch.equal(codes.logits(), same.logits())
    else:  # sums in another order
        assert distance(codes.logits(), same.logits()) < 0.02


@NEEDS_INT4
@pytest.mark.parametrize(
    ("name", "keeps_numbers"),
    [("AWQ", True), ("W4A16 actorder", False), more("GPTQ", True), more("ModelOpt NVFP4", False)],
)
def test_four_bits_that_are_there_are_not_drawn_anew(
    name: str, keeps_numbers: bool, write_pair: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With `-q int4`: the numbers of the checkpoint, activations in int8, and the bytes that were announced."""
    _, in_codes, plain_folder = write_pair(name)
    num_drawn: Counter[str] = Counter()

    def quantize(weight: Tensor) -> Int4Weight:
        num_drawn["matrices"] += 1
        return quantize_int4(weight)

    monkeypatch.setattr(rank_weights, "quantize_int4", quantize)
    codes = Served(in_codes, "bfloat16", "int4", keeps="codes")
    drawn, num_drawn = num_drawn["matrices"], Counter()
    anew = Served(plain_folder, "bfloat16", "int4")
    linears = codes.models[False].linears
    num_int4 = sum(isinstance(linear.weight, PackedInt4) for linear in linears)
    assert num_int4 == sum(isinstance(linear.weight, PackedInt4) for linear in anew.models[False].linears) > 8
    wanted = Served(plain_folder, "float32").logits()
    if keeps_numbers:
        assert drawn < num_int4 // 2
        assert distance(codes.logits(), wanted) < distance(anew.logits(), wanted)
    report = check(in_codes, CheckSettings(dtype="bfloat16", quantization="int4"))
    console = Console(width=300, record=True, file=io.StringIO())
    console.print(render(report))
    assert "brought to int4" in console.export_text()
    taken = bytes_of(*parts_of(codes.models[False], Tensor))
    # Headers do not say whether inputs are in another order: then they are drawn anew, in larger groups.
    assert 0.98 * taken < report.weight_bytes < (1.1 if name == "W4A16 actorder" else 1.02) * taken


# -- what is wrong -----------------------------------------------------------------------------------------------------


def changed(source: Path, folder: Path, change: Callable[[dict[str, Tensor]], None], **config: Any) -> Path:
    """A copy of a checkpoint with some tensors and fields of its quantization_config changed."""
    shutil.copytree(source, folder)
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")
    raw = json.loads((folder / "config.json").read_text())
    raw["quantization_config"].update(config)
    (folder / "config.json").write_text(json.dumps(raw))
    return folder


@pytest.fixture
def written(write_pair: Callable[[str], Pair]) -> Callable[[str], Path]:
    """The folder of a checkpoint in a format."""
    return lambda form: write_pair(form)[1]


LAYER = "model.layers.0.mlp.up_proj"


@pytest.mark.parametrize(
    ("form", "role", "to", "problem"),
    [
        ("AWQ", "scales", None, rf"{LAYER}.scales \[8, 512\] \(AWQ\) is missing"),
        (
            "AWQ",
            "qzeros",
            torch.ones(8, 63, dtype=torch.int32),
            rf"{LAYER}.qzeros is I32 \[8, 63\], AWQ of .* \[8, 64\]",
        ),
        ("GPTQ", "scales", torch.ones(4, 512).half(), rf"{LAYER}.scales is F16 \[4, 512\], GPTQ of .* F16 \[8, 512\]"),
        ("GPTQ", "qzeros", torch.ones(8, 64), rf"{LAYER}.qzeros is F32 .* GPTQ of .* makes it I32"),
        ("GPTQ", "qweight", torch.ones(16, 512, dtype=torch.int32), rf"{LAYER}.qweight is I32 \[16, 512\], GPTQ"),
        ("W4A16", "weight_scale", None, rf"{LAYER}.weight_scale .* \(compressed-tensors pack-quantized\) is missing"),
        ("compressed NVFP4", "weight_global_scale", None, rf"{LAYER}.weight_global_scale \[\] \(NVFP4\) is missing"),
        ("compressed NVFP4", "weight_scale", torch.ones(512, 16), rf"{LAYER}.weight_scale is F32 .*, NVFP4 .*F8_E4M3"),
        ("W8A8", "weight_scale", torch.ones(512, 3), rf"{LAYER}.weight_scale is F32 \[512, 3\], .*int-quantized"),
    ],
)
def test_what_is_missing_or_misshapen_is_named(
    written: Any, tmp_path: Path, form: str, role: str, to: Tensor | None, problem: str
) -> None:
    def change(tensors: dict[str, Tensor]) -> None:
        del tensors[f"{LAYER}.{role}"]
        if to is not None:
            tensors[f"{LAYER}.{role}"] = to

    folder = changed(written(form), tmp_path / "changed", change)
    problems = check(folder).accounting.problems
    assert re.search(problem, problems[0]) and len(problems) == 1
    assert main(["check", str(folder)]) == 2
    for keeps in (None, "codes"):
        with pytest.raises(ModelError, match=problem):
            open_model(folder, keeps=keeps).build(exact=False, backend="reference")


def test_groups_that_do_not_divide_are_named(written: Any, tmp_path: Path) -> None:
    folder = changed(written("AWQ"), tmp_path / "changed", lambda tensors: None, group_size=96)
    wanted = r"in_proj_qkv.weight \(AWQ\): groups of 96 do not divide its 256 inputs"
    assert any(re.search(wanted, each) for each in check(folder).accounting.problems)
    with pytest.raises(ModelError, match=r"\(AWQ\): groups of 96 do not divide"):
        open_model(folder, keeps="codes").build(exact=False, backend="reference")


@pytest.mark.parametrize(("form", "named"), [("AWQ", "awq"), ("W4A16", "compressed-tensors")])
def test_a_matrix_that_is_not_there_is_named(written: Any, tmp_path: Path, form: str, named: str) -> None:
    """With the format, also where it is none of codes."""

    def change(tensors: dict[str, Tensor]) -> None:
        for name in [name for name in tensors if name.startswith((LAYER, "model.norm"))]:
            del tensors[name]

    folder = changed(written(form), tmp_path / "changed", change)
    assert check(folder).accounting.problems == (
        f"{LAYER}.weight [512, 256] ({named}) is missing",
        f"model.norm.weight [256] ({named}) is missing",
    )
    with pytest.raises(ModelError, match="is missing: download it again if config"):
        open_model(folder, keeps="codes").build(exact=False, backend="reference")


def test_an_order_of_inputs_that_makes_no_groups_is_named(written: Any, tmp_path: Path) -> None:
    def change(tensors: dict[str, Tensor]) -> None:
        tensors[f"{LAYER}.g_idx"] = torch.zeros(256, dtype=torch.int32)

    folder = changed(written("GPTQ desc_act"), tmp_path / "changed", change)
    for keeps in (None, "codes"):
        with pytest.raises(ModelError, match=rf"{LAYER}.weight cannot be read: GPTQ: g_idx does not have 32 inputs"):
            open_model(folder, keeps=keeps).build(exact=False, backend="reference")


def test_a_file_that_is_cut_off_is_named(written: Any, tmp_path: Path) -> None:
    folder = tmp_path / "cut"
    shutil.copytree(written("AWQ"), folder)
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])
    with pytest.raises(
        ModelError,
        match=r"model.safetensors: damaged or cut short: \S+ ends at byte \d+, and the file at \d+: download it again",
    ):
        check(folder)


@pytest.mark.parametrize("form", ["W8A8", more("AWQ"), more("compressed NVFP4")])
def test_check_leaves_nothing_behind(form: str, written: Any, tmp_path: Path) -> None:
    """Of some operations without memory torch's compiler makes a folder."""
    (folder := tmp_path / "temporary").mkdir()
    code = f"from cairn.check.report import check; from pathlib import Path; check(Path({str(written(form))!r}))"
    subprocess.run([sys.executable, "-c", code], check=True, env={**os.environ, "TMPDIR": str(folder)})
    assert not list(folder.iterdir())


COMPRESSED = dict(FORMATS["W4A16"].config)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"quant_method": "bitsandbytes"}, "'bitsandbytes' is not read: serve the checkpoint .*--quantization int4"),
        ({"quant_method": "hqq"}, "quant_method 'hqq' is not read; known: auto-round, awq, compressed-tensors, fp8"),
        ({"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemv"}, "config.version is 'gemv'"),
        ({"quant_method": "awq", "bits": 4}, "quantization_config.group_size is missing"),
        (
            {"quant_method": "gptq", "bits": 3, "group_size": 128},
            r"config.json \(gptq\): quantization_config.bits is 3, but only 4 or 8",
        ),
        ({"quant_method": "gptq", "group_size": 128}, "quantization_config.bits is missing"),
        ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, "checkpoint_format is 'marlin'"),
        ({"quant_method": "auto-round", "packing_format": "auto_round:exllamav2"}, "packing_format is 'auto_round:e"),
        (
            COMPRESSED
            | {
                "format": "marlin-24",
            },
            "config_groups.group_0.weights.format is 'marlin-24'",
        ),
        (COMPRESSED | {"config_groups": {}}, "config_groups must be an object"),
        (COMPRESSED | {"config_groups": {"a": {"weights": {"num_bits": 2}}}}, "a.weights.num_bits is 2"),
        (COMPRESSED | {"transform_config": {"config_groups": {"R1": {}}}}, "transform_config is not read"),
        (COMPRESSED | {"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity_config is not read"),
        (
            {
                "quant_method": "modelopt",
                "quant_algo": "MIXED_PRECISION",
                "quantized_layers": {"a.b": {"quant_algo": "W4A8_AWQ"}},
            },
            "quantized_layers.a.b.quant_algo 'W4A8_AWQ' is not read; known: FP8, NVFP4",
        ),
        ({"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION"}, "quantized_layers must be an object"),
    ],
)
def test_what_is_not_read_is_refused(made_model: Any, tmp_path: Path, config: Any, message: str) -> None:
    raw = json.loads((made_model("qwen3_5") / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(raw | {"quantization_config": config}))
    with pytest.raises(ModelError, match=message):
        open_model(tmp_path)
