"""What families build their models with: one rank's tensors, drawn by name in the order of the checkpoint.

Names end where the layers' own begin: `config.attention.build(b, "model.layers.0.self_attn")` draws
`model.layers.0.self_attn.q_proj.weight` and its like.
"""

import logging
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, replace
from importlib import import_module
from importlib.util import find_spec
from itertools import count
from typing import Any, Literal

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from cairn.errors import ConfigError
from cairn.kernels.contract import Kernels, Weight
from cairn.layers.communicator import SINGLE_RANK, Communicator, SingleRank
from cairn.layers.feed_forward import (
    MixtureOfExperts,
    SharedExpert,
    SigmoidRouter,
    SoftmaxRouter,
    SquaredReluMLP,
    SwiGLU,
)
from cairn.layers.linear import Linear
from cairn.layers.model import Layer, Mixer, Model, Parallel, Scaled, VocabParallelEmbedding
from cairn.layers.norms import RMSNorm
from cairn.layers.rotary import Rotary, make_rotary
from cairn.models.contract import Fp8Loader, TensorLoader
from cairn.models.decoder_config import DecoderConfig, ServedQuantization
from cairn.models.rank_weights import PackedDtype, RankWeights
from cairn.models.sharding import TensorShard, shard_vocabulary

logger = logging.getLogger(__name__)

OUTPUT = "lm_head.weight"
"""The output's tensor, in every family."""

Backend = Literal["cpu", "cuda", "cuda_exact", "exact", "reference"]


@dataclass(frozen=True, slots=True)
class Execution:
    """How a model is to be executed: `exact` in fixed shapes, in which dtype, as which rank, on which kernels
    (None: the fast ones, or with `exact` those; a name, or functions that are there), which work on `device`.
    `stored`: the checkpoint's tensors, by which a family that is published in several forms knows them apart.
    `quantization`: what weights are kept in, instead of the dtype. `load_fp8`: gives those that stay in FP8.
    `packed_dtype`: by which bytes are counted; see `RankWeights`."""

    exact: bool
    dtype: torch.dtype
    communicator: Communicator = SINGLE_RANK
    backend: Backend | Kernels | None = None
    stored: Collection[str] = ()
    device: torch.device = torch.device("cpu")  # noqa: RUF009 - it cannot be changed
    quantization: ServedQuantization | None = None
    load_fp8: Fp8Loader | None = None
    packed_dtype: PackedDtype | None = None


class DecoderBuilder:
    """Draws one rank's tensors. Raises ConfigError for `exact` in another dtype than float32 or quantized and for a
    number of ranks that the model cannot be sharded among, before a tensor is drawn; and whatever `load` raises.

    `weights`: this rank's tensors; `attention_layers`, `recurrent_layers`: count the layers of that kind.
    """

    def __init__(self, config: DecoderConfig, load: TensorLoader, execution: Execution) -> None:
        if execution.exact and execution.dtype != torch.float32:
            raise ConfigError(f"--exact needs --dtype float32: the fixed rounding is not kept in {execution.dtype}")
        if execution.exact and execution.quantization is not None:
            raise ConfigError(
                f"--exact cannot be had with --quantization {execution.quantization}: leave one of them out"
            )
        communicator = execution.communicator
        self.rank, self.size = communicator.rank, communicator.size
        self.stored = execution.stored
        kernels = load_kernels(execution.backend or ("exact" if execution.exact else "cpu"))
        self._spec = config.cache_spec(self.rank, self.size).memory_spec(execution.dtype, execution.device)
        self.weights = RankWeights(
            load,
            kernels,
            communicator,
            execution.device,
            execution.quantization,
            execution.load_fp8,
            execution.packed_dtype,
        )
        self.attention_layers, self.recurrent_layers = count(), count()
        self._config = config
        self._execution = execution
        self._rotary: Rotary | None = None

    def vocabulary(self, name: str) -> Tensor:
        """The rank's rows of an embedding or an output, [rows, hidden]."""
        tokens, rows = shard_vocabulary(self._config.vocab_size, self.rank, self.size)
        shape = (self._config.vocab_size, self._config.hidden_size)
        return self.weights.vocabulary(f"{name}.weight", shape, tokens, rows)

    def norm(self, name: str, width: int | None = None, centred: bool = False) -> RMSNorm:
        """Over hidden states, or over `width` elements. `centred`: the weight is stored less 1; the sum is kept in
        float32, as bfloat16 would round it."""
        weight = self.weights.tensor(f"{name}.weight", (width or self._config.hidden_size,))
        return RMSNorm(self.weights.kernels, weight.float() + 1.0 if centred else weight, self._config.eps)

    def rotary(self, dim: int, theta: float, sections: tuple[int, int, int] | None = None) -> None:
        """Positions turn queries and keys, in all attention of the model; see `make_rotary`."""
        self._rotary = make_rotary(dim, theta, sections).to(self._execution.device)

    def scaled(self, mixer: Mixer, after: float, before: float = 1.0) -> Mixer:
        """after * mixer(before * x)."""
        return Scaled(mixer, after, before)

    def parallel(self, *mixers: Mixer) -> Mixer:
        """The sum of several mixers of the same input."""
        return Parallel(mixers)

    def moe(
        self,
        router: SoftmaxRouter | SigmoidRouter,
        experts: tuple[Weight, Weight],
        shared: SwiGLU | SquaredReluMLP | SharedExpert,
        *,
        gated: bool = True,
        latent: tuple[Linear, Linear] | None = None,
    ) -> Mixer:
        """Routed experts, SwiGLUs or, unless `gated`, squared-ReLU MLPs, and a shared one. `latent`: see `latent`."""
        return MixtureOfExperts(self.weights.kernels, router, *experts, gated, shared, *(latent or ()))

    def latent(self, to: str, back: str, hidden: int, width: int, bias: bool) -> tuple[Linear, Linear]:
        """The products into the space in which routed experts work, and back. The latter has all of its inputs, but its
        outputs are a partial sum."""
        to_latent = self.weights.column_parallel(to, (width, hidden), (0, width), bias=bias)
        return to_latent, self.weights.row_parallel(back, (hidden, width), (0, width), bias)

    def model(
        self,
        embedding: Tensor,
        layers: Iterable[Layer],
        final_norm: RMSNorm,
        embedding_scale: float = 1.0,
        logit_scale: float = 1.0,
    ) -> Model:
        """The whole, with the output's weight, which comes last in a checkpoint. One that is stored is served, also
        where config.json ties it to the embedding: so does transformers, and a copy is the same numbers."""
        if self._config.tie_word_embeddings and OUTPUT not in self.stored:
            head = embedding
            # Packing copies it, and the embedding's rows stay.
            self.weights.num_bytes += embedding.nbytes
        else:
            head = self.vocabulary(OUTPUT.removesuffix(".weight"))
        communicator = self._execution.communicator
        # Sharded like the output, which is as large: a sum over ranks a pass against a copy on every rank.
        (first, _), _ = shard_vocabulary(self._config.vocab_size, self.rank, self.size)
        return Model(
            kernels=self.weights.kernels,
            spec=self._spec,
            exact=self._execution.exact,
            vocab_size=self._config.vocab_size,
            communicator=communicator,
            embedding=VocabParallelEmbedding(self.weights.kernels, embedding, first, communicator),
            layers=tuple(layers),
            final_norm=final_norm,
            lm_head=self.weights.linear([head]).weight,
            linears=tuple(self.weights.linears),
            rotary=self._rotary,
            embedding_scale=embedding_scale,
            logit_scale=logit_scale,
        )


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


