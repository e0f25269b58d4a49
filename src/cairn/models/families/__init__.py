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

__all__ = ["FAMILIES", "family_of"]

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
