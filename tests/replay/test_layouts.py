"""What a model remembers and computes as the replay has it, by --layout, against sums over its layers and what was
published."""

import json

import pytest

from cairn.errors import ConfigError
from cairn.models.families import FAMILIES, family_of
from cairn.models.layer_sizes import LimitedScores
from cairn.replay.layouts import LAYOUT_NAMES, UNNEEDED, layout_for, sizes_for
from models.published import NANO
from models.published_qwen3_5 import QWEN35
from models.tiny_configs import (
    SHARING,
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

TEXT = {
    **QWEN35["text_config"],
    "layer_types": None,
    "num_hidden_layers": 5,
    "num_experts": 6,
    "num_experts_per_tok": 2,
}
DENSE = {**TEXT, "intermediate_size": 48}
CONFIGS = {
    "nano": NANO,
    "nano of few parts": {**NANO, "hybrid_override_pattern": "M*-", "num_hidden_layers": 3, "n_groups": 1},
    "nano without attention": {**NANO, "hybrid_override_pattern": "ME", "num_hidden_layers": 2},
    "nano by names": {
        **{name: value for name, value in NANO.items() if name not in ("hybrid_override_pattern", "head_dim")},
        "layers_block_type": ["mamba", "attention", "moe", "mlp"],
        "num_hidden_layers": 4,
        "attention_head_dim": 48,
        "moe_latent_size": 320,
    },
    "qwen3.5": QWEN35,
    "qwen3_5": {"model_type": "qwen3_5", "text_config": DENSE},
    "qwen3_5_text": {**DENSE, "model_type": "qwen3_5_text"},
    "qwen3_5_moe_text": {**TEXT, "mlp_only_layers": [1], "intermediate_size": 40},
    "qwen3_next": {
        **TEXT,
        "rope_parameters": {"partial_rotary_factor": 0.25},
        "model_type": "qwen3_next",
        "decoder_sparse_step": 2,
        "intermediate_size": 40,
    },
    "granite": granite(),
    "granite without experts": granite(num_local_experts=0, mamba_n_groups=2),
    "granite without attention": granite(layer_types=["mamba"] * 3),
    "granite by the number of layers": granite(layer_types=None),
    "falcon": falcon(),
    "falcon of a hidden size": falcon(mamba_d_ssm=None, mamba_d_head=16, head_dim=None, mamba_n_groups=1),
    "lfm2": lfm2(),
    "lfm2 by numbers": lfm2(layer_types=None, full_attn_idxs=[0, 2], block_auto_adjust_ff_dim=False),
    "lfm2 of attention alone": lfm2(layer_types=None, block_ff_dim=None, intermediate_size=100),
    "dense granite": dense_granite(),
    "qwen3_moe": qwen3_moe(),
    "qwen3_moe of every second layer": qwen3_moe(decoder_sparse_step=2, mlp_only_layers=None),
    "lfm2_moe": lfm2_moe(),
    "lfm2_moe of experts alone": lfm2_moe(num_dense_layers=0, intermediate_size=None),
    "olmo_hybrid": olmo_hybrid(),
    "olmo_hybrid with sizes of its heads": olmo_hybrid(
        linear_num_key_heads=None, linear_num_value_heads=None, linear_key_head_dim=None, linear_value_head_dim=None
    ),
    "gemma3": gemma3(intermediate_size=48),
    "gemma3 by pattern": gemma3(layer_types=None, sliding_window_pattern=2, num_hidden_layers=5, head_dim=24),
    "gemma3 that sees": {
        "model_type": "gemma3",
        "text_config": {name: value for name, value in gemma3().items() if name not in ("model_type", "architectures")},
    },
    "llama4": llama4(),
    "llama4 that sees": {
        "model_type": "llama4",
        "text_config": {
            name: value
            for name, value in llama4(moe_layers=[], num_hidden_layers=3).items()
            if name not in ("model_type", "architectures")
        },
    },
    "lfm3": lfm3(),
    "lfm3 without gates": lfm3(use_attention_gate=False, layer_types=None, conv_L_cache=4, head_dim=8),
    "gemma2": gemma2(layer_types=None, num_hidden_layers=4),
    "gemma4": gemma4(),
    "gemma4 that shares": gemma4(
        **SHARING, enable_moe_block=True, num_experts=6, top_k_experts=3, moe_intermediate_size=24
    ),
    "gemma4 that sees": {
        "model_type": "gemma4",
        "text_config": {name: value for name, value in gemma4().items() if name not in ("model_type", "architectures")},
    },
    "gemma4 with one encoder": {
        "model_type": "gemma4_unified",
        "text_config": {name: value for name, value in gemma4().items() if name not in ("model_type", "architectures")},
    },
    "gemma4 without encoders": gemma4(
        model_type="gemma4_unified_text", architectures=["Gemma4UnifiedForCausalLM"], hidden_size_per_layer_input=None
    ),
    "qwen3": qwen3(),
    "qwen3 with heads of 128": qwen3(head_dim=None),
    "gpt_oss": gpt_oss(),
    "gpt_oss of full reach": gpt_oss(layer_types=["full_attention"] * 3, sliding_window=None, head_dim=None),
}
NUMBERS = {
    "nano": (2_874_482_688, 24_576, 98_304, 49_087_744, 24_970_496),
    "nano of few parts": (67_264_512, 4_096, 16_384, 2_128_640, 1_080_064),
    "nano without attention": (118_874_112, 0, 65_536, 2_139_392, 1_090_816),
    "nano by names": (86_605_824, 1_536, 6_144, 2_139_392, 1_090_816),
    "qwen3.5": (2_436_710_400, 40_960, 327_680, 64_393_216, 32_935_936),
    "qwen3_5": (163_479_552, 4_096, 32_768, 8_589_312, 4_395_008),
    "qwen3_5_text": (163_479_552, 4_096, 32_768, 8_589_312, 4_395_008),
    "qwen3_5_moe_text": (200_056_832, 4_096, 32_768, 8_589_312, 4_395_008),
    "qwen3_next": (181_645_312, 4_096, 32_768, 8_589_312, 4_395_008),
    "granite": (51_008, 32, 1_024, 11_552, 6_432),
    "granite without experts": (32_256, 32, 1_024, 12_032, 6_912),
    "granite without attention": (55_488, 0, 65_536, 17_296, 9_616),
    "granite by the number of layers": (55_488, 0, 65_536, 17_296, 9_616),
    "falcon": (56_448, 192, 6_144, 13_888, 8_128),
    "falcon of a hidden size": (48_000, 96, 3_072, 17_296, 9_616),
    "lfm2": (36_864, 32, 1_024, 448, 448),
    "lfm2 by numbers": (45_056, 64, 2_048, 320, 320),
    "lfm2 of attention alone": (39_936, 128, 4_096, 64, 64),
    "dense granite": (25_344, 96, 3_072, 64, 64),
    "qwen3_moe": (38_016, 192, 6_144, 64, 64),
    "qwen3_moe of every second layer": (36_288, 192, 6_144, 64, 64),
    "lfm2_moe": (35_136, 32, 1_024, 448, 448),
    "lfm2_moe of experts alone": (34_560, 32, 1_024, 448, 448),
    "olmo_hybrid": (38_144, 32, 1_024, 9_280, 5_440),
    "olmo_hybrid with sizes of its heads": (32_000, 32, 1_024, 3_520, 2_368),
    "gemma3": (32_256, 192, 4_096, 64, 64),
    "gemma3 by pattern": (72_960, 480, 9_216, 64, 64),
    "gemma3 that sees": (34_560, 192, 4_096, 64, 64),
    "lfm3": (42_240, 128, 2_048, 832, 832),
    "llama4": (44_928, 256, 6_144, 64, 64),
    "llama4 that sees": (34_560, 192, 4_096, 64, 64),
    "lfm3 without gates": (36_864, 32, 1_024, 640, 640),
    "gemma2": (46_080, 256, 4_096, 64, 64),
    "gemma4": (44_032, 224, 6_144, 64, 64),
    "gemma4 that shares": (82_176, 224, 3_072, 64, 64),
    "gemma4 that sees": (44_032, 224, 6_144, 64, 64),
    "gemma4 with one encoder": (44_032, 224, 6_144, 64, 64),
    "gemma4 without encoders": (44_032, 224, 6_144, 64, 64),
    "qwen3": (34_560, 192, 6_144, 64, 64),
    "qwen3 with heads of 128": (163_584, 1_536, 49_152, 64, 64),
    "gpt_oss": (39_744, 192, 4_096, 64, 64),
    "gpt_oss of full reach": (95_040, 768, 24_576, 64, 64),
}
"""Active weights, score numbers, and bytes of a page, which has 16 tokens of the group with the most layers, and of a
checkpoint with a state in float32 and in bfloat16, pages and convolutions in bfloat16: from sums
over the layers, matrix by matrix, and not over a checkpoint's tensors."""


def models_layout(raw, dtype_bytes=2):
    return family_of(raw).parse(raw).layout(16, dtype_bytes)


def test_every_family_is_here():
    assert {raw["model_type"] for raw in CONFIGS.values()} == set(FAMILIES)
    assert NUMBERS.keys() == CONFIGS.keys()


@pytest.mark.parametrize("name", CONFIGS)
def test_what_a_config_comes_to(name, tmp_path):
    raw = {field: value for field, value in CONFIGS[name].items() if field not in ("dtype", "torch_dtype")}
    path = tmp_path / "config.json"
    path.write_text(json.dumps(raw | {"dtype": "bfloat16"}))
    sizes, layout, half = sizes_for(str(path)), layout_for(str(path)), layout_for(str(path), state_dtype="bfloat16")
    found = (layout.page_bytes, layout.checkpoint_bytes, half.checkpoint_bytes)
    scores = sizes.score_numbers + sum(limited.score_numbers for limited in sizes.limited_scores)
    assert (sizes.active_weights, scores, *found) == NUMBERS[name]
    assert half.page_bytes == layout.page_bytes


def test_scores_of_limited_reach_are_counted_apart():
    limited = {
        "gemma3": (64, (LimitedScores(128, window=20),)),
        "gemma4": (128, (LimitedScores(96, window=12),)),
        "llama4": (64, (LimitedScores(192, chunk=20),)),
        "lfm3": (64, (LimitedScores(64, window=12),)),
        "gpt_oss of full reach": (768, ()),
    }
    for name, wanted in limited.items():
        sizes = family_of(CONFIGS[name]).parse(CONFIGS[name]).forward_sizes()
        assert (sizes.score_numbers, sizes.limited_scores) == wanted


def without(raw, fields):
    return {
        field: without(value, fields) if isinstance(value, dict) else value
        for field, value in raw.items()
        if field not in fields
    }


@pytest.mark.parametrize("name", CONFIGS)
def test_what_decides_no_size_may_be_left_out(name, tmp_path):
    raw = without(CONFIGS[name], UNNEEDED)
    (tmp_path / "config.json").write_text(json.dumps(raw))
    layout, sizes = layout_for(str(tmp_path), state_dtype="bfloat16"), sizes_for(str(tmp_path))
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS[name]))
    assert layout == layout_for(str(tmp_path), state_dtype="bfloat16")
    assert sizes == sizes_for(str(tmp_path))


