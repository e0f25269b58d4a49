"""`cairn check` on Qwen3.5-35B-A3B with headers alone: as published in bfloat16, and in FP8."""

from pathlib import Path

import pytest

from cairn.check.report import CheckSettings, check
from cairn.models.registry import open_model
from models.published_qwen3_5 import QWEN35, QWEN35_FP8, Headers, fp8_headers, qwen35_headers, shallow
from models.test_check import rendered, write_checkpoint

EXPERT = "model.language_model.layers.2.mlp.experts"


def test_published_shapes(tmp_path: Path) -> None:
    headers = qwen35_headers()
    write_checkpoint(tmp_path, QWEN35, headers, num_shards=14)
    report = check(tmp_path)
    assert report.ok, report.accounting.problems[:3]
    assert report.layers == {"gated delta net": 30, "gated attention": 10}
    assert report.accounting.num_ignored == 0 and report.has_head
    assert report.num_tensors == len(headers)
    assert report.dtype == "bfloat16"
    assert report.parameters == sum(_count(shape) for _, shape in headers.values())
    assert 35.8e9 < report.parameters < 36.0e9  # the vision tower and the head included
    assert report.layout.bytes_per_token == 22 * 1024
    numbers, others = 30 * 32 * 128 * 128, 30 * 3 * (2 * 2048 + 4096) * 2 + 2048 * 2
    # of each of 16 units and 30 layers two scales
    assert report.layout.checkpoint_bytes == numbers * 2 + 16 * (30 * 2 * 4 + 16) + others
    plain = check(tmp_path, CheckSettings(checkpoint_dtype="float32"))
    assert plain.layout.checkpoint_bytes == numbers * 4 + others
    assert report.layout.state_units == 16
    assert report.max_model_len == 262144
    assert "every one accounted for" in rendered(tmp_path)
    for size in (2, 4, 8, 16):
        assert open_model(tmp_path).layout(16, size).state_units == 16 // size


def test_a_head_is_counted_on_each_rank(tmp_path: Path) -> None:
    headers = qwen35_headers()
    write_checkpoint(tmp_path, QWEN35, headers, num_shards=14)
    whole, half = (check(tmp_path, CheckSettings(tensor_parallel_size=size)) for size in (1, 2))
    assert half.ok and half.has_head and half.accounting.num_ignored == 0
    assert 2 * half.layout.bytes_per_token == whole.layout.bytes_per_token == 22 * 1024
    # what each has whole are norms, routers and the vision tower
    assert whole.weight_bytes / 2 < half.weight_bytes < 0.52 * whole.weight_bytes


def test_a_head_that_is_not_served_is_ignored(tmp_path: Path) -> None:
    headers = qwen35_headers()
    write_checkpoint(tmp_path, QWEN35, headers, num_shards=14)
    report = check(tmp_path, CheckSettings(gpu_memory_bytes=1 << 40))
    assert report.accounting.num_ignored == 785 and not report.has_head
    served = (shape for name, (_, shape) in headers.items() if not name.startswith("mtp."))
    assert report.parameters == sum(map(_count, served)) and 35.0e9 < report.parameters < 35.2e9
    assert report.layout.bytes_per_token == 20 * 1024


def _count(shape: tuple[int, ...]) -> int:
    count = 1
    for length in shape:
        count *= length
    return count


@pytest.mark.more
@pytest.mark.parametrize("scale", ["F32", pytest.param("BF16", marks=pytest.mark.long)])
def test_fp8(tmp_path: Path, scale: str) -> None:
    headers = fp8_headers(scale)
    assert len([name for name in headers if ".experts." in name and name.endswith("_scale_inv")]) == 41 * 256 * 3
    write_checkpoint(tmp_path, QWEN35_FP8, headers, num_shards=14)
    report = check(tmp_path)
    assert report.ok, report.accounting.problems[:3]
    assert report.stored_dtypes["F8_E4M3"] > 30_000
    assert 35.8e9 < report.parameters < 36.0e9  # the vision tower and the head included
    assert report.weight_bytes < 1.1 * report.parameters


def test_a_vision_tensor_that_nobody_knows(tmp_path: Path) -> None:
    """The server refuses it, so the check has to."""
    raw = shallow(QWEN35)
    headers = qwen35_headers(raw)
    name = "model.visual.merger.norm.scale"
    headers[name] = ("BF16", (1152,))
    write_checkpoint(tmp_path, raw, headers, num_shards=1)
    (problem,) = check(tmp_path).accounting.problems
    assert f"{name} is not part of this architecture" in problem


def lose_a_factor(headers: Headers) -> None:
    del headers[f"{EXPERT}.7.up_proj.weight_scale_inv"]


def misshape_a_factor(headers: Headers) -> None:
    headers[f"{EXPERT}.7.up_proj.weight_scale_inv"] = ("F32", (512, 16))


def lose_a_weight(headers: Headers) -> None:
    del headers[f"{EXPERT}.7.up_proj.weight"], headers[f"{EXPERT}.7.up_proj.weight_scale_inv"]


def add_a_factor(headers: Headers) -> None:
    headers["lm_head.weight_scale_inv"] = ("F32", (1940, 16))


def lose_experts(headers: Headers) -> None:
    headers[f"{EXPERT}.gate_up_proj"] = ("BF16", (7, 1024, 2048))


def add_experts(headers: Headers) -> None:
    headers[f"{EXPERT}.down_proj"] = ("BF16", (9, 2048, 512))


def widen_experts(headers: Headers) -> None:
    headers[f"{EXPERT}.gate_up_proj"] = ("BF16", (8, 1026, 2048))


def lose_a_stack(headers: Headers) -> None:
    del headers[f"{EXPERT}.down_proj"]


def quantize_a_stack(headers: Headers) -> None:
    headers[f"{EXPERT}.down_proj"] = ("F8_E4M3", (8, 2048, 512))


@pytest.mark.parametrize(
    ("change", "problem", "count"),
    [
        (lose_a_factor, "experts.7.up_proj.weight is F8_E4M3, but its weight_scale_inv is missing", 1),
        (misshape_a_factor, "with weight_scale_inv F32 [512, 16] instead of F32 [4, 16]", 1),
        (lose_a_weight, "experts.7.up_proj.weight [512, 2048] (fp8) is missing", 1),
        (add_a_factor, "lm_head.weight_scale_inv is not part of this architecture", 1),
        (lose_experts, "gate_up_proj has shape [7, 1024, 2048], config.json makes it [8, 1024, 2048]", 1),
        (lose_a_stack, "experts.down_proj [8, 2048, 512] (fp8) is missing", 1),
        (add_experts, "down_proj has shape [9, 2048, 512], config.json makes it [8, 2048, 512]", 1),
        (widen_experts, "gate_up_proj has shape [8, 1026, 2048], config.json makes it [8, 1024, 2048]", 1),
        (quantize_a_stack, "down_proj is F8_E4M3, which only matrices named .weight are read as", 1),
    ],
)
def test_each_wrong_tensor_is_named(tmp_path: Path, change, problem: str, count: int) -> None:
    one_by_one = change in (lose_a_factor, misshape_a_factor, lose_a_weight, add_a_factor)
    raw = shallow(QWEN35_FP8)
    headers = fp8_headers("F32", raw) if one_by_one else qwen35_headers(raw)
    change(headers)
    write_checkpoint(tmp_path, raw, headers, num_shards=1)
    problems = check(tmp_path).accounting.problems
    assert len(problems) == count
    assert all(problem in found for found in problems)
