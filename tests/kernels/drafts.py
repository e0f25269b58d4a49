"""Verifies and folds of fixed calls against decodes one after the other, bit for bit."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from cairn.kernels.contract import Kernels
from kernels.comparison import same_bits
from kernels.fixed_calls import conv_call, gdn_call, paged_call, ssd_call
from kernels.kernel_calls import Call
from kernels.random_batches import RandomBatch, SequenceRows

F64, F32 = torch.float64, torch.float32

RECURRENT = ("conv", "ssd", "gdn")


def call_of(name: str, batch: RandomBatch, dtype: torch.dtype, sizes: tuple[int, int] = (24, 16)) -> Call:
    """Of a model of a dtype. `sizes`: head dim and state size."""
    model = F32 if dtype == F64 else dtype
    calls: Mapping[str, Callable[[], Call]] = {
        "conv": lambda: conv_call(batch, (4, 2 * sizes[0] + sizes[1]), model),
        "ssd": lambda: ssd_call(batch, (2, 2, *sizes), model),
        "gdn": lambda: gdn_call(batch, (2, 2, *sizes), model),
        "attention": lambda: paged_call("attention", batch, (4, 2, sizes[0]), 16, model),
        "write_kv": lambda: paged_call("write_kv", batch, (4, 2, sizes[0]), 16, model),
        "linear": lambda: linear_call(batch, model),
    }
    call = calls[name]()
    return call.in_float64() if dtype == F64 else call


def linear_call(batch: RandomBatch, dtype: torch.dtype) -> Call:
    operands = {
        "x": batch.numbers(batch.num_tokens, 96).to(dtype),
        "weight": batch.numbers(64, 96, salt=1).mul(96**-0.5).to(dtype),
        "bias": batch.numbers(64, salt=2).to(dtype),
    }
    return Call("linear", batch, operands)


@dataclass(frozen=True)
class Decodes:
    """A verify of a call as decodes, one after the other in batches of their own. `results` [tokens, ...]; `states` and
    `snapshots`: after each token, if there are states."""

    results: Tensor
    states: Sequence[Tensor]
    snapshots: Sequence[Tensor]


def decode_one_by_one(kernels: Kernels, call: Call, index: int) -> Decodes:
    """Sequence `index` of the call's batch."""
    sequence, rows = call.batch.sequences[index], call.batch.rows_of(index)
    own = call.copied()
    results, states, snapshots = list[Tensor](), list[Tensor](), list[Tensor]()
    for offset in range(sequence.num_tokens):
        one = replace(sequence, start=sequence.start + offset, num_tokens=1, snapshots=(1,))
        row = slice(rows.start + offset, rows.start + offset + 1)
        decode = own.of_rows(row, RandomBatch((one,), (), call.batch.seed))
        found = (decode.without_reach() if call.name == "attention" else decode).run(kernels)
        results.append(found[0])
        if "states" in own.operands:
            states.append(own.operands["states"][sequence.slot].clone())
            snapshots.append(found[1][0])
    return Decodes(torch.cat(results), states, snapshots)


@dataclass(frozen=True)
class Drafts:
    """A call with verifies in its batch, and `accepted`: how many tokens of each one are folded later."""

    call: Call
    accepted: tuple[int, ...]

    @cached_property
    def places(self) -> range:
        first = len(self.call.batch.decodes)
        return range(first, first + len(self.call.batch.verifies))

    def fold(self, snapshots: Sequence[tuple[int, ...]]) -> Call:
        """Of the accepted tokens of all verifies. `snapshots`: their offsets."""
        batch, accepted = self.call.batch, zip(self.places, self.accepted, snapshots, strict=True)
        rows, sequences = list[int](), list[SequenceRows]()
        for index, num_accepted, offsets in accepted:
            first = batch.rows_of(index).start
            rows += range(first, first + num_accepted)
            sequences.append(replace(batch.sequences[index], num_tokens=num_accepted, snapshots=offsets))
        fold = RandomBatch((), (), batch.seed, verifies=tuple(sequences), is_fold=True)
        chosen = torch.tensor(rows)
        part = self.call.converted(lambda name, value: value[chosen] if name in self.call.operation.rows else value)
        return replace(part, batch=fold)


def in_layouts(call: Call) -> Sequence[Call]:
    """As layers have the operands, and if there are states, each operand in memory of its own, where those of slots
    begin at whole lines of the cache."""
    return (call.copied(), *[call.converted(lambda _, x: x.clone())] * ("states" in call.operands))


