"""Families whose configs are made of parts: what the engine asks of any family, answered by the parts."""

from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from cairn.cache.layout import CacheLayout
from cairn.layers.communicator import ALONE, Communicator
from cairn.models.contract import ModelFacts, TensorLoader
from cairn.models.cut import Units, check_rank
from cairn.models.forward_sizes import ForwardSizes
from cairn.models.remembered import STATE_BYTES, Remembered
from cairn.models.text_sizes import TextSizes

if TYPE_CHECKING:
    import torch

    from cairn.layers.model import Model
    from cairn.models.decoder_builder import Execution

__all__ = ["DecoderConfig", "DecoderFamily"]


class DecoderConfig(Protocol):
    """A family's checked config: a frozen dataclass of numbers, words and further frozen dataclasses."""

    @property
    def text(self) -> TextSizes: ...

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Every tensor of the checkpoint by its published name, in the order of the model, with its shape."""
        ...

    def layers(self) -> dict[str, int]:
        """How many layers of each kind, in words."""
        ...

    def forward_sizes(self) -> ForwardSizes:
        """What computing a prompt's token takes."""
        ...

    def remembered(self, rank: int, size: int) -> Remembered:
        """What one of `size` ranks remembers. Raises ConfigError naming --tensor-parallel-size and the field that does
        not divide, whatever that field belongs to."""
        ...


Config = TypeVar("Config", bound=DecoderConfig)


class DecoderFamily(Generic[Config]):
    """See `ServedFamily`. `read` makes a config of config.json, `execute` builds one rank of the model."""

    def __init__(
        self,
        model_type: str,
        architecture: str,
        read: Callable[[Mapping[str, object]], Config],
        execute: "Callable[[Config, TensorLoader, Execution], Model]",
        float32_tensors: tuple[str, ...] = (),
    ) -> None:
        self.model_type = model_type
        self.architectures: tuple[str, ...] = (architecture,)
        self.float32_tensors = float32_tensors
        # Checkpoints with tied embeddings may carry the same numbers twice.
        self.ignored_tensors: tuple[str, ...] = ("lm_head.weight",)
        self.tied_tensors: Mapping[str, str] = MappingProxyType({"lm_head.weight": "model.embed_tokens.weight"})
        self.execute = execute
        self._read = read

    def parse(self, raw: Mapping[str, object]) -> Config:
        return self._read(raw)

    def facts(self, config: Config) -> ModelFacts:
        text = config.text
        return ModelFacts(
            model_type=self.model_type,
            vocab_size=text.vocab_size,
            hidden_size=text.hidden_size,
            max_position_embeddings=text.max_position_embeddings,
            eos_token_ids=text.eos_token_ids,
        )

    def tensors(self, config: Config) -> dict[str, tuple[int, ...]]:
        return config.tensors()

    def layout(
        self, config: Config, block_size: int, dtype_bytes: int, tp_size: int = 1, state_bytes: int = STATE_BYTES
    ) -> CacheLayout:
        check_rank(0, tp_size)
        return config.remembered(0, tp_size).layout(block_size, dtype_bytes, state_bytes)

    def units(self, config: Config) -> Units:
        return config.remembered(0, 1).units()

    def forward_sizes(self, config: Config) -> ForwardSizes:
        return config.forward_sizes()

    def transfer_facts(self, config: Config) -> dict[str, str | int]:
        """All numbers and words of the config but how long a prompt may be and which ids end it."""
        found = _flat(config)
        for name in ("text.max_position_embeddings", "text.eos_token_ids"):
            del found[name]
        return found

    def layers(self, config: Config) -> dict[str, int]:
        return {word: count for word, count in config.layers().items() if count}

    def build(
        self,
        config: Config,
        load: TensorLoader,
        *,
        exact: bool,
        dtype: "torch.dtype",
        communicator: Communicator = ALONE,
    ) -> "Model":
        # Here and not above: accounting for a checkpoint needs none of the kernels.
        from cairn.models.decoder_builder import Execution

        return self.execute(config, load, Execution(exact, dtype, communicator))


def _flat(part: Any, prefix: str = "") -> dict[str, str | int]:
    """Numbers and words of nested dataclasses, by their names joined with dots."""
    found: dict[str, str | int] = {}
    for field in fields(part):
        value, name = getattr(part, field.name), f"{prefix}{field.name}"
        if is_dataclass(value):
            found |= _flat(value, f"{name}.")
        else:
            found[name] = value if type(value) is int else repr(value)
    return found
