"""config.json of Nemotron-H: what is read, what is refused, and the sizes that follow."""

import math
from typing import Any

import pytest
from transformers import NemotronHConfig as ReferenceConfig

from cairn.errors import ModelError
from cairn.models.families import FAMILIES
from models.published import NANO
from runner.harness import tensors

parse = FAMILIES["nemotron_h"].parse

# One layer of each kind; no two sizes are equal by accident.
SMALL: dict[str, Any] = {
    "model_type": "nemotron_h",
    "hybrid_override_pattern": "M*-E",
    "vocab_size": 101,
    "hidden_size": 24,
    "max_position_embeddings": 512,
    "eos_token_id": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "head_dim": 10,
    "mamba_num_heads": 4,
    "mamba_head_dim": 7,
    "ssm_state_size": 9,
    "n_groups": 2,
    "conv_kernel": 5,
    "intermediate_size": 22,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 13,
    "moe_shared_expert_intermediate_size": 17,
}


def test_published_model() -> None:
    config = parse(NANO)
    assert config.layer_counts() == {"Mamba2": 23, "attention": 6, "mixture of experts": 23}
    assert config.mamba2.conv_dim == 6144
    assert config.routed_scaling_factor == 2.5
    assert config.intermediate_size == 0  # no layer of that kind
    assert config.max_position_embeddings == 262144
    assert config.eos_token_ids == (2,)
    shapes = tensors(config)
    assert len(shapes) == 6243
    assert sum(map(math.prod, shapes.values())) == 31_577_940_288


def test_published_layout() -> None:
    found = parse(NANO).layout(block_size=16, dtype_bytes=2)
    assert found.bytes_per_token == 6144
    assert found.page_bytes == 16 * 6144
    assert found.page_units == 2
    ssm, conv, hidden = 23 * 64 * 64 * 128 * 4, 23 * 3 * 6144 * 2, 2688 * 2
    assert found.checkpoint_bytes == ssm + conv + hidden == 49_087_744
    assert found.header_bytes == hidden
    assert found.state_units == 8
    assert found.pages_per_checkpoint == 500


def test_one_group_shares_b_and_c_in_the_header() -> None:
    config = parse(SMALL | {"n_groups": 1})
    found = config.layout(block_size=16, dtype_bytes=2)
    columns = 4
    assert found.header_bytes == 24 * 2 + columns * 2 * 9 * 2
    assert found.state_units == 4
    assert found.state_bytes == columns * 4 * 7 * 2 + 4 * 7 * 9 * 4


def test_layout_without_attention_or_state() -> None:
    without_attention = parse(SMALL | {"hybrid_override_pattern": "MM"}).layout(16, 4)
    assert (without_attention.groups, without_attention.page_bytes, without_attention.page_units) == ((), 65536, 1)
    assert without_attention.bytes_per_token == 0
    without_state = parse(SMALL | {"hybrid_override_pattern": "*-"}).layout(32, 4)
    assert without_state.state_bytes == 0
    assert without_state.page_bytes == 32 * 3 * 2 * 10 * 4


def test_tensors_are_those_of_the_reference() -> None:
    """Against the module tree of transformers, which merges the experts of a layer into one tensor each."""
    import torch
    from transformers import NemotronHForCausalLM

    raw = SMALL | {"moe_latent_size": 11, "use_bias": True, "mlp_bias": True}
    with torch.device("meta"):
        reference = NemotronHForCausalLM(ReferenceConfig(**raw))
    expected = {
        name.replace("model.", "backbone.", 1): tuple(value.shape) for name, value in reference.state_dict().items()
    }
    for projection in ("up_proj", "down_proj"):
        count, *shape = expected.pop(f"backbone.layers.3.mixer.experts.{projection}")
        expected |= {f"backbone.layers.3.mixer.experts.{i}.{projection}.weight": tuple(shape) for i in range(count)}
    assert tensors(parse(raw)) == expected


@pytest.mark.parametrize("field", ["layers_block_type", "layer_types"])
@pytest.mark.parametrize(
    "names", [["mamba", "attention", "mlp", "moe"], ["linear_attention", "full_attention", "mlp", "moe"]]
)
def test_layers_by_name(field: str, names: list[str]) -> None:
    raw = {name: value for name, value in SMALL.items() if name != "hybrid_override_pattern"}
    assert parse(raw | {field: names}) == parse(SMALL)
    assert parse(SMALL | {field: names}) == parse(SMALL)  # both, and they agree


def test_config_saved_by_transformers() -> None:
    assert parse(ReferenceConfig(**NANO).to_dict()) == parse(NANO)


def test_optional_fields() -> None:
    config = parse(SMALL)
    assert config.time_step_limit == (0.0, math.inf)
    assert config.bos_token_id is None
    assert parse(SMALL | {"time_step_limit": [0.001, 0.1]}).time_step_limit == (0.001, 0.1)
    assert parse(SMALL | {"time_step_limit": [0.0, {"__float__": "Infinity"}]}).time_step_limit == (0.0, math.inf)
    assert parse(SMALL | {"eos_token_id": [2, 11, 2]}).eos_token_ids == (2, 11)
    assert parse(SMALL | {"eos_token_id": None}).eos_token_ids == ()
    assert parse(SMALL | {"num_key_value_heads": None}).num_key_value_heads == 6
    first_published = {name: value for name, value in SMALL.items() if name != "head_dim"}
    assert parse(first_published | {"attention_head_dim": 10}) == config


