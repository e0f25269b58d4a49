"""The way from a folder to a model."""

from collections.abc import Collection
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from cairn.cache.layout import CacheLayout
from cairn.errors import ConfigError
from cairn.kernels.contract import Kernels
from cairn.layers.communicator import SINGLE_RANK, Communicator
from cairn.layers.model import Model
from cairn.models.contract import Family
from cairn.models.decoder_builder import Backend, Execution, trace_rank
from cairn.models.decoder_config import AskedQuantization, DecoderConfig, ServedQuantization
from cairn.models.families import family_of
from cairn.models.weights.device_copy import CopyStream, load_weights, stream_to
from cairn.models.weights.identity import weights_identity
from cairn.models.weights.loader import DType, WeightReader, read_config, serving_dtype
from cairn.models.weights.quantization import Quantization, read_quantization
from cairn.models.weights.tensor_headers import read_headers

__all__ = ["OpenModel", "open_model"]


@dataclass(frozen=True, slots=True)
class OpenModel:
    """A checkpoint folder whose config has been read and accepted; no tensor has been looked at yet. `quantization`:
    how its weights are stored, if not in a plain dtype; `served_quantization`: what they are brought to."""

    folder: Path
    family: Family
    config: DecoderConfig
    dtype: torch.dtype
    quantization: Quantization | None = None
    served_quantization: ServedQuantization | None = None

    def layout(self, block_size: int, tp_size: int = 1) -> CacheLayout:
        """Pages and checkpoints of one of `tp_size` ranks; the same on every rank. Raises ConfigError naming
        --tensor-parallel-size and the field that does not divide."""
        return self.config.layout(block_size, self.dtype.itemsize, tp_size)

    def stored_tensors(self) -> Collection[str]:
        """The names of the folder's tensors. Raises ModelError as `read_headers`."""
        return read_headers(self.folder)

    def tensors(self, stored: Collection[str]) -> dict[str, tuple[int, ...]]:
        """Every tensor that the config calls for, with its shape, in the form in which these are stored."""
        return self.family.tensors(self.config, stored)

    def weight_bytes(self, stored: Collection[str]) -> int:
        """Bytes of all weights as they are served, in the form in which these tensors are stored; see
        `Family.weight_bytes`."""
        return self.family.weight_bytes(self.config, stored, self.dtype, self.served_quantization)

    def transfer_facts(self) -> dict[str, str | int]:
        """What must be equal for page bytes to mean the same on two servers: model type, serving dtype, quantization
        if there is one, every field of config.json that decides what keys, values and states are, and `weights`, the
        identity of the stored weights (see `weights_identity`). Block size and number of ranks are not in it. Raises
        ModelError."""
        identity = weights_identity(self.folder, self.tensors(read_headers(self.folder)), self.quantization)
        own = {"model_type": self.family.model_type, "dtype": str(self.dtype).removeprefix("torch.")}
        if self.served_quantization is not None:
            own["quantization"] = self.served_quantization
        return {**self.config.transfer_facts(), **own, "weights": identity}

    def build(
        self,
        *,
        exact: bool,
        communicator: Communicator = SINGLE_RANK,
        backend: Backend | Kernels | None = None,
        device: torch.device | None = None,
        stream: CopyStream | None = None,
    ) -> Model:
        """Account for every tensor, then load the communicator's rank of the model, reading no more than its share.
        `device`: None for the host. `stream`: what copies the weights there, None for the device's own.

        Raises ModelError that names the tensor and its file, or ConfigError that names --tensor-parallel-size.
        """
        place = device or torch.device("cpu")
        with WeightReader(self.folder, self.dtype, self.family.float32_tensors, self.quantization) as reader:
            expected = self.tensors(reader.headers)
            reader.verify(expected, self.family.ignored_tensors)
            for copy, name in self.family.tied_tensors.items():
                if copy in reader.headers and copy not in expected:
                    reader.verify_copy(copy, name, expected[name])
            execution = Execution(
                exact, self.dtype, communicator, backend, reader.headers, place, self.served_quantization
            )

            read_all = partial(trace_rank, self.family.compose, self.config, reader.load, execution)
            with load_weights(reader, expected, read_all, stream or stream_to(place), communicator):
                return self.family.build(self.config, reader.load, execution)


def open_model(folder: Path, dtype: DType = "auto", quantization: AskedQuantization | None = None) -> OpenModel:
    """Read config.json (and the end-of-sequence ids of generation_config.json). Raises ModelError, and ConfigError for
    a quantization that the checkpoint does not have."""
    raw = read_config(folder)
    family = family_of(raw)
    config = family.parse(raw)
    stored_as = read_quantization(folder, raw)
    served = _served_quantization(quantization, stored_as)
    return OpenModel(folder, family, config, serving_dtype(raw, dtype), stored_as, served)


def _served_quantization(asked: AskedQuantization | None, stored_as: Quantization | None) -> ServedQuantization | None:
    if asked is None or asked == "int8":
        return asked
    if stored_as is None or stored_as.method != asked:
        found = "not quantized" if stored_as is None else f"in {stored_as.method}"
        text = f"--quantization {asked}: the checkpoint is {found}, and is served as it is without this flag"
        raise ConfigError(f"{text}; int8 can be made of it while it is loaded")
    return None
