"""Gemma 4: what config.json may say, in which forms it is published, and what it costs."""

import json
import math
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import Gemma4TextConfig

from cairn.check.report import check
from cairn.errors import ConfigError, ModelError
from cairn.models.families import FAMILIES
from cairn.models.image_processor import FILE
from cairn.models.qwen3_5_vision import read_vision
from cairn.models.registry import open_model
from models.decoder_families import TinyDriver, logits_of, prompt, published, tiny
from models.logits_bar import Truth
from models.published_gemma4 import PUBLISHED, text_shapes
from models.tiny_configs import SHARING, gemma4
from tiers import more

WINDOWED, FULL = "sliding_attention", "full_attention"
EXPERTS = {"enable_moe_block": True, "num_experts": 6, "top_k_experts": 3, "moe_intermediate_size": 24}
UNIFIED = {"model_type": "gemma4_unified_text", "architectures": ["Gemma4UnifiedForCausalLM"]}


def parsed(raw: Any) -> Any:
    return FAMILIES[raw["model_type"]].parse(raw)


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("Gemma-4-31B", [(10, 4, 512, None), (50, 16, 256, 1024)]),
        ("Gemma-4-26B-A4B", [(5, 2, 512, None), (25, 8, 256, 1024)]),
        ("Gemma-4-12B", [(8, 1, 512, None), (40, 8, 256, 1024)]),
        # Of 42 layers, and of 35: those that read the keys and values of an earlier one have no pages.
        ("Gemma-4-E4B", [(4, 2, 512, None), (20, 2, 256, 512)]),
        ("Gemma-4-E2B", [(3, 1, 512, None), (12, 1, 256, 512)]),
    ],
)
def test_head_sizes_are_groups_of_the_layers_that_have_pages(name: str, wanted: list[tuple[Any, ...]]) -> None:
    config = parsed(PUBLISHED[name])
    spec, layout = config.cache_spec(), config.layout(16, 2)
    assert [(each.num_layers, each.num_kv_heads, each.head_dim, each.reach) for each in spec.attention] == wanted
    assert [2 * each.token_numbers for each in spec.attention] == [
        layers * heads * 2 * dim * 2 for layers, heads, dim, _ in wanted
    ]
    for group, spec_group in zip(layout.groups, spec.attention, strict=True):
        assert layout.page_bytes - 2 * spec_group.token_numbers * group.tokens_per_page >= 0
    assert config.eos_token_ids == (1, 106)


def test_the_layers_in_words() -> None:
    counts = {name: parsed(raw).layer_counts() for name, raw in PUBLISHED.items()}
    assert counts["Gemma-4-26B-A4B"] == {
        "windowed attention with MLP beside mixture of experts": 25,
        "attention with MLP beside mixture of experts": 5,
    }
    assert counts["Gemma-4-E2B"] == {
        "windowed attention with MLP": 12,
        "attention with MLP": 3,
        "windowed attention to keys of an earlier layer with MLP": 16,
        "attention to keys of an earlier layer with MLP": 4,
    }


