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
from cairn.runner.batch_builder import BatchPlaces, Row, build_batch
from cairn.runner.block_tables import BlockTables
from cairn.runner.checkpoint import CheckpointFiles
from cairn.runner.content import ImageCounts, Vision, row_content
from cairn.runner.memory import LiveStates, new_pool, paged_layers
from cairn.runner.sampler import draw
from cairn.runner.self_test import check_row_independence
from cairn.runner.slots import Sample, Slots
from cairn.runner.token_logprobs import logprobs_of, score
from cairn.step import SAMPLED, Logprobs, PrefillRow, SampledToken, Scored, Snapshot, StepPlan, StepResult
from cairn.types import Keys, Pages

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
        snapshots: Sequence[Snapshot],
    ) -> None:
        self.paged = paged
        self.recurrent = recurrent
        self._files = files
        self._snapshots = snapshots

    def keep(self, keep: int, layer: int, conv: Tensor, state: Tensor) -> None:
        """See `Memory.keep`."""
        self._files.write_layer(self._snapshots[keep].pages, layer, conv, state)


class Runner:
    """Holds the pages and the running states of one model and runs plans on them. One thread only.

    Plans are taken as they come: `cairn.runner.plan_check` looks at them where that is asked for.

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
        # a table has no more pages than the pool: its pages are distinct
        self._tables = BlockTables(layout.groups, num_slots, num_pages)
        self._slots = Slots()

    def self_test(self) -> None:
        """In exact mode: checks on this rank's weights that fixed tiles make rows independent. Raises ConfigError."""
        if self._exact:
            check_row_independence(self._model.linears)

    def run(self, plan: StepPlan) -> StepResult:
        """Carry a plan out, in the order that `cairn.step` gives."""
        with torch.inference_mode():
            self._slots.apply(plan)
            self._move(plan)
            self._tables.apply(plan)
            scored = self._forward(plan) if plan.num_rows else ()
            sampled = self._sample(plan)
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
        for save in plan.saves:
            self._save(save.slot, save.pages)

    def _restore(self, slot: int, pages: Pages) -> None:
        self._files.read_hidden(pages, self._live.hidden[slot])
        for number, layer in enumerate(self._live.recurrent):
            self._files.read_layer(pages, number, layer.conv[slot], layer.state[slot])

    def _save(self, slot: int, pages: Pages) -> None:
        self._files.write_hidden(pages, self._live.hidden[slot])
        for number, layer in enumerate(self._live.recurrent):
            self._files.write_layer(pages, number, layer.conv[slot], layer.state[slot])

    def _rows(self, plan: StepPlan) -> list[Row]:
        """The plan's rows, decode rows first."""
        rows = []
        for slot, start, token, write_from in plan.decodes:
            own = np.array([self._slots.sampled_token(slot, start) if token == SAMPLED else token], np.int64)
            rows.append(self._row(slot, start, own, write_from, decode=True))
        for row in plan.prefills:
            rows.append(self._row(row.slot, row.start, row.tokens, row.kv_write_from, decode=False))
        return rows

    def _row(self, slot: int, start: int, tokens: Keys, kv_write_from: int, *, decode: bool) -> Row:
        end = start + len(tokens)
        pages, images = self._tables.pages_of(slot, end), self._slots.admit(slot).images
        return Row(slot, start, end, tokens, pages, kv_write_from, decode, images)

    def _forward(self, plan: StepPlan) -> tuple[Scored, ...]:
        rows, snapshots = self._rows(plan), plan.snapshots
        for row in rows:
            if row.start == 0:
                self._live.clear(row.slot)
        places = BatchPlaces(rows, self._exact)
        communicator = self._model.communicator
        contents = [row_content(row, self.vision, communicator, self._live.hidden) for row in rows]
        batch = build_batch(places, snapshots, self.layout.groups, contents)
        memory = _StepMemory(self._paged, self._live.recurrent, self._files, snapshots)
        hidden = self._model.forward(batch, memory)
        self.forward_passes += 1
        last = [places.row_of(index, row.end - 1) for index, row in enumerate(rows)]
        self._live.hidden[[row.slot for row in rows]] = hidden[last]
        for snapshot in snapshots:
            self._files.write_hidden(snapshot.pages, hidden[places.row_of(snapshot.row, snapshot.position - 1)])
        first = places.first[len(plan.decodes) :]
        return tuple(
            scored for row, at in zip(plan.prefills, first, strict=True) for scored in self._score(row, hidden[at:])
        )

    def _score(self, row: PrefillRow, hidden: Tensor) -> Iterator[Scored]:
        """`hidden`: from the row's first token on. All ranks take part: each has a share of the logits."""
        if row.score is None:
            return
        position = row.start + 1
        for logprobs in score(row.score, hidden, self._model.logits):
            yield Scored(row.slot, position, logprobs)
            position += len(logprobs.ranks)

    def _sample(self, plan: StepPlan) -> tuple[SampledToken, ...]:
        wanted = list(self._slots.samples(plan))
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
            drawn = [draw(row, own) for (_, own), row in zip(wanted, logits, strict=True)]
            told = [_told(row, own, token) for (_, own), row, token in zip(wanted, logits, drawn, strict=True)]
        sampled = []
        for (slot, own), token, logprobs in zip(wanted, communicator.broadcast(drawn), told, strict=True):
            self._slots.add_token(slot, own.position, token)
            sampled.append(SampledToken(slot, token, logprobs))
        return tuple(sampled)


def _told(logits: Tensor, sample: Sample, token: int) -> Logprobs | None:
    return None if sample.logprobs is None else logprobs_of(logits[None], torch.tensor([token]), sample.logprobs)
