"""`cairn check` on checkpoints that have only headers, with the published shapes of models with windows."""

from pathlib import Path
from typing import Any

import pytest

from cairn.check.report import check
from models.published_families import GEMMA2, GEMMA3, GEMMA3_THAT_SEES, LFM3, LLAMA4
from models.published_gemma4 import OTHERS, PUBLISHED, text_shapes
from models.test_check import Headers, write_checkpoint


@pytest.fixture(autouse=True)
def _has_bfloat16_products(bfloat16_products: None) -> None:
    pass


def gemma_headers(prefix: str, raw: dict[str, Any], head_norms: bool) -> Headers:
    """As published, name by name."""
    hidden, inner, dim = raw["hidden_size"], raw["intermediate_size"], raw.get("head_dim", 256)
    queries, keys = raw.get("num_attention_heads", 8) * dim, raw.get("num_key_value_heads", 4) * dim
    shapes: dict[str, tuple[int, ...]] = {f"{prefix}.embed_tokens.weight": (raw.get("vocab_size", 262208), hidden)}
    for index in range(raw["num_hidden_layers"]):
        layer = f"{prefix}.layers.{index}"
        shapes |= {f"{layer}.mlp.{part}_proj.weight": (inner, hidden) for part in ("gate", "up")}
        shapes[f"{layer}.mlp.down_proj.weight"] = (hidden, inner)
        shapes[f"{layer}.self_attn.q_proj.weight"] = (queries, hidden)
        shapes |= {f"{layer}.self_attn.{part}_proj.weight": (keys, hidden) for part in "kv"}
        shapes[f"{layer}.self_attn.o_proj.weight"] = (hidden, queries)
        if head_norms:
            shapes |= {f"{layer}.self_attn.{part}_norm.weight": (dim,) for part in "qk"}
        for norm in ("input", "post_attention", "pre_feedforward", "post_feedforward"):
            shapes[f"{layer}.{norm}_layernorm.weight"] = (hidden,)
    shapes[f"{prefix}.norm.weight"] = (hidden,)
    return {name: ("BF16", shape) for name, shape in shapes.items()}


def lfm3_headers() -> Headers:
    """As transformers names them."""
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (128000, 2048)}
    for index, kind in enumerate(LFM3["layer_types"]):
        layer = f"model.layers.{index}"
        if kind == "conv":
            shapes |= {f"{layer}.conv.in_proj.weight": (6144, 2048), f"{layer}.conv.out_proj.weight": (2048, 2048)}
            shapes[f"{layer}.conv.conv.weight"] = (2048, 1, 7)
        else:
            shapes |= {f"{layer}.self_attn.{part}_proj.weight": (2048, 2048) for part in "qo"}
            shapes |= {f"{layer}.self_attn.{part}_proj.weight": (512, 2048) for part in "kv"}
            shapes |= {f"{layer}.self_attn.{part}_norm.weight": (128,) for part in "qk"}
            shapes[f"{layer}.self_attn.g_proj.weight"] = (16, 2048)
        shapes |= {f"{layer}.feed_forward.{part}.weight": (7680, 2048) for part in ("w1", "w3")}
        shapes[f"{layer}.feed_forward.w2.weight"] = (2048, 7680)
        for norm in ("operator_norm", "ffn_norm", "post_operator_norm", "post_ffn_norm"):
            shapes[f"{layer}.{norm}.weight"] = (2048,)
    shapes["model.embedding_norm.weight"] = (2048,)
    return {name: ("BF16", shape) for name, shape in shapes.items()}