@pytest.mark.parametrize("name", PUBLISHED)
def test_tensors_are_the_published_ones(name: str) -> None:
    """All but keys and values of layers that have none."""
    raw, shapes = PUBLISHED[name], text_shapes(PUBLISHED[name])
    family, config = FAMILIES[raw["model_type"]], parsed(raw)
    unused = tuple(config.unused(shapes))
    assert family.tensors(config, shapes) == {each: shapes[each] for each in shapes if not each.startswith(unused)}


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (
            gemma4(layer_types=[WINDOWED, "linear_attention", WINDOWED, FULL]),
            "layer_types has 'linear_attention' for layer 1; each layer must be one of sliding_attention, full_att",
        ),
        (
            gemma4(layer_types=[WINDOWED, FULL, FULL, WINDOWED]),
            "layer_types has 'sliding_attention' for layer 3, the last one, which must be 'full_attention'",
        ),
        (
            gemma4(num_kv_shared_layers=3),
            "num_kv_shared_layers 3 makes layer 1 read keys and values of an earlier layer that is full_attention, but "
            "none of the 1 layers that have their own is",
        ),
        (gemma4(num_kv_shared_layers=4), "num_kv_shared_layers 4 makes layer 0 read keys and values of an earlier"),
        (gemma4(num_kv_shared_layers=9), "num_kv_shared_layers 9 makes layer 0 read keys and values of an earlier"),
        (gemma4(num_kv_shared_layers=-1), "num_kv_shared_layers must be an integer in 0..512, not -1"),
        (gemma4(sliding_window=0), "sliding_window must be an integer in 1..1073741824, not 0, as layer 0 is sliding"),
        (
            gemma4(sliding_window=None),
            "sliding_window is null, but layer 0 is sliding_attention; give the number of",
        ),
        (gemma4(use_bidirectional_attention="all"), "use_bidirectional_attention is 'all', but only absent or"),
        (gemma4(hidden_activation="silu"), "hidden_activation is 'silu', but only 'gelu_pytorch_tanh'"),
        (
            gemma4(num_global_key_value_heads=3),
            "num_attention_heads 4 must be a multiple of num_global_key_value_heads 3, which layer 1 has",
        ),
        (gemma4(global_head_dim=15), "global_head_dim 15 must be even"),
        (gemma4(head_dim=11), "head_dim 11 must be even"),
        (
            gemma4(**{**SHARING, "vocab_size_per_layer_input": 96}),
            "vocab_size_per_layer_input must be an integer in 97",
        ),
        (gemma4(enable_moe_block=True), "num_experts is missing"),
        (gemma4(**{**EXPERTS, "top_k_experts": 7}), "top_k_experts must be an integer in 1..6, not 7"),
        (gemma4(**{**EXPERTS, "moe_intermediate_size": None}), "moe_intermediate_size is missing"),
        (
            gemma4(rope_parameters={WINDOWED: {"rope_theta": 1e4}}),
            "rope_parameters.full_attention is missing: it has the positions of layers of this kind",
        ),
        (
            gemma4(rope_parameters={WINDOWED: {"rope_theta": 1e4}, FULL: {"rope_type": "yarn", "factor": 2.0}}),
            "rope_parameters.full_attention.rope_type is 'yarn', but only 'default' or 'proportional' is implemented",
        ),
        (
            gemma4(
                rope_parameters={
                    WINDOWED: {"rope_theta": 1e4},
                    FULL: {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.1},
                }
            ),
            "rope_parameters.full_attention.partial_rotary_factor 0.1 of global_head_dim 16 is no pair",
        ),
        (
            gemma4(per_layer_config={"1": {"head_dim": 16}}),
            "per_layer_config has head_dim 12 for layer 3, but all layers that are full_attention must have one",
        ),
        (
            gemma4(per_layer_config={"2": {"head_dim": 16}}),
            "per_layer_config has head_dim 16 for layer 2, which is sliding_attention and has 12 like the others",
        ),
        (
            gemma4(per_layer_config={"1": {"eps": 1}}),
            "per_layer_config has 'eps' for layer 1, which is not implemented",
        ),
        (gemma4(per_layer_config=[1]), "per_layer_config must be an object of integers by layer, not [1]"),
        (gemma4(per_layer_config={"1": {"head_dim": 0}}), "per_layer_config.1.head_dim must be an integer in 1"),
    ],
)
def test_bad_input_names_the_layer_or_the_field(raw: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError) as refused:
        parsed(raw)
    assert str(refused.value).startswith(f"config.json: {message}")


@pytest.mark.parametrize(
    ("raw", "size", "field"),
    [
        (gemma4(num_key_value_heads=4, num_global_key_value_heads=1, global_head_dim=8), 8, "num_key_value_heads 4"),
        (gemma4(num_attention_heads=6, num_key_value_heads=6), 3, "num_global_key_value_heads 2"),
        (gemma4(**{**SHARING, "hidden_size_per_layer_input": 7}), 2, "hidden_size_per_layer_input 7"),
        (gemma4(**{**EXPERTS, "moe_intermediate_size": 25}), 2, "moe_intermediate_size 25"),
    ],
)
def test_sizes_that_do_not_divide_are_refused(raw: dict[str, Any], size: int, field: str) -> None:
    with pytest.raises(ConfigError, match=rf"--tensor-parallel-size {size}.*{field}"):
        parsed(raw).layout(16, 4, size)


@pytest.mark.parametrize("changes", [{}, {"attention_k_eq_v": False}, {"num_global_key_value_heads": None}])
def test_sizes_by_layer_are_those_of_the_published_form(changes: dict[str, Any]) -> None:
    """transformers reads the published form, and writes the other one."""
    raw = gemma4(**changes)
    written = json.loads(Gemma4TextConfig(**deepcopy(raw)).to_json_string(use_diff=False))
    assert "global_head_dim" not in written and written["per_layer_config"]["1"]["head_dim"] == 16
    config = parsed(raw)
    assert parsed(raw | {"per_layer_config": written["per_layer_config"]}) == config
    left = {name: value for name, value in raw.items() if not name.startswith(("global", "num_global"))}
    assert parsed(left | {"per_layer_config": written["per_layer_config"]}) == config


