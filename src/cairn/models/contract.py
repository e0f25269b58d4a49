"""A model family: its config, its tensors, and how a model of it is built."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from cairn.models.config_schema import Fields, parse_config
from cairn.models.decoder_config import DecoderConfig, ServedQuantization
from cairn.models.sharding import TensorShard

if TYPE_CHECKING:
    import torch

    from cairn.kernels.fp8 import Fp8Weight
    from cairn.layers.model import Model
    from cairn.models.decoder_builder import DecoderBuilder, Execution
    from cairn.models.rank_weights import PackedDtype

__all__ = ["Family", "Fp8Loader", "TensorLoader"]


class TensorLoader(Protocol):
    """Loads a tensor by its name."""

    def __call__(self, name: str, shape: tuple[int, ...], shard: TensorShard | None = None) -> "torch.Tensor":
        """The tensor, or a shard of it, in the dtype the model is served with. `shape` is that of the
        whole tensor in the checkpoint. Raises ModelError naming the tensor."""
        ...


class Fp8Loader(Protocol):
    """Loads a matrix that stays in FP8."""

    def __call__(self, name: str, shape: tuple[int, ...], shard: TensorShard | None = None) -> "Fp8Weight | None":
        """As a `TensorLoader`; None for a tensor that is to be loaded by that one instead."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One model family. `config`: what its config.json may say; `compose`: builds a model of a config, layer by layer.

    `float32_tensors`: last name parts of tensors that keep full precision in any serving dtype; `ignored_tensors`:
    name prefixes of parts of the checkpoint that are not served. `flatten`: brings the fields of config.json to where
    they are read.
    """

    model_type: str
    architecture: str
    config: type[DecoderConfig]
    compose: "Callable[[Any, DecoderBuilder], Model]"
    float32_tensors: tuple[str, ...] = ()
    ignored_tensors: tuple[str, ...] = ()
    flatten: Callable[[Mapping[str, object]], Fields] = Fields

    def parse(self, raw: Mapping[str, object]) -> DecoderConfig:
        """config.json -> config, of the family's own class. Raises ModelError that names the field and the fix."""
        return parse_config(self.config, self.flatten(raw))

    def tensors(self, config: DecoderConfig, stored: Collection[str] = ()) -> dict[str, tuple[int, ...]]:
        """Every tensor of the checkpoint by its published name, in the order of the model, with its shape. `stored`:
        the checkpoint's tensors, where the family is published in several forms."""
        # Here and not above: what config.json says is known without torch.
        from cairn.models.decoder_builder import trace_build

        return trace_build(self.compose, config, stored)[0]

    def weight_bytes(
        self,
        config: DecoderConfig,
        stored: Collection[str],
        dtype: "torch.dtype",
        quantization: ServedQuantization | None = None,
        load_fp8: Fp8Loader | None = None,
        num_ranks: int = 1,
        packed_dtype: "PackedDtype | None" = None,
    ) -> int:
        """Bytes of all weights as they are served on rank 0 of `num_ranks`, which has no fewer than any other: a tied
        embedding is there twice, as rows and as a packed output. `load_fp8`: gives matrices that stay in FP8, on the
        meta device. `packed_dtype`: of the backend, None where it keeps weights as they are. Raises ConfigError where
        the model cannot be sharded among so many."""
        from cairn.models.decoder_builder import trace_build

        def dtype_of(name: str) -> "torch.dtype":
            return self.served_dtype(name, dtype)

        return trace_build(self.compose, config, stored, dtype_of, quantization, load_fp8, num_ranks, packed_dtype)[1]

    def served_dtype(self, name: str, dtype: "torch.dtype") -> "torch.dtype":
        """The dtype of a tensor, where that of the model is `dtype`."""
        import torch

        return torch.float32 if name.rpartition(".")[2] in self.float32_tensors else dtype

    def build(self, config: DecoderConfig, load: TensorLoader, execution: "Execution") -> "Model":
        """One rank of the model, its weights drawn from `load`. Raises ModelError that names the tensor, or ConfigError
        that names --tensor-parallel-size or --dtype."""
        from cairn.models.decoder_builder import DecoderBuilder

        return self.compose(config, DecoderBuilder(config, load, execution))
