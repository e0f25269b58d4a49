"""The runner: carries a StepPlan out on the model's memory. It knows slots, pages and files, and no kind of layer.

Where the model is cut among ranks, each has a runner of its own, and all of them are given the same plans.
"""

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from cairn.cache.layout import CacheLayout
from cairn.kernels.staging import Staging
from cairn.layers.memory import PagedLayer, RecurrentLayer
from cairn.layers.model import Model
from cairn.runner.batch_builder import RowContent
from cairn.runner.checkpoint import CheckpointFiles
from cairn.runner.content import ImageCounts, Vision, row_content
from cairn.runner.contract import StepRunner
from cairn.runner.launched_step import LaunchedStep
from cairn.runner.memory import LiveStates, new_pool, paged_layers, set_aside
from cairn.runner.penalties import TokenCounts
from cairn.runner.self_test import check_row_independence
from cairn.runner.slot_arrays import SlotArrays
from cairn.runner.slots import Sample, Slots
from cairn.step import StepPlan, StepResult, TokenMasks

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


class Runner(StepRunner):
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
        device = model.spec.device
        self.pool = new_pool(num_pages + extra_pages, layout.page_bytes, device)
        self.num_slots = num_slots
        self._model = model
        self.vision = vision
        self.layout = layout
        self._exact = exact
        self._observe = observe
        self._paged = paged_layers(self.pool, model.spec, layout)
        self._live = LiveStates(model.spec, num_slots)
        self._files = CheckpointFiles(self.pool, model.spec, layout)
        # A table has no more pages than the pool: its pages are distinct.
        self._arrays = SlotArrays(len(layout.groups), num_slots, num_pages, device)
        self._slots = Slots()
        self._counts = TokenCounts(num_slots, model.vocab_size, device)
        self._out: deque[LaunchedStep] = deque()

    def get_ready(self) -> None:
        """Before the first plan: kernels are compiled, and in exact mode this rank's weights show that fixed tiles make
        rows independent. Raises ConfigError if they do not."""
        if self.pool.device.type == "cpu":
            # Nothing waits for it: what is used before it is there comes by page faults.
            threading.Thread(target=set_aside, args=(self.pool,), name="set_aside", daemon=True).start()
        self._model.kernels.warm_up(self._model.spec.dtype)
        if self._exact:
            check_row_independence(self._model.linears)

    def launch(self, plan: StepPlan) -> None:
        """Carry a plan out, in the order that `cairn.step` gives, up to the logits. All steps before it have to be
        drawn; they need not be collected."""
        assert not self._out or self._out[-1].is_drawn, f"step {plan.step} before the one before it was drawn"
        with torch.inference_mode():
            self._slots.launch(plan)
            step = LaunchedStep(plan, self._contents(plan), self._model.kernels)
            changes = [self._arrays.stage(plan, step.staging)]
            if self._model.communicator.rank == 0:
                step.stage_draws(self._slots, self._model.vocab_size)
                changes += self._stage_histories(plan, step.staging)
            step.staging.send(self._model.spec.device)
            self._move(step)
            for change in changes:
                change()
            if plan.num_rows:
                self._forward(step)
            if len(plan.samples):
                step.logits = self._model.logits(self._live.hidden[step.sampled_slots.tensor])
        self._out.append(step)

    def draw(self, step: int, masks: TokenMasks) -> None:
        """Draw the tokens of the step that was launched last. Where a mask, a penalty or a bad word is looked at, all
        steps before it have to be collected."""
        launched = self._out[-1]
        assert launched.plan.step == step and not launched.is_drawn, f"step {step} is not to be drawn now"
        with torch.inference_mode():
            launched.bring_back(None if launched.logits is None else self._draw(launched, launched.logits, masks))

    def collect(self, step: int) -> StepResult:
        """Waits for the oldest step that is out: its tokens are known, and all that it writes is written."""
        launched = self._out.popleft()
        assert launched.plan.step == step, f"step {step} is not to be collected now"
        result = launched.result()
        self._slots.collect(result.sampled)
        self.steps += 1
        return result

    @property
    def image_counts(self) -> ImageCounts | None:
        """What the vision model has done; None without one."""
        return None if self.vision is None else self.vision.counters

    def close(self) -> None:
        """Nothing runs beside it."""

    def _stage_histories(self, plan: StepPlan, staging: Staging) -> Iterator[Callable[[], None]]:
        """Only penalties look at what was drawn before."""
        for admit in plan.admits:
            if admit.sampling.has_penalties:
                history = admit.history
                assert history is not None, f"slot {admit.slot}: penalties without what they look at"
                prompt, answer = np.split(history, [admit.num_prompt_tokens])
                yield self._counts.admit(admit.slot, prompt, answer, staging)

    def _move(self, step: LaunchedStep) -> None:
        plan = step.plan
        if plan.copies:
            targets, sources = step.copies
            self.pool[targets.tensor] = self.pool[sources.tensor]
        if plan.restores:
            slots, files = (each.tensor for each in step.restores)
            self._live.hidden[slots] = self._files.read_hidden(files)
            for number, layer in enumerate(self._live.recurrent):
                layer.conv[slots], layer.state[slots] = self._files.read_layer(files, number)
        if plan.saves:
            slots, files = (each.tensor for each in step.saves)
            self._files.write_hidden(files, self._live.hidden[slots])
            for number, layer in enumerate(self._live.recurrent):
                self._files.write_layer(files, number, layer.conv[slots], layer.state[slots])

    def _contents(self, plan: StepPlan) -> list[RowContent | None]:
        """What the plan's rows have besides text, decode rows first."""
        if not self._slots.with_images:
            return [None] * plan.num_rows
        decodes = zip(plan.decodes.slots.tolist(), plan.decodes.positions.tolist(), strict=True)
        rows = [(slot, position, position + 1) for slot, position in decodes]
        rows += [(row.slot, row.start, row.end) for row in plan.prefills]
        communicator, like = self._model.communicator, self._live.hidden
        return [
            row_content(start, end, self._slots.admit(slot).images, self.vision, communicator, like)
            for slot, start, end in rows
        ]

    def _forward(self, step: LaunchedStep) -> None:
        batch = step.batch.batch(self._arrays)
        rows, files = (each.tensor for each in step.snapshots)
        hidden = self._model.forward(batch, _StepMemory(self._paged, self._live.recurrent, self._files, files))
        self.forward_passes += 1
        self._live.hidden[batch.state_slots] = hidden[batch.cu_seqlens[1:] - 1]
        if step.plan.snapshots:
            self._files.write_hidden(files, hidden[rows])
        # All ranks take part: each has a share of the logits.
        for slot, position, first, scoring in step.scorings:
            for scored in scoring.find(hidden[first:], self._model.logits):
                step.add_score(slot, position, scored)
                position += len(scored.ranks)

    def _draw(self, step: LaunchedStep, logits: Tensor, masks: TokenMasks) -> Tensor:
        wanted, samples = step.plan.samples, list[Sample]()
        has_rules = masks or wanted.bans_stop_tokens.any() or (step.sampler is not None and step.sampler.has_rules)
        if has_rules or self._observe is not None:
            samples = list(self._slots.samples(step.plan, masks))
        if self._observe is not None:
            for sample, row in zip(samples, logits, strict=True):
                self._observe(sample, row)
        if step.sampler is not None:
            tokens = step.sampler.draw(logits, wanted.slots.tolist(), samples, self._counts)
        else:
            tokens = torch.zeros(len(wanted), dtype=torch.int64, device=logits.device)
        tokens = self._model.communicator.broadcast(tokens)
        self._arrays.last_tokens[step.sampled_slots.tensor] = tokens
        return tokens
