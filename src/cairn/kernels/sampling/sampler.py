"""One token from each row of logits, all rows of a step together."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from types import MappingProxyType
from typing import overload

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import pad

from cairn.kernels.sampling.inverse_cdf import (
    BLOCK,
    Draws,
    sample_from_all,
    sample_from_best,
    sample_from_nucleus,
    take_largest,
    uniform,
)
from cairn.kernels.sampling.logits_processors import (
    LogitsProcessor,
    TorchTokenCounts,
    add_bias,
    apply_masks,
    ban_tokens,
    keep_tokens,
    penalize,
)
from cairn.kernels.sampling.metadata import SamplingMetadata
from cairn.kernels.staging import StagedArray, Staging
from cairn.types import SamplingParams

_MAX_SORTED_VOCAB = 1 << 14
"""For top_p a vocabulary of up to this size is sorted as a whole."""
_MAX_GROUP_LOGITS = 1 << 21
"""Of rows that are drawn together: the intermediate results are to stay in the processor's cache."""


class SampleFrom(IntEnum):
    """The tokens that a row is drawn from, in an order of their own: it decides which of them a uniform number means.

    LARGEST: the largest logit. FEW, MORE: the best 64 or 128 tokens, the best first; ALL where min_p and top_k keep
    as many of them or more. NUCLEUS: the best 128 as far as top_p goes; ALL where it ends among those that equal the
    last of them, or after it. ALL: the whole vocabulary, the lowest id first.
    """

    LARGEST = 0
    FEW = 1
    MORE = 2
    NUCLEUS = 3
    ALL = 4


NUM_FEW, NUM_MORE = 64, 128
"""How many of the best tokens are looked at first: rarely are more needed."""

SampleRows = Callable[[Tensor, Draws], Tensor]
_SAMPLE_ROWS: Mapping[SampleFrom, SampleRows] = MappingProxyType(
    {
        SampleFrom.LARGEST: take_largest,
        SampleFrom.FEW: lambda logits, draws: sample_from_best(logits, draws, NUM_FEW),
        SampleFrom.MORE: lambda logits, draws: sample_from_best(logits, draws, NUM_MORE),
        SampleFrom.NUCLEUS: lambda logits, draws: sample_from_nucleus(logits, draws, NUM_MORE),
        SampleFrom.ALL: lambda logits, draws: sample_from_all(logits, draws),
    }
)
_FROM_SOME = (SampleFrom.FEW, SampleFrom.MORE, SampleFrom.NUCLEUS)


_NO_DRAWS = Draws(np.zeros(0), np.zeros(0, np.int64), np.zeros(0), np.zeros(0), np.zeros(0), Staging())
"""Of greedy rows."""


@dataclass(frozen=True, slots=True)
class SampledGroup:
    """Rows that are drawn in one way, together. `index`: `rows` as int64 [n]; None where they are contiguous.
    `has_processors`: whether the sampling parameters have logits processors."""

    sample_from: SampleFrom
    rows: list[int]
    index: NDArray[np.int64] | None
    has_processors: bool


@dataclass(frozen=True, slots=True)
class StagedGroup:
    """What a step has of a `SampledGroup`."""

    group: SampledGroup
    index: StagedArray | None
    draws: Draws


