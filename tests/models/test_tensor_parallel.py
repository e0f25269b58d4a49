"""A model cut among ranks: the same logits, the shares that the transfer expects, and sizes that are refused."""

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from cairn.check.report import CheckSettings, check
from cairn.errors import ConfigError
from cairn.layers.communicator import SINGLE_RANK
from cairn.models import registry
from cairn.models.decoder_builder import Execution, build_decoder
from cairn.models.registry import open_model
from cairn.models.sharding import TensorShard
from cairn.models.weights.loader import WeightReader
from cairn.runner.runner import slot_bytes
from cairn.step import Snapshot
from doubles.thread_ranks import thread_ranks
from models.logits_bar import LENGTH, Truth, steps
from models.nemotron_h_truth import logits_of, published
from models.published import NANO
from models.rank_shares import Model, Remembered, close, every_pair_of_sizes_is_taken, every_share_is_found
from models.test_served_int8 import parts_of
from runner.harness import (
    Driver,
    build_tiny,
    left_of,
    parse,
    prompt,
    random_weights,
    ranks,
    raw_config,
    tensors,
)
from tiers import more

EIGHT_GROUPS = {"n_groups": 8, "mamba_num_heads": 16, "mamba_head_dim": 6}
ONE_GROUP = {"n_groups": 1, "mamba_num_heads": 4}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "dense": ("M*-M", {"mlp_bias": True, "use_bias": True}),
    "moe": ("ME*E", {}),
    "latent-moe": ("MEM*", {"moe_latent_size": 16, "mlp_bias": True, "n_group": 1}),
    "one-group": ("M*-M", ONE_GROUP | {"use_conv_bias": False}),
    "one-group-one-head": ("M*M", {"n_groups": 1, "mamba_num_heads": 1, "mamba_head_dim": 16}),
    "eight-groups": ("M*ME", EIGHT_GROUPS),
    "one-kv-head": ("M*-*", {"num_key_value_heads": 1}),
    "many-kv-heads": ("M*-*", {"num_key_value_heads": 4}),
    "no-attention": ("M-M", {}),
    "no-recurrence": ("*E*", {}),
}
FIRST_ON_4 = ("dense", "moe", "one-group-one-head", "one-kv-head")
CASES = [
    pytest.param(name, size, id=f"{name}-{size}", marks=[] if (size == 4) == (name in FIRST_ON_4) else pytest.mark.more)
    for name in MODELS
    for size in (2, 4)
]


def logits_by_every_way(driver: Driver, tokens: list[int]) -> list[Tensor]:
    """Whole prefill; in chunks, together with another sequence; decode steps; resumed from a checkpoint."""
    whole = driver.sequence(0, LENGTH)
    file = driver.file()
    found = driver.run(driver.row(whole, tokens[:130]), snapshots=[Snapshot(0, 64, file)])
    for position in range(130, 136):
        found += driver.run(driver.row(whole, tokens[position : position + 1], decode=True))
    pieces, other = driver.sequence(1, LENGTH), driver.sequence(2, LENGTH)
    found += driver.run(driver.row(pieces, tokens[:64]), driver.row(other, tokens[40:75]))
    found += driver.run(driver.row(other, tokens[75:76], decode=True), driver.row(pieces, tokens[64:LENGTH]))
    return found


@pytest.mark.parametrize(("name", "size"), CASES)
def test_logits_are_those_of_one_rank(name: str, size: int) -> None:
    pattern, changes = MODELS[name]
    config = parse(raw_config(pattern, **changes))
    weights, tokens = random_weights(config, 1), prompt(LENGTH, 1)
    alone = Driver(config, build_tiny(config, weights, exact=False), exact=False)
    several = ranks(config, weights, size, exact=False)
    wanted = torch.stack(logits_by_every_way(alone, tokens))
    found = torch.stack(logits_by_every_way(several, tokens))
    several.runner.close()
    assert found.shape == wanted.shape == (11, 97)
    assert (found - wanted).abs().max() <= 1e-5 * wanted.abs().max()


@pytest.mark.parametrize(
    "name", ["dense", "latent-moe", "one-kv-head", *map(more, ("moe", "one-group", "eight-groups"))]
)
@pytest.mark.parametrize("size", [pytest.param(2, marks=pytest.mark.long), 4])
def test_logits_against_float64(name: str, size: int) -> None:
    """The bar of one rank: twice the float32 error of transformers itself."""
    pattern, changes = MODELS[name]
    raw = raw_config(pattern, **changes)
    config, tokens = parse(raw), prompt(LENGTH, 2)
    weights = random_weights(config, 2)
    theirs = published(raw, weights, clamp=False)
    t = Truth.of(tokens, *(logits_of(theirs, tokens, wide=wide) for wide in (False, True)))
    several = ranks(config, weights, size, exact=True)
    track = several.sequence(0, LENGTH)
    t.check(several.run(several.row(track, tokens[:120]))[0], 120)
    steps(several, t, track, range(120, LENGTH))
    several.runner.close()


