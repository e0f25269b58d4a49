"""The runner: executes a StepPlan on the model's memory. It knows slots, pages and state pages, no kinds of
layers.

Where the model is cut among ranks, each has a runner of its own, and all of them are given the same plans.
"""

from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cairn.cache.layout import CacheLayout
from cairn.kernels.contract import Kernels
from cairn.kernels.graphs import Graphs
from cairn.kernels.operations import operations_of
from cairn.kernels.sampling.metadata import SamplingMetadata, TokenHistory
from cairn.kernels.sampling.sampler import SampledRows
from cairn.kernels.staging import StagedArray, Staging, StepBuffers
from cairn.layers.memory import FoldLayer, MemorySpec, PagedLayer
from cairn.layers.model import Model
from cairn.runner.batch_builder import MOST_STOP_TOKENS, SlotTensors
from cairn.runner.checkpoint import CheckpointPages
from cairn.runner.contract import EncoderCounters, StepRunner
from cairn.runner.decode_graphs import DecodeGraphs
from cairn.runner.head_drafting import HeadDrafter
from cairn.runner.input_batch import InputBatch, pages_of_table
from cairn.runner.launched_step import LaunchedStep, StepInputs
from cairn.runner.logprobs import SampledLogprobs
from cairn.runner.memory import (
    LiveStates,
    PoolPopulation,
    allocate_pool,
    explain_step_memory,
    paged_layers,
    torch_dtype,
)
from cairn.runner.row_independence import check_row_independence
from cairn.runner.verification import DraftVerifier, FoldBatch, KeptInputs, Observe
from cairn.runner.vision import MultimodalInputs, VisionEncoder, multimodal_inputs
from cairn.step import StepPlan, StepResult, TokenMasks
from cairn.types import Keys

__all__ = ["Observe", "Runner"]

EVERY_STEP = frozenset(("build_metadata", "step_graphs"))
"""What steps of any model ask of the kernels, beside its layers."""


class _StepMemory:
    """The memory of one forward pass. `snapshot_pages`: page lists, int64 [n, pages], in the batch's order. `kept`: of
    a pass with verify rows."""

    def __init__(
        self,
        paged: Sequence[PagedLayer],
        live: LiveStates,
        checkpoints: CheckpointPages,
        snapshot_pages: Tensor,
        kept: KeptInputs | None = None,
    ) -> None:
        self.paged = paged
        self.recurrent, self.hidden = live.recurrent, live.hidden
        self._checkpoint_pages = checkpoints
        self._snapshot_pages = snapshot_pages
        self._kept = kept

    def write_snapshots(self, layer: int, conv: Tensor, state: Tensor) -> None:
        """See `Memory.write_snapshots`."""
        self._checkpoint_pages.write_layer(self._snapshot_pages, layer, conv, state)

    def keep_inputs(self, inputs: Tensor, fold: FoldLayer) -> None:
        """See `Memory.keep_inputs`."""
        assert self._kept is not None
        self._kept.keep(inputs, fold)


