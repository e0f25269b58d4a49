"""The runner: carries a StepPlan out on the model's memory. It knows slots, pages and files, and no kind of layer.

Where the model is cut among ranks, each has a runner of its own, and all of them are given the same plans.
"""

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from cairn.cache.layout import CacheLayout
from cairn.layers.memory import PagedLayer, RecurrentLayer
from cairn.layers.model import Model
from cairn.runner.batch_builder import BatchPlaces, Ints, build_batch
from cairn.runner.checkpoint import CheckpointFiles
from cairn.runner.content import ImageCounts, Vision, row_content
from cairn.runner.memory import LiveStates, new_pool, paged_layers
from cairn.runner.penalties import TokenCounts
from cairn.runner.plan_check import PlanLimits
from cairn.runner.sampler import SamplingBatch, draw
from cairn.runner.self_test import check_row_independence
from cairn.runner.token_logprobs import logprobs_of_drawn, score
from cairn.step import FromStep, Keep, Logprobs, Row, Sample, SampledToken, Scored, StepPlan, StepResult
from cairn.types import Pages

__all__ = ["Observe", "Runner"]

Observe = Callable[[Sample, Tensor], None]
"""Called with each sampled row's logits, float32 [vocab]."""


class _StepMemory:
    """The memory of one step: what the model reads and writes, and where the states it hands over go."""

    def __init__(
        self,
        paged: Sequence[PagedLayer],
        recurrent: Sequence[RecurrentLayer],
        files: CheckpointFiles,
        keeps: Sequence[Keep],
    ) -> None:
        self.paged = paged
        self.recurrent = recurrent
        self._files = files
        self._keeps = keeps

    def keep(self, keep: int, layer: int, conv: Tensor, state: Tensor) -> None:
        """See `Memory.keep`."""
        self._files.write_layer(self._keeps[keep].pages, layer, conv, state)


