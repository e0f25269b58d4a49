"""config.json of the families made of parts: the published models, what is refused, and the sizes that follow."""

import json
import math
from copy import deepcopy
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import Gemma3TextConfig, Lfm2Config, Lfm3Config

from cairn.check.report import check
from cairn.engine.text.images import ImagePrompts
from cairn.errors import ConfigError, ModelError
from cairn.models.families import FAMILIES
from cairn.models.image_processor import FILE
from cairn.models.qwen3_5_vision import read_vision
from cairn.models.registry import open_model
from doubles.thread_ranks import thread_ranks
from models.decoder_families import TinyDriver, prompt, published, tiny, write
from models.published_families import GEMMA3_THAT_SEES, GPT_OSS, LFM3, PUBLISHED
from models.rank_shares import SIZES, Model, every_pair_of_sizes_is_taken
from models.tiny_configs import (
    MAKERS,
    dense_granite,
    falcon,
    gemma2,
    gemma3,
    gemma4,
    gpt_oss,
    granite,
    lfm2,
    lfm2_moe,
    lfm3,
    llama4,
    olmo_hybrid,
    qwen3,
    qwen3_moe,
)
from tiers import first

F32, BF16 = torch.float32, torch.bfloat16


def parsed(raw: dict[str, Any]) -> tuple[Any, Any]:
    family = FAMILIES[raw["model_type"]]
    return family, family.parse(raw)


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_models(name: str) -> None:
    raw, parameters, token_bytes, header, state = PUBLISHED[name]
    family, config = parsed(raw)
    assert sum(map(math.prod, family.tensors(config).values())) == parameters
    found = config.layout(16, 2)
    groups = config.cache_spec().attention
    numbers = sum(group.token_numbers for group in groups)
    assert (2 * numbers, found.header_bytes, found.state_bytes) == (token_bytes, header, state)
    # As many tokens as a page of the group with the most layers has room for.
    for group, pages in zip(groups, found.groups, strict=True):
        assert 0 <= found.page_bytes - 2 * group.token_numbers * pages.tokens_per_page < 2 * group.token_numbers
    assert 16 in {group.tokens_per_page for group in found.groups}
    assert family.model_type == raw["model_type"]
    assert config.eos_token_ids == (raw["eos_token_id"],)
    assert config.max_position_embeddings == raw["max_position_embeddings"]


@pytest.mark.parametrize("name", PUBLISHED)
@pytest.mark.parametrize("block_size", [16, 128])
def test_the_transfer_takes_every_pair_of_sizes(name: str, block_size: int) -> None:
    config = parsed(PUBLISHED[name][0])[1]
    # 30 heads are not four ranks'.
    sizes = (1, 2) if name == "Olmo-Hybrid-7B" else SIZES
    every_pair_of_sizes_is_taken(Model(config), block_size, sizes)


