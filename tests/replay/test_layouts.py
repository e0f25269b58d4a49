"""Replay's own sums against the models' own layouts and tensors, and against the published arithmetic."""

import json
import math

import pytest

from cairn.errors import ConfigError
from cairn.models.registry import FAMILIES, family_of
from cairn.replay import family_sizes as sizes_of_families
from cairn.replay.family_sizes import model_sizes
from cairn.replay.layouts import LAYOUT_NAMES, layout_for, sizes_for
from models.decoder_families import falcon, granite, lfm2, qwen3
from models.published import NANO
from models.published_qwen3_5 import QWEN35

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
    "qwen3": qwen3(),
    "qwen3 with heads of 128": qwen3(head_dim=None),
}


def assert_same(mine, theirs):
    assert mine.page_bytes == theirs.page_bytes
    assert mine.checkpoint_bytes == theirs.checkpoint_bytes
    assert mine.bytes_per_token == theirs.bytes_per_token
    assert mine.pages_per_checkpoint == theirs.pages_per_checkpoint
    assert mine.groups == theirs.groups
    assert (mine.state_bytes == 0) == (theirs.state_bytes == 0)


def models_layout(raw, dtype_bytes=2):
    family = family_of(raw)
    return family.layout(family.parse(raw), 16, dtype_bytes)


def multiplied_elements(raw):
    """Of the matrices that a token is multiplied with, by the checkpoint's tensors: of the experts as many as are
    chosen."""
    family, text = family_of(raw), raw.get("text_config", raw)
    chosen, total = text.get("num_experts_per_tok"), 0
    for name, shape in family.tensors(family.parse(raw)).items():
        depthwise = len(shape) == 3 and shape[1] == 1
        if "embed" in name or name.startswith("lm_head") or len(shape) < 2 or depthwise:
            continue
        if "block_sparse_moe" in name and len(shape) == 3:
            total += chosen * math.prod(shape[1:])
        elif ".experts." not in name or int(name.split(".experts.")[1].split(".")[0]) < chosen:
            total += math.prod(shape)
    return total


def test_every_family_is_here():
    assert set(sizes_of_families.FAMILIES) == set(FAMILIES)
    assert {raw["model_type"] for raw in CONFIGS.values()} == set(FAMILIES)


@pytest.mark.parametrize("name", CONFIGS)
def test_the_models_own_bytes_and_matrices(name, tmp_path):
    raw = {field: value for field, value in CONFIGS[name].items() if field not in ("dtype", "torch_dtype")}
    for field, dtype, dtype_bytes in (("dtype", "bfloat16", 2), ("torch_dtype", "float16", 4), ("dtype", "float32", 4)):
        (tmp_path / "config.json").write_text(json.dumps(raw | {field: dtype}))
        assert_same(layout_for(str(tmp_path)), models_layout(raw, dtype_bytes))
    assert layout_for(str(tmp_path)) == layout_for(str(tmp_path / "config.json"))
    assert sizes_for(str(tmp_path)).active_weights == multiplied_elements(raw)


def test_a_config_without_a_dtype_is_served_in_float32(tmp_path):
    raw = CONFIGS["qwen3"]
    assert "dtype" not in raw and "torch_dtype" not in raw
    (tmp_path / "config.json").write_text(json.dumps(raw))
    assert_same(layout_for(str(tmp_path)), models_layout(raw, 4))


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", 16, ["bfloat16"]])
def test_a_dtype_that_is_not_served(dtype, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS["qwen3"] | {"torch_dtype": dtype}))
    with pytest.raises(ConfigError, match=r"--layout .*torch_dtype .* is none of float32, float16, bfloat16"):
        layout_for(str(tmp_path))


@pytest.mark.parametrize(("name", "raw"), [("nemotron-3-nano", NANO), ("qwen3.5-35b-a3b", QWEN35)])
def test_the_names_are_the_published_models(name, raw):
    assert_same(layout_for(name), models_layout(raw))
    assert sizes_for(name) == model_sizes(raw, "published")


@pytest.mark.parametrize(
    ("name", "dtype", "token_bytes", "tokens"),
    [
        ("nemotron-3-nano", None, 6144, 7989),
        ("nemotron-3-nano", "bfloat16", 6144, 4063),
        ("qwen3.5-35b-a3b", None, 20480, 3144),
        ("qwen3-next-80b-a3b", None, 24576, 3144),
        ("granite-4-h-small", None, 16384, 4719),
        ("granite-4-h-small", "float32", 16384, 9327),
    ],
)
def test_published_sizes(name, dtype, token_bytes, tokens):
    """Bytes of a token, and how many tokens a checkpoint weighs, without the final hidden state."""
    layout = layout_for(name, 16, dtype)
    assert layout.bytes_per_token == token_bytes
    assert round(layout.state_bytes / token_bytes) == tokens
    assert layout_for(name, 32, dtype).page_bytes == 2 * layout.page_bytes


@pytest.mark.parametrize(
    ("name", "billions", "vocabulary", "hidden", "tolerance"),
    [
        ("nemotron-3-nano", 3.2, 131072, 2688, 0.03),
        ("qwen3.5-35b-a3b", 3.0, 248320, 2048, 0.03),
        ("qwen3-next-80b-a3b", 3.0, 151936, 2048, 0.2),
        ("granite-4-h-small", 9.0, 100352, 4096, 0.03),
    ],
)
def test_published_active_parameters(name, billions, vocabulary, hidden, tolerance):
    """What the models' cards call active has the output matrix, too, which a prompt's tokens do not meet."""
    assert sizes_for(name).active_weights + vocabulary * hidden == pytest.approx(billions * 1e9, rel=tolerance)


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
    refused(tmp_path, "model_type 'gpt'", NANO, model_type="gpt")
    refused(tmp_path, r"model_type \['a'\]", NANO, model_type=["a"])
    refused(tmp_path, "conv_kernel must be", NANO, conv_kernel=0)
    refused(tmp_path, "head_dim must be", NANO, head_dim="128")
    refused(tmp_path, "num_experts_per_tok must be", NANO, num_experts_per_tok=None)
    refused(tmp_path, "hybrid_override_pattern must be", NANO, hybrid_override_pattern=None)
    refused(tmp_path, "hybrid_override_pattern must be a list of the layers' kinds", NANO, hybrid_override_pattern="MX")
    refused(tmp_path, "layer_types must be", lfm2(), layer_types=["conv", ["conv"]])
    refused(tmp_path, "layer_types must be", granite(), layer_types=[])
    refused(tmp_path, "full_attn_idxs must be", lfm2(), layer_types=None, full_attn_idxs=[4])
    refused(tmp_path, "block_auto_adjust_ff_dim must be", lfm2(), block_auto_adjust_ff_dim=1)
    refused(tmp_path, "block_ffn_dim_multiplier must be", lfm2(), block_ffn_dim_multiplier=0)
    refused(tmp_path, "num_hidden_layers must be", qwen3(), num_hidden_layers=1 << 20)
    refused(tmp_path, "mlp_only_layers must be", CONFIGS["qwen3_next"], mlp_only_layers=[9])


def test_what_is_no_config_is_refused(tmp_path):
    for arguments, says in [
        (("nemotron-4",), LAYOUT_NAMES[0]),
        (("nemotron-3-nano", 0), "--block-size"),
        (("nemotron-3-nano", 16, "int8"), "--state-dtype"),
    ]:
        with pytest.raises(ConfigError, match=says):
            layout_for(*arguments)
    for text in ("{", "[]", "[" * 100_000):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(ConfigError, match="--layout"):
            layout_for(str(tmp_path))
