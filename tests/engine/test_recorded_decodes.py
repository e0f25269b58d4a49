"""Decode steps that are recorded and repeated leave the same bits everywhere as steps that are computed anew."""

import gc
from functools import partial
from itertools import cycle, product

import numpy as np
import pytest
import torch

from cairn.engine.build import build_core
from cairn.engine.contract import EngineConfig
from cairn.kernels.cpu.graphs import LoopSequence
from cairn.runner.runner import Runner
from cairn.scheduler.speculation import SpeculativeConfig
from cairn.step import DRAFTED
from doubles.drafters import KnowingDrafter
from doubles.engine_requests import generate_request
from models.covered import RECORDED
from models.gguf_files import write_gguf
from models.packed_checkpoints import FORMATS, write_packed
from tiers import by_run, first, first_of, long, more

FORMS = ("float32", "bfloat16", "int8", "int4")
SOME_FORMS = {
    *product(RECORDED.families[:3], FORMS),
    *((family, "bfloat16") for family in RECORDED.families),
    *zip(RECORDED.families[3:], cycle(("float32", "int8", "int4"))),
}
"""What a form is of matters to no other kernel but those of the family's layers, which the first three have most of."""

SEQS = 4
NONE = SpeculativeConfig(method="none")
"""How many drafts pay is measured, and so another number from one run to the next."""


def config_of(folder, form, **options):
    """A server that computes in one of `FORMS`."""
    quantization = form if form.startswith("int") else None
    dtype = "float32" if form == "float32" else "bfloat16"
    fields = {"dtype": dtype, "quantization": quantization, "max_num_batched_tokens": 256}
    return EngineConfig(model=str(folder), **fields, **options)


class Twin:
    """A core, and all that its runner has."""

    def __init__(self, folder, form, **options):
        options = {"max_num_seqs": SEQS, "kv_cache_memory_bytes": 4 << 20} | options
        config = config_of(folder, form, **options)
        self.core = build_core(config)
        self.runner: Runner = self.core._runner

    def submit(self, name, prompt, max_tokens, **options):
        keys = np.array(prompt, "<i8").tobytes()
        fields = {"seed": 1, "ignore_eos": True, "max_tokens": max_tokens} | options
        self.core.submit(generate_request(request_id=name, prompt=keys, **fields))

    def step(self):
        return [(output.request_id, list(output.token_ids)) for output in self.core.step()]

    def memory(self):
        """Without the slot that is nobody's."""
        runner = self.runner
        states = [part[:-1] for layer in runner._live.recurrent for part in (layer.conv, layer.state)]
        return [runner.pool, *states, runner._live.hidden[:-1], runner._slot_tensors.last_tokens[:-1]]

    def repeats(self, kind="replay"):
        """What repeats the steps, or the folds, that have been recorded."""
        passes = [getattr(each, kind) for each in self.runner._graphs._passes.values()]
        return [each for each in passes if each is not None]

    def spoil(self, folded=True):
        """What passes have allocated is rubbish from one step to the next, but for what the next fold reads. `folded`:
        there is none."""
        for recorder in [self.runner._graphs._fold_recorder, *[self.runner._graphs._recorder] * folded]:
            for block in recorder._memory._blocks:
                block.fill(0xFF)


def traffic(seed=0):
    """By step, the requests that come: one to four at a time, prompts over the ends of pages, and contexts over the end
    of a part of attention's, again and again, some sampled, some with penalties."""
    rng = np.random.default_rng(seed)
    lengths = {0: [5], 2: [63], 4: [500, 15], 30: [17, 64, 33, 128], 50: [1], 54: [3], 70: [509, 16, 7]}
    options = [{"temperature": 0.0}, {"temperature": 1.0}, {"temperature": 0.7, "presence_penalty": 1.0}]
    return {
        step: [(rng.integers(5, 300, length).tolist(), 12 + step % 7, options[length % 3]) for length in several]
        for step, several in lengths.items()
    }