@pytest.mark.parametrize("name", CONFIGS)
def test_the_layout_that_the_model_is_served_with(name, tmp_path):
    raw = {field: value for field, value in CONFIGS[name].items() if field not in ("dtype", "torch_dtype")}
    for field, dtype, dtype_bytes in (("dtype", "bfloat16", 2), ("torch_dtype", "float16", 4), ("dtype", "float32", 4)):
        (tmp_path / "config.json").write_text(json.dumps(raw | {field: dtype}))
        assert layout_for(str(tmp_path)) == models_layout(raw, dtype_bytes)
    assert layout_for(str(tmp_path)) == layout_for(str(tmp_path / "config.json"))


def test_a_config_without_a_dtype_is_served_in_float32(tmp_path):
    raw = CONFIGS["qwen3"]
    assert "dtype" not in raw and "torch_dtype" not in raw
    (tmp_path / "config.json").write_text(json.dumps(raw))
    assert layout_for(str(tmp_path)) == models_layout(raw, 4)


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", 16, ["bfloat16"]])
def test_a_dtype_that_is_not_served(dtype, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS["qwen3"] | {"torch_dtype": dtype}))
    with pytest.raises(ConfigError, match=r"--layout .*torch_dtype .* is none of float32, float16, bfloat16"):
        layout_for(str(tmp_path))


