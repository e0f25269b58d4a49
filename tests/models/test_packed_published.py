"""`cairn check` on published NVFP4 checkpoints with headers alone: what is read, and what serving takes."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from cairn.check.report import CheckSettings, check
from models.published import NANO
from models.published_qwen3_5 import QWEN35, Headers, fp8_headers, shallow
from models.test_check import ITEM_BYTES, published_headers, write_checkpoint
from tiers import more


def in_nvfp4(headers: Headers) -> Headers:
    """ModelOpt's tensors for the matrices of all experts but those of the head."""
    made: Headers = {}
    for name, (dtype, shape) in headers.items():
        base, _, last = name.rpartition(".")
        if ".experts." not in name or last != "weight" or name.startswith("mtp."):
            made[name] = (dtype, shape)
            continue
        outputs, inputs = shape
        made[name] = ("U8", (outputs, inputs // 2))
        made[f"{base}.weight_scale"] = ("F8_E4M3", (outputs, inputs // 16))
        made |= {f"{base}.weight_scale_2": ("F32", ()), f"{base}.input_scale": ("F32", ())}
    return made


def plain_experts(raw: dict[str, Any]) -> Headers:
    """Qwen3.5's tensors, one for each expert's matrix, in bfloat16."""
    headers = fp8_headers("F32", raw).items()
    return {n: ("BF16" if d == "F8_E4M3" else d, s) for n, (d, s) in headers if not n.endswith("_scale_inv")}


def write_nvfp4(folder: Path, raw: dict[str, Any], headers: Headers) -> None:
    write_checkpoint(folder, raw, headers, num_shards=4)
    config = {"quantization": {"quant_algo": "NVFP4", "kv_cache_quant_algo": "FP8", "group_size": 16}}
    (folder / "hf_quant_config.json").write_text(json.dumps(config))


def bytes_of(headers: Headers) -> int:
    return sum(ITEM_BYTES[dtype] * math.prod(shape) for dtype, shape in headers.values())


@pytest.mark.parametrize("raw", [shallow(QWEN35), more(QWEN35)], ids=["4 layers", "published"])
def test_qwen35_takes_what_its_files_have(tmp_path: Path, raw: dict[str, Any], bfloat16_products: None) -> None:
    plain = plain_experts(raw)
    headers = in_nvfp4(plain)
    write_nvfp4(tmp_path, raw, headers)
    report = check(tmp_path, CheckSettings(dtype="bfloat16"))
    assert report.ok, report.accounting.problems[:3]
    if not report.has_head:  # too large a part of four layers
        plain, headers = ({n: h for n, h in each.items() if not n.startswith("mtp.")} for each in (plain, headers))
    file_bytes = bytes_of(headers)
    matrices = sum(name.endswith("weight_scale_2") for name in headers)
    text = raw["text_config"]
    assert matrices == text["num_hidden_layers"] * text["num_experts"] * 3
    assert report.accounting.forms == {"NVFP4, 4 bits, groups of 16": matrices}
    assert report.parameters == sum(math.prod(shape) for _, shape in plain.values())
    assert report.settings.quantization == "modelopt"
    assert 0.97 * file_bytes < report.weight_bytes < 1.03 * file_bytes
    on_gpu = check(tmp_path, CheckSettings(dtype="bfloat16", gpu_memory_bytes=200 << 30))
    # Where nothing is drafted there is no head.
    assert on_gpu.weight_bytes < report.weight_bytes if report.has_head else on_gpu.weight_bytes == report.weight_bytes


def test_nemotron_nano_takes_what_its_files_have(tmp_path: Path, bfloat16_products: None) -> None:
    headers = in_nvfp4(published_headers())
    write_nvfp4(tmp_path, NANO, headers)
    file_bytes = bytes_of(headers)
    report = check(tmp_path, CheckSettings(dtype="bfloat16"))
    assert report.ok, report.accounting.problems[:3]
    assert report.accounting.forms == {"NVFP4, 4 bits, groups of 16": 23 * 128 * 2}
    assert 31.5e9 < report.parameters < 31.7e9
    assert 0.97 * file_bytes < report.weight_bytes < 1.03 * file_bytes < 0.35 * 2 * report.parameters