def test_bfloat16_runs_on_several_ranks() -> None:
    config = parse(raw_config("M*E-", n_groups=1))
    weights, tokens = random_weights(config, 3), prompt(90, 3)
    wide = Driver(config, build_tiny(config, weights, exact=False), exact=False)
    narrow = ranks(config, weights, 2, exact=False, dtype=torch.bfloat16)
    (wanted,) = wide.run(wide.row(wide.sequence(0, 90), tokens))
    (found,) = narrow.run(narrow.row(narrow.sequence(0, 90), tokens))
    narrow.runner.close()
    assert (found - wanted).abs().max() < 0.25 * wanted.std()


# -- what a rank remembers -------------------------------------------------------------------------------------------

SHARED = {
    "tiny": ("MEM*M-MEM*", {}),
    "one-group": ("M*-M*", ONE_GROUP),
    "eight-groups": ("M*ME", EIGHT_GROUPS),
    "head": ("ME*", {"num_nextn_predict_layers": 1, "mtp_hybrid_override_pattern": "*E"}),
}


def shared(name: str) -> Model:
    """`head`: with one that drafts, whose keys and values are in the pages."""
    raw = NANO if name == "published" else raw_config(SHARED[name][0], **SHARED[name][1])
    return Model(parse(raw).asking(serves_mtp=name == "head"))


@pytest.mark.parametrize("name", [*SHARED, "published"])
@pytest.mark.parametrize("block_size", [16, 128])
def test_the_transfer_takes_every_pair_of_sizes(name: str, block_size: int) -> None:
    every_pair_of_sizes_is_taken(shared(name), block_size)


@pytest.mark.parametrize("name", SHARED)
def test_every_share_is_found_among_the_ranks_of_any_other_size(name: str) -> None:
    model = shared(name)
    every_share_is_found(model, random_weights(model.config, 5))


@pytest.mark.parametrize("name", SHARED)
def test_the_ranks_files_are_one_ranks_file_cut_between_units(name: str) -> None:
    config = shared(name).config
    weights = random_weights(config, 5)
    one, two = Remembered(config, weights, 1), Remembered(config, weights, 2)
    header = one.layout.header_bytes
    assert two.layout.header_bytes == header
    assert 2 * two.layout.state_bytes == one.layout.state_bytes
    assert 2 * two.layout.state_units == one.layout.state_units == config.cache_spec().num_state_units
    close(np.concatenate([two.file(0)[:header], *(two.file(rank)[header:] for rank in (0, 1))]), one.file(0))


# -- loading ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_reader_cuts_what_it_reads(tmp_path: Path, dtype: torch.dtype) -> None:
    weights = {"a": torch.randn(10, 6), "b": torch.randn(12), "c": torch.randn(8, 1, 4)}
    save_file(weights, tmp_path / "model.safetensors")
    shards = {
        "a": [
            TensorShard(0, ((2, 5), (9, 10))),
            TensorShard(1, ((1, 4),)),
            TensorShard(0, ((10, 10),)),
            TensorShard(0, ((0, 10),)),
        ],
        "b": [TensorShard(0, ((0, 3), (3, 4), (11, 12)))],
        "c": [TensorShard(0, ((6, 8), (0, 1)))],
    }
    with WeightReader(tmp_path, dtype) as reader:
        for name, shard in ((name, shard) for name, wanted in shards.items() for shard in wanted):
            found = reader.load(name, tuple(weights[name].shape), shard)
            assert found.dtype == dtype and found.is_contiguous()
            assert torch.equal(found, left_of(weights[name], shard).to(dtype))
        for shard in (TensorShard(0, ((5, 11),)), TensorShard(1, ((-1, 3),)), TensorShard(0, ((4, 3),))):
            with pytest.raises(ValueError, match="not inside dimension"):
                reader.load("a", (10, 6), shard)


