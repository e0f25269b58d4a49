"""Drafts in the runner: which of them are right, and what a pass keeps of its verify rows for the folds of the next
plan.

    plan n     verify row [last token, d1, d2, d3]: one pass reads the slot's state, and leaves it
               tokens are sampled after each: t1, t2, ... as long as each equals the draft in its place
    plan n+1   fold: the state goes on by the tokens that were right, from the inputs that each layer had in the pass

See "Verify and fold" in docs/speculation.md.
"""

from collections.abc import Callable, Sequence
from itertools import accumulate, chain
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from cairn.kernels.batch import Batch, HostBatch
from cairn.kernels.contract import Kernels
from cairn.kernels.sampling.contract import TokenCounts
from cairn.kernels.sampling.metadata import SamplingMetadata
from cairn.kernels.sampling.sampler import SampledRows, has_processors
from cairn.kernels.staging import Staging
from cairn.keys import common_tokens
from cairn.layers.memory import FoldLayer, Memory
from cairn.layers.model import Model
from cairn.runner.input_batch import InputBatch
from cairn.runner.logprobs import SampledLogprobs
from cairn.step import Fold, Logprobs, Save, TokenMask, TokenMasks, VerifiedTokens, VerifyRow

_MOST_SAMPLED_ROWS = 64
"""Of which the parameters are kept as they are worked out."""

Observe = Callable[[SamplingMetadata, Tensor], None]
"""Called with each sampled row's logits, float32 [vocab]."""


class KeptInputs:
    """What a pass leaves of its verify rows until the next plan: the raw inputs of each recurrent layer, and the final
    hidden states, [rows, ...] of these rows alone."""

    def __init__(self, first: int, count: int, copies: bool = False) -> None:
        """Of `count` tokens of the batch, from `first` on. `copies`: the batch has others, whose memory is not to be
        kept with theirs."""
        self._tokens, self._copies = slice(first, first + count), copies
        self._layers: list[tuple[FoldLayer, Tensor]] = []
        self._hidden: Tensor | None = None
        self._verified = slice(0, count)
        self._rows: dict[int, tuple[int, VerifyRow]] = {}

    def assign(self, verifies: Sequence[VerifyRow], begin: int = 0) -> None:
        """Whose rows they are, from row `begin` on."""
        firsts = _first_rows(verifies)
        self._rows = {row.slot: (begin + first, row) for row, first in zip(verifies, firsts, strict=False)}
        self._verified = slice(begin, begin + firsts[-1])

    def keep(self, inputs: Tensor, fold: FoldLayer) -> None:
        """See `Memory.keep_inputs`."""
        self._layers.append((fold, self._part(inputs)))

    def keep_hidden(self, hidden: Tensor) -> None:
        """Of all the batch's tokens."""
        self._hidden = self._part(hidden)

    @property
    def hidden(self) -> Tensor:
        """The final hidden states of the rows."""
        assert self._hidden is not None, "the pass is not over"
        return self._hidden

    @property
    def verified_hidden(self) -> Tensor:
        """Of those rows alone that are somebody's."""
        return self.hidden[self._verified]

    @property
    def num_tokens(self) -> int:
        """Of the rows."""
        return self._tokens.stop - self._tokens.start

    def find(self, slot: int) -> tuple[int, VerifyRow]:
        """The first of a slot's rows, and its verify row. Raises LookupError for a slot without one."""
        if slot not in self._rows:
            raise LookupError(f"slot {slot} is folded, but the plan before verified nothing in it")
        return self._rows[slot]

    def fold(self, batch: Batch, memory: Memory, rows: Tensor | None = None) -> None:
        """Take the states of all layers on by the tokens of a fold batch: these rows, int64 [T], or all of them."""
        for fold, inputs in self._layers:
            fold(inputs if rows is None or len(rows) == len(inputs) else inputs.index_select(0, rows), batch, memory)

    def _part(self, x: Tensor) -> Tensor:
        part = x[self._tokens]
        return part.clone() if self._copies else part


class FoldPiece(NamedTuple):
    """The state in `slot` goes on by tokens [begin, end) of its verify row."""

    slot: int
    begin: int
    end: int


