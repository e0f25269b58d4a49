"""What kernels get beside their operands: the sequences of one forward pass, flattened.

    rows   [ decode tokens, one a sequence | tokens of the verify sequences | tokens of the prefill sequences ]

Sequence i has rows [cu_seqlens[i], cu_seqlens[i + 1]), which stand at positions [seq_starts[i], seq_lens[i]) of the
whole sequence; there is no padding. Shapes: T rows, B sequences, N snapshots.

Tokens of decodes and verifies are computed in the one-token form, each from what the token before it has left; those
of prefills in the chunked form, whose bits are others. A *verify* is a sequence's last token and the drafts after it.
Its tokens have the bits that as many decodes have, one after the other. Which drafts are accepted is not known before
they are computed, so the live states are left as they were. Keys and values of all its tokens are written: those of
drafts that are not accepted lie behind the sequence's end, where later ones are written over them. A *fold* brings the
live states forward when it is known: it is a batch of the accepted tokens alone, with the operands that they had in the
verify, for the functions that have states, which write those that as many decodes would have left.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
from numpy.typing import NDArray
from torch import Tensor

CHUNK = 64
"""Tokens of a chunk of the chunked scans. A chunk ends where a position of its own sequence is a multiple of it, in
every backend and whatever the batch, so that states at these positions do not depend on how a prompt was cut."""

Int32Array = NDArray[np.int32]


class HostBatch(msgspec.Struct, frozen=True, eq=False):
    """A batch's lengths as plain integers: the host knows every one of them.

    `num_decodes`: sequences *planned* as decode, the first ones; a prefill of one token is none of them.
    `num_verifies`: sequences after them that are verifies, of one token or more; no snapshots are taken of them.
    `is_fold`: all sequences are of a fold, and count as verifies; of these snapshots are taken.
    All arrays are contiguous. `cu_seqlens` int32 [B + 1]; `slots`, `seq_starts`, `seq_lens`, `kv_write_from` int32 [B]:
    see `Batch`.
    `snapshot_seqs`, `snapshot_offsets` int32 [N]: a snapshot of sequence `snapshot_seqs[n]` is taken after the first
    `snapshot_offsets[n]` of its tokens here, 1 at least; in the order of the sequences, and rising within one.
    `max_seq_len`: None but for decodes of a graph, of which the host knows the number alone: what is launched for
    them must do for all lengths up to this one. `slots` and all lengths are empty there, so that nobody uses any.
    """

    num_decodes: int
    cu_seqlens: Int32Array
    slots: Int32Array
    seq_starts: Int32Array
    seq_lens: Int32Array
    kv_write_from: Int32Array
    snapshot_seqs: Int32Array
    snapshot_offsets: Int32Array
    max_seq_len: int | None = None
    num_verifies: int = 0
    is_fold: bool = False

    @classmethod
    def captured(
        cls, num_decodes: int, max_seq_len: int, num_verify_tokens: int = 0, is_fold: bool = False
    ) -> "HostBatch":
        """Decodes of a graph, or one verify of so many tokens, or a fold of up to so many; without snapshots."""
        nothing = np.zeros(0, np.int32)
        edges = np.arange(num_decodes + 1, dtype=np.int32)
        if num_verify_tokens:
            edges = np.append(edges, np.int32(num_decodes + num_verify_tokens))
        lengths = (nothing,) * 6
        return cls(num_decodes, edges, *lengths, max_seq_len, int(num_verify_tokens > 0), is_fold)

    @classmethod
    def captured_mix(cls, num_places: int, num_tokens: int, max_seq_len: int, is_fold: bool = False) -> "HostBatch":
        """Up to so many decodes and so many verifies of a graph, in as many places of each kind, and a verify that has
        what they leave of the tokens: a place may be empty, `cu_seqlens` on the device says which one is. Or the fold
        of these verifies, with places for what is not folded before each of them and behind the last."""
        nothing, edges = np.zeros(0, np.int32), np.zeros(2 * num_places + 2, np.int32)
        edges[-1] = num_tokens
        num_decodes = 0 if is_fold else num_places
        return cls(num_decodes, edges, *(nothing,) * 6, max_seq_len, len(edges) - 1 - num_decodes, is_fold)

    @property
    def has_nobodys_tokens(self) -> bool:
        """Whether there may be tokens of no sequence, whose rows nobody reads, but which must be numbers."""
        return self.max_seq_len is not None and self.num_verifies > 1

    @property
    def num_seqs(self) -> int:
        """B."""
        return len(self.cu_seqlens) - 1

    @property
    def num_tokens(self) -> int:
        """T."""
        return int(self.cu_seqlens[-1])

    @property
    def first_prefill(self) -> int:
        """The first sequence in the chunked form; B if there is none."""
        return self.num_decodes + self.num_verifies

    @property
    def num_decode_tokens(self) -> int:
        """Rows in the one-token form, the first ones."""
        return int(self.cu_seqlens[self.first_prefill]) if self.num_verifies else self.num_decodes

    @property
    def num_in_place(self) -> int:
        """Sequences in the one-token form whose live states are written, the first ones: all but those that are to be
        verified."""
        return self.num_verifies if self.is_fold else self.num_decodes

    @property
    def num_snapshots(self) -> int:
        """N."""
        return len(self.snapshot_seqs)


class Batch(msgspec.Struct, frozen=True, eq=False):
    """The same on the device, and what the layers need beside it.

    `tokens` int64 [T], 0 where `multimodal_embeddings` has the row. `positions` int64 [3, T]: where a token
    stands in time, height and width; all three the absolute position for text. `cu_seqlens` int32 [B + 1].
    `slots` int32 [B]: the sequence's place in the block tables. `state_slots` int32 [B]: its place in the live states,
    which is the same, or nobody's where the device has seen that the sequence has ended: what is written there is not
    read. `seq_starts` int32 [B]: tokens computed before this pass; 0 means that the state before it is zero, whatever
    the slot holds. `seq_lens` int32 [B]: tokens with this pass. `kv_write_from` int32 [B]: keys and values of positions
    below it are read, never written: other sequences and other servers own those pages.
    `block_tables`: for each attention group int32 [slots + 1, pages]: the page of position p is entry p // page size of
    the slot's row; entries at and after the pages of `seq_lens` are not to be read.
    `metadata`: what `Kernels.build_metadata` made of `host`; nobody else looks into it.
    `rotations`: for each kind of rotary positions that the model has, cos and sin of every row, float32 [T, pairs].
    `head_positions`: those of the entries of a head that drafts, where they are others than `positions`.
    `layer_inputs`: what layers get of every row besides hidden states, [layers, T, width]: see `LayerInputs`.
    """

    tokens: Tensor
    positions: Tensor
    cu_seqlens: Tensor
    slots: Tensor
    state_slots: Tensor
    seq_starts: Tensor
    seq_lens: Tensor
    kv_write_from: Tensor
    block_tables: Sequence[Tensor]
    host: HostBatch
    metadata: object
    multimodal_embeddings: "MultimodalEmbeddings | None" = None
    rotations: Sequence[tuple[Tensor, Tensor]] = ()
    head_positions: Tensor | None = None
    layer_inputs: Tensor | None = None


@dataclass(frozen=True, slots=True)
class MultimodalEmbeddings:
    """Embeddings of images: `rows` int64 [k] of the batch, `values` [k, hidden]."""

    rows: Tensor
    values: Tensor
