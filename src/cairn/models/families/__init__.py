"""The model families that can be served, by `model_type`. Importing them loads no torch."""

from collections.abc import Mapping
from types import MappingProxyType

from cairn.errors import ModelError
from cairn.models.contract import Family
from cairn.models.families import (
    falcon_h1,
    gemma,
    gemma4,
    gpt_oss,
    granite,
    granitemoehybrid,
    lfm2,
    lfm2_moe,
    lfm3,
    llama4,
    nemotron_h,
    olmo_hybrid,
    qwen3,
    qwen3_5,
    qwen3_moe,
)
from cairn.models.random_weights.recipe import Recipe

__all__ = ["FAMILIES", "FAMILY_RECIPES", "family_of"]

FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        family.model_type: family
        for family in (
            nemotron_h.FAMILY,
            granitemoehybrid.FAMILY,
            falcon_h1.FAMILY,
            lfm2.FAMILY,
            qwen3.FAMILY,
            granite.FAMILY,
            qwen3_moe.FAMILY,
            lfm2_moe.FAMILY,
            lfm3.FAMILY,
            olmo_hybrid.FAMILY,
            gpt_oss.FAMILY,
            *qwen3_5.FAMILIES,
            *gemma.FAMILIES,
            *gemma4.FAMILIES,
            *llama4.FAMILIES,
        )
    }
)

FAMILY_RECIPES: Mapping[str, Recipe] = MappingProxyType(
    {
        "nemotron_h": nemotron_h.RECIPE,
        "qwen3_5": qwen3_5.DENSE_RECIPE,
        "qwen3_5_moe": qwen3_5.MOE_RECIPE,
        "granitemoehybrid": granitemoehybrid.RECIPE,
        "falcon_h1": falcon_h1.RECIPE,
        "lfm2": lfm2.RECIPE,
        "qwen3": qwen3.RECIPE,
        "olmo_hybrid": olmo_hybrid.RECIPE,
        "lfm2_moe": lfm2_moe.RECIPE,
        "qwen3_moe": qwen3_moe.RECIPE,
        "granite": granite.RECIPE,
        "gemma4": gemma4.RECIPE,
        "gemma3": gemma.GEMMA3_RECIPE,
        "gemma2": gemma.GEMMA2_RECIPE,
        "lfm3": lfm3.RECIPE,
        "llama4": llama4.RECIPE,
        "gpt_oss": gpt_oss.RECIPE,
    }
)
"""How random-weight checkpoints of a family are made, one line each."""


def family_of(raw: Mapping[str, object]) -> Family:
    """The family that config.json names. Raises ModelError that lists the known ones."""
    model_type = raw.get("model_type")
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        raise ModelError(f"config.json: model_type {model_type!r} is not served; known: {', '.join(sorted(FAMILIES))}")
    family = FAMILIES[model_type]
    named = raw.get("architectures")
    if named is not None and (not isinstance(named, list) or family.architecture not in map(str, named)):
        raise ModelError(
            f"config.json: architectures {named!r} is not served; known for {model_type}: {family.architecture}"
        )
    return family
