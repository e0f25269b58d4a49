"""The way from a folder to a model."""

import gc
import logging
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Literal

import torch

from cairn.cache.layout import CacheLayout
from cairn.errors import ConfigError
from cairn.kernels.contract import Kernels
from cairn.kernels.gpu_codes import warn_dequantized, why_no_codes
from cairn.kernels.quantized import QuantizedWeight
from cairn.kernels.weight_rows import StoredRows
from cairn.layers.communicator import SINGLE_RANK, Communicator
from cairn.layers.model import Model
from cairn.models.checkpoint_dtypes import choose_encoding
from cairn.models.contract import Family, StoredLoader
from cairn.models.decoder_builder import Backend, Execution, build_decoder
from cairn.models.decoder_config import MADE_AT_LOAD, ONLY_CODES, AskedQuantization, DecoderConfig, ServedQuantization
from cairn.models.decoder_spec import OUTPUT
from cairn.models.families import family_of
from cairn.models.rank_weights import read_weight
from cairn.models.sharding import TensorShard
from cairn.models.state_dtypes import AskedStateDtype, choose_state_dtype
from cairn.models.weight_bytes import PackedDtype, count_weight_bytes
from cairn.models.weights.device_copy import CopyStream, is_mapped, load_weights, stream_to
from cairn.models.weights.gguf.header import is_gguf
from cairn.models.weights.identity import weights_identity
from cairn.models.weights.loader import DType, WeightReader, read_config, read_generation_eos, serving_dtype
from cairn.models.weights.quantization import Quantization, describe_codes, describe_stored, logical_names, name_form
from cairn.models.weights.quantization_config import read_quantization
from cairn.models.weights.tensor_headers import TensorHeader, read_headers
from cairn.models.weights.tensor_source import reading_ahead

logger = logging.getLogger(__name__)

Kept = Literal["codes", "gpu_codes"]
"""Which weights of a quantized checkpoint are served as they are stored, beside FP8: all codes, as on the CPU, or those
that there are products with on GPUs."""

_SWITCH_SECONDS = 0.0005
"""That a thread has Python for while others want it, while a model is loaded."""

MOST_HEAD_SHARE = 0.02
"""Of a token's products. A model of a few million weights, which decodes in a millisecond, would lose more by it than a
text is worth that cannot be predicted."""