@pytest.mark.parametrize(("name", "raw"), [("nemotron-3-nano", NANO), ("qwen3.5-35b-a3b", QWEN35)])
def test_the_names_are_the_published_models(name, raw):
    assert layout_for(name) == models_layout(raw)
    assert sizes_for(name) == family_of(raw).parse(raw).forward_sizes()


@pytest.mark.parametrize(
    ("name", "dtype", "hidden", "token_bytes", "tokens"),
    [
        ("nemotron-3-nano", None, 2688, 6144, 7989),
        ("nemotron-3-nano", "bfloat16", 2688, 6144, 4063),
        ("qwen3.5-35b-a3b", None, 2048, 20480, 3144),
        ("qwen3-next-80b-a3b", None, 2048, 24576, 3144),
        ("granite-4-h-small", None, 4096, 16384, 4719),
        ("granite-4-h-small", "float32", 4096, 16384, 9327),
        ("gpt-oss-20b", None, 2880, 49152, 0),
    ],
)
def test_published_sizes(name, dtype, hidden, token_bytes, tokens):
    """Bytes of a token, and how many tokens a checkpoint weighs, without the final hidden state."""
    layout = layout_for(name, 16, dtype)
    assert layout.bytes_per_token == token_bytes
    assert round((layout.checkpoint_bytes - 2 * hidden) / token_bytes) == tokens
    assert layout_for(name, 32, dtype).page_bytes == 2 * layout.page_bytes