class FoldPart(NamedTuple):
    """Pieces of folds, of each one at most. `saves`: checkpoints of what lies in these slots then."""

    pieces: list[FoldPiece]
    saves: list[Save]


def parts_of_folds(folds: Sequence[Fold], kept: KeptInputs) -> list[FoldPart]:
    """Folds in parts one after the other, each up to a checkpoint that is taken within it. Raises LookupError for a
    fold of a slot that `kept` has no row of."""
    parts = list[FoldPart]()
    for fold in folds:
        _, row = kept.find(fold.slot)
        pages = {snapshot.position - row.start: snapshot.pages for snapshot in fold.snapshots}
        begin = 0
        for number, end in enumerate(sorted({*pages, fold.num_tokens})):
            if number == len(parts):
                parts.append(FoldPart([], []))
            parts[number].pieces.append(FoldPiece(fold.slot, begin, end))
            if end in pages:
                parts[number].saves.append(Save(fold.slot, pages[end]))
            begin = end
    return parts


class FoldBatch:
    """The folds of one plan as one batch, to be read once the staging has been sent. `snapshots`: rows of
    `KeptInputs.hidden` after which they are taken, int64 [n], and their state pages, int64 [n, pages]."""

    def __init__(self, folds: Sequence[Fold], kept: KeptInputs, kernels: Kernels, staging: Staging) -> None:
        """Raises LookupError for a fold of a slot that `kept` has no row of."""
        self._kept = kept
        rows = [kept.find(fold.slot) for fold in folds]
        firsts = np.array([first for first, _ in rows], np.int32)
        counts = np.array([fold.num_tokens for fold in folds], np.int32)
        starts = np.array([row.start for _, row in rows], np.int32)
        snapshots = [(number, snapshot) for number, fold in enumerate(folds) for snapshot in fold.snapshots]
        seqs = np.array([number for number, _ in snapshots], np.int32)
        offsets = np.array([snapshot.position for _, snapshot in snapshots], np.int32) - starts[seqs]
        cu_seqlens = np.zeros(len(folds) + 1, np.int32)
        np.cumsum(counts, out=cu_seqlens[1:])
        slots = np.array([fold.slot for fold in folds], np.int32)
        self._host = HostBatch(
            num_decodes=0,
            cu_seqlens=cu_seqlens,
            slots=slots,
            seq_starts=starts,
            seq_lens=starts + counts,
            kv_write_from=starts,
            snapshot_seqs=seqs,
            snapshot_offsets=offsets.astype(np.int32),
            num_verifies=len(folds),
            is_fold=True,
        )
        self._metadata = kernels.build_metadata(self._host, staging)
        ranges = [np.arange(first, first + count) for first, count in zip(firsts, counts, strict=True)]
        self._rows = staging.add(np.concatenate(ranges).astype(np.int64))
        self._last_rows = staging.add((firsts + counts - 1).astype(np.int64))
        snapshot_rows = staging.add((firsts[seqs] + offsets - 1).astype(np.int64))
        self.has_snapshots = bool(snapshots)
        self.snapshots = snapshot_rows, staging.add(np.array([snapshot.pages for _, snapshot in snapshots], np.int64))
        self._lengths = [staging.add(array) for array in (cu_seqlens, slots, starts, starts + counts)]

    def run(self, memory: Memory, hidden: Tensor, block_tables: Sequence[Tensor]) -> None:
        """Take the live states on. `hidden`: final hidden states by slot, [slots + 1, hidden]."""
        cu_seqlens, slots, starts, ends = (staged.tensor for staged in self._lengths)
        batch = fold_batch(self._host, self._metadata, cu_seqlens, slots, starts, ends, block_tables)
        self._kept.fold(batch, memory, self._rows.tensor)
        hidden[slots.long()] = self._kept.hidden.index_select(0, self._last_rows.tensor)


