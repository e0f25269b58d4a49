"""The way from a folder to a model."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from cairn.cache.layout import CacheLayout
from cairn.layers.communicator import ALONE, Communicator
from cairn.models.contract import ModelFacts
from cairn.models.cut import Units
from cairn.models.families import ServedFamily, family_of
from cairn.models.forward_sizes import ForwardSizes
from cairn.models.identity import weights_identity
from cairn.models.loader import DType, WeightReader, read_config, serving_dtype
from cairn.models.quantization import Quantization, read_quantization

if TYPE_CHECKING:
    from cairn.layers.model import Model

__all__ = ["OpenModel", "open_model"]


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

    def forward_sizes(self) -> ForwardSizes:
        """What computing a prompt's token takes, counted over the whole model."""
        return self.family.forward_sizes(self.config)

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