class Runner(StepRunner):
    """Executes plans on the pages and live states of one model. One thread only. Plans are not checked here: see
    `CheckedRunner`.

    `forward_passes`: passes through the model's layers. `steps`: collected plans. `pool`: the memory of the pages,
    uint8 [num_pages, page_bytes].

    On several ranks `launch` and `sample` wait for the others and raise EngineDead where one is missing. Rank 0 samples
    the tokens and broadcasts them, so ranks cannot drift apart.
    """

    def __init__(
        self,
        model: Model,
        layout: CacheLayout,
        num_pages: int,
        num_slots: int,
        exact: bool,
        observe: Observe | None = None,
        vision: VisionEncoder | None = None,
        max_model_len: int | None = None,
    ) -> None:
        """`vision`: None for a model, or a server, without images. `observe`: on rank 0 alone. `max_model_len`: tokens
        of the longest sequence; None for as many as find room in the pages.

        Raises ValueError where layout, model and `exact` do not fit together, ConfigError where the pages do not fit
        into memory.
        """
        if num_pages < 1 or num_slots < 1:
            raise ValueError(f"num_pages and num_slots must be positive: {num_pages}, {num_slots}")
        if exact != model.exact:
            raise ValueError(f"exact is {exact}, but the model was built with exact={model.exact}")
        self.forward_passes = self.steps = 0
        self.layout = layout
        self.num_slots = num_slots
        self.vision = vision
        self.pool = allocate_pool(num_pages, layout.page_bytes, model.spec.device)
        self._model = model
        self._observe = observe
        self._paged = paged_layers(self.pool, model.spec, layout)
        self._live = LiveStates(model.spec, num_slots)
        self._checkpoint_pages = CheckpointPages(self.pool, model.spec, layout, self._live, model.kernels)
        table_pages = pages_of_table(layout, num_pages, max_model_len)
        self._slot_tensors = SlotTensors(len(layout.groups), num_slots, table_pages, model.spec.device)
        self._input_batch = InputBatch(num_slots)
        self._sampled: tuple[tuple[int, bytes], tuple[SampledRows, list[int | None] | None]] | None = None
        self._counts = model.kernels.token_counts(num_slots, model.vocab_size, model.spec.device)
        self._verifier = DraftVerifier(model, self._counts, self._input_batch, observe)
        self._kept: KeptInputs | None = None
        self._drafted: Collection[int] = ()
        self._population: PoolPopulation | None = None
        self._launched: deque[LaunchedStep] = deque()
        self._late_restores: tuple[Tensor, Tensor] | None = None
        is_alone = model.spec.device.type == "cpu" and model.communicator.size == 1
        self._restores_late = is_alone and self._checkpoint_pages.has_hidden_apart
        self._inference_mode = torch.inference_mode()
        self._buffers: list[StepBuffers] = []
        no_pages = torch.zeros(0, layout.pages_per_checkpoint, dtype=torch.int64, device=model.spec.device)
        make_memory = partial(_StepMemory, self._paged, self._live, self._checkpoint_pages, no_pages)
        self._graphs = DecodeGraphs(model, make_memory, self._live.hidden, self._slot_tensors)
        self._head: HeadDrafter | None = None
        if model.head is not None:
            self._head = HeadDrafter(model, make_memory(None), self._input_batch, self._slot_tensors, vision)

    def capture_graphs(
        self,
        graphs: Graphs,
        sizes: Sequence[int],
        max_model_len: int,
        captured: Callable[[int], object],
        warmed: Callable[[int], object] = lambda size: None,
    ) -> None:
        """From now on decode steps of up to max(sizes) rows are replayed; see `DecodeGraphs`. To be called before the
        first plan, and after `get_ready`, by all ranks at the same time."""
        with torch.inference_mode():
            self._graphs.capture(graphs, sizes, max_model_len, captured, warmed)

    def record_decodes(self, max_num_seqs: int, max_model_len: int) -> None:
        """From now on decode steps of up to `max_num_seqs` rows are recorded as they are computed, where the kernels
        have what records them. To be called before the first plan."""
        graphs, folds = self._model.kernels.step_graphs(), self._model.kernels.step_graphs()
        if graphs is not None and folds is not None and max_num_seqs:
            self._graphs.record(graphs, folds, max_num_seqs, max_model_len)
            if self._head is not None:
                # in memory of their own: they come between a pass and what is read of it
                drafts = self._model.kernels.step_graphs()
                assert drafts is not None
                self._head.record(drafts, max_model_len)

    def get_ready(self) -> None:
        """Compile the kernels; in exact mode also check that rows are independent with this rank's
        weights. To be called before the first plan. Raises ConfigError if they do not."""
        if self.pool.device.type == "cpu":
            self._population = PoolPopulation(self.pool)
            self._population.reach(-1)
        spec = self._model.spec
        state_dtype = torch.float32 if spec.recurrent is None else torch_dtype(spec.recurrent.state_dtype)
        self._model.kernels.warm_up(spec.dtype, operations_of(self._model) | EVERY_STEP, state_dtype)
        if self._model.exact:
            check_row_independence(self._model.linears)

    def launch(self, plan: StepPlan) -> None:
        """Execute a plan in the order that `cairn.step` gives, up to the logits. All steps before it have to be
        sampled; they need not be collected."""
        assert not self._launched or self._launched[-1].is_sampled, f"step {plan.step} before the last one was sampled"
        try:
            with self._inference_mode:
                self._launched.append(self._launch(plan))
        except torch.OutOfMemoryError as error:
            raise explain_step_memory(error, plan) from error

    def _launch(self, plan: StepPlan) -> LaunchedStep:
        self._restore_late()
        if not plan.num_seqs:
            self._model.kernels.begin_step(0)
        continues = self._input_batch.update(plan)
        if self._population is not None:
            self._population.reach(last_new_page(plan))
        if plan.is_open:
            plan = self._draft(plan)
        step = self._prepare(plan, continues=continues)
        hidden = self._forward(step) if plan.num_seqs else None
        if len(plan.samples) or plan.verifies:
            step.logits = self._logits(step.inputs, hidden)
        return step

    def drafts(self, step: int) -> Mapping[int, Keys]:
        plan = self._launched[-1].plan
        assert plan.step == step, f"step {step} is not the one that was launched last"
        return {row.slot: row.tokens[1:] for row in plan.verifies if row.slot in self._drafted}

    def _draft(self, plan: StepPlan) -> StepPlan:
        """Do what comes before the rows of a plan, and return them with the drafts that they lack. Raises LookupError
        for a model without a head."""
        if self._head is None:
            raise LookupError(f"step {plan.step} leaves drafts to the model, which has no head for them")
        moves, rows = plan.split()
        self._buffers.append(self._prepare(moves, continues=False).inputs.buffers)
        self._drafted = {row.slot for row in plan.verifies if row.is_open}
        return msgspec.structs.replace(rows, verifies=self._head.draft(plan.verifies))

    def _prepare(self, plan: StepPlan, *, continues: bool) -> LaunchedStep:
        """Bring a plan's arrays to the device, and do what comes before its rows. `continues`: see `DecodeRows`."""
        # A set that no step uses any more: there are as many as steps were out at once.
        buffers = self._buffers.pop() if self._buffers else StepBuffers(self._model.spec.device)
        inputs = StepInputs(
            plan,
            self._multimodal_inputs(plan),
            self._model.kernels,
            buffers,
            self._graphs,
            self._kept,
            continues=continues,
        )
        step = LaunchedStep(plan, inputs)
        writes = [self._slot_tensors.stage_updates(plan, inputs.staging)]
        if self._model.communicator.rank == 0:
            self._stage_sampling(step)
            if plan.admits:
                writes += self._stage_histories(plan, inputs.staging)
        inputs.staging.send(self._model.spec.device)
        self._move_states(step)
        for write in writes:
            write()
        self._kept = None
        return step

    def sample(self, step: int, masks: TokenMasks) -> None:
        """Sample the tokens of the step that was launched last. For masks, penalties and bad words all steps before it
        have to be collected."""
        launched = self._launched[-1]
        assert launched.plan.step == step and not launched.is_sampled, f"step {step} is not to be sampled now"
        try:
            with self._inference_mode:
                tokens = self._sample_all(launched, masks)
                slots = launched.inputs.continuing_slots
                launched.read_back(tokens, None if slots is None else self._slot_tensors.advanced(slots.tensor))
        except torch.OutOfMemoryError as error:
            raise explain_step_memory(error, launched.plan) from error

    def collect(self, step: int) -> StepResult:
        """Wait for the oldest launched step; returns its tokens. All that it writes is written then."""
        launched = self._launched.popleft()
        assert launched.plan.step == step, f"step {step} is not to be collected now"
        result = launched.result()
        self._buffers.append(launched.inputs.buffers)
        self._input_batch.append(result.slots, result.tokens)
        self._input_batch.append_verified(result.verified)
        self.steps += 1
        return result

    def settle(self, *, has_slots: bool = True) -> None:
        """See `StepRunner`: a full hit is answered before all of its state is in its slot."""
        if not has_slots:
            self._late_restores = None
        elif self._late_restores is not None:
            with self._inference_mode:
                self._restore_late()

    def _restore_late(self) -> None:
        if self._late_restores is not None:
            self._checkpoint_pages.restore(*self._late_restores)
            self._late_restores = None

    @property
    def rank(self) -> int:
        """Which of the ranks this is."""
        return self._model.communicator.rank

    @property
    def kernels(self) -> Kernels:
        """What the model is computed with."""
        return self._model.kernels

    @property
    def is_complete(self) -> bool:
        """Whether `collect` of the oldest launched step would return at once."""
        return self._launched[0].is_complete

    @property
    def encoder_counters(self) -> EncoderCounters | None:
        """None without a vision encoder."""
        return None if self.vision is None else self.vision.counters

    def close(self) -> None:
        """Give the graphs back. There is nothing to shut down."""
        self._graphs.release()
        if self._head is not None:
            self._head.release()

    def _stage_sampling(self, step: LaunchedStep) -> None:
        samples, staging = step.plan.samples, step.inputs.staging
        if len(samples):
            rows, num_top = self._sampled_rows(samples.slots)
            step.sampler = self._model.kernels.sampler(
                rows, samples.positions.tolist(), self._model.vocab_size, staging
            )
            if num_top is not None:
                token_ids = [params.logprob_token_ids for params in rows]
                step.logprobs = SampledLogprobs(num_top, staging, token_ids, self._model.kernels.logprobs)

    def _sampled_rows(self, slots: NDArray[np.int32]) -> tuple[SampledRows, list[int | None] | None]:
        """The sampling parameters of some slots, the same object as long as nobody else is in them; and for each how
        many of the best tokens are told of, None where nobody is told of any."""
        asked = self._input_batch.num_admits, slots.tobytes()
        if self._sampled is None or self._sampled[0] != asked:
            admits = [self._input_batch.admit(slot) for slot in slots.tolist()]
            num_top = [admit.logprobs for admit in admits]
            rows = SampledRows([admit.sampling for admit in admits], self._model.vocab_size)
            self._sampled = asked, (rows, num_top if any(number is not None for number in num_top) else None)
        return self._sampled[1]

    def _stage_histories(self, plan: StepPlan, staging: Staging) -> list[Callable[[], None]]:
        """The token counts of new requests with penalties."""
        histories = []
        for admit in plan.admits:
            if admit.sampling.has_penalties:
                assert admit.history is not None, f"slot {admit.slot}: penalties without a history"
                histories.append(TokenHistory(admit.slot, *np.split(admit.history, [admit.num_prompt_tokens])))
        return [self._counts.admit(histories, staging)] if histories else []

    def _move_states(self, step: LaunchedStep) -> None:
        """The plan's page copies, restores, folds and saves."""
        plan, inputs = step.plan, step.inputs
        for targets, sources in inputs.copies:
            self._model.kernels.copy_pages(self.pool, targets.tensor, sources.tensor)
        if plan.restores:
            slots, state_pages = inputs.restores
            restores = state_pages.tensor, slots.tensor
            # A first token is drawn from the hidden state. On devices nobody waits for the rest, and who writes to
            # pages beside the steps would have to wait for it.
            if self._restores_late and len(plan.samples) and not (plan.num_seqs or plan.folds or plan.saves):
                self._checkpoint_pages.restore_hidden(*restores)
                self._late_restores = restores
            else:
                self._checkpoint_pages.restore(*restores)
        if inputs.folds is not None:
            self._fold(inputs.folds)
        elif plan.folds and self._kept is not None:
            step.is_first |= not self._graphs.has_recorded_folds(self._kept)
            for pieces, saves in inputs.fold_parts:
                self._graphs.replay_folds(self._kept, pieces)
                if saves is not None:
                    self._save(*saves)
        if plan.saves:
            self._save(*inputs.saves)

    def _fold(self, folds: FoldBatch) -> None:
        assert self._kept is not None
        rows, state_pages = folds.snapshots
        memory = _StepMemory(self._paged, self._live, self._checkpoint_pages, state_pages.tensor)
        folds.run(memory, self._live.hidden, self._slot_tensors.block_tables)
        if folds.has_snapshots:
            self._checkpoint_pages.write_hidden(state_pages.tensor, self._kept.hidden, rows.tensor)

    def _save(self, slots: StagedArray, state_pages: StagedArray) -> None:
        """What lies in the slots now."""
        self._checkpoint_pages.save(state_pages.tensor, slots.tensor)

    def _multimodal_inputs(self, plan: StepPlan) -> list[MultimodalInputs | None]:
        """Of each row, in their order; empty where nobody has images."""
        if not self._input_batch.image_slots:
            return []
        decodes = zip(plan.decodes.slots.tolist(), plan.decodes.positions.tolist(), strict=True)
        rows = [(slot, position, position + 1) for slot, position in decodes]
        rows += [(row.slot, row.start, row.end) for row in plan.long_rows]
        communicator, like, has_head = self._model.communicator, self._live.hidden, self._model.head is not None
        return [
            multimodal_inputs(
                start, end, self._input_batch.admit(slot).images, self.vision, communicator, like, has_head
            )
            for slot, start, end in rows
        ]

    def _forward(self, step: LaunchedStep) -> Tensor | None:
        """Returns the final hidden states that the plan samples from, [samples, hidden], if these are all rows of the
        pass; else they are those in the slots."""
        inputs = step.inputs
        self.forward_passes += 1
        if inputs.graph is not None:
            shape, packed = inputs.graph
            step.is_first |= not self._graphs.has_recorded(shape)
            self._kept = self._graphs.replay(step.plan, shape, packed.tensor)
            if step.plan.snapshots:
                self._save(*inputs.snapshots)
            return None
        assert inputs.batch is not None
        batch = inputs.batch.batch(self._slot_tensors)
        rows, state_pages = inputs.snapshots
        host, verifies, slots = batch.host, step.plan.verifies, batch.state_slots
        if verifies:
            num_tokens = host.num_decode_tokens - host.num_decodes
            self._kept = KeptInputs(host.num_decodes, num_tokens, copies=num_tokens < host.num_tokens)
            self._kept.assign(verifies)
            # of sequences whose states stay as they are the hidden state does, too: nobody's slot takes what came
            slots = slots.clone()
            slots[host.num_decodes : host.first_prefill] = self.num_slots
        memory = _StepMemory(self._paged, self._live, self._checkpoint_pages, state_pages.tensor, self._kept)
        hidden = self._model.forward(batch, memory)
        is_last = host.num_tokens == host.num_seqs
        last = hidden if is_last else hidden[batch.cu_seqlens[1:] - 1]
        # a row that goes on after a stop token leaves its slot as it was
        samples_rows = step.plan.samples_rows and inputs.continuing_slots is None
        self._live.hidden.index_copy_(0, inputs.sampled_slots.tensor if samples_rows else slots.long(), last)
        if self._kept is not None:
            self._kept.keep_hidden(hidden)
        if step.plan.snapshots:
            self._checkpoint_pages.write_hidden(state_pages.tensor, hidden, rows.tensor)
        # All ranks take part: each has a share of the logits.
        for slot, position, first, prompt_logprobs in inputs.prompt_logprobs:
            for logprobs in prompt_logprobs.compute(hidden[first:], self._model.logits):
                step.add_prompt_logprobs(slot, position, logprobs)
                position += len(logprobs.ranks)
        return last if samples_rows else None

    def _logits(self, inputs: StepInputs, hidden: Tensor | None) -> Tensor:
        """Of the plan's samples, then of its verify rows: float32 [n, vocab]. `hidden`: see `_forward`."""
        if hidden is None:
            hidden = self._live.hidden.index_select(0, inputs.sampled_slots.tensor)
        if self._kept is not None:
            hidden = torch.cat([hidden, self._kept.verified_hidden])
        return self._model.logits(hidden)

    def _sample_all(self, step: LaunchedStep, masks: TokenMasks) -> Tensor | None:
        """The tokens of the plan's samples, None where it has none; those after its verify rows go into the step."""
        samples, verifies, logits = step.plan.samples, step.plan.verifies, step.logits
        if logits is None:
            return None
        if verifies:
            step.verified = self._verifier.verify(verifies, logits[len(samples) :], masks)
        if not len(samples):
            return None
        return self._sample(step, logits[: len(samples)] if verifies else logits, masks)

    def _sample(self, step: LaunchedStep, logits: Tensor, masks: TokenMasks) -> Tensor:
        samples, sampler = step.plan.samples, step.sampler
        metadata: list[SamplingMetadata] = []
        bans = np.count_nonzero(samples.bans_stop_tokens)
        has_processors = masks or bans or (sampler is not None and sampler.has_processors)
        if has_processors or self._observe is not None:
            metadata = list(self._input_batch.sampling_metadata(step.plan, masks))
        if self._observe is not None:
            for each, row in zip(metadata, logits, strict=True):
                self._observe(each, row)
        if sampler is not None:
            tokens = sampler.sample(logits, samples.slots.tolist(), metadata, self._counts)
        else:
            tokens = torch.zeros(len(samples), dtype=torch.int64, device=logits.device)
        tokens = self._model.communicator.broadcast(tokens)
        self._slot_tensors.last_tokens.index_copy_(0, step.inputs.sampled_slots.tensor, tokens)
        return tokens


def last_new_page(plan: StepPlan) -> int:
    """The largest number among the pages that a plan names for the first time, -1 for none."""
    pages = [update.pages for update in plan.table_updates]
    pages += [table for admit in plan.admits for table in admit.tables]
    pages += [snapshot.pages for snapshot in plan.snapshots]
    pages += [save.pages for save in plan.saves]
    return int(np.concatenate(pages).max(initial=-1)) if pages else -1


def slot_bytes(spec: MemorySpec, layout: CacheLayout, num_pages: int, max_model_len: int | None = None) -> int:
    """Bytes of one slot's states, block tables and tokens, of which a `Runner` has those of `num_slots` + 1."""
    nowhere = torch.device("meta")
    slot = SlotTensors(len(layout.groups), 0, pages_of_table(layout, num_pages, max_model_len), nowhere)
    slot.reserve_stop_tokens(MOST_STOP_TOKENS)
    tensors = (*LiveStates(replace(spec, device=nowhere), 0).tensors, *slot.tensors)
    return sum(tensor.untyped_storage().nbytes() for tensor in tensors)
