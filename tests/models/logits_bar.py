"""cairn's float32 logits against transformers' in float64, by every way a token can be computed.

The bar: cairn's error is at most twice transformers' own float32 error plus 1e-6, both in units of the logits'
standard deviation.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from cairn.kernels.sampling.metadata import SamplingMetadata
from cairn.step import Restore, Snapshot
from cairn.types import Pages, SamplingParams
from doubles.hand_plans import SampleOnly
from runner.harness import Driver

LENGTH = 150
"""Tokens of the prompts here: two chunks of 64 and a part of one."""


@dataclass(frozen=True)
class Truth:
    """float64 logits of every position of one prompt, [n, vocab], and the error that cairn may have at each, [n]."""

    tokens: list[int]
    logits: Tensor
    bar: Tensor

    @classmethod
    def of(cls, tokens: list[int], narrow: Tensor, wide: Tensor) -> "Truth":
        """`narrow`, `wide`: transformers' own logits in float32 and in float64. The bar of every position is that of
        the worst one."""
        return cls(tokens, wide, (2 * errors(narrow, wide, wide).amax() + 1e-6).expand(len(tokens)))

    @classmethod
    def of_several(cls, tokens: list[int], narrow: list[Tensor], wide: Tensor) -> "Truth":
        """`narrow`: transformers' own logits in float32, of several models that differ in nothing but what is rounded.
        Each position has the bar of its own worst error."""
        return cls(tokens, wide, 2 * errors(torch.stack(narrow), wide, wide).amax(0) + 1e-6)

    def check(self, logits: Tensor, position: int) -> None:
        """`logits`: of the token at `position` - 1."""
        error, bar = self.error(logits, position), self.bar[position - 1].item()
        assert error <= bar, f"position {position}: error {error:.2e}, bar {bar:.2e}"

    def error(self, logits: Tensor, position: int) -> float:
        return float(errors(logits, self.logits[position - 1], self.logits).item())


def errors(found: Tensor, wanted: Tensor, spread: Tensor) -> Tensor:
    """[..., vocab] -> the largest differences, in standard deviations of `spread`."""
    return (found.double() - wanted).abs().amax(-1) / spread.std()


def full_hits(driver: Driver, truth: Truth, files: Mapping[int, Pages]) -> None:
    """Straight from checkpoints' hidden states to logits, without a forward pass."""
    passes, slot = driver.runner.forward_passes, 1
    for position, pages in files.items():
        only = SampleOnly(slot, SamplingMetadata(SamplingParams(temperature=0.0), position))
        (logits,) = driver.run(restores=(Restore(slot, pages),), sample_only=(only,))
        truth.check(logits, position)
    assert driver.runner.forward_passes == passes


def whole_in_chunks_and_token_by_token(driver: Driver, truth: Truth, kept: Sequence[int], stepped_from: int) -> None:
    """In one go with full hits of what is `kept` on the way, in chunks, and token by token from `stepped_from` on."""
    tokens = truth.tokens
    whole = driver.sequence(0, LENGTH)
    files = {position: driver.file() for position in kept}
    (logits,) = driver.run(driver.row(whole, tokens), snapshots=[Snapshot(0, p, pages) for p, pages in files.items()])
    truth.check(logits, LENGTH)
    full_hits(driver, truth, files)
    # Off the grid where exact mode does not forbid it.
    cuts = [64, 128] if driver.exact else [1, 3, 50, 64, 127, 131]
    pieces = driver.sequence(2, LENGTH)
    for begin, end in zip([0, *cuts], [*cuts, LENGTH], strict=True):
        (logits,) = driver.run(driver.row(pieces, tokens[begin:end]))
        truth.check(logits, end)
    stepped = driver.sequence(3, LENGTH)
    (logits,) = driver.run(driver.row(stepped, tokens[:stepped_from]))
    steps(driver, truth, stepped, range(stepped_from, LENGTH))


def steps(driver: Driver, truth: Truth, track: Any, positions: Iterable[int]) -> None:
    """A sequence goes on token by token."""
    for position in positions:
        (logits,) = driver.run(driver.row(track, truth.tokens[position : position + 1], decode=True))
        truth.check(logits, position + 1)


def batches_of_mixed_lengths(driver: Driver, truth: Truth) -> None:
    """Takes a driver with at least 11 slots."""
    tokens, lengths = truth.tokens, [1, 2, 63, 64, 65, 100, LENGTH]
    sequences = [driver.sequence(slot, LENGTH + 1) for slot in range(len(lengths))]
    logits = driver.run(*(driver.row(seq, tokens[:length]) for seq, length in zip(sequences, lengths, strict=True)))
    for row, length in zip(logits, lengths, strict=True):
        truth.check(row, length)
    # Some go on with one token, some with chunks, one begins.
    late = driver.sequence(10, LENGTH)
    rows = [driver.row(seq, tokens[seq.position : seq.position + 1], decode=True) for seq in sequences[:3]]
    rows += [driver.row(seq, tokens[seq.position : seq.position + 21]) for seq in sequences[3:6]]
    rows.append(driver.row(late, tokens[:77]))
    for row, logits_row in zip(rows, driver.run(*rows), strict=True):
        truth.check(logits_row, row.end)


def kept_everywhere(driver: Driver, truth: Truth, length: int, prefilled: int) -> tuple[Any, dict[int, Pages]]:
    """A sequence of `length` tokens, the first `prefilled` of them in one go and the others step by step, and a
    checkpoint of every position."""
    first = driver.sequence(0, length)
    files = {position: driver.file() for position in range(1, length + 1)}
    snapshots = [Snapshot(0, position, files[position]) for position in range(1, prefilled + 1)]
    driver.run(driver.row(first, truth.tokens[:prefilled]), snapshots=snapshots)
    for position in range(prefilled, length):
        row = driver.row(first, truth.tokens[position : position + 1], decode=True)
        driver.run(row, snapshots=[Snapshot(0, position + 1, files[position + 1])])
    return first, files


def resumed_at_every_position(driver: Driver, truth: Truth, first: Any, files: Mapping[int, Pages]) -> None:
    """What `kept_everywhere` has kept, each in a slot of its own, and the rest of the prompt behind it."""
    restores, rows, length = [], [], len(files)
    for position in range(1, length):
        resumed = driver.sequence(position, length)
        resumed.position, resumed.kv_write_from, resumed.pages = position, length, first.pages
        restores.append(Restore(position, files[position]))
        rows.append(driver.row(resumed, truth.tokens[position:length]))
    for logits in driver.run(*rows, restores=tuple(restores)):
        truth.check(logits, length)
