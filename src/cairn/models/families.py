"""The model families that can be served, by `model_type`: what config.json says is known here without torch."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Protocol

from cairn.cache.layout import CacheLayout
from cairn.errors import ModelError
from cairn.layers.communicator import ALONE, Communicator
from cairn.models import (
    falcon_h1_config,
    granitemoehybrid_config,
    lfm2_config,
    nemotron_h_config,
    qwen3_config,
)
from cairn.models.contract import Family, ModelFacts, TensorLoader
from cairn.models.cut import Units
from cairn.models.forward_sizes import ForwardSizes
from cairn.models.nemotron_h_config import NemotronHConfig
from cairn.models.qwen3_5_family import Qwen35Family
from cairn.models.remembered import STATE_BYTES

if TYPE_CHECKING:
    import torch

    from cairn.layers.model import Model

__all__ = ["FAMILIES", "ServedFamily", "family_of"]


class ServedFamily(Family[Any], Protocol):
    """A family that can also be executed.

    `float32_tensors`: last name parts of tensors that keep full precision in any serving dtype; `ignored_tensors`:
    name prefixes of parts of the checkpoint that are not served; `tied_tensors`: tensors that may be stored although
    the config does not call for them, and what they have to be equal to then.
    """

    float32_tensors: tuple[str, ...]
    ignored_tensors: tuple[str, ...]
    tied_tensors: Mapping[str, str]

    def layers(self, config: Any) -> dict[str, int]:
        """How many layers of each kind, by the kind's name, in words."""
        ...

    def build(
        self, config: Any, load: TensorLoader, *, exact: bool, dtype: "torch.dtype", communicator: Communicator = ALONE
    ) -> "Model":
        """The communicator's rank of the model, its weights drawn from `load`. Raises ModelError that names the
        tensor, or ConfigError that names --tensor-parallel-size."""
        ...


class NemotronHFamily:
    """Nemotron-H and Nemotron 3: Mamba2, attention, MLP and mixture-of-experts layers."""

    model_type: str = nemotron_h_config.MODEL_TYPE
    architectures: tuple[str, ...] = ("NemotronHForCausalLM",)
    float32_tensors: tuple[str, ...] = nemotron_h_config.FLOAT32_TENSORS
    ignored_tensors: tuple[str, ...] = ("mtp.",)
    tied_tensors: Mapping[str, str] = MappingProxyType({})

    def parse(self, raw: Mapping[str, object]) -> NemotronHConfig:
        return nemotron_h_config.parse(raw)

    def facts(self, config: NemotronHConfig) -> ModelFacts:
        return nemotron_h_config.facts(config)

    def tensors(self, config: NemotronHConfig) -> dict[str, tuple[int, ...]]:
        return nemotron_h_config.tensors(config)

    def layout(
        self,
        config: NemotronHConfig,
        block_size: int,
        dtype_bytes: int,
        tp_size: int = 1,
        state_bytes: int = STATE_BYTES,
    ) -> CacheLayout:
        return nemotron_h_config.layout(config, block_size, dtype_bytes, tp_size, state_bytes)

    def units(self, config: NemotronHConfig) -> Units:
        return nemotron_h_config.units(config)

    def forward_sizes(self, config: NemotronHConfig) -> ForwardSizes:
        return nemotron_h_config.forward_sizes(config)

    def transfer_facts(self, config: NemotronHConfig) -> dict[str, str | int]:
        return nemotron_h_config.transfer_facts(config)

    def layers(self, config: NemotronHConfig) -> dict[str, int]:
        return nemotron_h_config.layers(config)

    def build(
        self,
        config: NemotronHConfig,
        load: TensorLoader,
        *,
        exact: bool,
        dtype: "torch.dtype",
        communicator: Communicator = ALONE,
    ) -> "Model":
        # Here and not above: accounting for a checkpoint needs none of the kernels.
        from cairn.models import nemotron_h

        return nemotron_h.build(config, load, exact=exact, dtype=dtype, communicator=communicator)


def _by_type(*families: ServedFamily) -> Mapping[str, ServedFamily]:
    return MappingProxyType({family.model_type: family for family in families})


FAMILIES: Mapping[str, ServedFamily] = _by_type(
    NemotronHFamily(),
    granitemoehybrid_config.family(),
    falcon_h1_config.family(),
    lfm2_config.family(),
    qwen3_config.family(),
    Qwen35Family("qwen3_5", "Qwen3_5ForConditionalGeneration"),
    Qwen35Family("qwen3_5_text", "Qwen3_5ForCausalLM"),
    Qwen35Family("qwen3_5_moe", "Qwen3_5MoeForConditionalGeneration"),
    Qwen35Family("qwen3_5_moe_text", "Qwen3_5MoeForCausalLM"),
    Qwen35Family("qwen3_next", "Qwen3NextForCausalLM"),
)


def family_of(raw: Mapping[str, object]) -> ServedFamily:
    """The family that config.json names. Raises ModelError that lists the known ones."""
    model_type = raw.get("model_type")
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        raise ModelError(f"config.json: model_type {model_type!r} is not served; known: {', '.join(sorted(FAMILIES))}")
    family = FAMILIES[model_type]
    named = raw.get("architectures")
    if named is not None and (not isinstance(named, list) or not set(map(str, named)) & set(family.architectures)):
        raise ModelError(
            f"config.json: architectures {named!r} is not served; known for {model_type}: "
            f"{', '.join(family.architectures)}"
        )
    return family