@dataclass(frozen=True, slots=True)
class OpenModel:
    """A checkpoint folder whose config has been read and accepted; no tensor has been looked at yet. `quantization`:
    how its weights are stored, if not in a plain dtype; `served_quantization`: what those of products are served in;
    `keeps`: which of them stay as they are stored, if any do.
    `generation_eos_token_ids`: the end-of-sequence ids of generation_config.json."""

    folder: Path
    family: Family
    config: DecoderConfig
    dtype: torch.dtype
    quantization: Quantization | None = None
    served_quantization: ServedQuantization | None = None
    generation_eos_token_ids: tuple[int, ...] = ()
    keeps: Kept | None = None

    def eos_token_ids(self, *tokenizer_ids: int | None) -> tuple[int, ...]:
        """All ids that end an answer: those of config.json and of generation_config.json, which may name the end of a
        document alone, and the `tokenizer_ids` that the tokenizer calls its ends, unless the model has no such ones."""
        known = (each for each in tokenizer_ids if each is not None and each < self.config.vocab_size)
        return tuple(dict.fromkeys((*self.config.eos_token_ids, *self.generation_eos_token_ids, *known)))

    @property
    def stays_as_stored(self) -> bool:
        """Whether matrices are served as they are stored."""
        return self.quantization is not None and self.served_quantization == self.quantization.method

    @property
    def takes_codes(self) -> bool:
        """Whether what is brought to four bits has the numbers of codes that are four bits already."""
        has_codes = self.quantization is not None and self.quantization.has_codes
        return has_codes and self.keeps is not None and self.served_quantization == "int4"

    def layout(
        self, block_size: int, tp_size: int = 1, checkpoint_dtype: str = "float32", exact: bool = False
    ) -> CacheLayout:
        """Pages and checkpoints of one of `tp_size` ranks; the same on every rank. Raises ConfigError naming
        --tensor-parallel-size and the field that does not divide, or --checkpoint-dtype."""
        dtype, recurrent = str(self.dtype).removeprefix("torch."), self.config.cache_spec(0, tp_size).recurrent
        state_dtype = "float32" if recurrent is None else recurrent.state_dtype
        encoding = choose_encoding(checkpoint_dtype, self.family.model_type, dtype, exact, state_dtype)
        return self.config.layout(block_size, self.dtype.itemsize, tp_size, encoding)

    def with_states_in(self, asked: AskedStateDtype, exact: bool = False) -> "OpenModel":
        """The same with recurrent states that run in what is asked for, `auto` for what config.json names. Raises
        ConfigError as `choose_state_dtype`."""
        state_dtype = choose_state_dtype(asked, self.config.state_dtype, exact)
        return replace(self, config=replace(self.config, state_dtype=state_dtype))

    def with_head(self) -> "OpenModel":
        """The same with the checkpoint's head that drafts as a part of the model."""
        return replace(self, config=self.config.asking(serves_mtp=True))

    @property
    def has_small_head(self) -> bool:
        """Whether there may be a head that drafts, whose part of each step is small enough not to be asked for."""
        return 0.0 < self.with_head().config.served().head_share <= MOST_HEAD_SHARE

    def why_no_head(self, headers: Mapping[str, TensorHeader], num_ranks: int = 1) -> str | None:
        """Why the head that drafts cannot be served, in words that follow a colon; None where it can. `headers`:
        of the checkpoint's tensors."""
        stored = self.stored_names(headers)
        name, number = self.family.model_type, self.config.num_mtp_layers
        if number > 1:
            return f"config.json has {number} of them, and one is what is implemented"
        spec = self.family.spec(self.with_head().config, stored)
        names = [tensor.name for weight in spec.head_weights(0, 1) for tensor in weight.tensors]
        if not names:
            return f"there is none that is known of {name}"
        missing = next((name for name in names if name not in stored), None)
        if missing is not None:
            return f"the checkpoint has none: {missing} is not stored"
        if spec.cache_spec(0, 1).recurrent is None:
            return "the model has no recurrent layers, whose checkpoints have the hidden state that it goes on from"
        if self.config.hidden_size % num_ranks:
            return f"its hidden_size {self.config.hidden_size} does not divide among {num_ranks} ranks"
        return None

    def stored_tensors(self) -> Mapping[str, TensorHeader]:
        """The folder's tensors. Raises ModelError as `read_headers`."""
        return read_headers(self.folder)

    def stored_names(self, stored: Mapping[str, TensorHeader]) -> set[str]:
        """The names of these tensors, and of matrices in codes as if they were not."""
        return logical_names(stored, self.quantization)

    def tensors(self, stored: Collection[str]) -> dict[str, tuple[int, ...]]:
        """Every tensor that the config calls for, with its shape, in the form in which these are stored."""
        return self.family.tensors(self.config, stored)

    def ignored_tensors(self, stored: Collection[str]) -> tuple[str, ...]:
        """Beginnings of the names of tensors that are not served, where these are stored."""
        return self.family.ignored(self.config, stored)

    def weight_bytes(
        self, stored: Mapping[str, TensorHeader], num_ranks: int = 1, packed_dtype: PackedDtype | None = None
    ) -> int:
        """Bytes of all weights as they are served on the first of `num_ranks` ranks, in the form in which these tensors
        are stored; see `count_weight_bytes`."""
        of_checkpoint = stored, self.quantization, self.dtype
        load_stored = self._kept(describe_stored(*of_checkpoint), describe_codes(*of_checkpoint))
        served_as = self.dtype, self.served_quantization, load_stored
        names = self.stored_names(stored)
        return count_weight_bytes(self.family, self.config, names, *served_as, num_ranks, packed_dtype)

    def _kept(
        self, load_stored: StoredLoader, load_codes: StoredLoader, warn: Callable[[str], None] | None = None
    ) -> StoredLoader | None:
        """What gives the matrices that stay as they are stored, None where none does. `load_codes`: those in codes
        alone. `warn`: is told why codes do not stay."""
        load = load_stored if self.stays_as_stored else load_codes if self.takes_codes else None
        if load is None or self.keeps == "codes":
            return load

        def load_for_gpu(name: str, shape: tuple[int, ...], shard: TensorShard | None = None) -> StoredRows | None:
            rows = load(name, shape, shard)
            reason = why_no_codes(rows) if isinstance(rows, QuantizedWeight) else None
            if reason is None:
                return rows
            if warn is not None:
                warn(reason)
            return None

        return load_for_gpu

    def dequantized_forms(
        self, stored: Mapping[str, TensorHeader], expected: Mapping[str, tuple[int, ...]]
    ) -> frozenset[str]:
        """By name those of codes that there are no products with where it is served. `expected`: of `tensors`."""
        if self.keeps != "gpu_codes":
            return frozenset()
        describe = describe_codes(stored, self.quantization, self.dtype)
        places = {name_form(stored, name, shape, self.quantization): (name, shape) for name, shape in expected.items()}
        rows = {form: describe(*place) for form, place in places.items() if form is not None}
        return frozenset(
            form for form, part in rows.items() if isinstance(part, QuantizedWeight) and why_no_codes(part)
        )

    def transfer_facts(self) -> dict[str, str | int]:
        """What must be equal for page bytes to mean the same on two servers: model type, serving dtype, quantization
        if there is one, every field of config.json that decides what keys, values and states are, and `weights`, the
        identity of the stored weights (see `weights_identity`). Block size and number of ranks are not in it. Raises
        ModelError."""
        names = self.stored_names(read_headers(self.folder))
        identity = weights_identity(self.folder, self.tensors(names), self.quantization)
        facts = {"model_type": self.family.model_type, "dtype": str(self.dtype).removeprefix("torch.")}
        # Those that stay in FP8 are the same numbers as dequantized ones.
        if self.served_quantization in MADE_AT_LOAD:
            facts["quantization"] = str(self.served_quantization)
        return {**self.config.transfer_facts(), **facts, "weights": identity}

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
        stream = stream or stream_to(place)
        with (
            _undisturbed(),
            # The disk has work while all is accounted for.
            reading_ahead(self.folder, is_mapped(self.folder, stream)) as ahead,
            WeightReader(self.folder, self.dtype, self.family.float32_tensors, self.quantization, ahead) as reader,
        ):
            names = reader.names
            spec = self.family.spec(self.config, names)
            expected = {name: tensor.shape for name, tensor in spec.tensors(0, 1).items()}
            if is_mapped(self.folder, stream):
                reader.read_ahead(expected)
            reader.verify(expected, self.ignored_tensors(names))
            if self.config.tie_word_embeddings and OUTPUT in names and communicator.rank == 0:
                logger.warning(
                    "config.json ties the output to the embedding (tie_word_embeddings), but %s is stored as well: "
                    "what is stored is served",
                    OUTPUT,
                )
            load_stored = self._kept(reader.load_stored, reader.load_codes, warn_dequantized)
            lend = partial(reader.load, copy=False)
            lend_stored = self._kept(partial(reader.load_stored, copy=False), partial(reader.load_codes, copy=False))
            execution = Execution(
                exact,
                self.dtype,
                communicator,
                backend,
                place,
                self.served_quantization,
                load_stored,
                lambda weight: read_weight(weight, lend, lend_stored),
            )

            def read_all() -> None:
                for tensor in spec.tensors(communicator.rank, communicator.size).values():
                    read_weight(tensor, reader.load, load_stored)

            with load_weights(reader, expected, read_all, stream, communicator):
                return build_decoder(spec, reader.load, execution)