class SampledRows(Sequence[SamplingParams]):
    """The sampling parameters of n rows, and what is worked out of them: once, where the steps of the same requests
    are given the same object.

    `columns`: float64 [3, n]: temperature, top_p and min_p. `top_k`: int64 [n], 0 for all tokens. `kinds`: what each is
    drawn from. `groups`: all rows, by whether they have logits processors and by kind; `row_order`: where each is among
    those of all groups, one after the other, int64 [n], None where it is its own place. `unstaged`: the groups of rows
    that all take the largest logit, of which no step has anything to stage; None where any does. `penalized`: rows with
    penalties. `has_processors`: whether the parameters of any row have logits processors.
    """

    def __init__(self, params: Iterable[SamplingParams], vocab_size: int) -> None:
        self._params = list(params)
        self.columns = np.array(
            [(row_params.temperature, row_params.top_p, row_params.min_p) for row_params in self._params], np.float64
        ).T
        self.top_k = np.array(
            [row_params.top_k if row_params.top_k < vocab_size else 0 for row_params in self._params], np.int64
        )
        self.kinds = [sample_from(row_params, vocab_size) for row_params in self._params]
        self.penalized = [row for row, row_params in enumerate(self._params) if row_params.has_penalties]
        alike: dict[tuple[bool, SampleFrom], list[int]] = {}
        for row, (row_params, kind) in enumerate(zip(self._params, self.kinds, strict=True)):
            alike.setdefault((has_processors(row_params), kind), []).append(row)
        step = max(1, _MAX_GROUP_LOGITS // vocab_size)
        self.groups = [
            _group_of(kind, of_kind[start : start + step], is_processed)
            for (is_processed, kind), of_kind in alike.items()
            for start in range(0, len(of_kind), step)
        ]
        order = [row for group in self.groups for row in group.rows]
        self.row_order: NDArray[np.int64] | None = None if order == sorted(order) else np.argsort(order)
        self.has_processors = any(is_processed for is_processed, _ in alike)
        self._seeds = [row_params.seed or 0 for row_params in self._params]
        self._takes_largest = not self.columns[0].any()
        self.unstaged: list[StagedGroup] | None = None
        if self._takes_largest and self.row_order is None:
            self.unstaged = [StagedGroup(group, None, _NO_DRAWS) for group in self.groups]

    @classmethod
    def of(cls, params: Sequence[SamplingParams], vocab_size: int) -> "SampledRows":
        """`params` itself, if it is such an object already."""
        return params if isinstance(params, SampledRows) else cls(params, vocab_size)

    def __len__(self) -> int:
        return len(self._params)

    @overload
    def __getitem__(self, row: int) -> SamplingParams: ...
    @overload
    def __getitem__(self, row: slice) -> list[SamplingParams]: ...
    def __getitem__(self, row: int | slice) -> SamplingParams | list[SamplingParams]:
        return self._params[row]

    def uniform(self, positions: Sequence[int]) -> NDArray[np.float64]:
        """The rows' uniform numbers, shape [n]; 0 where all of them take the largest logit."""
        if self._takes_largest:
            return np.zeros(len(self._params))
        return uniform(self._seeds, positions)


class TorchSampler:
    """Samples the n tokens of one step, n at least 1. Each depends on its own row alone, whatever the batch.

    Temperature 0 takes the largest logit, the lowest id among equals. Otherwise the token at a uniform number in the
    cumulative distribution of what the filters leave; the number is Philox's for (seed, position), so the token is the
    same in any batch and after any preemption. `has_processors`: whether the parameters of any row have logits
    processors.
    """

    def __init__(
        self, params: Sequence[SamplingParams], positions: Sequence[int], vocab_size: int, staging: Staging
    ) -> None:
        """Stages what is known when the step is launched; `staging` is to be sent before `sample`."""
        sampled = SampledRows.of(params, vocab_size)
        self._groups = sampled.unstaged or _stage_groups(sampled, sampled.uniform(positions), staging)
        self._row_order = None if sampled.row_order is None else staging.add(sampled.row_order)
        self._penalized = sampled.penalized
        self._vocab_size = vocab_size
        self.has_processors = sampled.has_processors

    def sample(
        self, logits: Tensor, slots: Sequence[int], samples: Sequence[SamplingMetadata], counts: TorchTokenCounts
    ) -> Tensor:
        """Tokens, int64 [n], from float32 [n, vocab], which is not changed. `samples`: of each row, or empty where no
        row has a logits processor. `slots`: of each row, in `counts`, to which the new tokens are added.

        Logits processors are staged in a copy of their own. Raises ValueError for a mask that does not fit.
        """
        if not samples:
            return self._in_order([self._sample_group(logits, staged, ()) for staged in self._groups])
        staging, processors = Staging(), list[list[LogitsProcessor]]()
        for group in (staged.group for staged in self._groups):
            group_samples = [samples[row] for row in group.rows]
            if group.has_processors or any(
                sample.allowed_mask is not None or sample.banned_tokens for sample in group_samples
            ):
                of_group = [slots[row] for row in group.rows]
                processors.append(logits_processors(group_samples, of_group, self._vocab_size, counts, staging))
            else:
                processors.append([])
        append = None
        if self._penalized:
            append = counts.append([slots[row] for row in self._penalized], staging)
            penalized = staging.add(np.array(self._penalized))
        staging.send(logits.device)
        tokens = self._in_order(
            [
                self._sample_group(logits, staged, group_processors)
                for staged, group_processors in zip(self._groups, processors, strict=True)
            ]
        )
        if append is not None:
            append(tokens[penalized.tensor])
        return tokens

    def _in_order(self, parts: list[Tensor]) -> Tensor:
        """The tokens of all rows, of those of each group."""
        tokens = parts[0] if len(parts) == 1 else torch.cat(parts)
        return tokens if self._row_order is None else tokens[self._row_order.tensor]

    def _sample_group(self, logits: Tensor, staged: StagedGroup, processors: Sequence[LogitsProcessor]) -> Tensor:
        group, draws = staged.group, staged.draws
        if staged.index is not None:
            group_logits = logits.index_select(0, staged.index.tensor)
        else:
            group_logits = logits if len(self._groups) == 1 else logits[group.rows[0] : group.rows[-1] + 1]
            group_logits = group_logits.clone() if processors else group_logits.contiguous()
        for process in processors:
            process(group_logits)
        if group_logits.shape[1] % BLOCK:
            group_logits = pad(group_logits, (0, -group_logits.shape[1] % BLOCK), value=-torch.inf)
        tokens = _SAMPLE_ROWS[group.sample_from](group_logits, draws)
        if group.sample_from in _FROM_SOME:
            if logits.device.type != "cpu":
                tokens = torch.where(tokens < 0, sample_from_all(group_logits, draws), tokens)
            elif missing := (tokens < 0).nonzero()[:, 0].tolist():
                tokens[missing] = sample_from_all(group_logits[missing], draws.take(missing))
        # NaN logits may lead past the last token, but for the largest one.
        return tokens if group.sample_from is SampleFrom.LARGEST else tokens.clamp_(max=self._vocab_size - 1)


def _stage_groups(sampled: SampledRows, numbers: NDArray[np.float64], staging: Staging) -> list[StagedGroup]:
    """`numbers`: the rows' uniform ones."""
    staged = list[StagedGroup]()
    for group in sampled.groups:
        draws, rows = _NO_DRAWS, group.rows
        if group.sample_from is not SampleFrom.LARGEST:
            temperature, top_p, min_p = sampled.columns[:, rows]
            draws = Draws(temperature, sampled.top_k[rows], top_p, min_p, numbers[rows], staging)
        index = None if group.index is None else staging.add(group.index)
        staged.append(StagedGroup(group, index, draws))
    return staged


def _group_of(kind: SampleFrom, rows: list[int], is_processed: bool) -> SampledGroup:
    is_scattered = rows[-1] - rows[0] >= len(rows)
    return SampledGroup(kind, rows, np.array(rows) if is_scattered else None, is_processed)


def has_processors(params: SamplingParams) -> bool:
    """Whether the parameters change logits, whatever the temperature."""
    return bool(params.allowed_token_ids or params.bad_words or params.logit_bias or params.has_penalties)


def logits_processors(
    samples: Sequence[SamplingMetadata],
    slots: Sequence[int],
    vocab_size: int,
    counts: TorchTokenCounts,
    staging: Staging,
) -> list[LogitsProcessor]:
    """The logits processors of some rows in vLLM's order: masks and allowed tokens come first."""
    params = [sample.params for sample in samples]
    processors = [
        apply_masks([sample.allowed_mask for sample in samples], vocab_size, staging),
        keep_tokens([row_params.allowed_token_ids or () for row_params in params], staging),
        ban_tokens([sample.bad_word_ends() for sample in samples], staging),
        ban_tokens([sample.banned_tokens for sample in samples], staging),
        add_bias([row_params.logit_bias for row_params in params], staging),
    ]
    if rows := [row for row, row_params in enumerate(params) if row_params.has_penalties]:
        processors.append(penalize(rows, [params[row] for row in rows], [slots[row] for row in rows], counts, staging))
    return [processor for processor in processors if processor is not None]


def sample_from(params: SamplingParams, vocab_size: int) -> SampleFrom:
    """By the row's own parameters alone, because each way orders tokens otherwise."""
    if params.temperature == 0:
        return SampleFrom.LARGEST
    if params.top_k < NUM_MORE and (params.top_k or params.min_p):
        return SampleFrom.FEW if 0 < params.top_k < NUM_FEW else SampleFrom.MORE
    if params.top_p < 1 and vocab_size > _MAX_SORTED_VOCAB and (params.top_k == 0 or params.top_k >= vocab_size):
        return SampleFrom.NUCLEUS
    return SampleFrom.ALL


def sampling_bytes(num_rows: int, vocab_size: int, num_slots: int) -> int:
    """See `Kernels.sampling_bytes`."""
    return 4 * num_rows * vocab_size