def run_both(recorded, eager, steps=160):
    """Raises AssertionError where the two do not do the same."""
    coming, num_steps = traffic(), 0
    for step in range(steps):
        for place, (prompt, max_tokens, options) in enumerate(coming.get(step, ())):
            for twin in (recorded, eager):
                twin.submit(f"{step}-{place}", prompt, max_tokens, **options)
        if not (recorded.core.has_work or eager.core.has_work):
            continue
        num_steps += 1
        recorded.spoil()
        assert recorded.step() == eager.step(), step
        for found, wanted in zip(recorded.memory(), eager.memory(), strict=True):
            assert torch.equal(found.view(torch.uint8), wanted.view(torch.uint8)), step
    assert num_steps > 60 and not recorded.core.has_work


@pytest.mark.parametrize(
    ("family", "form"),
    by_run([("qwen3_5", "bfloat16"), ("qwen3_5_moe", "int8")], SOME_FORMS, product(RECORDED.families, FORMS)),
)
def test_a_repeated_step_leaves_the_bits_of_one_that_is_computed(family, form, made_model):
    folder = made_model(family)
    recorded, eager = Twin(folder, form, speculative=NONE), Twin(folder, form, enforce_eager=True, speculative=NONE)
    run_both(recorded, eager)
    assert len(recorded.repeats()) == SEQS and not eager.repeats()
    check_addresses(recorded)


STORED = ("mixed", "Q4_K", "MXFP4", "GPTQ desc_act", "AWQ", "W8A8", "MIXED_PRECISION", "Q8_0")
"""Published forms of weights: several kinds in one product, embeddings in codes, experts, inputs in another order."""


@pytest.mark.parametrize("name", first(1, STORED))
def test_a_repeated_step_of_weights_in_codes_leaves_the_bits_of_one_that_is_computed(name, made_model, tmp_path):
    if name.startswith("Q"):
        checkpoint = write_gguf(made_model("qwen3_5"), tmp_path / "made.gguf", name)
    else:
        source, checkpoint = made_model("qwen3_5_moe" if FORMATS[name].stacks else "qwen3_5"), tmp_path / "codes"
        write_packed(source, checkpoint, tmp_path / "same", FORMATS[name])
    recorded, eager = (Twin(checkpoint, "bfloat16", enforce_eager=each, speculative=NONE) for each in (False, True))
    run_both(recorded, eager)
    assert len(recorded.repeats()) == SEQS and not eager.repeats()
    check_addresses(recorded)


def check_addresses(twin):
    """All that loops point to is there: tensors, and memory of passes."""
    graphs = twin.runner._graphs
    blocks = [*graphs._recorder._memory._blocks, *graphs._fold_recorder._memory._blocks]
    places = [(block.ctypes.data, block.nbytes) for block in blocks]
    # A server that began in this process has frozen what there was, which is not among the objects then.
    gc.unfreeze()
    # Tensors of other tests' doubles have no memory of their own.
    kinds = torch.Tensor, torch.nn.Parameter
    storages = [each.untyped_storage() for each in gc.get_objects() if type(each) in kinds]
    places = np.array(sorted(places + [(each.data_ptr(), each.nbytes()) for each in storages]))
    pointers = 0
    for repeat in twin.repeats() + twin.repeats("fold"):
        for loops in repeat._operations:
            if isinstance(loops, LoopSequence):
                firsts = (loops._table[:, 1] - loops._arguments.ctypes.data) // 8
                ends = [*firsts[1:].tolist(), len(loops._arguments)]
                for code, begin, end in zip(loops._codes, [0, *ends[:-1]], ends, strict=True):
                    numbers = loops._arguments[begin + 1 : end].view(np.uint64)
                    # An address of a process, and no two numbers in one word.
                    for address in numbers[(numbers >= 1 << 32) & (numbers < 1 << 47)].tolist():
                        index = int(np.searchsorted(places[:, 0], address, side="right")) - 1
                        assert address < places[: index + 1].sum(axis=1).max(), (code.name, address)
                        pointers += 1
    assert pointers > 100


