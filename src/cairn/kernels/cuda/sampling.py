"""The sampler and the token counts of the CUDA backend: at most `MAX_LAUNCHES` launches a step whatever is asked for,
and nothing that the host would wait for."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import triton
from numpy.typing import NDArray
from torch import Tensor

from cairn.kernels.cuda import processors
from cairn.kernels.cuda import sample as sample_kernels
from cairn.kernels.cuda_support import SAMPLE_BEST, SAMPLE_BINS, SAMPLE_BLOCK, SAMPLE_LEVELS, check_vocabulary
from cairn.kernels.sampling.inverse_cdf import LEAST_SHARE, MOST_TEMPERATURE
from cairn.kernels.sampling.logits_processors import MIN_PENALTY, mask_words
from cairn.kernels.sampling.metadata import SamplingMetadata, TokenHistory
from cairn.kernels.sampling.sampler import SampledRows, SampleFrom
from cairn.kernels.staging import StagedArray, Staging
from cairn.types import SamplingParams

MAX_LAUNCHES = 10


class CudaTokenCounts:
    """See `TokenCounts`: int32 [num_slots, vocab], as `processors` says. Raises ConfigError for a vocabulary that the
    sampler does not take."""

    def __init__(self, num_slots: int, vocab_size: int, device: torch.device | None = None) -> None:
        check_vocabulary(vocab_size)
        self.times = torch.empty(num_slots, vocab_size, dtype=torch.int32, device=device)

    def admit(self, histories: Sequence[TokenHistory], staging: Staging) -> Callable[[], None]:
        """See `TokenCounts.admit`: two launches."""
        slots, tokens, steps = list[NDArray[Any]](), list[NDArray[Any]](), list[NDArray[Any]]()
        for slot, prompt, output in histories:
            used = np.unique(prompt[prompt >= 0])
            tokens += used, output
            steps += np.ones(len(used), np.int32), np.full(len(output), 2, np.int32)
            slots.append(np.full(len(used) + len(output), slot, np.int32))
        num_rows = sum(map(len, slots))
        cleared = staging.add(np.array([history.slot for history in histories], np.int32))
        columns = [staging.add(np.concatenate(column).astype(np.int32)) for column in (slots, tokens, steps)]

        def write() -> None:
            vocab_size = self.times.shape[1]
            grid = (len(histories), triton.cdiv(vocab_size, processors.COUNT_TILE))
            processors._clear_counts_kernel[grid](
                self.times, cleared.tensor, vocab_size, TILE=processors.COUNT_TILE, num_warps=4
            )
            if num_rows:
                operands = (self.times, *(column.tensor for column in columns), num_rows, vocab_size)
                processors._count_tokens_kernel[(triton.cdiv(num_rows, processors.COUNT_TILE),)](
                    *operands, TILE=processors.COUNT_TILE, num_warps=4
                )

        return write


@dataclass(frozen=True, slots=True)
class _Edits:
    """Rows whose logits change, staged. `sources` [n]: where a row's changed logits are, -1 for none. `slots` [n]: of
    a row with penalties, else -1. `rows`, `mask_numbers` [edits]; `masks` [masks, words]. `starts` [4, edits + 1] of
    the lists in `tokens` and `biases`. `has_masks`, `has_lists`: whether any row has."""

    sources: StagedArray
    slots: StagedArray
    rows: StagedArray
    mask_numbers: StagedArray
    masks: StagedArray
    starts: StagedArray
    tokens: StagedArray
    biases: StagedArray
    num_edits: int
    has_masks: bool
    has_lists: bool


class CudaSampler:
    """See `Sampler`; the tokens are those of `TorchSampler`."""

    def __init__(
        self, params: Sequence[SamplingParams], positions: Sequence[int], vocab_size: int, staging: Staging
    ) -> None:
        """Stages what is known when the step is launched."""
        self._params = rows = SampledRows.of(params, vocab_size)
        self._vocab_size = vocab_size
        kinds = np.array(rows.kinds, np.int32)
        drawn = kinds != SampleFrom.LARGEST
        top_k = rows.top_k.astype(np.int32)
        temperature, top_p, min_p = rows.columns
        self._is_sampled = bool(drawn.any())
        self._has_top_p = bool((drawn & (top_p < 1)).any())
        self._is_filtered = self._has_top_p or bool((drawn & ((kinds != SampleFrom.ALL) | (top_k > 0))).any())
        penalties = np.array(
            [(max(row.repetition_penalty, MIN_PENALTY), row.frequency_penalty, row.presence_penalty) for row in rows]
        ).T
        temperatures = temperature.clip(1 / MOST_TEMPERATURE, MOST_TEMPERATURE)
        singles = np.stack([temperatures, np.log(min_p.clip(LEAST_SHARE)), *penalties])
        self._singles = [staging.add(column.astype(np.float32)) for column in singles]
        self._doubles = [staging.add(column) for column in (top_p.copy(), rows.uniform(positions))]
        self._kinds, self._top_k = staging.add(kinds), staging.add(top_k)
        self._nowhere = staging.add(np.full(len(rows), -1, np.int32))
        self.has_processors = rows.has_processors

    def sample(
        self, logits: Tensor, slots: Sequence[int], samples: Sequence[SamplingMetadata], counts: CudaTokenCounts
    ) -> Tensor:
        """See `Sampler.sample`."""
        staging = Staging()
        edits = self._stage_edits(slots, samples, staging)
        staging.send(logits.device)
        tensors = _Step(logits, 0 if edits is None else edits.num_edits)
        rows: tuple[Any, ...] = (logits, tensors.processed, self._nowhere.tensor)
        penalty_slots, is_copied = self._nowhere.tensor, False
        if edits is not None:
            rows, penalty_slots = (*rows[:2], edits.sources.tensor), edits.slots.tensor
            if is_copied := edits.has_masks or edits.has_lists:
                tensors.edit(edits)
        temperatures, least_logs, *penalties = (column.tensor for column in self._singles)
        top_ps, uniforms = (column.tensor for column in self._doubles)
        kinds, scales = self._kinds.tensor, (temperatures, least_logs)
        maxima, weights, state = tensors.tile_maxima, tensors.tile_weights, tensors.state
        launch, launch_rows = tensors.launch, tensors.launch_rows
        launch(
            sample_kernels._summarize_kernel,
            *(*rows, penalty_slots, counts.times, *penalties, maxima, tensors.block_maxima),
            COPIED=is_copied,
        )
        if self._is_sampled:
            launch(sample_kernels._weigh_kernel, *rows, kinds, *scales, maxima, weights)
        if self._is_filtered:
            launch_rows(
                sample_kernels._best_kernel,
                *(*rows, kinds, *scales, self._top_k.tensor, top_ps, uniforms, maxima, tensors.block_maxima, weights),
                *(tensors.chosen, tensors.candidates, *state),
                CHOSEN=sample_kernels.num_chosen(self._vocab_size),
            )
            for level in range(SAMPLE_LEVELS if self._has_top_p else 0):
                launch(sample_kernels._histogram_kernel, *rows, *scales, top_ps, maxima, *state, LEVEL=level)
            launch(sample_kernels._filter_kernel, *rows, *scales, top_ps, maxima, *state, weights, tensors.tile_equals)
        launch_rows(
            sample_kernels._pick_kernel,
            *(*rows, kinds, *scales, top_ps, uniforms, penalty_slots, counts.times),
            *(maxima, weights, tensors.tile_equals, *state),
            FILTERED=self._is_filtered,
        )
        return tensors.tokens

    def _stage_edits(
        self, slots: Sequence[int], samples: Sequence[SamplingMetadata], staging: Staging
    ) -> _Edits | None:
        lists = [_lists(sample) for sample in samples] or [_NO_LISTS] * len(self._params)
        masks = [sample.allowed_mask for sample in samples] or [None] * len(self._params)
        rows = [
            row
            for row, params in enumerate(self._params)
            if params.has_penalties or masks[row] is not None or any(map(len, lists[row]))
        ]
        if not rows:
            return None
        sources = np.full(len(self._params), -1, np.int32)
        sources[rows] = np.arange(len(rows))
        penalized = [slot if params.has_penalties else -1 for slot, params in zip(slots, self._params, strict=True)]
        words = [mask_words(mask, self._vocab_size) for mask in masks if mask is not None]
        has_mask = np.array([masks[row] is not None for row in rows])
        mask_numbers = np.where(has_mask, np.cumsum(has_mask) - 1, -1)
        parts = [lists[row][kind] for kind in range(len(_NO_LISTS)) for row in rows]
        ends = np.cumsum([0, *map(len, parts)])
        starts = np.stack([ends[first : first + len(rows) + 1] for first in range(0, len(parts), len(rows))])
        tokens = np.concatenate(parts)
        biases = [value for row in rows for _, value in self._params[row].logit_bias] if samples else []
        values = np.concatenate([np.zeros(len(tokens) - len(biases)), biases])
        return _Edits(
            sources=staging.add(sources),
            slots=staging.add(np.array(penalized, np.int32)),
            rows=staging.add(np.array(rows, np.int32)),
            mask_numbers=staging.add(mask_numbers.astype(np.int32)),
            masks=staging.add(np.stack(words) if words else np.zeros((1, 1), np.int32)),
            starts=staging.add(starts.astype(np.int32)),
            tokens=staging.add(np.append(tokens, 0).astype(np.int32)),
            biases=staging.add(np.append(values, 0).astype(np.float32)),
            num_edits=len(rows),
            has_masks=bool(words),
            has_lists=len(tokens) > 0,
        )


Lists = tuple[NDArray[Any], ...]
_NO_LISTS: Lists = (np.zeros(0, np.int64),) * 4


def _lists(sample: SamplingMetadata) -> Lists:
    """Allowed tokens, ends of bad words, banned ones, and those with a bias, each once."""
    biased = [token for token, _ in sample.params.logit_bias]
    return (*map(_once, (sample.params.allowed_token_ids or (), sample.bad_word_ends(), sample.banned_tokens)),
            np.array(biased, np.int64))  # fmt: skip


def _once(tokens: Iterable[int]) -> NDArray[np.int64]:
    return np.array(sorted(set(tokens)), np.int64)


class _Step:
    """The memory of one step's drawing, and its launches. `state`: thresholds, histograms and tokens of the rows."""

    def __init__(self, logits: Tensor, num_edits: int) -> None:
        self._logits = logits
        num_rows, vocab_size = logits.shape
        self._tile = sample_kernels.tile_sizes(vocab_size)
        tiles, blocks = self._tile["TILES"], self._tile["TILES"] * self._tile["TILE"] // SAMPLE_BLOCK

        def empty(dtype: torch.dtype, *shape: int) -> Tensor:
            return torch.empty(shape, dtype=dtype, device=logits.device)

        self.processed = empty(torch.float32, max(1, num_edits * vocab_size))
        self.live = empty(torch.int32, max(1, num_edits * tiles))
        self.tile_maxima = empty(torch.float32, num_rows, tiles)
        self.block_maxima = empty(torch.float32, num_rows, blocks)
        self.tile_weights = empty(torch.int64, num_rows, tiles)
        self.tile_equals = empty(torch.int32, num_rows, tiles)
        self.chosen = empty(torch.int32, num_rows, SAMPLE_BEST)
        self.candidates = empty(torch.int64, num_rows, SAMPLE_BEST)
        self.tokens = empty(torch.int64, num_rows)
        histograms = empty(torch.int64, num_rows, SAMPLE_LEVELS, SAMPLE_BINS)
        self.state = empty(torch.float32, num_rows), histograms, self.tokens

    def launch(self, kernel: Any, *operands: object, **constants: int | bool) -> None:
        """A program for each tile of each row; after the operands come vocabulary and stride."""
        self._launch(
            kernel,
            (len(self._logits), self._num_tiles),
            operands,
            sample_kernels.num_warps(self._tile["TILE"]),
            constants,
        )

    def launch_rows(self, kernel: Any, *operands: object, **constants: int | bool) -> None:
        """As `launch`, a program for each row."""
        warps = sample_kernels.BEST_WARPS if "CHOSEN" in constants else 8
        self._launch(kernel, (len(self._logits),), operands, warps, constants)

    def edit(self, edits: _Edits) -> None:
        """Masks and lists of tokens, into `processed`."""
        # Of a vocabulary alone: kernels would be compiled anew for the one word where there is no mask.
        rows, mask_stride = edits.rows.tensor, int(triton.cdiv(self._logits.shape[1], 32))
        operands = (self._logits, self.processed, rows, edits.masks.tensor, edits.mask_numbers.tensor)
        sizes = (self._logits.shape[1], self._logits.stride(0), mask_stride)
        warps, starts = sample_kernels.num_warps(self._tile["TILE"]), edits.starts.tensor
        processors._copy_kernel[(edits.num_edits, self._num_tiles)](
            *(*operands, starts, self.live, *sizes), **self._tile, num_warps=warps
        )
        if edits.has_lists:
            lists = (starts, edits.tokens.tensor, edits.biases.tensor, self.live, edits.num_edits)
            processors._edit_kernel[(edits.num_edits,)](
                *(*operands, *lists, *sizes), LIST=processors.LIST_TILE, **self._tile, num_warps=warps
            )

    @property
    def _num_tiles(self) -> int:
        return int(triton.cdiv(self._logits.shape[1], self._tile["TILE"]))

    def _launch(
        self, kernel: Any, grid: tuple[int, ...], operands: Sequence[object], warps: int, constants: dict[str, int]
    ) -> None:
        sizes = (self._logits.shape[1], self._logits.stride(0))
        # A product and a sum are rounded one after the other, as on the CPU.
        kernel[grid](*operands, *sizes, **self._tile, **constants, num_warps=warps, enable_fp_fusion=False)