@pytest.mark.parametrize("size", [2, 4])
def test_ranks_together_read_every_number_and_the_large_ones_once(tiny_model: Path, size: int) -> None:
    opened = open_model(tiny_model)
    expected = tensors(opened.config)
    read: dict[str, Tensor] = {name: torch.zeros(shape, dtype=torch.int32) for name, shape in expected.items()}
    with WeightReader(tiny_model, opened.dtype, opened.family.float32_tensors) as reader:

        def load(name: str, shape: tuple[int, ...], shard: TensorShard | None = None) -> Tensor:
            shard = shard or TensorShard(0, ((0, shape[0]),))
            for begin, end in shard.slices:
                read[name].narrow(shard.dim, begin, end - begin).add_(1)
            return reader.load(name, shape, shard)

        for communicator in thread_ranks(size):
            build_decoder(opened.family.spec(opened.config), load, Execution(True, opened.dtype, communicator))
    assert all((counts > 0).all() for counts in read.values())
    # k and v of a head, and a group's states, are on as many ranks as share it.
    shared = {"k_proj": size // 2, "v_proj": size // 2, "in_proj": size // 2, "gate": size}
    for name, counts in read.items():
        if len(counts.shape) == 2:
            assert (counts == shared.get(name.split(".")[-2], 1)).all(), name


def test_one_rank_is_what_it_was(tiny_model: Path) -> None:
    opened = open_model(tiny_model)
    assert opened.layout(16) == opened.layout(16, tp_size=1) == check(tiny_model).layout
    model = opened.build(exact=True)
    assert model.communicator is SINGLE_RANK
    assert sum(linear.weight.numel() for linear in model.linears) > 3e6


@pytest.mark.parametrize(("family", "size"), [("nemotron_h", 1), ("nemotron_h", 2), ("nemotron_h", 4), ("head", 2)])
def test_a_ranks_weights_are_counted(
    made_model: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, family: str, size: int
) -> None:
    """Of the first one, which has most: what a GPU of each must have room for. With a head that drafts, too."""
    monkeypatch.setattr(registry, "MOST_HEAD_SHARE", 1.0)
    folder = made_model("nemotron_h+mtp" if family == "head" else family)
    report = check(folder, CheckSettings(tensor_parallel_size=size))
    opened, taken = open_model(folder), list[int]()
    assert report.has_head is (family == "head")
    opened = opened.with_head() if report.has_head else opened
    for communicator in thread_ranks(size) if size > 1 else [SINGLE_RANK]:
        model = opened.build(exact=False, communicator=communicator, backend="reference")
        taken.append(sum(tensor.nbytes for tensor in parts_of(replace(model, rotaries=()), Tensor)))
    assert report.weight_bytes == taken[0] == max(taken)
    assert report.layout == opened.layout(16, size)
    spec = opened.config.cache_spec(0, size).memory_spec(opened.dtype, torch.device("cpu"))
    assert report.plan.slot == slot_bytes(spec, report.layout, report.num_pages, report.max_model_len)


# -- sizes that cannot be ----------------------------------------------------------------------------------------------


THIRDS = {"moe_intermediate_size": 24, "moe_shared_expert_intermediate_size": 39}


@pytest.mark.parametrize(
    ("size", "changes", "field"),
    [
        (3, {}, "num_key_value_heads 2"),
        (8, {}, "4 ranks share one of num_key_value_heads 2.* 2 query heads"),
        (3, {"num_key_value_heads": 3, "num_attention_heads": 6, "intermediate_size": 57} | THIRDS, "n_groups 2"),
        (3, {"hybrid_override_pattern": "ME", "num_hidden_layers": 2, "n_groups": 1} | THIRDS, "mamba_num_heads 4"),
        (4, {"num_attention_heads": 6}, "num_key_value_heads 2.* 3 query heads"),
        (4, {"mamba_num_heads": 2, "mamba_head_dim": 13}, "n_groups 2.* 13 channels"),
        (2, {"intermediate_size": 57}, "intermediate_size 57"),
        (2, {"moe_intermediate_size": 25}, "moe_intermediate_size 25"),
        (2, {"moe_shared_expert_intermediate_size": 41}, "moe_shared_expert_intermediate_size 41"),
        (0, {}, "at least 1"),
        (-1, {}, "at least 1"),
        (1024, {}, "num_key_value_heads"),
    ],
)
def test_sizes_that_do_not_divide_are_refused(size: int, changes: dict[str, Any], field: str) -> None:
    config = parse(raw_config("M*-E", **changes))
    with pytest.raises(ConfigError, match=rf"--tensor-parallel-size {size}.*({field})"):
        config.layout(16, 4, size)


def test_a_model_is_not_built_for_a_size_that_does_not_divide() -> None:
    config = parse(raw_config("M*-E"))
    with pytest.raises(ConfigError, match=r"--tensor-parallel-size 3 .*num_key_value_heads 2"):
        build_tiny(config, {}, exact=False, communicator=thread_ranks(3)[0])


def test_every_size_that_divides_has_a_layout_of_the_same_units() -> None:
    config = parse(NANO)
    whole = config.layout(16, 2)
    for size in (1, 2, 4, 8, 16):
        each = config.layout(16, 2, size)
        assert each.header_bytes == whole.header_bytes
        assert each.page_units == max(1, 2 // size)
        assert each.page_bytes * whole.page_units == whole.page_bytes * each.page_units
        assert each.state_units == max(1, 8 // size)
        assert math.isclose(each.state_bytes / each.state_units, whole.state_bytes / whole.state_units)