def check_verifies(kernels: Kernels, call: Call) -> None:
    """Every token of each verify of the call has a decode's bits, and live states stay as they are."""
    first = len(call.batch.decodes)
    wanted = [decode_one_by_one(kernels, call, first + place) for place in range(len(call.batch.verifies))]
    for given in in_layouts(call):
        (found, *_) = given.run(kernels)
        for place, sequence in enumerate(call.batch.verifies):
            rows = call.batch.rows_of(first + place)
            assert same_bits(found[rows], wanted[place].results), f"a verify is no decodes: {sequence}"
            if "states" in call.operands:
                states = given.operands["states"][sequence.slot], call.operands["states"][sequence.slot]
                assert same_bits(*states), f"a verify has written its live state: {sequence}"


def check_wrong_numbers(kernels: Kernels, call: Call) -> None:
    """Where the last draft of each verify has keys that are NaN and values that are infinite, the tokens before it have
    a decode's bits all the same."""
    given, first, (table,) = call.converted(lambda _, x: x.clone()), len(call.batch.decodes), call.block_tables
    page_size = given.operands["keys"].shape[2]
    for sequence in call.batch.verifies:
        page, offset = int(table[sequence.slot, (sequence.end - 1) // page_size]), (sequence.end - 1) % page_size
        for name, number in (("keys", torch.nan), ("values", torch.inf)):
            given.operands[name][page, :, offset] = number
    wanted = [decode_one_by_one(kernels, given, first + place) for place in range(len(call.batch.verifies))]
    (found,) = given.run(kernels)
    for place, sequence in enumerate(call.batch.verifies):
        rows = call.batch.rows_of(first + place)
        before = slice(rows.start, rows.stop - 1)
        assert same_bits(found[before], wanted[place].results[:-1]), f"a token sees a draft behind it: {sequence}"


def check_written_pages(kernels: Kernels, call: Call) -> None:
    """A verify writes the keys and values that decodes write."""
    given = call.copied()
    given.run(kernels)
    wanted = call.copied()
    for index in range(len(call.batch.sequences)):
        alone = wanted.of_rows(call.batch.rows_of(index), call.batch.alone(index))
        for row in range(alone.batch.num_tokens if alone.batch.verifies else 0):
            (sequence,) = alone.batch.verifies
            one = replace(sequence, start=sequence.start + row, num_tokens=1)
            alone.of_rows(slice(row, row + 1), RandomBatch((one,), ())).run(kernels)
        if not alone.batch.verifies:
            alone.run(kernels)
    for name in ("keys", "values"):
        # The last page is for padding rows.
        assert same_bits(given.operands[name][:-1], wanted.operands[name][:-1]), f"a verify writes other {name}"


def check_folds(kernels: Kernels, drafts: Drafts, snapshots: Sequence[tuple[int, ...]]) -> None:
    """A fold leaves the states, and takes the snapshots, of as many decodes one after the other; states of other slots
    stay as they are."""
    decodes = [decode_one_by_one(kernels, drafts.call, index) for index in drafts.places]
    for fold in in_layouts(drafts.fold(snapshots)):
        _check_fold(kernels, fold, decodes)


def _check_fold(kernels: Kernels, fold: Call, decodes: Sequence[Decodes]) -> None:
    before = fold.operands["states"].clone()
    by_row, kept = fold.run(kernels)
    states = fold.operands["states"]
    slots = [sequence.slot for sequence in fold.batch.sequences]
    for place, (sequence, wanted) in enumerate(zip(fold.batch.sequences, decodes, strict=True)):
        num_accepted = sequence.num_tokens
        assert same_bits(states[sequence.slot], wanted.states[num_accepted - 1]), f"a fold is no decodes: {sequence}"
        assert same_bits(by_row[fold.batch.rows_of(place)], wanted.results[:num_accepted])
        found = kept[fold.batch.snapshots_of(place)]
        for snapshot, offset in zip(found, sequence.snapshots, strict=True):
            assert same_bits(snapshot, wanted.states[offset - 1]), f"a fold's snapshot is no decode's: {sequence}"
            assert same_bits(snapshot, wanted.snapshots[offset - 1])
    others = [slot for slot in range(len(states)) if slot not in slots]
    assert same_bits(states[others], before[others]), "a fold has written states of other slots"


def every_acceptance(call: Call) -> Iterator[Drafts]:
    """Each number of accepted tokens of the first verify, with others of the other ones."""
    lengths = [sequence.num_tokens for sequence in call.batch.verifies]
    for count in range(max(lengths)):
        yield Drafts(call, tuple((count + 2 * place) % length + 1 for place, length in enumerate(lengths)))
