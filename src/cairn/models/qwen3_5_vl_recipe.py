"""Qwen3.5's random-weight checkpoints with a vision tower: the text model's, and what images need besides."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from cairn.models import qwen3_5_recipe, qwen3_5_vision
from cairn.models.image_processor import FILE
from cairn.models.make_tokenizer import CHAT_TEMPLATE
from cairn.models.qwen3_5_recipe import IMAGE_TOKENS
from cairn.models.recipe import Asked, Recipe

__all__ = ["recipe"]

_START, _END, _IMAGE, _VIDEO = IMAGE_TOKENS

_SHOWN = (
    "{%- macro shown(content) -%}{%- if content is string -%}{{- content -}}{%- else -%}"
    "{%- for part in content or [] -%}{%- if part.type == 'image' -%}{{- '"
    + _START
    + _IMAGE
    + _END
    + "' -}}{%- else -%}{{- part.text -}}{%- endif -%}{%- endfor -%}{%- endif -%}{%- endmacro -%}\n"
)
"""Content as text: parts follow each other with nothing between, as in the published template."""


def recipe() -> Recipe:
    text = qwen3_5_recipe.recipe(experts=False)
    sizes = {"tiny": (64, 128, 4, 2), "small": (256, 512, 8, 4)}
    return Recipe(
        sizes=MappingProxyType(
            {size: {**text.sizes[size], "vision": _vision(*sizes[size], text.sizes[size])} for size in text.sizes}
        ),
        config=_config,
        # The tower's own come first: its norms are not stored less 1.
        spreads=MappingProxyType({"merger.norm.weight": (1.0, 0.1), "pos_embed.weight": (0.0, 0.5), **text.spreads}),
        gains=MappingProxyType({"merger.linear_fc2.weight": 2.0, **text.gains}),
        float32=text.float32,
        tokens=IMAGE_TOKENS,
        chat_template=_SHOWN + CHAT_TEMPLATE.replace("message.content", "shown(message.content)"),
        files=MappingProxyType({FILE: _processor()}),
        other_tensors=_vision_tensors,
    )


def _vision(hidden: int, wide: int, heads: int, depth: int, text: Mapping[str, Any]) -> Mapping[str, Any]:
    return {
        "deepstack_visual_indexes": [],
        "depth": depth,
        "hidden_act": "gelu_pytorch_tanh",
        "hidden_size": hidden,
        "in_channels": 3,
        "initializer_range": 0.02,
        "intermediate_size": wide,
        "model_type": "qwen3_5",
        "num_heads": heads,
        "num_position_embeddings": 64,
        "out_hidden_size": text["hidden_size"],
        "patch_size": 16,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
    }


def _processor() -> Mapping[str, Any]:
    """As published, but for smaller bounds: an image has 1 to 1,024 tokens."""
    return {
        "image_mean": [0.5, 0.5, 0.5],
        "image_processor_type": "Qwen2VLImageProcessorFast",
        "image_std": [0.5, 0.5, 0.5],
        "merge_size": 2,
        "patch_size": 16,
        "size": {"longest_edge": 1024 * 1024, "shortest_edge": 32 * 32},
        "temporal_patch_size": 2,
    }


def _config(sizes: Mapping[str, Any], asked: Asked) -> dict[str, Any]:
    """config.json with the fields, names and forms of the published ones."""
    words = {name: value for name, value in sizes.items() if name != "vision"}
    text = qwen3_5_recipe.recipe(experts=False).config(words, asked)
    del text["architectures"]
    return {
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "model_type": "qwen3_5",
        "dtype": asked.dtype,
        "eos_token_id": asked.eos_token_id,
        "image_token_id": asked.tokens[_IMAGE],
        "pad_token_id": asked.pad_token_id,
        "text_config": text,
        "tie_word_embeddings": False,
        "video_token_id": asked.tokens[_VIDEO],
        "vision_config": dict(sizes["vision"]),
        "vision_end_token_id": asked.tokens[_END],
        "vision_start_token_id": asked.tokens[_START],
    }


def _vision_tensors(raw: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    return qwen3_5_vision.tensors(qwen3_5_vision.parse(raw["vision_config"]))