def test_what_is_left_out_is_transformers_own() -> None:
    theirs: Any = Gemma4TextConfig()
    theirs.allow_global_per_layer_attribute_access = True
    silent = parsed({"model_type": "gemma4_text", "hidden_size_per_layer_input": None})
    assert list(silent.layer_types) == theirs.layer_types
    for name in (
        *("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim"),
        *("sliding_window", "final_logit_softcapping", "num_kv_shared_layers", "attention_k_eq_v", "enable_moe_block"),
        *("max_position_embeddings", "tie_word_embeddings", "use_double_wide_mlp"),
    ):
        assert getattr(silent, name) == getattr(theirs, name), name
    assert silent.hidden_size_per_layer_input == 0
    assert (
        parsed({"model_type": "gemma4_text"}).hidden_size_per_layer_input == theirs.hidden_size_per_layer_input == 256
    )
    theirs.allow_global_per_layer_attribute_access = False
    full = theirs.per_layer_config[5]
    assert (silent.global_head_dim, silent.num_global_key_value_heads) == (full.head_dim, full.num_key_value_heads)
    assert silent == parsed(
        {"model_type": "gemma4_text", "hidden_size_per_layer_input": 0, "rope_parameters": theirs.rope_parameters}
    )
    assert silent.rope_theta == theirs.rope_parameters[FULL]["rope_theta"]
    assert silent.rope_local_base_freq == theirs.rope_parameters[WINDOWED]["rope_theta"]


@pytest.mark.parametrize(
    "change",
    [
        {"num_kv_shared_layers": 1},
        {"attention_k_eq_v": False},
        {"global_head_dim": 12},
        {"hidden_size_per_layer_input": 4},
        {"moe_intermediate_size": 8},
        {"use_double_wide_mlp": False},
        {"sliding_window": 13},
        {"rope_parameters": {WINDOWED: {"rope_theta": 2e4}, FULL: {"rope_type": "default", "rope_theta": 1e6}}},
    ],
)
def test_facts_are_all_that_decides_keys_and_values(change: dict[str, Any]) -> None:
    raw = gemma4(**SHARING, **EXPERTS)
    facts = parsed(raw).transfer_facts()
    assert parsed(raw | {"max_position_embeddings": 99, "eos_token_id": 5}).transfer_facts() == facts
    assert parsed(raw | change).transfer_facts() != facts
    assert all(isinstance(value, str | int) for value in facts.values())


def test_every_tensor_is_asked_for_and_none_twice() -> None:
    model, asked = tiny(gemma4(**SHARING, **EXPERTS)), list[str]()

    class Noted(type(model)):  # type: ignore[misc]
        def load(self, name: str, shape: tuple[int, ...], cut: Any = None) -> torch.Tensor:
            asked.append(name)
            return super().load(name, shape, cut)

    Noted(model.raw, model.weights).model(exact=True)
    assert sorted(asked) == sorted(model.weights)


@pytest.mark.parametrize("unified", [False, more(True)])
def test_the_text_of_a_checkpoint_that_sees_and_hears_is_served(unified: bool, tmp_path: Path) -> None:
    """Keys and values of layers that have none are there, and other parts."""
    changes = UNIFIED | {"num_kv_shared_layers": 2} if unified else {**SHARING, **EXPERTS}
    model, tokens = tiny(gemma4(**changes), 4), prompt(40, 4)
    name = str(model.raw["model_type"]).removesuffix("_text")
    text = {field: value for field, value in model.raw.items() if field != "architectures"}
    weights = {each.replace("model", "model.language_model", 1): value for each, value in model.weights.items()}
    unused = [
        f"model.language_model.layers.{index}.self_attn.{part}" for index in (2, 3) for part in ("k_proj", "k_norm")
    ]
    others = ["model.vision_tower.std_bias", "model.embed_vision.embedding_projection.weight"]
    others += ["model.audio_tower.output_proj.bias", "model.embed_audio.embedding_projection.weight"]
    weights |= {each: torch.ones(3) for each in (*(f"{each}.weight" for each in unused), *others)}
    save_file(weights, tmp_path / "model.safetensors")
    architecture = f"Gemma4{'Unified' * unified}ForConditionalGeneration"
    outer = {"model_type": name, "architectures": [architecture], "text_config": text, "vision_config": {}}
    (tmp_path / "config.json").write_text(json.dumps(outer))
    (tmp_path / FILE).write_text("{}")
    report = check(tmp_path)
    assert report.ok and report.accounting.num_ignored == 8
    assert report.parameters == sum(math.prod(each.shape) for each in model.weights.values())
    # Nothing reads images, so that a request with one is refused by that name.
    assert read_vision(tmp_path) is None
    driver, alone = TinyDriver(model, [open_model(tmp_path).build(exact=True)], exact=True), model.driver(exact=True)
    found, wanted = (each.run(each.row(each.sequence(0, 40), tokens))[0] for each in (driver, alone))
    assert torch.equal(found, wanted)


def test_the_model_with_one_encoder_has_the_same_layers() -> None:
    model, tokens = tiny(gemma4(**UNIFIED, num_kv_shared_layers=1, use_double_wide_mlp=True), 3), prompt(90, 3)
    theirs = published(model)
    truth = Truth.of(tokens, *(logits_of(theirs, tokens, wide=wide) for wide in (False, True)))
    driver = model.driver(exact=False)
    (logits,) = driver.run(driver.row(driver.sequence(0, 90), tokens))
    truth.check(logits, 90)
    silent = parsed({"model_type": "gemma4_unified_text"})
    assert (silent.sliding_window, silent.max_model_len, silent.hidden_size_per_layer_input) == (1024, 262144, 0)
