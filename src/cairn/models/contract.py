"""What a model family gives the engine: a parsed config, its tensors by name, its layout, and the model itself.

A family is three steps, each usable without the next: `parse` needs only config.json, `tensors` and `layout` only the
parsed config (so `cairn check` accounts for a checkpoint without loading it), `build` the weights.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

from cairn.cache.layout import CacheLayout
from cairn.models.cut import Cut, Units
from cairn.models.forward_sizes import ForwardSizes
from cairn.models.remembered import STATE_BYTES

if TYPE_CHECKING:
    import torch

__all__ = ["Family", "ModelFacts", "TensorLoader"]

Config = TypeVar("Config")


class TensorLoader(Protocol):
    """Where a model's tensors come from."""

    def __call__(self, name: str, shape: tuple[int, ...], cut: Cut | None = None) -> "torch.Tensor":
        """The tensor, or what the cut leaves of it, in the dtype the model is served with. `shape` is that of the
        whole tensor in the checkpoint. Raises ModelError naming the tensor."""
        ...


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What the engine needs to know of any model, whatever its family."""

    model_type: str
    vocab_size: int
    hidden_size: int
    max_position_embeddings: int
    eos_token_ids: tuple[int, ...]


class Family(Protocol, Generic[Config]):
    """One model family. Stateless; `Config` is its own frozen dataclass."""

    model_type: str
    architectures: tuple[str, ...]

    def parse(self, raw: Mapping[str, object]) -> Config:
        """config.json -> config. Raises ModelError that names the field and the fix."""
        ...

    def facts(self, config: Config) -> ModelFacts: ...

    def tensors(self, config: Config) -> dict[str, tuple[int, ...]]:
        """Every tensor of the checkpoint, by its published name, with its shape."""
        ...

    def layout(
        self, config: Config, block_size: int, dtype_bytes: int, tp_size: int = 1, state_bytes: int = STATE_BYTES
    ) -> CacheLayout:
        """What one of `tp_size` ranks remembers, a number of recurrent state in `state_bytes` bytes; the same on every
        rank. Raises ConfigError naming the flag and the field where the model cannot be cut into so many shares."""
        ...

    def units(self, config: Config) -> Units:
        """What tensor parallelism shares out, counted over the whole model."""
        ...

    def forward_sizes(self, config: Config) -> ForwardSizes:
        """What computing a prompt's token takes, counted over the whole model."""
        ...

    def transfer_facts(self, config: Config) -> dict[str, str | int]:
        """All fields that decide what keys, values and states are, by name."""
        ...