class Runner:
    """Holds the pages and the running states of one model and runs plans on them. One thread only.

    `forward_passes` counts passes through the model's layers, `steps` the plans carried out; `pool` is the pages'
    memory, uint8 [num_pages + extra_pages, page_bytes]. Plans name the first `num_pages`; the extra ones behind them
    are for whoever moves pages between servers.

    On several ranks `run` waits for the others and raises EngineDead where one of them does not come. Rank 0 draws
    the tokens, and all others take them from there: they cannot drift apart.
    """

    def __init__(
        self,
        model: Model,
        layout: CacheLayout,
        num_pages: int,
        num_slots: int,
        exact: bool,
        observe: Observe | None = None,
        extra_pages: int = 0,
        vision: Vision | None = None,
    ) -> None:
        """`vision`: None for a model, or a server, without images.

        Raises ValueError where layout, model and `exact` do not fit together, ConfigError where the pages do not fit
        into memory.
        """
        if num_pages < 1 or num_slots < 1:
            raise ValueError(f"num_pages and num_slots must be positive: {num_pages}, {num_slots}")
        if extra_pages < 0:
            raise ValueError(f"extra_pages must not be negative: {extra_pages}")
        if exact != model.exact:
            raise ValueError(f"exact is {exact}, but the model was built with exact={model.exact}")
        self.forward_passes = 0
        self.steps = 0
        self.pool = new_pool(num_pages + extra_pages, layout.page_bytes)
        self._model = model
        self.vision = vision
        self.layout = layout
        self._exact = exact
        self._observe = observe
        self._paged = paged_layers(self.pool, model.spec, layout)
        self._live = LiveStates(model.spec, num_slots)
        self._files = CheckpointFiles(self.pool, model.spec, layout)
        aligned = exact and model.spec.recurrent is not None
        self._limits = PlanLimits(layout, num_pages, num_slots, model.vocab_size, aligned)
        self._counts = TokenCounts(num_slots, model.vocab_size)
        self._last_step: int | None = None
        self._sampled_steps: list[int | None] = [None] * num_slots
        self._sampled_tokens = [0] * num_slots

    def self_test(self) -> None:
        """In exact mode: checks on this rank's weights that fixed tiles make rows independent. Raises ConfigError."""
        if self._exact:
            check_row_independence(self._model.linears)

    def validate(self, plan: StepPlan) -> None:
        """Raises ValueError that names the record which cannot be carried out; then nothing has been done."""
        if self._last_step is not None and plan.step <= self._last_step:
            raise ValueError(f"step {plan.step} does not follow step {self._last_step}")
        self._limits.check(plan, self._sampled_steps)

    def run(self, plan: StepPlan) -> StepResult:
        """Carry a plan out, in the order that `cairn.step` gives. Raises ValueError as `validate` does."""
        self.validate(plan)
        with torch.inference_mode():
            self._move(plan)
            scored = self._forward(plan.rows, plan.keeps) if plan.rows else ()
            sampled = self._sample(plan)
        self._last_step = plan.step
        self.steps += 1
        return StepResult(plan.step, sampled, scored)

    @property
    def image_counts(self) -> ImageCounts | None:
        """What the vision model has done; None without one."""
        return None if self.vision is None else self.vision.counters

    def close(self) -> None:
        """Nothing runs beside it."""

    def _move(self, plan: StepPlan) -> None:
        for copy in plan.copies:
            self.pool[copy.target] = self.pool[copy.source]
        for restore in plan.restores:
            self._restore(restore.slot, restore.pages)
        for fork in plan.forks:
            self._live.copy(fork.source, fork.target)
            self._sampled_steps[fork.target] = self._sampled_steps[fork.source]
            self._sampled_tokens[fork.target] = self._sampled_tokens[fork.source]
        for save in plan.saves:
            self._save(save.slot, save.pages)

    def _restore(self, slot: int, pages: Pages) -> None:
        self._files.read_hidden(pages, self._live.hidden[slot])
        for number, layer in enumerate(self._live.recurrent):
            self._files.read_layer(pages, number, layer.conv[slot], layer.state[slot])
        self._sampled_steps[slot] = None

    def _save(self, slot: int, pages: Pages) -> None:
        self._files.write_hidden(pages, self._live.hidden[slot])
        for number, layer in enumerate(self._live.recurrent):
            self._files.write_layer(pages, number, layer.conv[slot], layer.state[slot])

    def _forward(self, rows: Sequence[Row], keeps: Sequence[Keep]) -> tuple[Scored, ...]:
        for row in rows:
            if row.start == 0:
                self._live.clear(row.slot)
        places = BatchPlaces(rows, self._exact)
        communicator = self._model.communicator
        contents = [row_content(row, self.vision, communicator, self._live.hidden) for row in rows]
        batch = build_batch(places, [self._tokens(row) for row in rows], keeps, self.layout.groups, contents)
        memory = _StepMemory(self._paged, self._live.recurrent, self._files, keeps)
        hidden = self._model.forward(batch, memory)
        self.forward_passes += 1
        last = [places.row_of(index, row.end - 1) for index, row in enumerate(rows)]
        self._live.hidden[[row.slot for row in rows]] = hidden[last]
        for row in rows:
            self._sampled_steps[row.slot] = None
        for keep in keeps:
            self._files.write_hidden(keep.pages, hidden[places.row_of(keep.row, keep.position - 1)])
        return tuple(part for index, row in enumerate(rows) for part in self._score(row, hidden[places.first[index] :]))

    def _score(self, row: Row, hidden: Tensor) -> Iterator[Scored]:
        """`hidden`: from the row's first token on. All ranks take part: each has a share of the logits."""
        if row.score is None:
            return
        position = row.start + 1
        for logprobs in score(row.score, hidden, self._model.logits):
            yield Scored(row.slot, position, logprobs)
            position += len(logprobs.ranks)

    def _tokens(self, row: Row) -> Ints:
        if isinstance(row.tokens, FromStep):
            return np.array([self._sampled_tokens[row.slot]], dtype=np.int64)
        return row.tokens

    def _sample(self, plan: StepPlan) -> tuple[SampledToken, ...]:
        wanted = [(row.slot, row.sample) for row in plan.rows if row.sample is not None]
        wanted += [(only.slot, only.sample) for only in plan.sample_only]
        if not wanted:
            return ()
        logits = self._model.logits(self._live.hidden[[slot for slot, _ in wanted]])
        if self._observe is not None:
            for (_, sample), row in zip(wanted, logits, strict=True):
                self._observe(sample, row)
        communicator = self._model.communicator
        drawn = [0] * len(wanted)
        told: list[Logprobs | None] = [None] * len(wanted)
        if communicator.rank == 0:
            slots, samples = zip(*wanted, strict=True)
            for slot, sample in wanted:
                if sample.params.has_penalties:
                    self._counts.follow(slot, sample)
            drawn = draw(logits, SamplingBatch.of(slots, samples, logits.shape[1]), self._counts)
            told = logprobs_of_drawn(logits, drawn, [sample.logprobs for sample in samples])
        sampled = []
        for (slot, _), token, logprobs in zip(wanted, communicator.broadcast(drawn), told, strict=True):
            self._sampled_steps[slot], self._sampled_tokens[slot] = plan.step, token
            sampled.append(SampledToken(slot, token, logprobs))
        return tuple(sampled)
