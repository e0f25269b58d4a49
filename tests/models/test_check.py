"""`cairn check` on a checkpoint that has only headers, with the published shapes of Nemotron-3-Nano-30B-A3B."""

import json
import math
import struct
from collections.abc import Callable, Mapping
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from cairn.check.report import GPU_MEMORY, CheckReport, CheckSettings, check, render
from cairn.engine.contract import EngineConfig
from cairn.engine.memory_plan import MemoryPlan, divide_memory, guess_graph_bytes, guess_process_bytes
from cairn.errors import ConfigError, ModelError
from models.published import NANO
from runner.harness import parse, tensors
from tiers import more

ITEM_BYTES = {"BF16": 2, "F32": 4, "F8_E4M3": 1, "U8": 1}

Headers = dict[str, tuple[str, tuple[int, ...]]]
"""Tensor name -> safetensors dtype, shape."""


def write_headers(path: Path, headers: Headers) -> None:
    """A valid safetensors file whose tensors are a hole in a sparse file: no data is written."""
    offset = 0
    entries: dict[str, Any] = {}
    for name, (dtype, shape) in headers.items():
        end = offset + math.prod(shape) * ITEM_BYTES[dtype]
        entries[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    header = json.dumps(entries).encode()
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        file.truncate(8 + len(header) + offset)


def write_checkpoint(folder: Path, raw: Mapping[str, Any], headers: Headers, num_shards: int) -> None:
    (folder / "config.json").write_text(json.dumps(raw))
    names = list(headers)
    weight_map = {}
    for shard in range(num_shards):
        file = f"model-{shard + 1:05d}-of-{num_shards:05d}.safetensors"
        part = names[shard * len(names) // num_shards : (shard + 1) * len(names) // num_shards]
        write_headers(folder / file, {name: headers[name] for name in part})
        weight_map.update(dict.fromkeys(part, file))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def published_headers() -> Headers:
    """As published: bfloat16, the routers' correction biases float32."""
    return {
        name: ("F32" if name.endswith("e_score_correction_bias") else "BF16", shape)
        for name, shape in tensors(parse(NANO)).items()
    }


@pytest.fixture(autouse=True)
def _has_bfloat16_products(bfloat16_products: None) -> None:
    pass


def rendered(folder: Path, settings: CheckSettings | None = None) -> str:
    return shown(check(folder, settings))


def shown(report: CheckReport) -> str:
    output = StringIO()
    Console(file=output, width=160).print(render(report))
    return output.getvalue()


def test_published_shapes(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, NANO, published_headers(), num_shards=13)
    asked = CheckSettings(kv_cache_memory_bytes=64 << 30, max_num_seqs=4, checkpoint_dtype="float32")
    report = check(tmp_path, asked)
    assert report.ok
    assert report.layers == {"Mamba2": 23, "attention": 6, "mixture of experts": 23}
    assert (report.num_tensors, report.num_files) == (6243, 13)
    assert report.stored_dtypes == {"BF16": 6220, "F32": 23}
    assert report.parameters == 31_577_940_288
    # served in bfloat16, but for 64 heads times A_log, D, dt_bias and 128 expert biases a layer
    assert report.weight_bytes == 2 * report.parameters + 2 * 23 * (3 * 64 + 128)
    assert report.layout.bytes_per_token == 6144
    assert report.layout.checkpoint_bytes == 49_087_744
    assert report.layout.pages_per_checkpoint == 500
    assert report.checkpoint_tokens == 8000
    assert report.max_model_len == 262144
    assert report.pages_for_longest == 262144 // 16 + 500
    assert report.num_pages == (64 << 30) // 98304
    # auto: half the states, and of each of 8 units and 23 layers 8 scales
    smaller = check(tmp_path, replace(asked, checkpoint_dtype="auto"))
    saved = 23 * 64 * 64 * 128 * 2 - 8 * (23 * 8 * 4 + 32)
    assert smaller.layout.checkpoint_bytes == 49_087_744 - saved == 24_976_640
    assert smaller.layout.pages_per_checkpoint == 255 and smaller.checkpoint_tokens == 4080
    assert replace(smaller.plan, weights=report.weight_bytes) == report.plan, "running states are what they were"


def test_running_states_in_float16(tmp_path: Path) -> None:
    """As config.json may name them, by which more sequences run on the same GPU."""
    write_checkpoint(tmp_path, {**NANO, "mamba_ssm_cache_dtype": "float16"}, published_headers(), num_shards=2)
    reports = {
        dtype: check(tmp_path, CheckSettings(mamba_ssm_cache_dtype=dtype, gpu_memory_bytes=80 << 30))
        for dtype in ("auto", "float16", "float32")
    }
    assert replace(reports["auto"], settings=reports["float16"].settings) == reports["float16"]
    half, whole = reports["auto"], reports["float32"]
    # 23 layers of 64 heads of 64 times 128 numbers
    assert whole.plan.slot - half.plan.slot == 2 * 23 * 64 * 64 * 128
    assert half.layout.state_dtype == half.layout.checkpoint_dtype == "float16"
    assert half.plan.num_slots > 1.5 * whole.plan.num_slots
    assert ", in float16" in shown(half) and ", in float16" not in shown(whole)


def test_what_this_machine_has(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, NANO, published_headers(), num_shards=2)
    report = check(tmp_path)
    assert "this machine" not in shown(report)
    taken = report.plan.weights + report.plan.states + report.plan.pool
    enough, short = (
        " ".join(rendered(tmp_path, CheckSettings(available_memory=each)).replace("\u2502", "").split())
        for each in (taken, taken - (3 << 30))
    )
    assert "too little" not in enough and "weights, running states and pool take" in enough
    assert "3.00 GiB too little: lower --kv-cache-memory-bytes or --max-num-seqs" in short


def test_weights_of_a_cpu_without_bfloat16_products(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cairn.kernels.cpu.packed_dtype", lambda dtype: torch.float32)
    write_checkpoint(tmp_path, NANO, published_headers(), num_shards=2)
    report, on_gpu = check(tmp_path), check(tmp_path, CheckSettings(gpu_memory_bytes=80 << 30))
    # The embedding, norms and convolutions stay.
    assert 1.98 < report.weight_bytes / on_gpu.weight_bytes < 2
    assert "GiB in bfloat16, those of products in float32" in shown(report)
    assert "58.82 GiB in bfloat16 " in shown(on_gpu)


def test_weights_in_int8(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, NANO, published_headers(), num_shards=2)
    plain, report = check(tmp_path), check(tmp_path, CheckSettings(quantization="int8"))
    embedding = 131_072 * 2688
    # a byte for each number of a matrix and eight for each output, of which there are fewer than one in a thousand
    assert 0.5 < (report.weight_bytes - 2 * embedding) / (plain.weight_bytes - 2 * embedding) < 0.503
    text = rendered(tmp_path, CheckSettings(quantization="int8"))
    assert "GiB in int8, embedding and norms in bfloat16" in text


def test_what_is_printed(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, NANO, published_headers(), num_shards=2)
    text = rendered(tmp_path)
    for words in (
        "nemotron_h, 52 layers: 23 Mamba2, 6 attention, 23 mixture of experts",
        "6,243 in 2 files (6,220 BF16, 23 F32): every one accounted for",
        "31,577,940,288 (31.58 B)",
        "58.82 GiB in bfloat16",
        "6,144 bytes per token",
        "24,976,640 bytes = 255 pages, states in float16, as much as 4,080 tokens",
        "2.97 GiB for 64 sequences, with their block tables",
        "262,144 tokens and a checkpoint: 16,639 pages, 1.52 GiB",
        "1.00 GiB = 10,922 pages: too small for that; raise --kv-cache-memory-bytes or lower --max-model-len",
        "a repeated prompt of 1 token, or 64 tokens shared with another prompt",
    ):
        assert words in text
    roomy = CheckSettings(kv_cache_memory_bytes=4 << 30, dtype="float32", block_size=32, max_model_len=1000)
    text = rendered(tmp_path, roomy)
    assert "117.64 GiB in float32" in text
    assert "12,288 bytes per token" in text
    assert "1,000 tokens and a checkpoint: 160 pages" in text
    assert "4.00 GiB = 10,922 pages: 68.3 of those, or 85 checkpoints" in text


def drop(headers: Headers) -> None:
    del headers["backbone.layers.3.mixer.experts.127.down_proj.weight"]


def add(headers: Headers) -> None:
    headers["backbone.layers.3.mixer.experts.128.down_proj.weight"] = ("BF16", (2688, 1856))


def reshape(headers: Headers) -> None:
    headers["backbone.layers.0.mixer.A_log"] = ("F32", (63,))


def quantize(headers: Headers) -> None:
    headers["lm_head.weight"] = ("F8_E4M3", (131072, 2688))


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        more(drop, "backbone.layers.3.mixer.experts.127.down_proj.weight [2688, 1856] (safetensors) is missing"),
        more(add, "backbone.layers.3.mixer.experts.128.down_proj.weight is not part of this architecture"),
        (reshape, "backbone.layers.0.mixer.A_log has shape [63], config.json makes it [64]"),
        (quantize, "lm_head.weight is F8_E4M3, but config.json has no quantization_config that says how it is scaled"),
    ],
)
def test_each_wrong_tensor_is_named(tmp_path: Path, change: Callable[[Headers], None], problem: str) -> None:
    headers = published_headers()
    change(headers)
    write_checkpoint(tmp_path, NANO, headers, num_shards=1)
    report = check(tmp_path)
    assert not report.ok
    assert [found for found in report.accounting.problems if problem in found] == list(report.accounting.problems)
    text = rendered(tmp_path)
    assert "1 problem" in text
    assert problem in text


def test_long_lists_are_cut(tmp_path: Path) -> None:
    headers = {name: entry for name, entry in published_headers().items() if ".experts." not in name}
    write_checkpoint(tmp_path, NANO, headers, num_shards=1)
    text = rendered(tmp_path)
    assert "5,888 problems" in text
    assert "... and 5,868 more" in text


def test_unserved_parts_are_counted(tmp_path: Path) -> None:
    headers = published_headers() | {"mtp.layers.0.eh_proj.weight": ("BF16", (2688, 5376))}
    write_checkpoint(tmp_path, NANO, headers, num_shards=1)
    report = check(tmp_path)
    assert report.ok
    assert report.accounting.num_ignored == 1
    assert "1 ignored" in rendered(tmp_path)


def test_model_without_attention(tmp_path: Path) -> None:
    raw = NANO | {"hybrid_override_pattern": "MM", "num_hidden_layers": 2}
    write_checkpoint(tmp_path, raw, {name: ("BF16", shape) for name, shape in tensors(parse(raw)).items()}, 1)
    report = check(tmp_path)
    assert report.ok
    assert report.checkpoint_tokens == 0
    assert report.pages_for_longest == report.layout.pages_per_checkpoint
    assert "as much as" not in rendered(tmp_path)


def test_unreadable_folder(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"config\.json is missing"):
        check(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(NANO))
    with pytest.raises(ModelError, match=r"neither model\.safetensors nor"):
        check(tmp_path)


def test_what_a_gpu_has_left_is_the_pool(tmp_path):
    write_checkpoint(tmp_path, NANO, published_headers(), 1)
    own = {"max_model_len": 8192, "max_num_seqs": 64, "checkpoint_dtype": "float32"}
    asked = CheckSettings(gpu_memory_bytes=GPU_MEMORY["h100"], **own)
    fits = check(tmp_path, asked)
    assert fits.ok and fits.fits_gpu
    plan, usable = fits.plan, int(0.9 * (81559 << 20))
    # 64 slots and one more, each with a state and a block table of 512 pages, which goes through the steps' copies, too
    entries = 4 + 12 * 4  # a page in the table; index and page in two buffers of up to twice their size
    assert 0 < plan.slot - fits.layout.checkpoint_bytes - entries * 512 < 5000
    assert fits.plan.states == 65 * plan.slot
    # logits, what is made of them, and tokens' counts, each of four bytes; masks and histograms are little
    assert 12 < plan.logits / 64 / NANO["vocab_size"] < 12.6
    # 52 layers in graphs of 1, 2, 4, 8, 16, ... 64 rows
    assert plan.graphs == guess_graph_bytes(52, 11) and plan.process == guess_process_bytes(1)
    assert fits.plan.pool == usable - fits.plan.states - plan.fixed
    assert plan.fixed == fits.weight_bytes + plan.graphs + plan.process + plan.logits
    assert fits.num_pages == fits.plan.pool // fits.layout.page_bytes > fits.pages_for_longest
    text = shown(fits)
    assert "90% of 79.65 GiB" in text and "of CUDA graphs and some 768.00 MiB of CUDA itself" in text
    small = check(tmp_path, CheckSettings(gpu_memory_bytes=GPU_MEMORY["l4"]))
    assert not small.ok and not small.accounting.problems and small.num_pages == 0
    text = shown(small)
    assert "too little for" in text and "every one accounted for" in text and "a larger GPU" in text
    # all that there is, and not one page less
    exact = CheckSettings(gpu_memory_utilization=1.0, max_num_seqs=1, max_model_len=64, checkpoint_dtype="float32")
    roomy = check(tmp_path, replace(exact, gpu_memory_bytes=80 << 30))
    needed = roomy.plan.states + roomy.plan.fixed
    needed += (fits.layout.pages_for(64) + fits.layout.pages_per_checkpoint + 1) * fits.layout.page_bytes
    assert check(tmp_path, replace(exact, gpu_memory_bytes=needed)).ok
    assert not check(tmp_path, replace(exact, gpu_memory_bytes=needed - 1)).ok


def test_requests_at_once_are_those_that_the_server_takes_on_a_gpu(tmp_path):
    write_checkpoint(tmp_path, NANO, published_headers(), 1)
    report = check(tmp_path, CheckSettings(gpu_memory_bytes=GPU_MEMORY["h200"], checkpoint_dtype="float32"))
    plan = report.plan
    config = EngineConfig(model="m", kv_cache_memory_bytes=None, max_num_seqs=None, device="cuda")
    found = divide_memory(MemoryPlan(on_gpu=True, usable=plan.left, slot=plan.slot), config, report.layout)
    assert (plan.num_slots, plan.pool) == (found.num_slots, found.pool)
    assert 64 < found.num_slots < 256  # a tenth of the room has no more states
    # the block tables of the longest sequences are small beside their states, however large the pool is
    assert plan.slot < 1.02 * report.layout.checkpoint_bytes
    assert check(tmp_path).plan.num_slots == 64


def test_ranks_have_a_share_each(tmp_path):
    write_checkpoint(tmp_path, NANO, published_headers(), 1)
    one, two = (
        check(tmp_path, CheckSettings(gpu_memory_bytes=GPU_MEMORY["h100"], max_num_seqs=64, tensor_parallel_size=size))
        for size in (1, 2)
    )
    # all but norms, routers and convolution channels that ranks share
    assert 0.5 < two.weight_bytes / one.weight_bytes < 0.51
    assert 0.5 < two.plan.slot / one.plan.slot < 0.52
    assert two.layout.page_bytes == one.layout.page_bytes // 2
    assert two.plan.process > one.plan.process
    assert "2; what follows is on each of them" in shown(two)
    with pytest.raises(ConfigError, match="--tensor-parallel-size 3"):
        check(tmp_path, CheckSettings(tensor_parallel_size=3))