@pytest.mark.parametrize(
    ("family", "form"),
    [
        *first_of([("nemotron_h", "int8")], RECORDED.families[:3], FORMS),
        *(more(family, "bfloat16") for family in RECORDED.families[3::2]),
        *(long(family, "bfloat16") for family in RECORDED.families[4::2]),
    ],
)
def test_repeated_verify_passes_and_folds_leave_the_bits_of_those_that_are_computed(family, form, made_model):
    """Chains of one to eight drafts, none, some or all of them right, over ends of pages and parts of attention; other
    requests come in between, whose steps are none of these."""
    folder, prompts = made_model(family), [list(range(20, 70)), list(range(30, 530))]
    plain = Twin(folder, form, speculative=NONE)
    answers = {}
    for number, prompt in enumerate(prompts):
        plain.submit(str(number), prompt, 90, temperature=0.0)
        answers[str(number)] = [token for _, tokens in run_alone(plain) for token in tokens]
    recorded, eager = Twin(folder, form), Twin(folder, form, enforce_eager=True)
    repeated_saves = see_saves_of_folds(recorded)
    drafters = []
    for twin in (recorded, eager):
        drafters.append(Varying(answers, 8, lambda proposal: [99, 3, 0, 99, 1][proposal % 5], 300))
        twin.core._scheduler.state.drafting.drafter = drafters[-1]
    num_steps = 0
    for number, prompt in enumerate(prompts):
        for twin in (recorded, eager):
            twin.submit(str(number), prompt, 90, temperature=0.0)
        while recorded.core.has_work:
            num_steps += 1
            if num_steps in (20, 45):
                for twin in (recorded, eager):
                    twin.submit(f"other {num_steps}", prompt[:40], 6, temperature=0.0)
            recorded.spoil(folded=not recorded.core._scheduler.state.drafting.pending_folds)
            assert recorded.step() == eager.step(), num_steps
            for found, wanted in zip(recorded.memory(), eager.memory(), strict=True):
                assert torch.equal(found.view(torch.uint8), wanted.view(torch.uint8)), num_steps
    assert drafters[0].records == drafters[1].records and len(drafters[0].records) > 40
    alone = [shape for shape, each in recorded.runner._graphs._passes.items() if each.fold and not shape.num_places]
    assert len(alone) == 8 and not eager.repeats("fold")
    # of some folds a checkpoint is taken within, of others at their end
    kinds = {len(saves) for saves in repeated_saves if any(saves)}
    assert kinds <= {1, 2} and (2 in kinds) == recorded.core._scheduler.state.cache.layout.needs_checkpoints
    # of what a step takes whose pass is being recorded, or will be, nothing is learned
    assert len(drafters[1].steps) - len(drafters[0].steps) >= 2 * 8
    check_addresses(recorded)


@pytest.mark.parametrize(
    ("family", "form"),
    [
        *first_of([("qwen3_5", "bfloat16")], RECORDED.families[:3], FORMS),
        *(more(family, "bfloat16") for family in RECORDED.families[4::2]),
        *(long(family, "bfloat16") for family in RECORDED.families[3::2]),
    ],
)
def test_repeated_passes_of_decodes_beside_verify_rows_leave_the_bits_of_those_that_are_computed(
    family, form, made_model
):
    """One to four sequences, some of which draft one to five tokens and one never, over ends of pages and of a part of
    attention."""
    folder, lengths = made_model(family), (50, 505, 9, 61)
    prompts = {str(number): list(range(20 + number, 20 + number + length)) for number, length in enumerate(lengths)}
    plain = Twin(folder, form, speculative=NONE)
    answers = {}
    for name, prompt in list(prompts.items())[:-1]:
        plain.submit(name, prompt, 60, temperature=0.0)
        answers[name] = [token for _, tokens in run_alone(plain) for token in tokens]
    recorded, eager = Twin(folder, form), Twin(folder, form, enforce_eager=True)
    for twin in (recorded, eager):
        drafter = Varying(answers, 5, lambda proposal: [99, 0, 2, 99, 1, 0, 99][proposal % 7], 300)
        twin.core._scheduler.state.drafting.drafter = drafter
    num_steps = 0
    for step in range(200):
        for place, (name, prompt) in enumerate(prompts.items()):
            if step in (5 * place, 70 + 2 * place):
                for twin in (recorded, eager):
                    twin.submit(name if step < 70 else f"{name} again", prompt, 60, temperature=0.0)
        if step == 70:
            for known in list(answers):
                answers[f"{known} again"] = answers[known]
        if not recorded.core.has_work:
            continue
        num_steps += 1
        recorded.spoil(folded=not recorded.core._scheduler.state.drafting.pending_folds)
        assert recorded.step() == eager.step(), step
        for found, wanted in zip(recorded.memory(), eager.memory(), strict=True):
            assert torch.equal(found.view(torch.uint8), wanted.view(torch.uint8)), step
    assert num_steps > 60 and not recorded.core.has_work
    mixed = {shape: each for shape, each in recorded.runner._graphs._passes.items() if shape.num_places}
    assert {shape.num_places for shape in mixed} == {SEQS} and not eager.repeats("fold")
    padded = recorded.runner._graphs._num_padded
    # a mix is recorded when it has gone with a larger one's tokens so often
    assert padded or form == "float32"
    assert {padded[shape] for shape in mixed} <= {0, 3}
    for kind in ("replay", "fold"):
        assert sum(getattr(each, kind) is not None for each in mixed.values()) > 3, kind
    check_addresses(recorded)


