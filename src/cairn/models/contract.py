"""A model family: its config, its tensors, and the model of a config as data."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

from cairn.models.config_schema import REACHES, Fields, parse_config
from cairn.models.decoder_config import DecoderConfig
from cairn.models.decoder_spec import OUTPUT, DecoderSpec
from cairn.models.sharding import TensorShard

if TYPE_CHECKING:
    import torch

    from cairn.kernels.weight_rows import StoredRows


class TensorLoader(Protocol):
    """Loads a tensor by its name."""

    def __call__(self, name: str, shape: tuple[int, ...], shard: TensorShard | None = None) -> "torch.Tensor":
        """The tensor, or a shard of it, in the dtype the model is served with. `shape` is that of the
        whole tensor in the checkpoint. Raises ModelError naming the tensor."""


class StoredLoader(Protocol):
    """Loads a matrix that stays as it is stored."""

    def __call__(self, name: str, shape: tuple[int, ...], shard: TensorShard | None = None) -> "StoredRows | None":
        """As a `TensorLoader`; None for a tensor that is to be loaded by that one instead."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One model family. `config`: what its config.json may say, and the model of it as data.

    `float32_tensors`: last name parts of tensors that keep full precision in any serving dtype; `ignored_tensors`:
    name prefixes of parts of the checkpoint that are not served. `flatten`: brings the fields of config.json to where
    they are read. `reads_images`: whether a vision tower that config.json has is served; see `qwen3_5_vision`.
    """

    model_type: str
    architecture: str
    config: type[DecoderConfig]
    float32_tensors: tuple[str, ...] = ()
    ignored_tensors: tuple[str, ...] = ()
    flatten: Callable[[Mapping[str, object]], Fields] = Fields
    reads_images: bool = False

    def parse(self, raw: Mapping[str, object]) -> DecoderConfig:
        """config.json -> config, of the family's own class. Raises ModelError that names the field and the fix."""
        return parse_config(self.config, self.flatten(raw), unless_declared=REACHES)

    def spec(self, config: DecoderConfig, stored: Collection[str] = ()) -> DecoderSpec:
        """See `DecoderConfig.served`. An output that is stored is served, also where config.json ties it to the
        embedding: so does transformers."""
        spec = config.served(stored)
        return replace(spec, output=spec.embedding) if config.tie_word_embeddings and OUTPUT not in stored else spec

    def tensors(self, config: DecoderConfig, stored: Collection[str] = ()) -> dict[str, tuple[int, ...]]:
        """Every tensor of the checkpoint by its published name, in the order of the model, with its shape; `stored` as
        for `spec`."""
        return {name: tensor.shape for name, tensor in self.spec(config, stored).tensors(0, 1).items()}

    def ignored(self, config: DecoderConfig, stored: Collection[str] = ()) -> tuple[str, ...]:
        """Beginnings of the names of tensors that are not served: `ignored_tensors`, and what this model has no use
        for."""
        return (*self.ignored_tensors, *config.unused(stored))

    def keeps_float32(self, name: str) -> bool:
        """Whether a tensor has full precision in any serving dtype."""
        return name.rpartition(".")[2] in self.float32_tensors
