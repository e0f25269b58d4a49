"""Qwen3.5 and Qwen3-Next as families, one for each `model_type`."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING

from cairn.cache.layout import CacheLayout
from cairn.layers.communicator import ALONE, Communicator
from cairn.models import qwen3_5_config
from cairn.models.contract import ModelFacts, TensorLoader
from cairn.models.cut import Units
from cairn.models.forward_sizes import ForwardSizes
from cairn.models.qwen3_5_config import Qwen35Config
from cairn.models.remembered import STATE_BYTES

if TYPE_CHECKING:
    import torch

    from cairn.layers.model import Model

__all__ = ["Qwen35Family"]


class Qwen35Family:
    """Gated delta nets and gated attention, with MLPs or mixtures of experts."""

    float32_tensors: tuple[str, ...] = qwen3_5_config.FLOAT32_TENSORS
    ignored_tensors: tuple[str, ...] = qwen3_5_config.IGNORED_TENSORS
    tied_tensors: Mapping[str, str] = MappingProxyType({})

    def __init__(self, model_type: str, *architectures: str) -> None:
        self.model_type = model_type
        self.architectures = architectures

    def parse(self, raw: Mapping[str, object]) -> Qwen35Config:
        return qwen3_5_config.parse(raw, self.model_type)

    def facts(self, config: Qwen35Config) -> ModelFacts:
        return qwen3_5_config.facts(config)

    def tensors(self, config: Qwen35Config) -> dict[str, tuple[int, ...]]:
        return qwen3_5_config.tensors(config)

    def layout(
        self, config: Qwen35Config, block_size: int, dtype_bytes: int, tp_size: int = 1, state_bytes: int = STATE_BYTES
    ) -> CacheLayout:
        return qwen3_5_config.layout(config, block_size, dtype_bytes, tp_size, state_bytes)

    def units(self, config: Qwen35Config) -> Units:
        return qwen3_5_config.units(config)

    def forward_sizes(self, config: Qwen35Config) -> ForwardSizes:
        return qwen3_5_config.forward_sizes(config)

    def transfer_facts(self, config: Qwen35Config) -> dict[str, str | int]:
        return qwen3_5_config.transfer_facts(config)

    def layers(self, config: Qwen35Config) -> dict[str, int]:
        return qwen3_5_config.layers(config)

    def build(
        self,
        config: Qwen35Config,
        load: TensorLoader,
        *,
        exact: bool,
        dtype: "torch.dtype",
        communicator: Communicator = ALONE,
    ) -> "Model":
        # Here and not above: accounting for a checkpoint needs none of the kernels.
        from cairn.models import qwen3_5

        return qwen3_5.build(config, load, exact=exact, dtype=dtype, communicator=communicator)