def open_model(
    folder: Path, dtype: DType = "auto", quantization: AskedQuantization | None = None, keeps: Kept | None = None
) -> OpenModel:
    """Read config.json and the end-of-sequence ids of generation_config.json. `keeps`: which weights of a quantized
    checkpoint stay as they are stored. Raises ModelError, and ConfigError for a quantization that the
    checkpoint does not have."""
    raw = read_config(folder)
    family = family_of(raw)
    config = family.parse(raw)
    stored_as = read_quantization(folder, raw)
    # vLLM's word for any GGUF file, be it in plain numbers.
    asked = None if quantization == "gguf" and is_gguf(folder) else quantization
    served = _served_quantization(asked, stored_as, keeps)
    generation_eos = read_generation_eos(folder, config.vocab_size)
    return OpenModel(folder, family, config, serving_dtype(raw, dtype), stored_as, served, generation_eos, keeps)


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Inside, Python looks for no garbage: of the many objects that a model is made of nearly all stay, and in a small
    one's start a twentieth of the time was spent looking through them. And threads take turns often: the one that has
    the disk read needs Python for a moment between two of its calls, and would wait ten times as long."""
    was_enabled, interval = gc.isenabled(), sys.getswitchinterval()
    gc.disable()
    sys.setswitchinterval(min(interval, _SWITCH_SECONDS))
    try:
        yield
    finally:
        sys.setswitchinterval(interval)
        if was_enabled:
            # As old ones, all of which would else be looked through by whatever is made next.
            if not gc.get_freeze_count():
                gc.freeze()
                gc.unfreeze()
            gc.enable()


def _served_quantization(
    asked: AskedQuantization | None, stored_as: Quantization | None, keeps: Kept | None
) -> ServedQuantization | None:
    if asked in MADE_AT_LOAD:
        return asked
    if asked is not None and (stored_as is None or stored_as.method != asked):
        stored = "not quantized" if stored_as is None else f"in {stored_as.method}"
        text = f"--quantization {asked}: the checkpoint is {stored}, and is served as it is without this flag"
        raise ConfigError(f"{text}; int8 or int4 can be made of it while it is loaded")
    if keeps is None or stored_as is None:
        return None
    if stored_as.method in ONLY_CODES:
        return stored_as.method
    if not stored_as.can_stay and not stored_as.has_codes:
        logger.warning("weights are dequantized: there are no products with factors for blocks of %s", stored_as.block)
        return None
    return stored_as.method
