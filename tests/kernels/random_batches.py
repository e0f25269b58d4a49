"""Random batches for the kernels' tests, with everything that a kernel must not read made poisonous.

decodes, verifies and prefills in one batch, or without one of these kinds; folds
verifies of one token and of several
prefills of one token, off the grid of chunks, across several chunks, up to a chunk's end
fresh sequences (`seq_starts` 0), whose slots hold NaN
snapshots at the end, at chunks' ends and inside chunks, several a sequence
`kv_write_from` before, inside and behind the rows of the pass
block tables with garbage behind the entries in use; NaN in pages behind a sequence's end and in pages of nobody
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from hypothesis import strategies as st
from torch import Tensor

from cairn.kernels.batch import CHUNK, Batch, HostBatch
from cairn.kernels.contract import Kernels
from cairn.kernels.staging import Staging
from kernels.backends import BACKENDS, VERIFIES_DRAFTS

NUM_SLOTS = 9
PAGE_SIZES = (1, 7, 16, 64, 100)
OUT_OF_RANGE = 2**30


@dataclass(frozen=True)
class SequenceRows:
    """What one sequence has in a batch: `num_tokens` tokens from position `start` on; `snapshots` are offsets."""

    slot: int
    start: int
    num_tokens: int
    kv_write_from: int = 0
    snapshots: tuple[int, ...] = ()

    @property
    def end(self) -> int:
        return self.start + self.num_tokens


@dataclass(frozen=True)
class RandomBatch:
    """Sequences in the batch's order, decodes first, then verifies. `seed`: of all numbers that a test fills its
    operands with. `ended`: decodes, by their places, whose states are in nobody's slot. `is_fold`: the verifies, which
    are all that there is, are to be folded."""

    decodes: tuple[SequenceRows, ...]
    prefills: tuple[SequenceRows, ...]
    seed: int = 0
    ended: tuple[int, ...] = ()
    verifies: tuple[SequenceRows, ...] = ()
    is_fold: bool = False

    @property
    def sequences(self) -> tuple[SequenceRows, ...]:
        return self.decodes + self.verifies + self.prefills

    @property
    def num_tokens(self) -> int:
        return sum(sequence.num_tokens for sequence in self.sequences)

    def rows_of(self, index: int) -> slice:
        """The rows of sequence `index`."""
        first = sum(sequence.num_tokens for sequence in self.sequences[:index])
        return slice(first, first + self.sequences[index].num_tokens)

    def snapshots_of(self, index: int) -> slice:
        """The places of sequence `index` among the snapshots."""
        first = sum(len(sequence.snapshots) for sequence in self.sequences[:index])
        return slice(first, first + len(self.sequences[index].snapshots))

    def alone(self, index: int) -> "RandomBatch":
        """A batch with sequence `index` only."""
        one = (self.sequences[index],)
        if index < len(self.decodes):
            return replace(self, decodes=one, verifies=(), prefills=())
        if index < len(self.decodes) + len(self.verifies):
            return RandomBatch((), (), self.seed, verifies=one, is_fold=self.is_fold)
        return RandomBatch((), one, self.seed)

    def host(self) -> HostBatch:
        def ints(numbers: Sequence[int]) -> np.ndarray:
            return np.array(numbers, dtype=np.int32)

        sequences = self.sequences
        return HostBatch(
            num_decodes=len(self.decodes),
            cu_seqlens=ints([0, *np.cumsum([sequence.num_tokens for sequence in sequences])]),
            slots=ints([sequence.slot for sequence in sequences]),
            seq_starts=ints([sequence.start for sequence in sequences]),
            seq_lens=ints([sequence.end for sequence in sequences]),
            kv_write_from=ints([sequence.kv_write_from for sequence in sequences]),
            snapshot_seqs=ints([i for i, sequence in enumerate(sequences) for _ in sequence.snapshots]),
            snapshot_offsets=ints([offset for sequence in sequences for offset in sequence.snapshots]),
            num_verifies=len(self.verifies),
            is_fold=self.is_fold,
        )

    def batch(self, kernels: Kernels, block_tables: Sequence[Tensor] = (), device: torch.device | None = None) -> Batch:
        """What the kernels are given, with `kernels`' own metadata."""
        host, staging = self.host(), Staging()
        metadata = kernels.build_metadata(host, staging)
        staging.send(device or torch.device("cpu"))
        positions = [torch.arange(sequence.start, sequence.end) for sequence in self.sequences]
        return Batch(
            tokens=torch.zeros(host.num_tokens, dtype=torch.int64, device=device),
            positions=torch.cat([*positions, torch.arange(0)]).expand(3, -1).contiguous().to(device),
            cu_seqlens=torch.tensor(host.cu_seqlens, device=device),
            slots=torch.tensor(host.slots, device=device),
            state_slots=self._state_slots(host).to(device),
            seq_starts=torch.tensor(host.seq_starts, device=device),
            seq_lens=torch.tensor(host.seq_lens, device=device),
            kv_write_from=torch.tensor(host.kv_write_from, device=device),
            block_tables=block_tables,
            host=host,
            metadata=metadata,
        )

    def _state_slots(self, host: HostBatch) -> Tensor:
        slots = torch.tensor(host.slots)
        slots[list(self.ended)] = NUM_SLOTS
        return slots

    def numbers(self, *shape: int, salt: int = 0) -> Tensor:
        """Normal float64 numbers that depend on the seed, the salt and the shape alone."""
        generator = torch.Generator().manual_seed(self.seed + 1000003 * salt)
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    def states(self, *shape: int, salt: int = 0) -> Tensor:
        """States float64 [NUM_SLOTS + 1, *shape]: NaN in the slots of fresh sequences and in those of nobody."""
        random = self.numbers(NUM_SLOTS + 1, *shape, salt=salt)
        states = torch.full_like(random, torch.nan)
        for sequence in self.sequences:
            if sequence.start:
                states[sequence.slot] = random[sequence.slot]
        return states

    def pages(self, page_size: int, garbage: int | None = None) -> "Pages":
        """Pages of its own for every sequence, in random order; `garbage` stands in the tables behind the entries in
        use, None for a page full of NaN."""
        counts = [-(-sequence.end // page_size) for sequence in self.sequences]
        generator = torch.Generator().manual_seed(self.seed)
        order = torch.randperm(sum(counts) + 1, generator=generator).tolist()
        nobodys = order.pop()
        table = torch.full(
            (NUM_SLOTS + 1, max(counts, default=0) + 2), nobodys if garbage is None else garbage, dtype=torch.int32
        )
        for sequence, count in zip(self.sequences, counts, strict=True):
            own, order = order[:count], order[count:]
            table[sequence.slot, :count] = torch.tensor(own, dtype=torch.int32)
        return Pages(self, page_size, sum(counts) + 2, table)


@dataclass(frozen=True)
class Pages:
    """Where the sequences of a batch have their keys and values: `table` int32 [NUM_SLOTS + 1, entries]. The last two
    of the pages are nobody's and the one for padding rows."""

    owner: RandomBatch
    page_size: int
    num_pages: int
    table: Tensor

    def place(self, slot: int, position: int) -> tuple[int, int]:
        """The page of a position, and where in it."""
        return int(self.table[slot, position // self.page_size]), position % self.page_size

    def filled(self, heads: int, dim: int, salt: int = 0) -> Tensor:
        """Keys (or values) float64 [page, heads, token, dim] of every position up to the sequences' ends; NaN else."""
        cache = torch.full((self.num_pages, heads, self.page_size, dim), torch.nan, dtype=torch.float64)
        for index, sequence in enumerate(self.owner.sequences):
            own = self.owner.numbers(sequence.end, heads, dim, salt=salt + 7 * index)
            for position in range(sequence.end):
                page, offset = self.place(sequence.slot, position)
                cache[page, :, offset] = own[position]
        return cache


STARTS = st.one_of(st.just(0), st.sampled_from([1, 63, 64, 65, 128]), st.integers(0, 200))


def _kv_write_from(draw: st.DrawFn, start: int, end: int) -> int:
    return draw(st.one_of(st.just(0), st.just(start), st.integers(0, end)))


@st.composite
def decode_rows(draw: st.DrawFn, slot: int) -> SequenceRows:
    """One token, planned as decode."""
    start = draw(STARTS)
    snapshots = (1,) if draw(st.booleans()) else ()
    return SequenceRows(slot, start, 1, _kv_write_from(draw, start, start + 1), snapshots)


MAX_DRAFTS = 5


@st.composite
def verify_rows(draw: st.DrawFn, slot: int, is_fold: bool = False) -> SequenceRows:
    """A last token and drafts; of a fold what is accepted of them, with snapshots."""
    start, num_tokens = draw(STARTS), draw(st.integers(1, 1 + MAX_DRAFTS))
    offsets = draw(st.sets(st.integers(1, num_tokens), max_size=3)) if is_fold else set()
    kv_write_from = 0 if is_fold else _kv_write_from(draw, start, start + num_tokens)
    return SequenceRows(slot, start, num_tokens, kv_write_from, tuple(sorted(offsets)))


@st.composite
def prefill_rows(draw: st.DrawFn, slot: int, max_tokens: int) -> SequenceRows:
    """Some tokens of a prompt."""
    start = draw(STARTS)
    to_the_edge = CHUNK - start % CHUNK
    num_tokens = draw(st.one_of(st.integers(1, max_tokens), st.sampled_from([1, to_the_edge, max_tokens])))
    edges = [position - start for position in range(start + 1, start + num_tokens + 1) if position % CHUNK == 0]
    places = st.one_of(st.just(num_tokens), st.integers(1, num_tokens), st.sampled_from([*edges, num_tokens]))
    snapshots = tuple(sorted(draw(st.sets(places, max_size=4))))
    return SequenceRows(slot, start, num_tokens, _kv_write_from(draw, start, start + num_tokens), snapshots)


HAVE_VERIFIES = all(backend in VERIFIES_DRAFTS for backend in BACKENDS)


@st.composite
def batches(
    draw: st.DrawFn,
    max_decodes: int = 4,
    max_verifies: int = 2 if HAVE_VERIFIES else 0,
    max_prefills: int = 3,
    max_tokens: int = 150,
    min_sequences: int = 1,
) -> RandomBatch:
    """See the top of this file."""
    num_decodes, num_verifies = draw(st.integers(0, max_decodes)), draw(st.integers(0, max_verifies))
    num_prefills = draw(st.integers(max(0, min_sequences - num_decodes - num_verifies), max_prefills))
    slots = iter(draw(st.permutations(range(NUM_SLOTS))))
    return RandomBatch(
        tuple(draw(decode_rows(next(slots))) for _ in range(num_decodes)),
        tuple(draw(prefill_rows(next(slots), max_tokens)) for _ in range(num_prefills)),
        draw(st.integers(0, 2**31)),
        verifies=tuple(draw(verify_rows(next(slots))) for _ in range(num_verifies)),
    )


@st.composite
def folds(draw: st.DrawFn, max_sequences: int = 4) -> RandomBatch:
    """What is accepted of the drafts of some sequences."""
    slots = draw(st.permutations(range(NUM_SLOTS)))[: draw(st.integers(1, max_sequences))]
    sequences = tuple(draw(verify_rows(slot, is_fold=True)) for slot in slots)
    return RandomBatch((), (), draw(st.integers(0, 2**31)), verifies=sequences, is_fold=True)


def garbage() -> st.SearchStrategy[int | None]:
    """What block tables hold behind the entries in use: a page of NaN, or no page at all."""
    return st.sampled_from([None, -OUT_OF_RANGE, OUT_OF_RANGE])