class DraftVerifier:
    """Samples after verify rows. Each token is the one that a decode would have sampled in its place, whatever the
    temperature: its number is that of its position. So a draft is right if it is that token, and drafts change no
    answer, nor its distribution."""

    def __init__(self, model: Model, counts: TokenCounts, inputs: InputBatch, observe: Observe | None) -> None:
        """`observe`: on rank 0 alone, which samples."""
        self._kernels, self._vocab_size, self._communicator = model.kernels, model.vocab_size, model.communicator
        self._counts, self._inputs, self._observe = counts, inputs, observe
        self._sampled: dict[tuple[int, ...], SampledRows] = {}
        self._num_admits = 0

    def verify(self, verifies: Sequence[VerifyRow], logits: Tensor, masks: TokenMasks) -> tuple[VerifiedTokens, ...]:
        """What each row gives. `logits`: float32 [tokens of the rows, vocab]. All ranks take part."""
        logprobs = list[Logprobs | None]([None] * len(verifies))
        verified: list[list[int]] = [[] for _ in verifies]
        if self._communicator.rank == 0:
            verified = self._sample(verifies, logits, masks)
            logprobs = self._logprobs(verifies, verified, logits)
        if self._communicator.size > 1:
            padded = torch.tensor(_pad(verifies, verified), dtype=torch.int64, device=logits.device)
            verified = _unpad(verifies, self._communicator.broadcast(padded).tolist())
        return tuple(
            VerifiedTokens(row.slot, tuple(tokens), each)
            for row, tokens, each in zip(verifies, verified, logprobs, strict=True)
        )

    def _sample(self, verifies: Sequence[VerifyRow], logits: Tensor, masks: TokenMasks) -> list[list[int]]:
        """The tokens after each row, one more than its right drafts."""
        params = [self._inputs.admit(row.slot).sampling for row in verifies]
        has_bans = any(row.start + 1 < row.min_tokens_until for row in verifies)
        has_masks = any(row.slot in masks for row in verifies)
        if has_bans or has_masks or self._observe is not None or any(map(has_processors, params)):
            return self._sample_in_turn(verifies, logits, masks)
        staging = Staging()
        positions = [position for row in verifies for position in range(row.start + 1, row.end + 1)]
        slots = [row.slot for row in verifies for _ in row.tokens]
        sampler = self._kernels.sampler(self._sampled_rows(slots), positions, self._vocab_size, staging)
        staging.send(logits.device)
        tokens = sampler.sample(logits, slots, [], self._counts).tolist()
        verified = []
        for row, first in zip(verifies, _first_rows(verifies), strict=False):
            sampled = tokens[first : first + len(row.tokens)]
            verified.append(sampled[: 1 + common_tokens(row.tokens[1:], np.array(sampled, np.int64))])
        return verified

    def _sampled_rows(self, slots: Sequence[int]) -> SampledRows:
        """The sampling parameters of rows in these slots, the same object as long as nobody else is in any slot."""
        if self._num_admits != self._inputs.num_admits or len(self._sampled) >= _MOST_SAMPLED_ROWS:
            self._num_admits = self._inputs.num_admits
            self._sampled.clear()
        key = tuple(slots)
        if key not in self._sampled:
            params = [self._inputs.admit(slot).sampling for slot in slots]
            self._sampled[key] = SampledRows(params, self._vocab_size)
        return self._sampled[key]

    def _sample_in_turn(self, verifies: Sequence[VerifyRow], logits: Tensor, masks: TokenMasks) -> list[list[int]]:
        """One token of each row after the other: what is sampled next depends on those before it."""
        verified: list[list[int]] = [[] for _ in verifies]
        firsts = _first_rows(verifies)
        drafts = [row.tokens[1:].tolist() for row in verifies]
        open_rows = list(range(len(verifies)))
        while open_rows:
            metadata = [self._metadata(verifies[row], verified[row], masks) for row in open_rows]
            index = torch.tensor([firsts[row] + len(verified[row]) for row in open_rows], device=logits.device)
            row_logits, slots = logits.index_select(0, index), [verifies[row].slot for row in open_rows]
            if self._observe is not None:
                for each, observed in zip(metadata, row_logits, strict=True):
                    self._observe(each, observed)
            staging = Staging()
            params, positions = [each.params for each in metadata], [each.position for each in metadata]
            sampler = self._kernels.sampler(params, positions, self._vocab_size, staging)
            staging.send(logits.device)
            tokens = sampler.sample(row_logits, slots, metadata, self._counts).tolist()
            for row, token in zip(open_rows, tokens, strict=True):
                verified[row].append(token)
            open_rows = [
                row
                for row in open_rows
                if drafts[row][: len(verified[row])] == verified[row]
                and len(verified[row]) < len(masks.get(verifies[row].slot, verifies[row].tokens))
            ]
        return verified

    def _metadata(self, row: VerifyRow, sampled: Sequence[int], masks: TokenMasks) -> SamplingMetadata:
        """Of the token after those that have been sampled already."""
        position = row.start + 1 + len(sampled)
        mask: TokenMask | None = masks[row.slot][len(sampled)] if row.slot in masks else None
        return self._inputs.metadata_of(row.slot, position, mask, position < row.min_tokens_until, sampled)

    def _logprobs(
        self, verifies: Sequence[VerifyRow], verified: Sequence[Sequence[int]], logits: Tensor
    ) -> list[Logprobs | None]:
        """Of the tokens of each row, None where they were not asked for."""
        admits = [self._inputs.admit(row.slot) for row in verifies]
        if all(admit.logprobs is None for admit in admits):
            return [None] * len(verifies)
        num_top, tokens, token_ids, owners = list[int | None](), list[int](), list[tuple[int, ...]](), list[int]()
        for number, (row, admit, sampled) in enumerate(zip(verifies, admits, verified, strict=True)):
            num_wrong = len(row.tokens) - len(sampled)
            num_top += [admit.logprobs] * len(sampled) + [None] * num_wrong
            tokens += [*sampled, *[0] * num_wrong]
            token_ids += [admit.sampling.logprob_token_ids] * len(row.tokens)
            owners += [number] * len(row.tokens)
        staging = Staging()
        sampled_logprobs = SampledLogprobs(num_top, staging, token_ids, self._kernels.logprobs)
        staged_tokens = staging.add(np.array(tokens, np.int64))
        staging.send(logits.device)
        parts: list[list[Logprobs]] = [[] for _ in verifies]
        for rows, tensors in sampled_logprobs.compute(logits, staged_tokens.tensor):
            arrays = [tensor.cpu().numpy() for tensor in tensors]
            for place, row_number in enumerate(rows):
                parts[owners[row_number]].append(Logprobs(*(array[place : place + 1] for array in arrays)))
        return [_join(part) for part in parts]