def llama4_headers() -> Headers:
    """As published, with some of the vision model's."""
    model, outer = "language_model.model", "language_model"
    shapes: dict[str, tuple[int, ...]] = {f"{model}.embed_tokens.weight": (202048, 5120)}
    for index in range(48):
        layer = f"{model}.layers.{index}"
        shapes |= {f"{layer}.self_attn.{part}_proj.weight": (5120, 5120) for part in "qo"}
        shapes |= {f"{layer}.self_attn.{part}_proj.weight": (1024, 5120) for part in "kv"}
        shapes[f"{layer}.feed_forward.experts.gate_up_proj"] = (16, 5120, 16384)
        shapes[f"{layer}.feed_forward.experts.down_proj"] = (16, 8192, 5120)
        shapes[f"{layer}.feed_forward.router.weight"] = (16, 5120)
        shapes |= {f"{layer}.feed_forward.shared_expert.{part}_proj.weight": (8192, 5120) for part in ("gate", "up")}
        shapes[f"{layer}.feed_forward.shared_expert.down_proj.weight"] = (5120, 8192)
        shapes |= {f"{layer}.{norm}_layernorm.weight": (5120,) for norm in ("input", "post_attention")}
    shapes |= {f"{model}.norm.weight": (5120,), f"{outer}.lm_head.weight": (202048, 5120)}
    shapes |= {"vision_model.class_embedding": (1408,), "multi_modal_projector.linear_1.weight": (5120, 4096)}
    return {name: ("BF16", shape) for name, shape in shapes.items()}


LLAMA4_THAT_SEES = {
    "model_type": "llama4",
    "architectures": ["Llama4ForConditionalGeneration"],
    "text_config": {name: value for name, value in LLAMA4.items() if name != "architectures"},
    "vision_config": {"hidden_size": 1408, "model_type": "llama4_vision_model"},
}


def headers_that_see() -> Headers:
    """The text model's, with some of the others'."""
    text = gemma_headers("language_model.model", GEMMA3_THAT_SEES["text_config"], head_norms=True)
    tower = {
        "vision_tower.vision_model.embeddings.patch_embedding.weight": (1152, 3, 14, 14),
        "multi_modal_projector.mm_input_projection_weight": (1152, 2560),
    }
    return text | {name: ("BF16", shape) for name, shape in tower.items()}


def gemma4(name: str, parameters: int, num_ignored: int) -> tuple[dict[str, Any], Headers, int, int, int]:
    """`num_ignored`: keys and values that nothing is computed with, and what is not the text model's."""
    raw = dict(PUBLISHED[name])
    headers: Headers = {each: ("BF16", shape) for each, shape in (text_shapes(raw) | OTHERS).items()}
    return raw, headers, parameters, raw["text_config"]["max_position_embeddings"], num_ignored


CHECKPOINTS = {
    "Gemma-3-1B": (GEMMA3, gemma_headers("model", GEMMA3, head_norms=True), 999_885_952, 32768, 0),
    "Gemma-3-4B": (GEMMA3_THAT_SEES, headers_that_see(), 3_880_263_168, 131072, 2),
    "Gemma-2-2B": (GEMMA2, gemma_headers("model", GEMMA2, head_norms=False), 2_614_341_888, 8192, 0),
    "Llama-4-Scout": (LLAMA4_THAT_SEES, llama4_headers(), 107_769_861_120, 10485760, 2),
    "Gemma-4-31B": gemma4("Gemma-4-31B", 30_697_345_340, 4),
    "Gemma-4-26B-A4B": gemma4("Gemma-4-26B-A4B", 25_233_141_790, 4),
    "Gemma-4-12B": gemma4("Gemma-4-12B", 11_907_350_320, 4),
    "Gemma-4-E4B": gemma4("Gemma-4-E4B", 7_463_013_418, 4 + 18 * 3),
    "Gemma-4-E2B": gemma4("Gemma-4-E2B", 4_628_569_379, 4 + 20 * 3),
    "LFM3-1.7B": (LFM3, lfm3_headers(), 1_728_801_536, 128000, 0),
}


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_published_shapes(name: str, tmp_path: Path) -> None:
    raw, headers, parameters, max_model_len, num_ignored = CHECKPOINTS[name]
    write_checkpoint(tmp_path, {**raw, "torch_dtype": "bfloat16"}, headers, num_shards=2)
    report = check(tmp_path)
    assert report.ok, report.accounting.problems[:3]
    assert report.accounting.num_ignored == num_ignored
    assert (report.parameters, report.max_model_len) == (parameters, max_model_len)
    # The output is the embedding once more, packed for products.
    assert report.weight_bytes >= 2 * parameters
    assert any(words.startswith(("windowed attention", "chunked attention")) for words in report.layers)
