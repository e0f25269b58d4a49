"""From a decoder as data to one rank's model."""

import logging
from dataclasses import dataclass, replace
from functools import singledispatchmethod
from importlib import import_module
from importlib.util import find_spec
from typing import Literal, TypeVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from cairn.errors import ConfigError
from cairn.kernels.contract import Kernels, Weight
from cairn.kernels.quantized import QuantizedWeight
from cairn.layers.attention import Attention
from cairn.layers.communicator import SINGLE_RANK, Communicator
from cairn.layers.layer_inputs import LayerInputs
from cairn.layers.model import Model, Softcap, VocabParallelEmbedding
from cairn.layers.mtp_head import MTPHead
from cairn.layers.norms import NormOfSum, PostNorm, RMSNorm, SandwichNorm, ScaledSum
from cairn.layers.residual import Layer
from cairn.layers.rotary import Rotary, Temperature, make_rotary
from cairn.models.contract import StoredLoader, TensorLoader
from cairn.models.decoder_config import ServedQuantization
from cairn.models.decoder_spec import DecoderSpec, EmbeddingScale, HeadSpec, scalar
from cairn.models.layer_inputs import LayerInputsSpec
from cairn.models.mixer_builder import MixerBuilder
from cairn.models.rank_weights import RankWeights, RowsLoader
from cairn.models.rotary import RotarySpec, TemperatureSpec
from cairn.models.sharding import shard_vocabulary
from cairn.models.weight_specs import MixerSpec, StoredTensor

logger = logging.getLogger(__name__)

AnyNorm = TypeVar("AnyNorm", RMSNorm, PostNorm, SandwichNorm)

Backend = Literal["cpu", "cuda", "cuda_exact", "exact", "reference"]


@dataclass(frozen=True, slots=True)
class Execution:
    """How a model is to be executed: `exact` in fixed shapes, in which dtype, as which rank, on which kernels
    (None: the fast ones, or with `exact` those; a name, or functions that are there), which work on `device`.
    `quantization`: what weights are kept in, instead of the dtype. `load_stored`: gives those that
    stay as they are stored. `lend_rows`: gives matrices for kernels that lay them out, see `RankWeights`."""

    exact: bool
    dtype: torch.dtype
    communicator: Communicator = SINGLE_RANK
    backend: Backend | Kernels | None = None
    device: torch.device = torch.device("cpu")  # noqa: RUF009 - it cannot be changed
    quantization: ServedQuantization | None = None
    load_stored: StoredLoader | None = None
    lend_rows: RowsLoader | None = None


def build_decoder(spec: DecoderSpec, load: TensorLoader, execution: Execution) -> Model:
    """One rank of the model, its weights drawn from `load`. Raises ModelError that names the tensor, and before one
    is drawn ConfigError: for `exact` in another dtype than float32 or quantized, and for a number of ranks that the
    model cannot be sharded among."""
    if execution.exact and execution.dtype != torch.float32:
        raise ConfigError(f"--exact needs --dtype float32: the fixed rounding is not kept in {execution.dtype}")
    if execution.exact and execution.quantization is not None:
        raise ConfigError(f"--exact cannot be had with --quantization {execution.quantization}: leave one of them out")
    return _DecoderBuilder(spec, load, execution).build()


def load_kernels(backend: Backend | Kernels) -> Kernels:
    """The kernel functions of a backend, which may be these already. `exact` and, on GPUs, `cuda_exact`: fixed shapes
    and orders; `exact` also replaces `cpu` where numba is missing; `reference`: the slow truth, for tests."""
    if not isinstance(backend, str):
        return backend
    if backend == "cpu" and find_spec("numba") is None:
        logger.warning("numba cannot be imported: the CPU's kernels are replaced by plain ones, which are much slower")
        backend = "exact"
    kernels: Kernels = import_module(f"cairn.kernels.{backend}")
    return kernels


