"""What families build their models with: one rank's tensors, drawn by name in the order of the checkpoint, as bricks.

Names end where the bricks' own begin: `attention("model.layers.0.self_attn", ...)` draws
`model.layers.0.self_attn.q_proj.weight` and its like.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from cairn.errors import ConfigError
from cairn.kernels.contract import Weight
from cairn.layers.attention import Attention
from cairn.layers.backend import Backend, kernels_of
from cairn.layers.blend import Mixer, Parallel, Scaled
from cairn.layers.communicator import ALONE, Communicator
from cairn.layers.embedding import Embedding, SpreadEmbedding, TokenVectors
from cairn.layers.linear import Linear, Projection, ScaledLinear
from cairn.layers.mlp import SquaredReluMLP, SwiGLU
from cairn.layers.moe import GatedSharedExpert, SigmoidMixture, SigmoidRouter, SoftmaxMixture, SoftmaxRouter
from cairn.layers.norms import RMSNorm
from cairn.layers.rotary import Rotary, make_rotary
from cairn.layers.short_conv import ShortConv
from cairn.models.contract import TensorLoader
from cairn.models.decoder import Decoder, Layer
from cairn.models.decoder_config import DecoderConfig
from cairn.models.delta_net_build import build_delta_net
from cairn.models.delta_net_share import DeltaNetSizes
from cairn.models.layer_sizes import ExpertSizes, FeedForwardSizes
from cairn.models.mamba2_build import build_mamba2
from cairn.models.mamba2_share import Mamba2Sizes
from cairn.models.rank_weights import Part, RankWeights
from cairn.models.served_dtype import ServedQuantization
from cairn.models.sharding import Cut, Run, rows_of
from cairn.models.short_conv_share import ShortConvSizes

Build = Callable[[Any, "DecoderBuilder"], Decoder]
Experts = tuple[Weight, Weight]
"""The matrices of all experts: into their inner channels, and out of them."""


@dataclass(frozen=True, slots=True)
class Execution:
    """How a model is to be executed: `exact` in fixed shapes, in which dtype, as which rank, on which kernels
    (None: the fast ones, or with `exact` those), which work on `device`.
    `stored`: the checkpoint's tensors, by which a family that is published in several forms knows them apart.
    `quantization`: what weights are kept in, instead of the dtype."""

    exact: bool
    dtype: torch.dtype
    communicator: Communicator = ALONE
    backend: Backend | None = None
    stored: Collection[str] = ()
    device: torch.device = torch.device("cpu")  # noqa: RUF009 - it cannot be changed
    quantization: ServedQuantization | None = None


class DecoderBuilder:
    """Draws one rank's tensors. Raises ConfigError for `exact` in another dtype than float32 or quantized and for a
    number of ranks that the model cannot be cut among, before a tensor is drawn; and whatever `load` raises."""

    def __init__(self, config: DecoderConfig, load: TensorLoader, execution: Execution) -> None:
        if execution.exact and execution.dtype != torch.float32:
            raise ConfigError(f"--exact needs --dtype float32: the fixed rounding is not kept in {execution.dtype}")
        if execution.exact and execution.quantization is not None:
            raise ConfigError(
                f"--exact cannot be had with --quantization {execution.quantization}: leave one of them out"
            )
        self.rank, self.size = execution.communicator.rank, execution.communicator.size
        self.stored = execution.stored
        kernels = kernels_of(execution.backend or ("exact" if execution.exact else "cpu"))
        self.weights = RankWeights(load, kernels, execution.communicator, execution.device, execution.quantization)
        self._spec = config.remembered(self.rank, self.size).spec(execution.dtype, execution.device)
        self._config = config
        self._execution = execution
        self._attention_layers, self._recurrent_layers = count(), count()
        self._rotary: Rotary | None = None

    # -- the whole -----------------------------------------------------------------------------------------------------

    def vocabulary(self, name: str) -> torch.Tensor:
        """The rank's rows of an embedding or an output, [rows, hidden]."""
        tokens, rows = rows_of(self._config.vocab_size, self.rank, self.size)
        shape = (self._config.vocab_size, self._config.hidden_size)
        return self.weights.vocabulary(f"{name}.weight", shape, tokens, rows)

    def norm(self, name: str, width: int | None = None, centred: bool = False) -> RMSNorm:
        """Over hidden states, or over `width` elements. `centred`: the weight is stored less 1; the sum is kept in
        float32, as bfloat16 would round it."""
        weight = self.weights.tensor(f"{name}.weight", (width or self._config.hidden_size,))
        return RMSNorm(self.weights.kernels, weight.float() + 1.0 if centred else weight, self._config.eps)

    def decoder(
        self,
        embedding: torch.Tensor,
        layers: Iterable[Layer],
        final_norm: RMSNorm,
        embedding_scale: float = 1.0,
        logit_scale: float = 1.0,
    ) -> Decoder:
        """The whole, with the output's weight, which comes last in a checkpoint."""
        head = embedding if self._config.tie_word_embeddings else self.vocabulary("lm_head")
        return Decoder(
            kernels=self.weights.kernels,
            spec=self._spec,
            exact=self._execution.exact,
            vocab_size=self._config.vocab_size,
            communicator=self._execution.communicator,
            embedding=self._vectors(embedding),
            layers=tuple(layers),
            final_norm=final_norm,
            lm_head=self.weights.linear(head).weight,
            linears=tuple(self.weights.linears),
            rotary=self._rotary,
            embedding_scale=embedding_scale,
            logit_scale=logit_scale,
        )

    def _vectors(self, weight: torch.Tensor) -> TokenVectors:
        """Cut like the output, which is as large: a sum over ranks a pass against a copy on every rank."""
        if self.size == 1:
            return Embedding(self.weights.kernels, weight)
        first = rows_of(self._config.vocab_size, self.rank, self.size)[0][0]
        return SpreadEmbedding(self.weights.kernels, weight, first, self._execution.communicator)

    # -- mixers --------------------------------------------------------------------------------------------------------

    def scaled(self, mixer: Mixer, after: float, before: float = 1.0) -> Mixer:
        """after * mixer(before * x)."""
        return Scaled(mixer, after, before)

    def parallel(self, *mixers: Mixer) -> Mixer:
        """The sum of several mixers of the same input."""
        return Parallel(mixers)

    def rotary(self, dim: int, theta: float, sections: tuple[int, int, int] | None = None) -> None:
        """Positions turn queries and keys, in all attention of the model; see `make_rotary`."""
        self._rotary = make_rotary(dim, theta, sections).to(self._execution.device)

    def attention(
        self,
        name: str,
        *,
        head_norms: tuple[str, str] | None = None,
        centred: bool = False,
        gated: bool = False,
        out: str = "o_proj",
        factors: Mapping[str, float] | None = None,
    ) -> Mixer:
        """The config's attention.

        `head_norms`: what the norms over one head of queries and of keys are called, `centred` as for `norm`; `gated`:
        a gate on every output channel, stored behind each head's query; `out`: what the output projection is called;
        `factors`: what a projection's results are multiplied with, by its name.
        """
        weights, sizes, bias = self.weights, self._config.attention, self._config.attention_bias
        share, dim, hidden = sizes.share(self.rank, self.size), sizes.head_dim, sizes.hidden_size
        (first, last), key_values, queries = share.query_heads, share.kv_heads.held(dim), sizes.num_heads * dim
        wide, kv_shape = (2 if gated else 1) * dim, (sizes.num_kv_heads * dim, hidden)
        parts: list[Part] = [
            (f"{name}.q_proj", (wide * sizes.num_heads, hidden), ((first * wide, last * wide),)),
            (f"{name}.k_proj", kv_shape, (key_values,)),
            (f"{name}.v_proj", kv_shape, (key_values,)),
        ]
        heads, kv_heads = last - first, share.kv_heads.count
        projection: Projection = weights.fused(parts, bias, _gates_last(heads, dim) if gated else None)
        if factors:
            widths = {"q_proj": heads * dim, "k_proj": kv_heads * dim, "v_proj": kv_heads * dim}
            by = [torch.full((width,), factors.get(part, 1.0)) for part, width in widths.items()]
            projection = ScaledLinear(projection, torch.cat(by).to(self._execution.device))
        o_proj = weights.row_parallel(f"{name}.{out}", (hidden, queries), (first * dim, last * dim), bias)
        q_norm, k_norm = (
            (None, None) if head_norms is None else (self.norm(f"{name}.{norm}", dim, centred) for norm in head_norms)
        )
        return Attention(
            kernels=weights.kernels,
            projection=projection,
            o_proj=o_proj,
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=dim,
            layer=next(self._attention_layers),
            q_norm=q_norm,
            k_norm=k_norm,
            gated=gated,
        )

    def mamba2(self, name: str, sizes: Mamba2Sizes, factors: tuple[float, ...] = ()) -> Mixer:
        """See `build_mamba2`."""
        return build_mamba2(self.weights, name, sizes, next(self._recurrent_layers), factors)

    def short_conv(self, name: str, sizes: ShortConvSizes) -> Mixer:
        """LFM2's: convolution, and its projections to B | C | x and back."""
        weights, share, hidden = self.weights, sizes.share(self.rank, self.size), sizes.hidden_size
        held = share.held(sizes.unit_channels)
        conv, bias = weights.taps(f"{name}.conv", (hidden, 1, sizes.taps), held, bias=sizes.bias)
        thirds = (share.held(sizes.unit_channels, part * hidden) for part in range(3))
        return ShortConv(
            kernels=weights.kernels,
            conv=conv,
            conv_bias=bias,
            in_proj=weights.column_parallel(f"{name}.in_proj", (3 * hidden, hidden), *thirds, bias=sizes.bias),
            out_proj=weights.row_parallel(f"{name}.out_proj", (hidden, hidden), held, sizes.bias),
            layer=next(self._recurrent_layers),
        )

    def delta_net(self, name: str, sizes: DeltaNetSizes) -> Mixer:
        """See `build_delta_net`."""
        return build_delta_net(self.weights, name, sizes, next(self._recurrent_layers))

    # -- feed-forward --------------------------------------------------------------------------------------------------

    def swiglu(
        self,
        name: str,
        sizes: FeedForwardSizes,
        parts: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
        bias: bool = False,
        gate_factor: float = 1.0,
    ) -> SwiGLU:
        """`parts`: what gate, up and down are called; `gate_factor`: what the gate is multiplied with."""
        weights, run, shape = self.weights, sizes.share(self.rank, self.size), (sizes.inner, sizes.hidden)
        gate_up: Projection = weights.fused([(f"{name}.{part}", shape, (run,)) for part in parts[:2]], bias)
        if gate_factor != 1.0:
            inner = run[1] - run[0]
            factors = torch.cat([torch.full((inner,), gate_factor), torch.ones(inner)])
            gate_up = ScaledLinear(gate_up, factors.to(self._execution.device))
        return SwiGLU(weights.kernels, gate_up, weights.row_parallel(f"{name}.{parts[2]}", shape[::-1], run, bias))

    def fused_swiglu(self, gate_up: str, down: str, sizes: FeedForwardSizes) -> SwiGLU:
        """Whose gate and up are stored as one matrix, in this order. Both tensors by their names."""
        weights, run = self.weights, sizes.share(self.rank, self.size)
        both = weights.column_parallel(gate_up, (2 * sizes.inner, sizes.hidden), run, _behind(run, sizes.inner))
        return SwiGLU(weights.kernels, both, weights.row_parallel(down, (sizes.hidden, sizes.inner), run))

    def squared_relu(self, name: str, sizes: FeedForwardSizes, bias: bool = False) -> SquaredReluMLP:
        """`up_proj` and `down_proj`."""
        weights, run, shape = self.weights, sizes.share(self.rank, self.size), (sizes.inner, sizes.hidden)
        up = weights.column_parallel(f"{name}.up_proj", shape, run, bias=bias)
        down = weights.row_parallel(f"{name}.down_proj", shape[::-1], run, bias)
        return SquaredReluMLP(weights.kernels, up, down)

    # -- mixtures of experts -------------------------------------------------------------------------------------------

    def softmax_router(self, name: str, sizes: ExpertSizes, normalize: bool = True) -> SoftmaxRouter:
        """By a softmax over all experts; `normalize`: the chosen ones' shares add up to 1."""
        return SoftmaxRouter(self.weights.kernels, self._gate(name, sizes, sizes.one.hidden), sizes.chosen, normalize)

    def sigmoid_router(self, name: str, hidden: int, sizes: ExpertSizes, **rule: Any) -> SigmoidRouter:
        """By a sigmoid and a correction; `rule`: further fields of `SigmoidRouter`."""
        gate = self._gate(name, sizes, hidden)
        correction = self.weights.tensor(f"{name}.e_score_correction_bias", (sizes.count,)).float()
        return SigmoidRouter(self.weights.kernels, gate, correction, top_k=sizes.chosen, **rule)

    def _gate(self, name: str, sizes: ExpertSizes, hidden: int) -> Linear:
        return self.weights.unquantized(self.weights.tensor(f"{name}.weight", (sizes.count, hidden)).float())

    def stacked_experts(self, gate_up: str, down: str, sizes: ExpertSizes) -> Experts:
        """SwiGLUs in two stacks, gate and up [count, 2 * inner, hidden] and down [count, hidden, inner], by the names
        of both tensors."""
        one, run = sizes.one, sizes.one.share(self.rank, self.size)
        shape = (sizes.count, 2 * one.inner, one.hidden)
        return (
            self.weights.stack(gate_up, shape, run, _behind(run, one.inner), dim=1),
            self.weights.stack(down, (sizes.count, one.hidden, one.inner), run, dim=2),
        )

    def swiglu_experts(self, name: str, sizes: ExpertSizes) -> Experts:
        """A tensor for each expert and matrix, or two stacks where the checkpoint has those: both forms are published.
        gate and up are one product."""
        if f"{name}.gate_up_proj" in self.stored:
            return self.stacked_experts(f"{name}.gate_up_proj", f"{name}.down_proj", sizes)
        return self._experts(name, sizes, ("gate", "up"))

    def squared_relu_experts(self, name: str, sizes: ExpertSizes) -> Experts:
        """A tensor for each expert and matrix."""
        return self._experts(name, sizes, ("up",))

    def _experts(self, name: str, sizes: ExpertSizes, parts: Sequence[str]) -> Experts:
        """`parts`: what an expert's matrices into its inner channels are called."""
        weights, run, shape = self.weights, sizes.one.share(self.rank, self.size), (sizes.one.inner, sizes.one.hidden)
        ups, downs = [], []
        for expert in range(sizes.count):
            base = f"{name}.{expert}"
            ups.append(torch.cat([weights.tensor(f"{base}.{part}_proj.weight", shape, run) for part in parts]))
            downs.append(weights.tensor(f"{base}.down_proj.weight", shape[::-1], run, dim=1))
        return weights.pack(torch.stack(ups)), weights.pack(torch.stack(downs))

    def gated_shared(self, name: str, sizes: FeedForwardSizes) -> GatedSharedExpert:
        """A SwiGLU and, called `<name>_gate`, the gate on all of its outcome."""
        expert = self.swiglu(name, sizes)
        gate = self.weights.unquantized(self.weights.tensor(f"{name}_gate.weight", (1, sizes.hidden)))
        return GatedSharedExpert(self.weights.kernels, expert, gate)

    def softmax_mixture(self, router: SoftmaxRouter, experts: Experts, shared: SwiGLU | GatedSharedExpert) -> Mixer:
        """Routed SwiGLUs and a shared one."""
        return SoftmaxMixture(self.weights.kernels, router, *experts, shared)

    def latent(self, to: str, back: str, hidden: int, width: int, bias: bool) -> tuple[Linear, Linear]:
        """The way to the space in which routed experts work, and back. The latter has all of its inputs, but its
        outputs are a partial sum."""
        to_latent = self.weights.whole(to, (width, hidden), bias)
        return to_latent, self.weights.row_parallel(back, (hidden, width), (0, width), bias)

    def sigmoid_mixture(
        self,
        router: SigmoidRouter,
        experts: Experts,
        shared: SquaredReluMLP,
        latent: tuple[Linear, Linear] | None,
    ) -> Mixer:
        """Routed squared-ReLU MLPs, in a latent space if there is one, and a shared one."""
        return SigmoidMixture(self.weights.kernels, router, *experts, shared, *(latent or (None, None)))