@pytest.mark.parametrize(
    ("name", "billions", "vocabulary", "hidden", "tolerance"),
    [
        ("nemotron-3-nano", 3.2, 131072, 2688, 0.03),
        ("qwen3.5-35b-a3b", 3.0, 248320, 2048, 0.03),
        ("qwen3-next-80b-a3b", 3.0, 151936, 2048, 0.2),
        ("granite-4-h-small", 9.0, 100352, 4096, 0.03),
        ("gpt-oss-20b", 3.6, 201088, 2880, 0.03),
    ],
)
def test_published_active_parameters(name, billions, vocabulary, hidden, tolerance):
    """What the models' cards call active has the output matrix, too, which a prompt's tokens do not meet."""
    assert sizes_for(name).active_weights + vocabulary * hidden == pytest.approx(billions * 1e9, rel=tolerance)


def test_windows_have_pages_of_their_own_unless_all_tokens_are_kept():
    layout, whole = layout_for("gpt-oss-20b"), layout_for("gpt-oss-20b", keeps_all_tokens=True)
    assert [(group.reach, group.tokens_per_page) for group in layout.groups] == [(None, 16), (128, 16)]
    assert [(group.reach, group.tokens_per_page) for group in whole.groups] == [(None, 16)]
    assert whole.page_bytes == 2 * layout.page_bytes and layout.pages_to_resume == 1 + 128 // 16 // 2


def test_flops():
    sizes = sizes_for("nemotron-3-nano")
    assert sizes.score_numbers == 6 * 32 * 128
    one_by_one = [2 * sizes.active_weights + 2 * 2 * sizes.score_numbers * (p + 1) for p in range(100)]
    assert sizes.forward_flops(0, 100) == sum(one_by_one)
    assert sizes.forward_flops(37, 90) == sum(one_by_one[37:90])
    assert sizes.forward_flops(5, 5) == 0


def refused(tmp_path, says, raw, **changes):
    config = tmp_path / "config.json"
    config.write_text(json.dumps({**raw, **changes}))
    with pytest.raises(ConfigError, match=says) as error:
        layout_for(str(config))
    assert "--layout" in str(error.value) and str(config) in str(error.value)


def test_a_wrong_field_is_named_with_flag_and_file(tmp_path):
    refused(tmp_path, "model_type 'gpt' is not served", NANO, model_type="gpt")
    refused(tmp_path, r"model_type \['a'\] is not served", NANO, model_type=["a"])
    refused(tmp_path, "conv_kernel must be an integer in 2..64, not 0", NANO, conv_kernel=0)
    refused(tmp_path, "head_dim must be", NANO, head_dim="128")
    refused(tmp_path, "num_experts_per_tok is missing", NANO, num_experts_per_tok=None)
    refused(tmp_path, "hybrid_override_pattern is missing", NANO, hybrid_override_pattern=None)
    refused(tmp_path, "hybrid_override_pattern has 'X'", NANO, hybrid_override_pattern="MX")
    refused(tmp_path, "layer_types must be", lfm2(), layer_types=["conv", ["conv"]])
    refused(tmp_path, "num_hidden_layers must be", qwen3(), num_hidden_layers=1 << 20)


def test_what_is_no_config_is_refused(tmp_path):
    for arguments, says in [
        (("nemotron-4",), LAYOUT_NAMES[0]),
        (("nemotron-3-nano", 0), "--block-size"),
        (("nemotron-3-nano", 16, "int8"), "--state-dtype"),
        (("nemotron-3-nano", 16, None, "bfloat16"), "--checkpoint-dtype must be one of float32, float16, int8"),
    ]:
        with pytest.raises(ConfigError, match=says):
            layout_for(*arguments)
    for text in ("{", "[]", "[" * 100_000):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(ConfigError, match="--layout"):
            layout_for(str(tmp_path))


@pytest.mark.parametrize("name", [name for name in LAYOUT_NAMES if layout_for(name).state_bytes])
def test_checkpoints_in_smaller_forms(name):
    """Of published models scales are less than a hundredth of the state in float16, and a few hundredths in int8."""
    found = {dtype: layout_for(name, checkpoint_dtype=dtype) for dtype in ("float32", "float16", "int8")}
    state = found["float32"].state_bytes
    assert 0.5 * state <= found["float16"].state_bytes < 0.54 * state
    assert 0.25 * state <= found["int8"].state_bytes < 0.31 * state
    assert len({(layout.page_bytes, layout.header_bytes) for layout in found.values()}) == 1
    assert {layout.checkpoint_dtype for layout in found.values()} == set(found)
