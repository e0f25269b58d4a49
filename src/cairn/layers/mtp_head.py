"""A head of multi-token prediction (arXiv 2412.19437, section 2.2), as Qwen3.5, Qwen3-Next and Nemotron-H publish it:
one layer with attention, and its feed-forward, which say of a token and of the hidden state before it what the token
after it may be.

    entry of token j    fc([norm(embedding of j), norm(hidden state after j - 1)]) -> attention, feed-forward -> norm
    draft of j + 1      the model's own output of that; for further drafts it is the hidden state in its place

Hidden states are those after the model's final norm, which checkpoints keep as well. Keys and values of j's entry
depend on the tokens up to j alone, so they lie in the pages of j with those of the model's layers, and are shared,
copied and sent with them. The entry is published at the position of j - 1; it has the one after that here, which of a
text is that of j: all of them are moved by one, and only distances count. Before the first token is nothing: its entry,
which training has not seen, is made of a hidden state of zeros.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from cairn.kernels.batch import Batch
from cairn.layers.attention import Attention
from cairn.layers.communicator import Communicator
from cairn.layers.linear import Linear
from cairn.layers.memory import Memory
from cairn.layers.norms import RMSNorm
from cairn.layers.residual import Layer


@dataclass(frozen=True, slots=True)
class MTPHead:
    """Its layers: `attention` first, which alone has keys and values, then `others`; of each a rank has its share, as
    of the model's. `projection` gives the rank's columns of an entry."""

    embedding_norm: RMSNorm
    hidden_norm: RMSNorm
    projection: Linear
    attention_norm: RMSNorm
    attention: Attention
    others: tuple[Layer, ...]
    final_norm: RMSNorm
    communicator: Communicator

    def write_kv(self, embeddings: Tensor, hidden: Tensor, batch: Batch, memory: Memory) -> None:
        """Write keys and values of the entries of all rows. `embeddings`: of the rows' tokens, after `embedding_norm`;
        `hidden`: the hidden states before them; both [rows, hidden]."""
        entries = self._entries(embeddings, hidden, batch)
        self.attention.write_kv(self.attention_norm(entries), batch, memory)

    def __call__(self, embeddings: Tensor, hidden: Tensor, batch: Batch, memory: Memory) -> Tensor:
        """As `write_kv`, and what the model's output and the next entries take: [rows, hidden]."""
        entries = self._entries(embeddings, hidden, batch)
        inner = self.communicator.all_reduce(self.attention(self.attention_norm(entries), batch, memory))
        for norm, mixer in self.others:
            inner = self.communicator.all_reduce(mixer(norm.add_norm(entries, inner), batch, memory))
        return self.final_norm.add_norm(entries, inner)

    def _entries(self, embeddings: Tensor, hidden: Tensor, batch: Batch) -> Tensor:
        columns = self.projection(torch.cat([embeddings, self.hidden_norm(hidden)], dim=-1), batch)
        return self.communicator.gather_columns(columns)


def hidden_before(hidden: Tensor, last: Tensor, batch: Batch) -> Tensor:
    """The hidden state before each row, [rows, hidden]: the one of the row before it, or for the first row of a
    sequence the one that its slot has in `last`, [slots + 1, hidden]; zeros where there was no token."""
    host = batch.host
    first = last[batch.slots]
    if host.num_tokens == host.num_decodes and not host.has_nobodys_tokens:
        return first
    first = first.masked_fill((batch.seq_starts == 0)[:, None], 0.0)
    if host.has_nobodys_tokens:
        # a place may be empty: it begins where another sequence does, or behind all rows
        rows = torch.arange(len(hidden), dtype=batch.cu_seqlens.dtype, device=hidden.device)
        owners = torch.searchsorted(batch.cu_seqlens[1:], rows, right=True).clamp(max=len(first) - 1)
        begins = (batch.cu_seqlens[owners] == rows)[:, None]
        return torch.where(begins, first[owners], torch.cat([hidden[:1], hidden[:-1]]))
    before = torch.empty_like(hidden)
    before[1:] = hidden[:-1]
    before[batch.cu_seqlens[:-1].long()] = first
    return before