def test_sizes_of_absent_layers_are_not_needed() -> None:
    assert (
        parse(
            {
                "hybrid_override_pattern": "-",
                **{k: SMALL[k] for k in ("vocab_size", "hidden_size", "max_position_embeddings", "intermediate_size")},
            }
        ).mamba_num_heads
        == 0
    )


BAD: list[tuple[dict[str, Any], str]] = [
    ({"hidden_size": None}, "hidden_size is missing; it must be an integer in 1..1048576"),
    ({"hidden_size": "24"}, "hidden_size must be an integer in 1..1048576, not '24'"),
    ({"hidden_size": 24.0}, "hidden_size must be an integer in 1..1048576, not 24.0"),
    ({"hidden_size": True}, "hidden_size must be an integer in 1..1048576, not true"),
    ({"hidden_size": 0}, "hidden_size must be an integer in 1..1048576, not 0"),
    ({"hidden_size": 1 << 40}, "hidden_size must be an integer in 1..1048576"),
    ({"vocab_size": -1}, "vocab_size must be an integer in 1..16777216, not -1"),
    ({"max_position_embeddings": 1 << 31}, "max_position_embeddings must be an integer in"),
    ({"layer_norm_epsilon": 0}, "layer_norm_epsilon must be a number in 1e-12..1, not 0"),
    ({"layer_norm_epsilon": math.nan}, "layer_norm_epsilon must be a number in 1e-12..1, not nan"),
    ({"eos_token_id": 101}, "eos_token_id must be an integer in 0..100, not 101"),
    ({"eos_token_id": [2, "x"]}, "eos_token_id must be an integer in 0..100, not 'x'"),
    ({"pad_token_id": -1}, "pad_token_id must be an integer in 0..100, not -1"),
    ({"hybrid_override_pattern": None}, "hybrid_override_pattern is missing"),
    ({"hybrid_override_pattern": ""}, "hybrid_override_pattern names 0 layers"),
    ({"hybrid_override_pattern": "M*X"}, "hybrid_override_pattern has 'X' for layer 2; each layer must be one of M"),
    ({"hybrid_override_pattern": ["M"]}, "hybrid_override_pattern must be a string, not ['M']"),
    ({"hybrid_override_pattern": "M" * 513}, "names 513 layers; a model has 1..512"),
    ({"layers_block_type": ["mamba", "rwkv"]}, "layers_block_type has 'rwkv' for layer 1; each layer must be one of"),
    ({"layers_block_type": "M*"}, "layers_block_type must be a list of strings, not 'M*'"),
    ({"layer_types": ["mamba"]}, "layer_types and hybrid_override_pattern name different layers"),
    ({"num_hidden_layers": 5}, "num_hidden_layers is 5, but hybrid_override_pattern names 4 layers"),
    ({"num_attention_heads": 7}, "num_attention_heads 7 must be a multiple of num_key_value_heads 3"),
    ({"head_dim": None}, "head_dim is missing"),
    ({"mamba_num_heads": 5}, "mamba_num_heads 5 must be a multiple of n_groups 2"),
    ({"conv_kernel": 1}, "conv_kernel must be an integer in 2..64, not 1"),
    ({"use_conv_bias": "yes"}, "use_conv_bias must be true or false, not 'yes'"),
    ({"time_step_limit": [0.1, 0.0]}, "time_step_limit must be two numbers, 0 <= low < high"),
    ({"time_step_limit": 0.1}, "time_step_limit must be two numbers, 0 <= low < high, not 0.1"),
    ({"time_step_limit": [0.0, "inf"]}, "time_step_limit must be two numbers"),
    ({"intermediate_size": None}, "intermediate_size is missing"),
    ({"n_routed_experts": 1}, "n_routed_experts must be an integer in 2..4096, not 1"),
    ({"n_group": 3}, "n_routed_experts 8 must make n_group 3 equal groups"),
    ({"n_group": 8}, "n_routed_experts 8 must make n_group 8 equal groups of 2 or more"),
    ({"n_group": 4, "topk_group": 5}, "topk_group must be an integer in 1..4, not 5"),
    ({"num_experts_per_tok": 9}, "num_experts_per_tok must be an integer in 1..8, not 9"),
    ({"n_group": 4, "topk_group": 2, "num_experts_per_tok": 5}, "num_experts_per_tok must be an integer in 1..4"),
    ({"routed_scaling_factor": -1}, "routed_scaling_factor must be a number in 1e-06..1e+06, not -1"),
    ({"moe_latent_size": 0}, "moe_latent_size must be an integer in"),
    ({"n_shared_experts": 2}, "n_shared_experts is 2, but only 1 is implemented"),
    ({"mamba_hidden_act": "gelu"}, "mamba_hidden_act is 'gelu', but only 'silu' is implemented"),
    ({"mlp_hidden_act": "silu"}, "mlp_hidden_act is 'silu', but only 'relu2' is implemented"),
    ({"residual_in_fp32": True}, "residual_in_fp32 is true, but only false is implemented"),
    ({"attention_bias": True}, "attention_bias is true, but only false is implemented"),
    ({"mamba_proj_bias": True}, "mamba_proj_bias is true, but only false is implemented"),
    ({"tie_word_embeddings": 1}, "tie_word_embeddings must be true or false, not 1"),
    ({"sliding_window": 4096}, "sliding_window is 4096, but only absent is implemented"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "message"), BAD, ids=[message[:40] for _, message in BAD])
def test_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError) as caught:
        parse(SMALL | change)
    assert message in str(caught.value)
    assert str(caught.value).startswith("config.json: ")
