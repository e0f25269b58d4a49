"""The runner: carries a StepPlan out on the model's memory. It knows slots, pages and files, and no kind of layer.

Where the model is cut among ranks, each has a runner of its own, and all of them are given the same plans.
"""

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from cairn.cache.layout import CacheLayout
from cairn.layers.memory import PagedLayer, RecurrentLayer
from cairn.layers.model import Model
from cairn.runner.batch_builder import BatchBuilder, RowContent
from cairn.runner.block_tables import table_entries
from cairn.runner.checkpoint import CheckpointFiles
from cairn.runner.content import ImageCounts, Vision, row_content
from cairn.runner.memory import LiveStates, new_pool, paged_layers, set_aside
from cairn.runner.penalties import TokenCounts
from cairn.runner.sampler import SamplingBatch, draw
from cairn.runner.self_test import check_row_independence
from cairn.runner.slots import Sample, Slots
from cairn.runner.staging import Staged, Staging
from cairn.runner.token_logprobs import logprobs_of_drawn, score
from cairn.step import (
    SAMPLED,
    Logprobs,
    PrefillRow,
    Restore,
    SampledToken,
    Save,
    Scored,
    Snapshot,
    StepPlan,
    StepResult,
)

__all__ = ["Observe", "Runner"]

Observe = Callable[[Sample, Tensor], None]
"""Called with each sampled row's logits, float32 [vocab]."""


class _StepMemory:
    """The memory of one step: what the model reads and writes, and where its snapshots go.

    `snapshot_files`: page lists, int64 [N, pages], in the batch's order.
    """

    def __init__(
        self,
        paged: Sequence[PagedLayer],
        recurrent: Sequence[RecurrentLayer],
        files: CheckpointFiles,
        snapshot_files: Tensor,
    ) -> None:
        self.paged = paged
        self.recurrent = recurrent
        self._files = files
        self._snapshot_files = snapshot_files

    def write_snapshots(self, layer: int, conv: Tensor, state: Tensor) -> None:
        """See `Memory.write_snapshots`."""
        self._files.write_layer(self._snapshot_files, layer, conv, state)