def test_the_layers_in_words() -> None:
    words = {name: parsed(raw)[1].layer_counts() for name, (raw, *_) in PUBLISHED.items()}
    assert words == {
        "Granite-4.0-H-Tiny": {"Mamba2 with mixture of experts": 36, "attention with mixture of experts": 4},
        "Falcon-H1-0.5B": {"Mamba2 beside attention with MLP": 36},
        "LFM2-1.2B": {"short convolution with MLP": 10, "attention with MLP": 6},
        "Granite-3.1-2B": {"attention with MLP": 40},
        "Qwen3-30B-A3B": {"attention with mixture of experts": 48},
        "LFM2-8B-A1B": {
            "short convolution with MLP": 2,
            "attention with mixture of experts": 6,
            "short convolution with mixture of experts": 16,
        },
        "Olmo-Hybrid-7B": {"gated delta net with MLP": 24, "attention with MLP": 8},
        "Qwen3-0.6B": {"attention with MLP": 28},
        "Gemma-3-1B": {"windowed attention with MLP": 22, "attention with MLP": 4},
        "Llama-4-Scout": {
            "chunked attention with mixture of experts": 36,
            "attention with mixture of experts": 12,
        },
        "LFM3-1.7B": {
            "short convolution with MLP": 13,
            "windowed attention with MLP": 5,
            "attention with MLP": 6,
        },
        "Gemma-2-2B": {"windowed attention with MLP": 13, "attention with MLP": 13},
        "gpt-oss-20b": {"windowed attention with mixture of experts": 12, "attention with mixture of experts": 12},
        "gpt-oss-120b": {"windowed attention with mixture of experts": 18, "attention with mixture of experts": 18},
    }


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (qwen3(num_key_value_heads=3), "num_attention_heads 4 must be a multiple of num_key_value_heads 3"),
        (qwen3(head_dim=15), "head_dim 15 must be even"),
        (qwen3(rope_parameters={"rope_type": "dynamic", "rope_theta": 1e6}), "rope_type is 'dynamic'"),
        (qwen3(rope_parameters={"rope_theta": -1}), "rope_theta must be a number in 1..1e.15"),
        (qwen3(rope_parameters=[1]), "rope_parameters must be an object"),
        (qwen3(rope_parameters={"type": "longrope", "factor": 4.0, "rope_theta": 1e6}), "type is 'longrope'"),
        (qwen3(rope_parameters={"full_attention": {"rope_theta": 1e4}}), "settings for full_attention alone"),
        (qwen3(rope_parameters={"partial_rotary_factor": 0.5}), "partial_rotary_factor is 0.5"),
        (qwen3(rope_parameters={"rope_theta": 1e6}, partial_rotary_factor=0.5), "partial_rotary_factor is 0.5"),
        (qwen3(use_sliding_window=True), "use_sliding_window is true"),
        (qwen3(layer_types=["sliding_attention"] * 3), "layer_types has 'sliding_attention'"),
        (qwen3(layer_types=["full_attention"] * 2), "num_hidden_layers is 3, but layer_types names 2 layers"),
        (qwen3(hidden_act="gelu"), "hidden_act is 'gelu'"),
        (qwen3(num_hidden_layers=0), "num_hidden_layers must be an integer in 1..512"),
        (qwen3(intermediate_size=None), "intermediate_size is missing"),
        (dense_granite(mlp_bias="no"), "mlp_bias must be true or false"),
        (dense_granite(hidden_act="gelu"), "hidden_act is 'gelu'"),
        (dense_granite(residual_multiplier=0), "residual_multiplier must be a number"),
        (dense_granite(num_attention_heads=6), "hidden_size 32 must be a multiple of num_attention_heads 6"),
        (qwen3_moe(num_experts_per_tok=7), "num_experts_per_tok must be an integer in 1..6"),
        (qwen3_moe(intermediate_size=None), "intermediate_size is missing"),
        (qwen3_moe(mlp_only_layers=[3]), "mlp_only_layers must be an integer in 0..2, not 3"),
        (qwen3_moe(norm_topk_prob=1), "norm_topk_prob must be true or false"),
        (lfm2_moe(layer_types=None), "layer_types is missing"),
        (lfm2_moe(num_dense_layers=5), "num_dense_layers must be an integer in 0..4"),
        (lfm2_moe(num_experts_per_tok=7), "num_experts_per_tok must be an integer in 1..6"),
        (lfm2_moe(use_expert_bias="yes"), "use_expert_bias must be true or false"),
        (olmo_hybrid(layer_types=["mamba"] * 3), "layer_types has 'mamba'"),
        (
            olmo_hybrid(linear_num_value_heads=5),
            "linear_num_value_heads 5 must be a multiple of linear_num_key_heads 2",
        ),
        (olmo_hybrid(num_attention_heads=6), "hidden_size 32 must be a multiple of num_attention_heads 6"),
        (olmo_hybrid(rope_parameters={"rope_type": "dynamic", "rope_theta": 1e5}), "rope_type is 'dynamic'"),
        (lfm2(num_attention_heads=6), "hidden_size 32 must be a multiple of num_attention_heads 6"),
        (lfm2(num_attention_heads=6, head_dim=8), "hidden_size 32 must be a multiple of num_attention_heads 6"),
        (
            lfm2(layer_types=["conv", "mamba"]),
            "layer_types has 'mamba' for layer 1; each layer must be one of conv, full_attention",
        ),
        (lfm2(layer_types=[]), "layer_types names 0 layers"),
        (lfm2(layer_types=None, full_attn_idxs=[4]), "full_attn_idxs must be an integer in 0..3, not 4"),
        (lfm2(conv_L_cache=1), "conv_L_cache must be an integer in 2..64"),
        (falcon(mamba_d_head=13), "mamba_d_head is 13, but only 12 or 'auto' is implemented"),
        (falcon(mamba_d_ssm=50, mamba_d_head="auto"), "mamba_n_heads 4 must divide the 50 channels"),
        (falcon(mamba_n_groups=3), "mamba_n_heads 4 must be a multiple of mamba_n_groups 3"),
        (falcon(mamba_rms_norm=True, mamba_norm_before_gate=True), "mamba_norm_before_gate is true"),
        (falcon(mamba_rms_norm=True, mamba_norm_before_gate=None), "mamba_norm_before_gate is true"),
        (falcon(ssm_multipliers=[1.0, 1.0]), "ssm_multipliers must be a list of 5 numbers"),
        (falcon(mlp_multipliers=[1.0, "x"]), "mlp_multipliers must be a number"),
        (
            gemma3(layer_types=["sliding_attention", "full_attention", "chunked_attention"]),
            "layer_types has 'chunked_attention' for layer 2; each layer must be one of sliding_attention, full_att",
        ),
        (gemma3(layer_types=None, sliding_window_pattern=0), "sliding_window_pattern must be an integer in 1..512"),
        (gemma3(hidden_activation="gelu"), "hidden_activation is 'gelu', but only 'gelu_pytorch_tanh'"),
        (gemma3(attn_logit_softcapping=50.0), "attn_logit_softcapping is 50.0, but only absent is implemented"),
        (gemma3(use_bidirectional_attention=True), "use_bidirectional_attention is true"),
        (gemma3(query_pre_attn_scalar=0), "query_pre_attn_scalar must be a number"),
        (
            gemma3(rope_parameters={"sliding_attention": {"rope_type": "linear", "factor": 2.0}}),
            "rope_parameters.sliding_attention.rope_type is 'linear', but only 'default' is implemented",
        ),
        (
            gemma3(rope_parameters={"rope_theta": 1e6}),
            "rope_parameters.rope_theta must be an object: settings are by kind of layer, as full_attention",
        ),
        (gemma3(rope_local_base_freq=0), "rope_local_base_freq must be a number in 1"),
        (
            gemma3(rope_parameters={"full_attention": {"rope_theta": 0}}),
            "rope_parameters.full_attention.rope_theta must be a number in 1",
        ),
        (gemma3(rope_scaling={"rope_type": "dynamic", "factor": 2.0}), "rope_scaling.rope_type is 'dynamic'"),
        (llama4(num_experts_per_tok=2), "num_experts_per_tok is 2, but only 1 is implemented"),
        (llama4(no_rope_layers=[1, 0, 1]), "no_rope_layers has 3 entries for num_hidden_layers 4"),
        (llama4(no_rope_layers=[1, 0, 1, 2]), "no_rope_layers must be an integer in 0..1, not 2"),
        (
            llama4(layer_types=["chunked_attention"] * 4),
            "layer_types has 'chunked_attention' for layer 1, whose positions, by no_rope_layers or no_rope_layer_int",
        ),
        (llama4(layer_types=["sliding_attention"] * 4), "layer_types has 'sliding_attention' for layer 0; each layer"),
        (llama4(moe_layers=[4]), "moe_layers must be an integer in 0..3, not 4"),
        (
            lfm3(layer_types=["conv", "linear"]),
            "layer_types has 'linear' for layer 1; each layer must be one of conv, sl",
        ),
        (
            lfm3(rope_parameters={"full_attention": {"rope_theta": 1e6}}),
            "rope_parameters.sliding_attention is missing: it has the positions of layers of this kind",
        ),
        (
            lfm3(
                rope_parameters={
                    "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.1},
                    "sliding_attention": {},
                }
            ),
            "rope_parameters.full_attention.partial_rotary_factor 0.1 of head_dim 16 is no pair",
        ),
        (gemma2(final_logit_softcapping=0), "final_logit_softcapping must be a number"),
        (gemma2(rope_parameters={"full_attention": {"rope_theta": 1e4}}), "settings for full_attention alone"),
        (granite(position_embedding_type="alibi"), "position_embedding_type is 'alibi', but only 'nope' or 'rope'"),
        (granite(layers_block_type=["mamba"] * 3), "layer_types and layers_block_type name different layers"),
        (granite(num_experts_per_tok=7), "num_experts_per_tok must be an integer in 1..6"),
        (granite(logits_scaling=0), "logits_scaling must be a number"),
        (granite(normalization_function="layernorm"), "normalization_function is 'layernorm'"),
        (
            gpt_oss(layer_types=["chunked_attention"] * 3),
            "layer_types has 'chunked_attention' for layer 0; each layer must be one",
        ),
        (gpt_oss(layer_types=["full_attention"] * 2), "num_hidden_layers is 3, but layer_types names 2 layers"),
        (gpt_oss(num_experts_per_tok=7), "num_experts_per_tok must be an integer in 1..6"),
        (gpt_oss(hidden_act="gelu"), "hidden_act is 'gelu'"),
        (gpt_oss(swiglu_limit=0), "swiglu_limit must be a number"),
        (gpt_oss(attention_bias="yes"), "attention_bias must be true or false"),
    ],
)
def test_refused(raw: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        parsed(raw)


@pytest.mark.parametrize(
    ("make", "field", "layer"),
    [
        (gemma2, "sliding_window", "layer 0 is sliding_attention"),
        (gemma3, "sliding_window", "layer 0 is sliding_attention"),
        (lfm3, "sliding_window", "layer 2 is sliding_attention"),
        (gpt_oss, "sliding_window", "layer 0 is sliding_attention"),
        (llama4, "attention_chunk_size", "layer 0 is chunked_attention"),
    ],
)
def test_a_reach_that_is_none_is_refused_by_its_layer(make: Any, field: str, layer: str) -> None:
    for value, shown in ((0, "0"), (-4, "-4"), (True, "true"), ("20", "'20'"), (1 << 31, "2147483648"), (2.5, "2.5")):
        with pytest.raises(ModelError) as caught:
            parsed(make(**{field: value}))
        bounds = f"{field} must be an integer in 1..1073741824, not {shown}, as {layer}"
        assert str(caught.value) == f"config.json: {bounds}"
    with pytest.raises(ModelError) as caught:
        parsed(make(**{field: None}))
    assert str(caught.value) == f"config.json: {field} is null, but {layer}; give the number of tokens it reaches"


@pytest.mark.parametrize(
    ("make", "field"),
    [
        *product((dense_granite, granite, falcon, lfm2, lfm2_moe, olmo_hybrid), ("sliding_window",)),
        *product((qwen3, qwen3_moe, dense_granite, lfm2, lfm3, gpt_oss, gemma3), ("attention_chunk_size",)),
        (llama4, "sliding_window"),
    ],
)
def test_a_reach_in_a_family_without_it_is_refused(make: Any, field: str) -> None:
    with pytest.raises(ModelError, match=f"{field} is 20, but only absent is implemented"):
        parsed(make(**{field: 20}))
    parsed(make(**{field: None}))


def test_a_window_that_is_switched_off_counts_for_nothing() -> None:
    assert parsed(qwen3(sliding_window=20, use_sliding_window=False))[1].sliding_window is None
    with pytest.raises(ModelError, match="use_sliding_window is true, but only false is implemented"):
        parsed(qwen3_moe(sliding_window=20, use_sliding_window=True))


def test_what_may_be_left_out() -> None:
    assert parsed(granite(layer_types=None))[1].layer_types == ("mamba",) * 3
    assert parsed(granite(layer_types=None, layers_block_type=["attention"] * 3))[1].layer_types == ("attention",) * 3
    assert parsed(granite(position_embedding_type=None))[1].rope_theta == 0
    assert parsed(granite(num_local_experts=0, num_experts_per_tok=0, intermediate_size=None))[1].num_local_experts == 0
    assert parsed(falcon(mamba_d_ssm=None, mamba_d_head="auto"))[1].mamba2.inner == 64
    assert parsed(falcon(mamba_expand=0))[1].mamba2.inner == 48  # mamba_d_ssm says it
    assert parsed(falcon(rope_theta=None, rope_parameters={"rope_theta": 1e11}))[1].rope_theta == 1e11
    assert parsed(lfm2(layer_types=None, full_attn_idxs=[1]))[1].layer_types == (
        "conv",
        "full_attention",
        "conv",
        "conv",
    )
    assert parsed(lfm2(layer_types=None))[1].layer_types == ("full_attention",) * 4
    assert parsed(lfm2())[1].intermediate_size == 56  # 53, and a multiple of 8
    assert (
        parsed(lfm2(block_ff_dim=None, intermediate_size=80, block_auto_adjust_ff_dim=False))[1].intermediate_size == 80
    )
    assert parsed(lfm2())[1].tie_word_embeddings
    assert not parsed(lfm2(tie_embedding=False))[1].tie_word_embeddings
    assert parsed(qwen3(rope_parameters={"rope_type": "default", "type": "mrope"}))[1].rope_theta == 1e6
    left_out = ("layer_types", "sliding_window", "rope_parameters", "swiglu_alpha", "swiglu_limit")
    _, silent = parsed({name: value for name, value in gpt_oss(num_hidden_layers=4).items() if name not in left_out})
    assert silent.layer_types == ("sliding_attention", "full_attention") * 2
    assert (silent.sliding_window, silent.swiglu_alpha, silent.swiglu_limit) == (128, 1.702, 7.0)
    assert (silent.rope_theta, silent.rope_scaling) == (150000.0, parsed(GPT_OSS)[1].rope_scaling)
    assert silent.max_model_len == 131072
    assert parsed(gpt_oss(layer_types=["full_attention"] * 3, sliding_window=None))[1].sliding_window == 0


def test_gemmas_embeddings_are_scaled_in_the_models_dtype() -> None:
    """bfloat16 has no root of 32, and the models were trained with what it has in its place."""
    scales = {dtype: tiny(gemma3()).model(False, dtype=dtype).embedding.scale for dtype in (F32, BF16)}
    assert scales == {dtype: torch.tensor(32**0.5, dtype=dtype).item() for dtype in (F32, BF16)}
    assert scales[F32] != scales[BF16] == 5.65625


def test_what_lfm3_leaves_out_is_transformers_own() -> None:
    theirs = Lfm3Config()
    silent = parsed({"model_type": "lfm3", "architectures": ["Lfm3ForCausalLM"]})[1]
    assert list(silent.layer_types) == theirs.layer_types
    said = parsed({**LFM3, "layer_types": theirs.layer_types})[1]
    assert silent == replace(said, eos_token_ids=())
    assert parsed({**lfm3(), "rope_parameters": theirs.rope_parameters})[1] == parsed(lfm3())[1]


def test_the_text_model_of_one_that_sees() -> None:
    family, config = parsed(GEMMA3_THAT_SEES)
    assert sum(map(math.prod, family.tensors(config).values())) == 3_880_263_168
    assert [(group.tokens_per_page, group.reach) for group in config.layout(16, 2).groups] == [(92, None), (16, 1024)]
    assert config.eos_token_ids == (1, 106)
    assert config.layer_counts() == {"windowed attention with MLP": 29, "attention with MLP": 5}
    # It is the length with scaled positions.
    assert config.max_model_len == 131072 and config.rope_scaling is not None
    alone = parsed({**GEMMA3_THAT_SEES["text_config"], "architectures": ["Gemma3ForCausalLM"]})[1]
    assert alone.transfer_facts() == config.transfer_facts()


@pytest.mark.parametrize(
    ("changes", "wanted"),
    [
        ({}, (1e6, 1e4)),
        ({"rope_theta": 5e5, "rope_local_base_freq": 2e4}, (5e5, 2e4)),
        ({"rope_parameters": {"full_attention": {"rope_theta": 7e5}, "sliding_attention": None}}, (7e5, 1e4)),
        ({"rope_parameters": {"sliding_attention": {"rope_theta": 3e4, "rope_type": "default"}}}, (1e6, 3e4)),
        (
            {
                "rope_parameters": {
                    "full_attention": {"rope_theta": 7e5, "rope_type": "linear", "factor": 8.0},
                    "sliding_attention": {"rope_theta": 3e4, "rope_type": "default"},
                }
            },
            (7e5, 3e4),
        ),
        ({"rope_scaling": {"type": "linear", "factor": 8.0}}, (1e6, 1e4)),
    ],
)
def test_two_bases_of_positions_as_transformers_reads_them(
    changes: dict[str, Any], wanted: tuple[float, float]
) -> None:
    raw = gemma3(rope_theta=None, rope_local_base_freq=None) | changes
    raw = {name: value for name, value in raw.items() if value is not None}
    theirs = Gemma3TextConfig(**deepcopy({name: raw[name] for name in raw if name != "architectures"})).rope_parameters
    config = parsed(raw)[1]
    full, windowed = config.rotary("full_attention"), config.rotary("sliding_attention")
    assert (full.theta, windowed.theta) == wanted
    assert wanted == (theirs["full_attention"]["rope_theta"], theirs["sliding_attention"]["rope_theta"])
    factor = None if full.scaling is None else dict(full.scaling.settings)["factor"]
    assert factor == theirs["full_attention"].get("factor") and windowed.scaling is None


@pytest.mark.parametrize("prefix", ["language_model.model", "model.language_model"])
@pytest.mark.parametrize(
    ("make", "model_type", "architecture", "tower"),
    [
        (gemma3, "gemma3", "Gemma3ForConditionalGeneration", "vision_tower"),
        (llama4, "llama4", "Llama4ForConditionalGeneration", "vision_model"),
    ],
)
def test_the_text_of_a_checkpoint_that_sees_is_served(
    make: Any, model_type: str, architecture: str, tower: str, prefix: str, tmp_path: Any
) -> None:
    model, tokens = tiny(make(), 4), prompt(40, 4)
    text = {name: value for name, value in make().items() if name != "architectures"}
    outer = {"model_type": model_type, "architectures": [architecture], "text_config": text}
    whole = prefix.startswith("model")
    weights = {
        name.replace("model", prefix, 1): value for name, value in model.weights.items() if "lm_head" not in name
    }
    if "lm_head.weight" in model.weights:
        weights[f"{'' if whole else 'language_model.'}lm_head.weight"] = model.weights["lm_head.weight"]
    ignored = (f"{tower}.post_layernorm.weight", "multi_modal_projector.linear_1.weight")
    weights |= {f"{'model.' * whole}{name}": torch.ones(3) for name in ignored}
    save_file(weights, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(outer | {"vision_config": {"image_size": 896}}))
    (tmp_path / FILE).write_text("{}")
    report = check(tmp_path)
    assert report.ok and report.accounting.num_ignored == 2
    # Nothing reads images, so that a request with one is refused by that name.
    assert read_vision(tmp_path) is None and ImagePrompts.read(tmp_path, lambda token: "") is None
    driver = TinyDriver(model, [open_model(tmp_path).build(exact=True)], exact=True)
    alone = model.driver(exact=True)
    found, wanted = (each.run(each.row(each.sequence(0, 40), tokens))[0] for each in (driver, alone))
    assert torch.equal(found, wanted)


@pytest.mark.parametrize("outer", [True, False, None])
@pytest.mark.parametrize("inner", [True, False])
def test_the_older_name_of_tied_embeddings_counts(outer: bool | None, inner: bool) -> None:
    raw = lfm2(tie_embedding=inner) | ({} if outer is None else {"tie_word_embeddings": outer})
    theirs = Lfm2Config(**{name: value for name, value in raw.items() if name != "architectures"})
    assert parsed(raw)[1].tie_word_embeddings == theirs.tie_word_embeddings == inner


@pytest.mark.parametrize(
    ("raw", "size", "field"),
    [
        (qwen3(intermediate_size=57), 3, "num_key_value_heads 2"),
        (qwen3(), 8, "4 ranks share one of num_key_value_heads 2.* 2 query heads"),
        (qwen3(intermediate_size=57), 2, "intermediate_size 57"),
        (lfm2(), 8, "num_attention_heads 4"),
        (lfm2(layer_types=["conv"] * 4), 8, "num_attention_heads 4"),
        (falcon(mamba_n_groups=1, mamba_n_heads=6, mamba_d_head=8), 4, "mamba_n_heads 6"),
        (falcon(intermediate_size=58), 4, "intermediate_size 58"),
        (granite(intermediate_size=25), 2, "intermediate_size 25"),
        (granite(shared_intermediate_size=41), 2, "shared_intermediate_size 41"),
        (granite(mamba_n_groups=4, mamba_d_head="auto", mamba_n_heads=16), 8, "4 ranks share one of num_key_value"),
        (dense_granite(intermediate_size=57), 2, "intermediate_size 57"),
        (qwen3_moe(moe_intermediate_size=25), 2, "moe_intermediate_size 25"),
        (lfm2_moe(moe_intermediate_size=25), 2, "moe_intermediate_size 25"),
        (olmo_hybrid(), 3, "num_key_value_heads 2|linear_num_key_heads 2"),
        (gpt_oss(intermediate_size=25), 2, "intermediate_size 25"),
        (qwen3(), 0, "at least 1"),
        (qwen3(), -1, "at least 1"),
    ],
)
def test_sizes_that_do_not_divide_are_refused(raw: dict[str, Any], size: int, field: str) -> None:
    _, config = parsed(raw)
    with pytest.raises(ConfigError, match=rf"--tensor-parallel-size {size}.*({field})"):
        config.layout(16, 4, size)


def test_a_model_is_not_built_for_a_size_that_does_not_divide() -> None:
    for raw in (qwen3(), lfm2(), falcon(), granite()):
        with pytest.raises(ConfigError, match="--tensor-parallel-size 3"):
            tiny(raw).model(False, thread_ranks(3)[0])


def test_layers_that_are_absent_do_not_limit_the_size() -> None:
    _, config = parsed(granite(layer_types=["attention"] * 3, mamba_n_groups=4))
    assert config.layout(16, 4, 2).state_units == 0


@pytest.mark.parametrize("make", MAKERS.values())
def test_transfer_facts_are_all_that_decides_keys_values_and_states(make: Any) -> None:
    family, config = parsed(make())
    facts = config.transfer_facts()
    for changes in ({"max_position_embeddings": 99}, {"eos_token_id": 5}):
        assert family.parse(make(**changes)).transfer_facts() == facts
    changes = {
        granite: [
            {"embedding_multiplier": 2},
            {"residual_multiplier": 0.5},
            {"mamba_d_state": 16},
            {"rms_norm_eps": 1e-4},
        ],
        falcon: [
            {"key_multiplier": 1.0},
            {"ssm_multipliers": [1.0] * 5},
            {"mamba_rms_norm": True},
            {"rope_theta": 1e4},
        ],
        lfm2: [{"conv_bias": True}, {"conv_L_cache": 4}, {"layer_types": ["conv"] * 4}, {"rope_theta": 1e4}],
        dense_granite: [
            {"attention_multiplier": 1.0},
            {"residual_multiplier": 0.5},
            {"mlp_bias": True},
            {"rope_scaling": {"type": "linear", "factor": 2.0}},
        ],
        qwen3_moe: [
            {"norm_topk_prob": False},
            {"mlp_only_layers": []},
            {"num_experts_per_tok": 2},
            {"moe_intermediate_size": 8},
        ],
        lfm2_moe: [
            {"use_expert_bias": False},
            {"routed_scaling_factor": 1.0},
            {"num_dense_layers": 2},
            {"conv_L_cache": 4},
        ],
        olmo_hybrid: [
            {"linear_allow_neg_eigval": False},
            {"linear_key_head_dim": 8},
            {"rope_parameters": {"rope_theta": 1e4}},
            {"layer_types": ["linear_attention"] * 2 + ["full_attention"]},
        ],
        gemma3: [
            {"sliding_window": 12},
            {"query_pre_attn_scalar": 16},
            {"rope_local_base_freq": 1e5},
            {"rope_scaling": {"type": "linear", "factor": 2.0}},
            {"layer_types": ["full_attention"] * 3},
        ],
        llama4: [
            {"attention_chunk_size": 21},
            {"attn_temperature_tuning": False},
            {"floor_scale": 13},
            {"attn_scale": 0.1},
            {"use_qk_norm": False},
            {"moe_layers": [0]},
            {"no_rope_layers": [1, 1, 0, 1]},
        ],
        lfm3: [
            {"sliding_window": 13},
            {"use_attention_gate": False},
            {"use_sandwich_norm": False},
            {"rope_parameters": {kind: {"rope_theta": 1e4} for kind in ("full_attention", "sliding_attention")}},
        ],
        gemma4: [{"attention_k_eq_v": False}, {"global_head_dim": 12}, {"num_kv_shared_layers": 1}],
        gemma2: [{"attn_logit_softcapping": None}, {"final_logit_softcapping": 5.0}, {"rope_theta": 1e5}],
        gpt_oss: [
            {"sliding_window": 13},
            {"swiglu_alpha": 1.702},
            {"swiglu_limit": 7.0},
            {"layer_types": ["full_attention"] * 3},
        ],
        qwen3: [{"rope_theta": 1e4}, {"head_dim": 8}, {"attention_bias": True}, {"intermediate_size": 8}],
    }
    for change in changes[make]:
        assert family.parse(make(**change)).transfer_facts() != facts, change
    assert all(isinstance(value, str | int) for value in facts.values())


@pytest.mark.parametrize("make", MAKERS.values())
def test_every_tensor_is_asked_for_and_none_twice(make: Any) -> None:
    model = tiny(make())
    asked: list[str] = []

    class Noted(type(model)):  # type: ignore[misc]
        def load(self, name: str, shape: tuple[int, ...], cut: Any = None) -> torch.Tensor:
            asked.append(name)
            return super().load(name, shape, cut)

    Noted(model.raw, model.weights).model(exact=True)
    assert set(asked) == set(model.weights)
    assert {name for name in asked if asked.count(name) > 1} == set()


def test_an_output_has_no_bias(tmp_path: Any) -> None:
    model = tiny(qwen3())
    write(model, tmp_path)
    save_file(dict(model.weights) | {"lm_head.bias": torch.ones(97)}, tmp_path / "model.safetensors")
    assert check(tmp_path).accounting.problems == ("model.safetensors: lm_head.bias is not part of this architecture",)
    with pytest.raises(ModelError, match=r"lm_head.bias is not part"):
        open_model(tmp_path).build(exact=True)


def test_an_untied_checkpoint_must_have_the_output(tmp_path: Any) -> None:
    model = tiny(qwen3())
    write(model, tmp_path)
    save_file(
        {name: each for name, each in model.weights.items() if name != "lm_head.weight"}, tmp_path / "model.safetensors"
    )
    with pytest.raises(ModelError, match=r"lm_head.weight \[97, 32\] \(safetensors\) is missing"):
        open_model(tmp_path).build(exact=True)


@pytest.mark.parametrize("make", first(4, MAKERS.values()))
def test_bfloat16_and_the_slow_kernels(make: Any) -> None:
    model, tokens = tiny(make(), 3), prompt(80, 3)
    logits = {}
    for name, options in {
        "fast": {},
        "slow": {"backend": "reference"},
        "narrow": {"dtype": torch.bfloat16},
    }.items():
        driver = model.driver(False)
        driver = type(driver)(model, [model.model(False, **options)], False)
        (logits[name],) = driver.run(driver.row(driver.sequence(0, 90), tokens))
        first = driver.sequence(1, 90)
        driver.run(driver.row(first, tokens[:79]))
        (stepped,) = driver.run(driver.row(first, tokens[79:], decode=True))
        bar = 0.2 if name == "narrow" else 1e-4
        assert (stepped - logits[name]).abs().max() <= bar * logits[name].std()
    torch.testing.assert_close(logits["slow"], logits["fast"], rtol=0, atol=3e-5)
    assert (logits["narrow"] - logits["fast"]).abs().max() < 0.25 * logits["fast"].std()


def test_exact_needs_float32() -> None:
    with pytest.raises(ConfigError, match="--exact needs --dtype float32"):
        tiny(qwen3()).model(True, dtype=torch.bfloat16)


def test_transformers_reads_what_cairn_was_given() -> None:
    """`published` fails on any name that is missing or left over; the untied output is the one that is easily lost."""
    theirs = published(tiny(falcon(tie_word_embeddings=False)))
    assert not torch.equal(theirs.lm_head.weight, theirs.model.embed_tokens.weight)
