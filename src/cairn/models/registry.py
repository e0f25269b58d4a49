"""The model families that can be served, by `model_type`, and the way from a folder to a model."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Protocol

import torch

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
from cairn.models.identity import weights_identity
from cairn.models.loader import DType, WeightReader, read_config, serving_dtype
from cairn.models.nemotron_h_config import NemotronHConfig
from cairn.models.quantization import Quantization, read_quantization
from cairn.models.qwen3_5_family import Qwen35Family

if TYPE_CHECKING:
    from cairn.layers.model import Model

__all__ = ["FAMILIES", "OpenModel", "ServedFamily", "family_of", "open_model"]


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
        self, config: Any, load: TensorLoader, *, exact: bool, dtype: torch.dtype, communicator: Communicator = ALONE
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

    def layout(self, config: NemotronHConfig, block_size: int, dtype_bytes: int, tp_size: int = 1) -> CacheLayout:
        return nemotron_h_config.layout(config, block_size, dtype_bytes, tp_size)

    def units(self, config: NemotronHConfig) -> Units:
        return nemotron_h_config.units(config)

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
        dtype: torch.dtype,
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


@dataclass(frozen=True, slots=True)
class OpenModel:
    """A checkpoint folder whose config has been read and accepted; no tensor has been looked at yet. `quantization`:
    how its weights are stored, if not in the dtype they are served in."""

    folder: Path
    family: ServedFamily
    config: Any
    facts: ModelFacts
    dtype: torch.dtype
    quantization: Quantization | None = None

    def layout(self, block_size: int, tp_size: int = 1) -> CacheLayout:
        """What one of `tp_size` ranks remembers; the same on every rank. Raises ConfigError naming
        --tensor-parallel-size and the field that does not divide."""
        return self.family.layout(self.config, block_size, self.dtype.itemsize, tp_size)

    def units(self) -> Units:
        """What tensor parallelism shares out, counted over the whole model."""
        return self.family.units(self.config)

    def transfer_facts(self) -> dict[str, str | int]:
        """What must be equal for page bytes to mean the same on two servers: model type, serving dtype, every field
        of config.json that decides what keys, values and states are, and `weights`, the identity of the stored
        weights (see `weights_identity`). Block size and number of ranks are not in it. Raises ModelError."""
        identity = weights_identity(self.folder, self.family.tensors(self.config), self.quantization)
        own = {"model_type": self.facts.model_type, "dtype": str(self.dtype).removeprefix("torch.")}
        return {**self.family.transfer_facts(self.config), **own, "weights": identity}

    def build(self, *, exact: bool, communicator: Communicator = ALONE) -> "Model":
        """Account for every tensor, then load the communicator's rank of the model, reading no more than its share.

        Raises ModelError that names the tensor and its file, or ConfigError that names --tensor-parallel-size.
        """
        with WeightReader(self.folder, self.dtype, self.family.float32_tensors, self.quantization) as reader:
            expected = self.family.tensors(self.config)
            reader.verify(expected, self.family.ignored_tensors)
            for copy, name in self.family.tied_tensors.items():
                if copy in reader.headers and copy not in expected:
                    reader.verify_copy(copy, name, expected[name])
            return self.family.build(self.config, reader.load, exact=exact, dtype=self.dtype, communicator=communicator)


def open_model(folder: Path, dtype: DType = "auto") -> OpenModel:
    """Read config.json (and the end-of-sequence ids of generation_config.json). Raises ModelError."""
    raw = read_config(folder)
    family = family_of(raw)
    config = family.parse(raw)
    quantization = read_quantization(folder, raw)
    return OpenModel(folder, family, config, family.facts(config), serving_dtype(raw, dtype), quantization)