class LeavesAll(KnowingDrafter):
    """Leaves one to four drafts to the model's head, of each sequence in every step."""

    def propose(self, request, most, num_decodes):
        return np.full(min(most, 1 + len(request.output) % 4), DRAFTED, np.int64)


@pytest.mark.parametrize(
    ("family", "form"),
    [("qwen3_5+mtp", "bfloat16"), more("nemotron_h+mtp", "float32"), more("qwen3_5_moe+mtp", "int8")],
)
def test_repeated_passes_of_a_head_draft_what_computed_ones_do(family, form, made_model):
    """Of one to three sequences, with leftovers of drafts that were wrong; the head's own drafts, token by token."""
    recorded, eager = (
        Twin(made_model(family), form, enforce_eager=eager, speculative=SpeculativeConfig(method="mtp"))
        for eager in (False, True)
    )
    made = {}
    for twin in (recorded, eager):
        twin.core._scheduler.state.drafting.drafter = LeavesAll({}, 4, lambda proposal: 0, 300)
        head, seen = twin.runner._head, made.setdefault(twin, [])
        head.advance = partial(see_drafts, head, seen)
    for step in range(44):
        for twin in (recorded, eager):
            if step in (0, 12, 20):
                twin.submit(str(step), list(range(20 + step, 70 + 7 * step)), 24, temperature=0.0)
        if recorded.runner._head._recorder is not None:
            for block in recorded.runner._head._recorder._memory._blocks:
                block.fill(0xFF)
        if recorded.core.has_work:
            assert recorded.step() == eager.step(), step
            assert made[recorded] == made[eager]
            for found, wanted in zip(recorded.memory(), eager.memory(), strict=True):
                assert torch.equal(found.view(torch.uint8), wanted.view(torch.uint8)), step
    head_passes = recorded.runner._head._passes
    assert [head_passes[number].replay is not None for number in (1, 2, 3)] == [True, True, True]
    assert not eager.runner._head._passes and len(made[recorded]) > 60


def see_saves_of_folds(twin):
    """By step with repeated folds, whether something is saved after each part of them."""
    seen, move_states = [], twin.runner._move_states

    def see(step):
        if step.inputs.fold_parts:
            seen.append([saves is not None for _, saves in step.inputs.fold_parts])
        move_states(step)

    twin.runner._move_states = see
    return seen


def see_drafts(head, seen, rows, depth):
    type(head).advance(head, rows, depth)
    seen += head.tokens[: len(rows)].tolist()


def run_alone(twin):
    outputs = []
    while twin.core.has_work:
        outputs += twin.step()
    return outputs


class Varying(KnowingDrafter):
    """Drafts one token, then two, and so on."""

    def propose(self, request, most, num_decodes):
        return super().propose(request, min(most, 1 + self._proposals % 8), num_decodes)