class _DecoderBuilder:
    def __init__(self, spec: DecoderSpec, load: TensorLoader, execution: Execution) -> None:
        self._spec, self._execution, self._communicator = spec, execution, execution.communicator
        self._rank, self._size = self._communicator.rank, self._communicator.size
        self._memory_spec = spec.cache_spec(self._rank, self._size).memory_spec(execution.dtype, execution.device)
        self._kernels = load_kernels(execution.backend or ("exact" if execution.exact else "cpu"))
        lays_out = self._kernels.lays_out(execution.dtype)
        self._weights = RankWeights(
            load,
            self._kernels,
            execution.device,
            execution.quantization,
            execution.load_stored,
            execution.lend_rows if lays_out else None,
        )
        self._mixers = MixerBuilder(
            spec, self._memory_spec, self._weights, self._kernels, self._communicator, execution.device
        )
        self._build_mixer = self._mixers.build

    def build(self) -> Model:
        spec = self._spec
        embedding = self._vocabulary(spec.vocabulary(spec.embedding, self._rank, self._size))
        # Where the output is the embedding it has just been read.
        lm_head = self._output(embedding) if spec.output == spec.embedding else None
        layer_inputs = None if spec.layer_inputs is None else self._layer_inputs(spec.layer_inputs)
        layers = tuple(self._layer(norm, mixer) for norm, mixer in spec.layers)
        final_norm = self._of_scaled_sum(spec.final_norm, self._norm(spec.final_norm))
        if lm_head is None:
            lm_head = self._output(embedding)
        head = None if spec.head is None else self._head(spec.head)
        return Model(
            kernels=self._kernels,
            spec=self._memory_spec,
            exact=self._execution.exact,
            vocab_size=spec.config.vocab_size,
            communicator=self._communicator,
            embedding=self._embedding(embedding, spec.embedding_scale),
            layers=layers,
            final_norm=final_norm,
            lm_head=lm_head,
            linears=tuple(self._weights.linears),
            rotaries=tuple(map(self._rotary, self._mixers.rotaries)),
            logit_scale=spec.logit_scale,
            logit_cap=None if spec.logit_cap is None else Softcap(self._kernels, spec.logit_cap),
            layer_inputs=layer_inputs,
            head=head,
        )

    def _output(self, embedding: Tensor | QuantizedWeight) -> Weight:
        """Of the model's last product."""
        spec, output = self._spec, embedding
        # An embedding that is still being copied is not looked at.
        if spec.output != spec.embedding or (isinstance(embedding, Tensor) and self._weights.lend_rows is not None):
            output = self._vocabulary(spec.vocabulary(spec.output, self._rank, self._size), stays=False)
        return self._weights.linear([output]).weight

    def _embedding(self, weight: Tensor | QuantizedWeight, scale: EmbeddingScale) -> VocabParallelEmbedding:
        """Sharded like the output, which is as large: a sum over ranks a pass against a copy on every rank."""
        (first, _), _ = shard_vocabulary(self._spec.config.vocab_size, self._rank, self._size)
        value = torch.tensor(scale.value, dtype=self._execution.dtype).item() if scale.rounded else scale.value
        return VocabParallelEmbedding(self._kernels, weight, first, self._communicator, value)

    def _layer_inputs(self, spec: LayerInputsSpec) -> LayerInputs:
        embedding, projection, norm = (
            spec.vocabulary(self._spec.config.vocab_size, self._rank, self._size),
            self._weights.make(spec.product),
            self._weights.make(spec.norm_weight),
        )
        return LayerInputs(
            embedding=self._embedding(self._vocabulary(embedding), EmbeddingScale(spec.width**0.5, rounded=True)),
            projection=projection,
            norm=self._mixers.rms_norm(norm, self._spec.centred),
            num_layers=spec.num_layers,
            projection_scale=spec.hidden**-0.5,
            scale=2**-0.5,
        )

    def _head(self, head: HeadSpec) -> MTPHead:
        """Its attention is the last of the model's attention layers."""
        embedding_norm, hidden_norm = self._norm(head.embedding_norm), self._norm(head.hidden_norm)
        projection = self._weights.make(self._spec.product(head.projection, self._rank, self._size))
        kv_projection = self._weights.make(head.attention.keys_and_values(self._rank, self._size))
        attention_norm, attention = self._norm(head.attention_norm), cast(Attention, self._mixers.build(head.attention))
        others = tuple((self._norm(norm), self._mixers.build(mixer)) for norm, mixer in head.others)
        return MTPHead(
            embedding_norm=embedding_norm,
            hidden_norm=hidden_norm,
            projection=projection,
            attention_norm=attention_norm,
            attention=replace(attention, kv_projection=kv_projection),
            others=others,
            final_norm=self._norm(head.final_norm),
            communicator=self._communicator,
        )

    def _vocabulary(self, stored: StoredTensor, stays: bool = True) -> Tensor | QuantizedWeight:
        """The rank's tokens, with zeros where it has fewer than the first one: [rows, width]. `stays`: see
        `RankWeights.vocabulary`."""
        weight = self._weights.vocabulary(stored, stays)
        _, rows = shard_vocabulary(self._spec.config.vocab_size, self._rank, self._size)
        missing = rows - weight.shape[0]
        if not missing:
            return weight

        def pad(part: Tensor) -> Tensor:
            return F.pad(part, (0, 0, 0, missing))

        return pad(weight) if isinstance(weight, Tensor) else weight.changed(pad)

    def _layer(self, name: str, mixer: MixerSpec) -> Layer:
        """The mixer with its norm `name`. Tensors are drawn in their order in the checkpoint."""
        norm, built, after = self._norm(name), self._build_mixer(mixer), self._spec.norms_after.get(name)
        if after is not None:
            return self._of_scaled_sum(name, SandwichNorm(norm, self._norm(after))), built
        if name not in self._spec.post_norms:
            return self._of_scaled_sum(name, norm), built
        parts = tuple(map(self._norm, mixer.result_norms))
        return self._of_scaled_sum(name, PostNorm(NormOfSum(parts, norm) if parts else norm)), built

    def _of_scaled_sum(self, name: str, norm: AnyNorm) -> AnyNorm | ScaledSum:
        """The norm called `name`, with the scale of the hidden states that it is of, if they have one."""
        scale = self._spec.sum_scales.get(name)
        return norm if scale is None else ScaledSum(norm, self._weights.tensor(scalar(scale)).item())

    @singledispatchmethod
    def _rotary(self, spec: RotarySpec) -> Rotary | Temperature:
        scaling = {} if spec.scaling is None else spec.scaling.parameters
        return make_rotary(spec.dim, spec.theta, spec.sections, scaling).to(self._execution.device)

    @_rotary.register
    def _(self, spec: TemperatureSpec) -> Rotary | Temperature:
        return Temperature(spec.dim // 2, spec.floor_scale, spec.strength)

    def _norm(self, name: str) -> RMSNorm:
        return self._mixers.rms_norm(self._weights.tensor(self._spec.norm(name)), self._spec.centred)
