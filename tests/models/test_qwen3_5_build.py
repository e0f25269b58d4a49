"""Building Qwen3.5: names and numbers as transformers saves them, configs that are refused, shares that fit."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import save_file
from torch import Tensor

from cairn.check.report import check
from cairn.errors import ConfigError, ModelError
from cairn.models.decoder_builder import Execution, build_decoder
from cairn.models.registry import open_model
from cairn.models.sharding import TensorShard
from models.published_qwen3_5 import QWEN35
from models.qwen3_5_truth import CLASSES, parse_qwen, published_qwen, qwen_logits, qwen_weights, raw_qwen
from models.rank_shares import Model, every_pair_of_sizes_is_taken, every_share_is_found
from runner.harness import Driver, build_tiny, family, left_of, prompt, ranks, tensors

KINDS = list(CLASSES)
VISION = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "num_position_embeddings": 16}


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_a_checkpoint_saved_by_transformers_is_served(tmp_path: Path, kind: str, tied: bool) -> None:
    raw = raw_qwen(kind, tie_word_embeddings=tied)
    fields = {name: value for name, value in raw.items() if name != "model_type"}
    if "text_config" in fields:
        fields |= {"vision_config": VISION | {"out_hidden_size": 32}, "tie_word_embeddings": tied}
    config_class, model_class, _ = CLASSES[kind]
    torch.manual_seed(1)
    theirs = getattr(transformers, model_class)(getattr(transformers, config_class)(**fields)).eval()
    theirs.save_pretrained(tmp_path)
    opened = open_model(tmp_path)
    assert opened.config.tie_word_embeddings == tied
    driver = Driver(opened.config, opened.build(exact=False), exact=False)
    tokens = prompt(70, 0)
    (found,) = driver.run(driver.row(driver.sequence(0, 70), tokens))
    with torch.inference_mode():
        wanted = theirs(torch.tensor([tokens]), use_cache=False).logits[0, -1]
    assert wanted.std() > 0.01
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-5)


def test_experts_in_one_tensor_are_the_same_model(tmp_path: Path) -> None:
    """The form that Qwen publishes in bfloat16."""
    raw = raw_qwen("qwen3_5_moe_text")
    config = parse_qwen(raw)
    weights, tokens = qwen_weights(config, 0), prompt(70, 0)
    packed = {name: tensor for name, tensor in weights.items() if ".experts." not in name}
    for index in range(3):
        base = f"model.layers.{index}.mlp.experts"
        gate, up, down = (
            torch.stack([weights[f"{base}.{expert}.{part}_proj.weight"] for expert in range(8)])
            for part in ("gate", "up", "down")
        )
        packed[f"{base}.gate_up_proj"], packed[f"{base}.down_proj"] = torch.cat([gate, up], 1), down
    save_file(packed, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(raw))
    found = []
    for model in (open_model(tmp_path).build(exact=True), build_tiny(config, weights, exact=True)):
        driver = Driver(config, model, exact=True)
        found += driver.run(driver.row(driver.sequence(0, 70), tokens))
    assert torch.equal(found[0], found[1])
    assert len(open_model(tmp_path).transfer_facts()["weights"]) == 64


@pytest.mark.parametrize("kind", KINDS)
def test_every_tensor_is_asked_for_once(kind: str) -> None:
    config = parse_qwen(raw_qwen(kind))
    weights = qwen_weights(config, 0)
    asked: list[str] = []

    def load(name: str, shape: tuple[int, ...], shard: TensorShard | None = None) -> Tensor:
        assert tuple(weights[name].shape) == shape
        asked.append(name)
        return left_of(weights[name], shard).clone()

    build_decoder(family(config).spec(config), load, Execution(True, torch.float32))
    assert sorted(asked) == sorted(tensors(config))


@pytest.mark.parametrize("kind", ["qwen3_5", "qwen3_next"])
@pytest.mark.parametrize("exact", [False, True])
def test_the_fast_kernels_and_the_slow_ones_make_the_same_model(kind: str, exact: bool) -> None:
    config = parse_qwen(raw_qwen(kind))
    weights = qwen_weights(config, 1)
    found = []
    for backend in ("cpu", "reference"):
        driver = Driver(config, build_tiny(config, weights, exact, backend=backend), exact)
        driver.runner.pool.zero_()
        one, two = driver.sequence(0, 100), driver.sequence(1, 100)
        logits = driver.run(driver.row(one, prompt(70, 2)), driver.row(two, prompt(64, 3)))
        logits += driver.run(driver.row(one, prompt(1, 4), decode=True), driver.row(two, prompt(9, 5)))
        found.append(torch.stack(logits))
    torch.testing.assert_close(found[0], found[1], rtol=0, atol=5e-5)


@pytest.mark.parametrize("size", [1, 2])
def test_bfloat16(size: int) -> None:
    raw = raw_qwen("qwen3_5_moe")
    config = parse_qwen(raw)
    weights, tokens = qwen_weights(config, 3), prompt(90, 3)
    wanted = qwen_logits(published_qwen(raw, weights), tokens, wide=True)[-1]
    if size == 1:
        model = build_tiny(config, weights, exact=False, dtype=torch.bfloat16)
        driver = Driver(config, model, exact=False)
    else:
        driver = ranks(config, weights, size, exact=False, dtype=torch.bfloat16)
    track = driver.sequence(0, 90)
    driver.run(driver.row(track, tokens[:89]))
    (found,) = driver.run(driver.row(track, tokens[89:], decode=True))
    driver.runner.close()
    assert (found - wanted).abs().max() < 0.25 * wanted.std()
    with pytest.raises(ConfigError, match="--exact needs --dtype float32"):
        build_tiny(config, weights, exact=True, dtype=torch.bfloat16)


# -- what a rank remembers ---------------------------------------------------------------------------------------------

SHARED: dict[str, dict[str, Any]] = {
    "tiny": {},
    "one-of-each": {"linear_num_key_heads": 1, "num_key_value_heads": 1},
    "eight-heads": {"linear_num_key_heads": 8, "linear_num_value_heads": 8},
}


def shared(name: str) -> Model:
    raw = QWEN35 if name == "published" else raw_qwen("qwen3_5", **SHARED[name])
    return Model(parse_qwen(raw))


@pytest.mark.parametrize("block_size", [16, 128])
@pytest.mark.parametrize("name", [*SHARED, "published"])
def test_the_transfer_takes_every_pair_of_sizes(name: str, block_size: int) -> None:
    every_pair_of_sizes_is_taken(shared(name), block_size)


@pytest.mark.parametrize("name", SHARED)
def test_every_share_is_found_among_the_ranks_of_any_other_size(name: str) -> None:
    model = shared(name)
    every_share_is_found(model, qwen_weights(model.config, 5))


# -- configs -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("size", "changes", "field"),
    [
        (3, {}, "num_key_value_heads 2"),
        (8, {}, "4 ranks share one of num_key_value_heads 2.* 2 query heads"),
        (3, {"num_key_value_heads": 3, "num_attention_heads": 6}, "linear_num_key_heads 2"),
        (2, {"intermediate_size": 57}, "intermediate_size 57"),
        (4, {"linear_value_head_dim": 15, "linear_num_value_heads": 2}, "linear_num_key_heads 2.* 15 channels"),
        (0, {}, "at least 1"),
    ],
)
def test_sizes_that_do_not_divide_are_refused(size: int, changes: dict[str, Any], field: str) -> None:
    config = parse_qwen(raw_qwen("qwen3_5", **changes))
    with pytest.raises(ConfigError, match=rf"--tensor-parallel-size {size}.*({field})"):
        config.layout(16, 4, size)


@pytest.mark.parametrize("field", ["moe_intermediate_size", "shared_expert_intermediate_size"])
def test_experts_that_do_not_divide_are_refused(field: str) -> None:
    config = parse_qwen(raw_qwen("qwen3_5_moe", **{field: 25}))
    with pytest.raises(ConfigError, match=rf"--tensor-parallel-size 2 .*{field} 25"):
        config.layout(16, 4, 2)


def rope(**changes: Any) -> dict[str, Any]:
    given = raw_qwen("qwen3_5_text")["rope_parameters"]
    return {"rope_parameters": given | changes}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu', but only"),
        ({"attention_bias": True}, "attention_bias is true"),
        ({"attn_output_gate": False}, "attn_output_gate is false"),
        ({"vocab_size": None}, "vocab_size is missing"),
        ({"num_attention_heads": 5}, "num_attention_heads 5 must be a multiple of num_key_value_heads 2"),
        ({"linear_num_value_heads": 5}, "linear_num_value_heads 5 must be a multiple of linear_num_key_heads 2"),
        (
            {"layer_types": ["mamba"]},
            "layer_types has 'mamba' for layer 0; each layer must be one of linear_attention, full_attention",
        ),
        ({"layer_types": []}, "layer_types names 0 layers"),
        ({"num_hidden_layers": 7}, "num_hidden_layers is 7, but layer_types names 3 layers"),
        ({"linear_conv_kernel_dim": 1}, "linear_conv_kernel_dim must be an integer in 2..64"),
        (rope(rope_type="dynamic"), "rope_type is 'dynamic'"),
        (rope(rope_type=None, type="longrope"), "type is 'longrope'"),
        ({"rope_parameters": [1]}, "rope_parameters must be an object"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, "settings for full_attention alone"),
        (rope(mrope_interleaved=False), "mrope_interleaved is false"),
        (rope(mrope_section="2,1,1"), "mrope_section must be a list of integers"),
        (rope(partial_rotary_factor=0.2), "partial_rotary_factor 0.2 of head_dim 16 must be an even number"),
        (rope(partial_rotary_factor=1.5), "partial_rotary_factor must be a number in 0..1"),
    ],
)
def test_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        parse_qwen(raw_qwen("qwen3_5_text", **changes))


@pytest.mark.parametrize(
    ("sections", "shown"),
    [([2, 2, 1], r"\[2, 2, 1\]"), ([2, 2], r"\[2, 2\]"), (None, r"\[11, 11, 10\]")],
)
def test_positions_of_images_are_checked(sections: list[int] | None, shown: str) -> None:
    raw = raw_qwen("qwen3_5", **rope(mrope_section=sections))
    with pytest.raises(ModelError, match=rf"mrope_section {shown} must be three numbers that add up to 4"):
        parse_qwen(raw | {"vision_config": VISION})


def test_positions_of_text_are_one(tmp_path: Path) -> None:
    """As transformers saves a text model with small heads: by its default, mrope_section adds up to 32."""
    left_out = ("rope_parameters", "model_type")
    sizes = {name: value for name, value in raw_qwen("qwen3_5_text").items() if name not in left_out}
    torch.manual_seed(2)
    theirs = transformers.Qwen3_5ForCausalLM(transformers.Qwen3_5TextConfig(**sizes)).eval()
    theirs.save_pretrained(tmp_path)
    assert theirs.config.head_dim == 16 and "mrope_section" not in theirs.config.rope_parameters
    assert check(tmp_path).ok
    opened = open_model(tmp_path)
    assert (opened.config.rotary_dim, opened.config.mrope_section) == (4, None)
    driver, tokens = Driver(opened.config, opened.build(exact=False), exact=False), prompt(70, 0)
    (found,) = driver.run(driver.row(driver.sequence(0, 70), tokens))
    with torch.inference_mode():
        wanted = theirs(torch.tensor([tokens]), use_cache=False).logits[0, -1]
    assert wanted.std() > 0.01
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-5)


def test_experts_are_checked() -> None:
    with pytest.raises(ModelError, match=r"num_experts_per_tok must be an integer in 1\.\.8"):
        parse_qwen(raw_qwen("qwen3_5_moe", num_experts_per_tok=9))
    with pytest.raises(ModelError, match="norm_topk_prob is false"):
        parse_qwen(raw_qwen("qwen3_5_moe", norm_topk_prob=False))
    with pytest.raises(ModelError, match="norm_topk_prob must be true or false, not 1"):
        parse_qwen(raw_qwen("qwen3_5_moe", norm_topk_prob=1))
    with pytest.raises(ModelError, match="tie_word_embeddings must be true or false, not 0"):
        parse_qwen(raw_qwen("qwen3_5", tie_word_embeddings=0) | {"tie_word_embeddings": False})
    with pytest.raises(ModelError, match="text_config is missing; qwen3_5_moe keeps"):
        parse_qwen({"model_type": "qwen3_5_moe"})


def test_the_fields_of_older_checkpoints() -> None:
    """Qwen3-Next's: rotary fields beside the others, layers by an interval, which layers are dense."""
    raw = raw_qwen("qwen3_next", layer_types=None, num_hidden_layers=8, decoder_sparse_step=2, mlp_only_layers=[3])
    del raw["rope_parameters"]
    config = parse_qwen(raw | {"rope_theta": 5e6, "partial_rotary_factor": 0.25, "rope_scaling": None})
    assert config.layer_types == (*["linear_attention"] * 3, "full_attention") * 2
    assert config.sparse_layers == (1, 5, 7)
    assert (config.rope_theta, config.rotary_dim, config.mrope_section) == (5e6, 4, None)
