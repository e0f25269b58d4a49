"""What decoder families are built with: one rank's tensors, drawn by name, as bricks."""

from dataclasses import dataclass

import torch

from cairn.errors import ConfigError
from cairn.layers.attention import PagedAttention
from cairn.layers.backend import Backend, kernels_of
from cairn.layers.communicator import Communicator
from cairn.layers.embedding import Embedding, SpreadEmbedding, TokenVectors
from cairn.layers.linear import Linear, Projection
from cairn.layers.norms import RMSNorm
from cairn.layers.rotary import Rotary
from cairn.layers.rotary_attention import HeadNormedLinear, RotaryAttention
from cairn.layers.swiglu import SwiGLU
from cairn.models.attention_share import AttentionShare, AttentionSizes
from cairn.models.contract import TensorLoader
from cairn.models.cut import Run, rows_of
from cairn.models.decoder import Decoder, Layer
from cairn.models.rank_weights import RankWeights
from cairn.models.remembered import Remembered
from cairn.models.text_sizes import TextSizes

__all__ = ["DecoderBuilder", "Execution"]


@dataclass(frozen=True, slots=True)
class Execution:
    """How a model is to be executed: `exact` in fixed shapes, in which dtype, as which rank, on which kernels."""

    exact: bool
    dtype: torch.dtype
    communicator: Communicator
    backend: Backend = "cpu"


class DecoderBuilder:
    """Draws one rank's tensors. Raises ConfigError for `exact` in another dtype than float32, and whatever `load`
    raises."""

    def __init__(self, text: TextSizes, load: TensorLoader, execution: Execution) -> None:
        if execution.exact and execution.dtype != torch.float32:
            raise ConfigError(f"--exact needs --dtype float32: the fixed rounding is not kept in {execution.dtype}")
        self.weights = RankWeights(load, kernels_of(execution.backend), execution.communicator)
        self._text = text
        self._execution = execution

    def norm(self, name: str, width: int | None = None) -> RMSNorm:
        """Over hidden states, or over `width` elements."""
        weight = self.weights.tensor(f"{name}.weight", (width or self._text.hidden_size,))
        return RMSNorm(self.weights.kernels, weight, self._text.eps)

    def attention(
        self, name: str, sizes: AttentionSizes, share: AttentionShare, layer: int, rotary: Rotary | None
    ) -> PagedAttention | RotaryAttention:
        """One rank's heads, their positions turned by `rotary` or, if None, not at all."""
        weights, dim, (first, last) = self.weights, sizes.head_dim, share.query_heads
        queries, key_values = (first * dim, last * dim), share.kv_heads.held(dim)
        runs = {"q_proj": queries, "k_proj": key_values, "v_proj": key_values}
        projections: dict[str, Projection] = {
            part: weights.column_parallel(f"{name}.{part}", (width, sizes.hidden_size), runs[part], bias=sizes.bias)
            for part, width in sizes.widths.items()
        }
        for part, norm in zip(("q_proj", "k_proj"), sizes.head_norms, strict=False):
            projections[part] = HeadNormedLinear(projections[part], self.norm(f"{name}.{norm}", dim))
        q, k, v = projections.values()
        out = weights.row_parallel(
            f"{name}.{sizes.out}", (sizes.hidden_size, sizes.num_heads * dim), queries, bias=sizes.bias
        )
        if rotary is None:
            return PagedAttention(weights.kernels, q, k, v, out, dim, layer)
        return RotaryAttention(weights.kernels, q, k, v, out, rotary, dim, layer)

    def swiglu(self, names: tuple[str, str, str], inner_size: int, inner: Run, bias: bool = False) -> SwiGLU:
        """`names`: of gate, up and down; `inner`: the rank's run of the `inner_size` channels."""
        weights, hidden = self.weights, self._text.hidden_size
        gate, up = (
            weights.column_parallel(name, (inner_size, hidden), inner, bias=bias) for name in (names[0], names[1])
        )
        return SwiGLU(weights.kernels, gate, up, weights.row_parallel(names[2], (hidden, inner_size), inner, bias))

    def vocabulary(self, name: str) -> torch.Tensor:
        """The rank's rows of an embedding or an output, [rows, hidden]."""
        communicator = self._execution.communicator
        tokens, rows = rows_of(self._text.vocab_size, communicator.rank, communicator.size)
        shape = (self._text.vocab_size, self._text.hidden_size)
        return self.weights.vocabulary(f"{name}.weight", shape, tokens, rows)

    def decoder(
        self,
        remembered: Remembered,
        embedding: torch.Tensor,
        layers: list[Layer],
        final_norm: RMSNorm,
        scales: tuple[float, float] = (1.0, 1.0),
    ) -> Decoder:
        """The whole, with the output's weight, which comes last in a checkpoint. `scales`: of embedding and logits."""
        head = embedding if self._text.tied else self.vocabulary("lm_head")
        lm_head = self.weights.collect(Linear(self.weights.kernels, head))
        return Decoder(
            spec=remembered.spec(self._execution.dtype),
            exact=self._execution.exact,
            vocab_size=self._text.vocab_size,
            communicator=self._execution.communicator,
            embedding=self._vectors(embedding),
            layers=tuple(layers),
            final_norm=final_norm,
            lm_head=lm_head,
            linears=tuple(self.weights.linears),
            embedding_scale=scales[0],
            logit_scale=scales[1],
        )

    def _vectors(self, weight: torch.Tensor) -> TokenVectors:
        communicator = self._execution.communicator
        if communicator.size == 1:
            return Embedding(weight)
        first = rows_of(self._text.vocab_size, communicator.rank, communicator.size)[0][0]
        return SpreadEmbedding(weight, first, communicator)