def shapes_of(build: Build, config: DecoderConfig, stored: Collection[str] = ()) -> dict[str, tuple[int, ...]]:
    """Every tensor that a model is built of, by its published name and with its shape in the checkpoint, in the order
    in which they are asked for: by building the model of tensors without memory."""
    found: dict[str, tuple[int, ...]] = {}

    def note(name: str, shape: tuple[int, ...], cut: Cut | None = None) -> torch.Tensor:
        found[name] = shape
        return torch.empty(shape if cut is None else cut.shape(shape), device="meta")

    with _ShapesAlone():
        build(config, DecoderBuilder(config, note, Execution(False, torch.float32, backend="reference", stored=stored)))
    return found


class _ShapesAlone(TorchFunctionMode):
    """What comes out of arithmetic on tensors without memory. torch's own answer is written in Python, and brings its
    compiler along: 1.5 s and 70 MB at the start of every server."""

    _LIKE_THE_FIRST = frozenset(
        (torch.Tensor.add, torch.Tensor.mul, torch.Tensor.neg, torch.Tensor.__neg__, torch.Tensor.exp)
    )

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in self._LIKE_THE_FIRST:
            return torch.empty(args[0].shape, device="meta")
        if func is torch.stack:
            return torch.empty((len(args[0]), *args[0][0].shape), device="meta")
        if func is torch.cat:
            parts, dim = list(args[0]), (*args[1:], *(kwargs or {}).values(), 0)[0]
            shape = list(parts[0].shape)
            shape[dim] = sum(part.shape[dim] for part in parts)
            return torch.empty(shape, device=parts[0].device, dtype=parts[0].dtype)
        return func(*args, **(kwargs or {}))


def _behind(gate: Run, rows: int) -> Run:
    """Where up's rows are, if the gate's are at `gate` of the first `rows`."""
    return gate[0] + rows, gate[1] + rows


def _gates_last(heads: int, dim: int) -> Callable[[torch.Tensor], torch.Tensor]:
    """Rows of each head's query and then its gate, with keys and values behind them all -> queries | keys | values |
    gates."""

    def reordered(rows: torch.Tensor) -> torch.Tensor:
        both, others = rows[: 2 * heads * dim], rows[2 * heads * dim :]
        queries, gates = both.reshape(heads, 2, dim, *rows.shape[1:]).unbind(1)
        return torch.cat([queries.flatten(0, 1), others, gates.flatten(0, 1)])

    return reordered
