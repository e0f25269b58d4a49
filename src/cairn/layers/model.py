"""A causal language model of residual layers, executed: each is x + mixer(norm(x)), x + norm(mixer(x)), or with a norm
at both places, so that a block of attention and feed-forward is two of them. On each of several ranks a mixer gives a
partial sum.
"""

from dataclasses import dataclass
from functools import reduce

import msgspec
import torch
from torch import Tensor

from cairn.kernels.batch import Batch
from cairn.kernels.contract import Kernels, Weight
from cairn.kernels.quantized import QuantizedWeight
from cairn.layers.communicator import Communicator
from cairn.layers.layer_inputs import LayerInputs
from cairn.layers.linear import Linear
from cairn.layers.memory import Memory, MemorySpec
from cairn.layers.mtp_head import MTPHead, hidden_before
from cairn.layers.norms import RMSNorm, ScaledSum
from cairn.layers.residual import Layer, Mixer
from cairn.layers.rotary import Rotary, Temperature


@dataclass(frozen=True, slots=True)
class Scaled:
    """after * mixer(before * x): constant multipliers, published with the weights and not folded into them, so that
    bfloat16 weights stay what they are."""

    mixer: Mixer
    after: float
    before: float = 1.0

    def __call__(self, hidden: Tensor, batch: Batch, memory: Memory) -> Tensor:
        """See `Mixer`."""
        inner = hidden if self.before == 1.0 else hidden * self.before
        return self.mixer(inner, batch, memory).mul_(self.after)


@dataclass(frozen=True, slots=True)
class Parallel:
    """The sum of several mixers of the same input, in their order."""

    mixers: tuple[Mixer, ...]

    def __call__(self, hidden: Tensor, batch: Batch, memory: Memory) -> Tensor:
        """See `Mixer`."""
        return reduce(Tensor.add_, (mixer(hidden, batch, memory) for mixer in self.mixers))


@dataclass(frozen=True, slots=True)
class SideBySide:
    """Several mixers of the same input, for a norm of each of them: see `NormOfSum`."""

    mixers: tuple[Mixer, ...]

    def __call__(self, hidden: Tensor, batch: Batch, memory: Memory) -> Tensor:
        """[rows, hidden] -> the rank's partial sums of [mixers, rows, hidden]."""
        return torch.stack([mixer(hidden, batch, memory) for mixer in self.mixers])


@dataclass(frozen=True, slots=True)
class Normed:
    """mixer(norm(x)), inside a layer whose parts have norms of their own."""

    norm: RMSNorm
    mixer: Mixer

    def __call__(self, hidden: Tensor, batch: Batch, memory: Memory) -> Tensor:
        """See `Mixer`."""
        return self.mixer(self.norm(hidden), batch, memory)


@dataclass(frozen=True, slots=True)
class Softcap:
    """Logits in (-cap, cap); see `Kernels.softcap`."""

    kernels: Kernels
    cap: float

    def __call__(self, logits: Tensor) -> Tensor:
        """A new tensor of the same shape."""
        return self.kernels.softcap(logits, self.cap)


@dataclass(frozen=True, slots=True)
class VocabParallelEmbedding:
    """Token ids to vectors. `weight` [tokens, hidden]: the rows of this rank, from token `first` on, in codes if they
    are stored so.

    A token's vector comes from one rank and zeros from all others, so their sum is exact. `scale`: a constant
    multiplier of some families.
    """

    kernels: Kernels
    weight: Tensor | QuantizedWeight
    first: int
    communicator: Communicator
    scale: float = 1.0

    def __call__(self, tokens: Tensor) -> Tensor:
        """[rows] int64 -> [rows, hidden], a new tensor."""
        vectors = self._of_all_ranks(tokens)
        return vectors if self.scale == 1.0 else vectors.mul_(self.scale)

    def _of_all_ranks(self, tokens: Tensor) -> Tensor:
        if self.communicator.size == 1:
            return self._take(tokens)
        local = tokens - self.first
        elsewhere = (local < 0) | (local >= self.weight.shape[0])
        vectors = self._take(local.masked_fill(elsewhere, 0))
        return self.communicator.all_reduce(vectors.masked_fill_(elsewhere[:, None], 0.0))

    def _take(self, rows: Tensor) -> Tensor:
        weight = self.weight
        return self.kernels.embed(rows, weight) if isinstance(weight, Tensor) else weight[rows].dequantize()