def fold_batch(
    host: HostBatch,
    metadata: object,
    cu_seqlens: Tensor,
    slots: Tensor,
    starts: Tensor,
    ends: Tensor,
    block_tables: Sequence[Tensor],
) -> Batch:
    """Folds as a batch: of no tokens, whose inputs are there already. `slots`, `starts`, `ends`: of each fold, int32
    [folds]."""
    nothing = slots.new_zeros(0, dtype=torch.int64)
    return Batch(
        tokens=nothing,
        positions=nothing,
        cu_seqlens=cu_seqlens,
        slots=slots,
        state_slots=slots,
        seq_starts=starts,
        seq_lens=ends,
        kv_write_from=starts,
        block_tables=block_tables,
        host=host,
        metadata=metadata,
    )


def _first_rows(verifies: Sequence[VerifyRow]) -> list[int]:
    """Where the rows of each begin among those of all, and where they end."""
    return [0, *accumulate(len(row.tokens) for row in verifies)]


def _join(parts: Sequence[Logprobs]) -> Logprobs | None:
    if not parts:
        return None
    columns = zip(*((part.token_ids, part.values, part.ranks) for part in parts), strict=True)
    return Logprobs(*(np.concatenate(column) for column in columns))


def _pad(verifies: Sequence[VerifyRow], verified: Sequence[Sequence[int]]) -> list[int]:
    """The tokens of all rows in places of their own, so many as the rows have tokens; -1 in the others."""
    return list(
        chain.from_iterable(
            [*tokens, *[-1] * (len(row.tokens) - len(tokens))] for row, tokens in zip(verifies, verified, strict=True)
        )
    )


def _unpad(verifies: Sequence[VerifyRow], padded: Sequence[int]) -> list[list[int]]:
    """The reverse of `_pad`."""
    firsts = _first_rows(verifies)
    return [
        [token for token in padded[first : first + len(row.tokens)] if token >= 0]
        for row, first in zip(verifies, firsts, strict=False)
    ]