def trace_build(
    compose: Callable[[Any, DecoderBuilder], Model],
    config: DecoderConfig,
    stored: Collection[str] = (),
    dtype_of: Callable[[str], torch.dtype] = lambda name: torch.float32,
    quantization: ServedQuantization | None = None,
    load_fp8: Fp8Loader | None = None,
    num_ranks: int = 1,
    packed_dtype: PackedDtype | None = None,
) -> tuple[dict[str, tuple[int, ...]], int]:
    """Build the first of `num_ranks` ranks of a model, of tensors without memory, on the meta device.

    Returns every tensor that it is built of, by its published name and with its shape in the checkpoint, in the order
    in which they are drawn; and the bytes that its weights take when a tensor is loaded as `dtype_of` its name, or by
    `load_fp8` where that gives one, and those of products are kept in the `packed_dtype` of that.
    """
    shapes: dict[str, tuple[int, ...]] = {}
    meta = torch.device("meta")

    def load(name: str, shape: tuple[int, ...], shard: TensorShard | None = None) -> Tensor:
        shapes[name] = shape
        return torch.empty(shape if shard is None else shard.shape(shape), dtype=dtype_of(name), device=meta)

    execution = Execution(
        False,
        torch.float32,
        _FirstRank(num_ranks),
        backend="reference",
        stored=stored,
        device=meta,
        quantization=quantization,
        load_fp8=load_fp8,
        packed_dtype=packed_dtype,
    )
    builder = DecoderBuilder(config, load, execution)
    with _ShapesAlone():
        compose(config, builder)
    return shapes, builder.weights.num_bytes


def trace_rank(
    compose: Callable[[Any, DecoderBuilder], Model], config: DecoderConfig, load: TensorLoader, execution: Execution
) -> None:
    """Draw from `load`, which gives tensors without memory, all that one rank of a model is built of, in the order in
    which it is when that is built in earnest."""
    meta = replace(execution, backend="reference", device=torch.device("meta"))
    with _ShapesAlone():
        compose(config, DecoderBuilder(config, load, meta))


@dataclass(frozen=True, slots=True)
class _FirstRank(SingleRank):
    """Of a model that is composed and never executed."""

    num_ranks: int

    @property
    def size(self) -> int:
        return self.num_ranks


class _ShapesAlone(TorchFunctionMode):
    """The results of arithmetic on tensors without memory. torch's own are computed in Python, and import its compiler:
    1.5 s and 70 MB at the start of every server."""

    _LIKE_THE_FIRST = frozenset(
        (torch.Tensor.add, torch.Tensor.mul, torch.Tensor.neg, torch.Tensor.__neg__, torch.Tensor.exp)
    )

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in self._LIKE_THE_FIRST:
            return torch.empty(args[0].shape, device="meta")
        if func is torch.stack:
            return torch.empty((len(args[0]), *args[0][0].shape), device="meta", dtype=args[0][0].dtype)
        if func is torch.cat:
            parts, dim = list(args[0]), (*args[1:], *(kwargs or {}).values(), 0)[0]
            shape = list(parts[0].shape)
            shape[dim] = sum(part.shape[dim] for part in parts)
            return torch.empty(shape, device=parts[0].device, dtype=parts[0].dtype)
        return func(*args, **(kwargs or {}))
