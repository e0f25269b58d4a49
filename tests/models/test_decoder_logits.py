"""Logits of the families made of parts, by every way a token can be computed: see `logits_bar`."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch

from cairn.step import Restore, Snapshot
from models.covered import LOGITS
from models.decoder_families import Tiny, logits_of, prompt, published, tiny
from models.logits_bar import (
    LENGTH,
    Truth,
    batches_of_mixed_lengths,
    full_hits,
    kept_everywhere,
    resumed_at_every_position,
    whole_in_chunks_and_token_by_token,
)
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
from tiers import more

YARN = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 64}
BIASED = {"attention_bias": True, "mamba_proj_bias": True}
MODELS: Mapping[str, Callable[[], dict[str, Any]]] = {
    "granite": granite,
    "granite-dense": partial(
        granite,
        num_local_experts=0,
        position_embedding_type="rope",
        mamba_n_groups=2,
        tie_word_embeddings=False,
        **BIASED,
    ),
    "granite-attention": partial(granite, layer_types=["attention", "attention"], num_hidden_layers=2),
    "falcon": partial(falcon, attention_bias=True, mlp_bias=True),
    "falcon-normed": partial(falcon, mamba_rms_norm=True, mamba_n_groups=1, tie_word_embeddings=True),
    "falcon-biased": partial(falcon, projectors_bias=True, mlp_bias=True, mamba_conv_bias=False, **BIASED),
    "lfm2": lfm2,
    "lfm2-biased": partial(
        lfm2, conv_bias=True, conv_L_cache=4, tie_embedding=False, block_ff_dim=56, block_auto_adjust_ff_dim=False
    ),
    "qwen3": qwen3,
    "qwen3-tied": partial(qwen3, tie_word_embeddings=True, attention_bias=True),
    "dense-granite": partial(dense_granite, attention_bias=True, mlp_bias=True),
    "dense-granite-untied": partial(dense_granite, tie_word_embeddings=False),
    "qwen3_moe": qwen3_moe,
    "qwen3_moe-tied": partial(
        qwen3_moe,
        tie_word_embeddings=True,
        attention_bias=True,
        norm_topk_prob=False,
        decoder_sparse_step=2,
        mlp_only_layers=None,
    ),
    "lfm2_moe": lfm2_moe,
    "lfm2_moe-plain": partial(
        lfm2_moe, conv_bias=True, use_expert_bias=False, norm_topk_prob=False, num_dense_layers=0, tie_embedding=False
    ),
    "olmo_hybrid": olmo_hybrid,
    "olmo_hybrid-turned": partial(
        olmo_hybrid,
        layer_types=["full_attention", "linear_attention", "full_attention"],
        rope_parameters={"rope_theta": 1e5, "rope_type": "default"},
        attention_bias=True,
        linear_num_key_heads=4,
        linear_allow_neg_eigval=False,
        tie_word_embeddings=True,
    ),
    "gemma3": partial(gemma3, rope_scaling={"rope_type": "linear", "factor": 2.0}),
    "gemma3-biased": partial(
        gemma3, attention_bias=True, tie_word_embeddings=False, final_logit_softcapping=1.5, query_pre_attn_scalar=16
    ),
    "gemma4": partial(
        gemma4, **SHARING, enable_moe_block=True, num_experts=6, top_k_experts=3, moe_intermediate_size=24
    ),
    "gemma4-dense": partial(gemma4, attention_bias=True, tie_word_embeddings=False),
    "gemma4-sharing": partial(
        gemma4, **{**SHARING, "num_kv_shared_layers": 1, "attention_k_eq_v": False, "sliding_window": 20}
    ),
    "gemma2": gemma2,
    # yarn makes turned heads longer, which the norm after that undoes.
    "llama4": partial(llama4, rope_scaling=YARN),
    "llama4-plain": partial(
        llama4,
        use_qk_norm=False,
        attn_temperature_tuning=False,
        attention_bias=True,
        tie_word_embeddings=True,
        moe_layers=[0, 1],
        rope_scaling={
            "rope_type": "llama3",
            "factor": 2.0,
            "low_freq_factor": 0.3,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    ),
    "lfm3": lfm3,
    "lfm3-plain": partial(
        lfm3,
        use_attention_gate=False,
        use_sandwich_norm=False,
        attention_bias=True,
        conv_bias=True,
        conv_L_cache=4,
        tie_word_embeddings=False,
    ),
    "gpt_oss": gpt_oss,
    "gpt_oss-tied": partial(
        gpt_oss,
        layer_types=["full_attention", "sliding_attention"],
        num_hidden_layers=2,
        sliding_window=70,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4},
        attention_bias=False,
        swiglu_alpha=1.702,
        swiglu_limit=7.0,
        tie_word_embeddings=True,
    ),
    # Positions are scaled from 64 to 128 or more: the prompt ends behind either.
    "qwen3-yarn": partial(qwen3, rope_scaling=YARN),
    "lfm2-linear": partial(lfm2, rope_scaling={"type": "linear", "factor": 2.5}, max_position_embeddings=64),
    "granite-llama3": partial(
        granite,
        layer_types=["attention", "attention"],
        num_hidden_layers=2,
        position_embedding_type="rope",
        rope_scaling={
            "rope_type": "llama3",
            "factor": 2.0,
            "low_freq_factor": 0.3,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    ),
}


@dataclass(frozen=True)
class TinyTruth(Truth):
    """Of one tiny model."""

    tiny: Tiny


LONG = (
    "granite-attention",
    "falcon-normed",
    "falcon-biased",
    "qwen3",
    "lfm2-linear",
    "granite-llama3",
    "gemma3-biased",
)

MORE = (
    "dense-granite-untied",
    "qwen3_moe-tied",
    "lfm2_moe-plain",
    "olmo_hybrid-turned",
    "gemma4-dense",
    "gemma4-sharing",
    "gemma2",
    "lfm3-plain",
    "llama4-plain",
    "gpt_oss-tied",
)


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(name, marks=pytest.mark.long if name in LONG else pytest.mark.more if name in MORE else ())
        for name in MODELS
    ],
)
def truth(request: pytest.FixtureRequest) -> TinyTruth:
    model = tiny(MODELS[request.param](), seed=len(request.param))
    theirs, tokens = published(model), prompt(LENGTH, 1)
    found = Truth.of(tokens, *(logits_of(theirs, tokens, wide=wide) for wide in (False, True)))
    return TinyTruth(found.tokens, found.logits, found.bar, model)


@pytest.mark.parametrize("exact", [False, more(True)])
def test_whole_in_chunks_and_token_by_token(truth: TinyTruth, exact: bool) -> None:
    driver = truth.tiny.driver(exact)
    whole_in_chunks_and_token_by_token(driver, truth, (1, 2, 63, 64, 65, 128, 149, LENGTH), stepped_from=120)


def test_every_family_is_here() -> None:
    """But those with files of their own."""
    made = {make()["model_type"].removesuffix("_text") for make in MODELS.values()}
    assert made | {"nemotron_h", "qwen3_5", "qwen3_5_moe"} == LOGITS.plain_families


def test_batches_of_mixed_lengths(truth: TinyTruth) -> None:
    batches_of_mixed_lengths(truth.tiny.driver(exact=False, num_slots=12), truth)


def test_resumed_from_a_checkpoint_at_every_position(truth: TinyTruth) -> None:
    """Prefill to a place off the grid, then steps that hand out states, too."""
    length = 71
    driver = truth.tiny.driver(exact=False, num_slots=length + 1, num_pages=4096)
    first, files = kept_everywhere(driver, truth, length, prefilled=67)
    full_hits(driver, truth, {position: files[position] for position in (1, 64, 66, 68, length)})
    resumed_at_every_position(driver, truth, first, files)


@pytest.mark.parametrize("size", [pytest.param(2, marks=pytest.mark.long), 4])
def test_cut_among_ranks(truth: TinyTruth, size: int) -> None:
    """The bar of one rank; on one thread a rank."""
    driver, tokens = truth.tiny.ranks(size, exact=True), truth.tokens
    whole, file = driver.sequence(0, LENGTH), driver.file()
    found = [(130, driver.run(driver.row(whole, tokens[:130]), snapshots=[Snapshot(0, 64, file)])[0])]
    for position in range(130, 140):
        row = driver.row(whole, tokens[position : position + 1], decode=True)
        found.append((position + 1, driver.run(row)[0]))
    resumed = driver.sequence(1, LENGTH)
    resumed.position, resumed.kv_write_from, resumed.pages = 64, 130, whole.pages
    found.append((130, driver.run(driver.row(resumed, tokens[64:130]), restores=(Restore(1, file),))[0]))
    driver.runner.close()
    assert torch.equal(found[0][1], found[-1][1]), "resumed on the grid, every bit is the same"
    for position, logits in found:
        truth.check(logits, position)