class _Staged:
    """What a step needs of the host, on the device: one copy takes all of it there."""

    def __init__(
        self,
        plan: StepPlan,
        layout: CacheLayout,
        max_pages: int,
        contents: Sequence[RowContent | None],
        to: torch.device,
    ) -> None:
        """`max_pages`: entries of a slot's block table. `contents`: see `BatchBuilder`."""
        staging = Staging()

        def ints(numbers: Iterable[int]) -> Staged:
            return staging.add(np.array(list(numbers), np.int64))

        def files(records: Sequence[Restore | Save | Snapshot]) -> Staged:
            shape = (len(records), layout.pages_per_checkpoint)
            return staging.add(np.array([record.pages for record in records], np.int64).reshape(shape))

        origins: dict[int, int] = {}  # copies are one after the other in the plan, and all at once on the device
        for copy in plan.copies:
            origins[copy.target] = origins.get(copy.source, copy.source)
        self.copies = ints(origins.values()), ints(origins)
        self.restores = ints(restore.slot for restore in plan.restores), files(plan.restores)
        self.saves = ints(save.slot for save in plan.saves), files(plan.saves)
        entries = table_entries(plan, len(layout.groups), max_pages)
        self.table_entries = [(staging.add(places), staging.add(pages)) for places, pages in entries]
        self.batch = BatchBuilder(plan, contents, staging)
        host = self.batch.host
        last_rows = host.cu_seqlens[host.snapshot_rows] + host.snapshot_offsets - 1
        self.snapshots = ints(last_rows), files(self.batch.snapshots)
        self.sampled = staging.add(plan.samples.slots.astype(np.int64))
        staging.send(to)


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
        device = self._device = self.pool.device
        self._max_pages, self.num_slots = num_pages, num_slots
        self._model = model
        self.vision = vision
        self.layout = layout
        self._exact = exact
        self._observe = observe
        self._paged = paged_layers(self.pool, model.spec, layout)
        self._live = LiveStates(model.spec, num_slots)
        self._files = CheckpointFiles(self.pool, model.spec, layout)
        # A table has no more pages than the pool: its pages are distinct.
        self._tables = [torch.zeros(num_slots + 1, num_pages, dtype=torch.int32, device=device) for _ in layout.groups]
        self._last_tokens = torch.zeros(num_slots + 1, dtype=torch.int64, device=device)
        self._slots = Slots()
        self._counts = TokenCounts(num_slots, model.vocab_size)

    def get_ready(self) -> None:
        """Before the first plan: kernels are compiled, and in exact mode this rank's weights show that fixed tiles make
        rows independent. Raises ConfigError if they do not."""
        # Nothing waits for it: what is used before it is there comes by page faults.
        threading.Thread(target=set_aside, args=(self.pool,), name="set_aside", daemon=True).start()
        self._model.kernels.warm_up(self._model.spec.dtype)
        if self._exact:
            check_row_independence(self._model.linears)

    def run(self, plan: StepPlan) -> StepResult:
        """Carry a plan out, in the order that `cairn.step` gives."""
        with torch.inference_mode():
            self._slots.apply(plan)
            self._count_histories(plan)
            staged = _Staged(plan, self.layout, self._max_pages, self._contents(plan), self._device)
            self._move(plan, staged)
            scored = self._forward(plan, staged) if plan.num_rows else ()
            sampled = self._sample(plan, staged)
        self.steps += 1
        return StepResult(plan.step, sampled, scored)

    @property
    def image_counts(self) -> ImageCounts | None:
        """What the vision model has done; None without one."""
        return None if self.vision is None else self.vision.counters

    def close(self) -> None:
        """Nothing runs beside it."""

    def _count_histories(self, plan: StepPlan) -> None:
        """Only rank 0 draws, and only penalties look at what was drawn before."""
        for admit in plan.admits:
            if admit.sampling.has_penalties and self._model.communicator.rank == 0:
                history = admit.history
                assert history is not None, f"slot {admit.slot}: penalties without what they look at"
                self._counts.admit(admit.slot, history[: admit.num_prompt_tokens], history[admit.num_prompt_tokens :])

    def _move(self, plan: StepPlan, staged: _Staged) -> None:
        if plan.copies:
            sources, targets = staged.copies
            self.pool[targets.tensor] = self.pool[sources.tensor]
        if plan.restores:
            slots, files = (each.tensor for each in staged.restores)
            self._live.hidden[slots] = self._files.read_hidden(files)
            for number, layer in enumerate(self._live.recurrent):
                layer.conv[slots], layer.state[slots] = self._files.read_layer(files, number)
        if plan.saves:
            slots, files = (each.tensor for each in staged.saves)
            self._files.write_hidden(files, self._live.hidden[slots])
            for number, layer in enumerate(self._live.recurrent):
                self._files.write_layer(files, number, layer.conv[slots], layer.state[slots])
        if plan.admits or plan.table_updates:
            for table, (places, pages) in zip(self._tables, staged.table_entries, strict=True):
                table.view(-1).index_copy_(0, places.tensor, pages.tensor)

    def _contents(self, plan: StepPlan) -> list[RowContent | None]:
        """What the plan's rows have besides text, decode rows first."""
        rows = []
        for slot, start, token, _ in plan.decodes:
            if token == SAMPLED:
                self._slots.sampled_token(slot, start)  # there has to be one
            rows.append((slot, start, start + 1))
        rows += [(row.slot, row.start, row.end) for row in plan.prefills]
        communicator, like = self._model.communicator, self._live.hidden
        return [
            row_content(start, end, self._slots.admit(slot).images, self.vision, communicator, like)
            for slot, start, end in rows
        ]

    def _forward(self, plan: StepPlan, staged: _Staged) -> tuple[Scored, ...]:
        batch = staged.batch.batch(self._tables, self._last_tokens, self._model.kernels)
        tokens, files = (each.tensor for each in staged.snapshots)
        hidden = self._model.forward(batch, _StepMemory(self._paged, self._live.recurrent, self._files, files))
        self.forward_passes += 1
        self._live.hidden[batch.slots] = hidden[batch.cu_seqlens[1:] - 1]
        self._files.write_hidden(files, hidden[tokens])
        first = batch.host.cu_seqlens[len(plan.decodes) :].tolist()
        return tuple(
            scored for row, at in zip(plan.prefills, first, strict=False) for scored in self._score(row, hidden[at:])
        )

    def _score(self, row: PrefillRow, hidden: Tensor) -> Iterator[Scored]:
        """`hidden`: from the row's first token on. All ranks take part: each has a share of the logits."""
        if row.score is None:
            return
        position = row.start + 1
        for logprobs in score(row.score, hidden, self._model.logits):
            yield Scored(row.slot, position, logprobs)
            position += len(logprobs.ranks)

    def _sample(self, plan: StepPlan, staged: _Staged) -> tuple[SampledToken, ...]:
        wanted = list(self._slots.samples(plan))
        if not wanted:
            return ()
        logits = self._model.logits(self._live.hidden[staged.sampled.tensor])
        if self._observe is not None:
            for (_, sample), row in zip(wanted, logits, strict=True):
                self._observe(sample, row)
        communicator = self._model.communicator
        drawn = [0] * len(wanted)
        told: list[Logprobs | None] = [None] * len(wanted)
        if communicator.rank == 0:
            slots, samples = zip(*wanted, strict=True)
            drawn = draw(logits, SamplingBatch.of(slots, samples, logits.shape[1]), self._counts)
            told = logprobs_of_drawn(logits, drawn, [sample.logprobs for sample in samples])
        tokens, sampled = communicator.broadcast(drawn), []
        on_device = torch.tensor(tokens, device=self._device)
        self._last_tokens[staged.sampled.tensor] = on_device
        penalized = [row for row, (_, sample) in enumerate(wanted) if sample.params.has_penalties]
        if penalized and communicator.rank == 0:
            self._counts.append([wanted[row][0] for row in penalized], on_device[penalized])
        for (slot, own), token, logprobs in zip(wanted, tokens, told, strict=True):
            self._slots.add_token(slot, own.position, token)
            sampled.append(SampledToken(slot, token, logprobs))
        return tuple(sampled)