@dataclass(frozen=True, slots=True)
class Model:
    """The model, or one rank's share; all ranks run the same batches, each on its own memory, and have the same hidden
    states and logits.

    `spec`: what this rank keeps between steps. `exact`: on a backend where a row's bits do not depend on the batch.
    `lm_head`: the output's weight, packed. `linears`: every matrix product of this rank, for the self test of exact
    mode. `rotaries`: what turns queries and keys, each for some of the attention layers. `logit_scale`: a constant
    multiplier of some families; `logit_cap`: bounds logits in others. `layer_inputs`: what layers get of a token
    besides hidden states, None for nothing. `head`: drafts; None where that is not served.
    """

    kernels: Kernels
    spec: MemorySpec
    exact: bool
    vocab_size: int
    communicator: Communicator
    embedding: VocabParallelEmbedding
    layers: tuple[Layer, ...]
    final_norm: RMSNorm | ScaledSum
    lm_head: Weight
    linears: tuple[Linear, ...]
    rotaries: tuple[Rotary | Temperature, ...] = ()
    logit_scale: float = 1.0
    logit_cap: Softcap | None = None
    layer_inputs: LayerInputs | None = None
    head: MTPHead | None = None

    def forward(self, batch: Batch, memory: Memory) -> Tensor:
        """The hidden states after the final norm, [rows, hidden]. Updates the live states of the batch's slots, writes
        its keys and values, those of the head, too, and hands over its snapshots."""
        hidden = self.embed(batch)
        embeddings = None if self.head is None else self.head.embedding_norm(hidden)
        batch = self._turned(batch, batch.positions)
        if self.layer_inputs is not None:
            batch = msgspec.structs.replace(batch, layer_inputs=self.layer_inputs(hidden, batch))
        normed = self.layers[0][0](hidden)
        # A layer's sum and the next one's norm go through memory once.
        next_norms = [*(norm for norm, _ in self.layers[1:]), self.final_norm]
        for (norm, mixer), next_norm in zip(self.layers, next_norms, strict=True):
            given = self.communicator.all_reduce(mixer(normed, batch, memory))
            normed = next_norm.add_norm(hidden, norm.norm_result(given))
        if self.head is not None and embeddings is not None:
            if batch.head_positions is not None:
                batch = self._turned(batch, batch.head_positions)
            self.head.write_kv(embeddings, hidden_before(normed, memory.hidden, batch), batch, memory)
        return normed

    def draft(self, batch: Batch, hidden: Tensor, memory: Memory) -> Tensor:
        """What the head makes of one token a sequence and the hidden states before them, [rows, hidden]: its own, of
        which `logits` are those of the tokens after them. Writes keys and values of the head."""
        assert self.head is not None
        positions = batch.positions if batch.head_positions is None else batch.head_positions
        embeddings = self.head.embedding_norm(self.embed(batch))
        return self.head(embeddings, hidden, self._turned(batch, positions), memory)

    def embed(self, batch: Batch) -> Tensor:
        """What the first layer gets, [rows, hidden]."""
        hidden = self.embedding(batch.tokens)
        if batch.multimodal_embeddings is not None:
            hidden[batch.multimodal_embeddings.rows] = batch.multimodal_embeddings.values.to(hidden.dtype)
        return hidden

    def _turned(self, batch: Batch, positions: Tensor) -> Batch:
        """With the rotations of each row."""
        if not self.rotaries:
            return batch
        return msgspec.structs.replace(batch, rotations=tuple(rotary.at(positions) for rotary in self.rotaries))

    def logits(self, hidden: Tensor) -> Tensor:
        """[n, hidden] -> float32 [n, vocab]."""
        columns = self.kernels.lm_head(hidden, self.lm_head)
        logits = self.communicator.gather_columns(columns)[:, : self.vocab_size]
        if self.logit_scale != 1.0:
            logits = logits * self.logit_scale
        return logits if self.logit_cap is None else self.logit_cap(logits)

    def logits_room(self, num_seqs: int) -> int:
        """See `logits_room`."""
        sampling_bytes = self.kernels.sampling_bytes(num_seqs, self.vocab_size, num_seqs)
        return logits_room(num_seqs, self.vocab_size, self.communicator.size, sampling_bytes)


def logits_room(num_seqs: int, vocab_size: int, num_ranks: int, sampling_bytes: int) -> int:
    """Bytes that drawing a token for each of so many sequences takes: logits as float32, and what the sampler keeps and
    makes of them, `sampling_bytes`, or the ranks' columns while they are gathered, of which each rank has at most
    half."""
    logits_bytes = 4 * num_seqs * vocab_size
    gathered = logits_bytes + logits_bytes // 2 if num_ranks > 1 else 0
    return logits_bytes + max(gathered, sampling_bytes)
