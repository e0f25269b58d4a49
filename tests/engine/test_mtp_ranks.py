"""A head of multi-token prediction that is cut among ranks as the model is: drafts change no logit, a hit drafts at
once, and processes draft what threads do."""

from collections.abc import Iterator

import numpy as np
import pytest

from cairn.engine.build import build_core
from cairn.engine.contract import EngineConfig
from cairn.models.registry import open_model
from cairn.scheduler.draft_cost import VerifyCost
from cairn.scheduler.mtp_drafter import MTPDrafter
from cairn.scheduler.preempt import preempt
from cairn.scheduler.speculation import SpeculativeConfig
from doubles.drafters import KnowingHead, LeftToTheHead
from doubles.engine_requests import generate_request
from engine.test_exactness import OTHER, TEXT, assert_same
from engine.test_exactness_drafts import Drafted, tokens_of
from engine.test_ranks_exactness import LoadedRanks
from tiers import long, more

MTP = SpeculativeConfig(method="mtp")
RANKS = [("qwen3_5+mtp", 2), ("nemotron_h+mtp", 2), ("nemotron_h+mtp", 4), ("qwen3_5_moe+mtp", 4)]


@pytest.fixture(scope="module", params=[RANKS[0], long(RANKS[1]), *map(more, RANKS[2:])], ids=str)
def several(request, made_model) -> Iterator[LoadedRanks]:
    family, size = request.param
    loaded = LoadedRanks(open_model(made_model(family)).with_head(), size)
    yield loaded
    for engine in loaded.engines:
        engine.runner.close()


def drafting(several, pattern="rising", **arguments) -> Drafted:
    return Drafted(several, pattern, engine=lambda loaded, **given: loaded.engine(**given), **arguments)


@pytest.mark.parametrize("pattern", ["rising", more("all"), more("none")])
def test_every_logit_is_that_without_drafts(several, pattern):
    """Cold, wholly cached and in the next turn, whose states are those that folds have left; beside another one."""
    drafted, prompt = drafting(several, pattern, num_drafts=4), TEXT[:70]
    expected = several.alone(prompt, 20)
    for _ in range(2):
        assert_same(drafted.ask(prompt, expected), expected)
    following = prompt + tuple(tokens_of(expected)[:15]) + OTHER[:9]
    beside, last = several.alone(OTHER[:130], 12), several.alone(following, 12)
    numbers = [drafted.submit(each, logits) for each, logits in ((OTHER[:130], beside), (following, last))]
    drafted.engine.run()
    for number, logits in zip(numbers, (beside, last), strict=True):
        assert_same(drafted.engine.logits[number], logits)
    assert (drafted.num_accepted > 0) is (pattern != "none")
    assert isinstance(drafted.drafter, KnowingHead) and drafted.drafter.num_made > 20


def test_a_hit_drafts_at_once(several):
    """Right after the token that a checkpoint's hidden state gives: two passes have the other eleven."""
    expected = several.alone(TEXT[:64], 12)
    drafted = drafting(several, "all", num_drafts=5)
    drafted.ask(TEXT[:64], expected[:1])
    before = drafted.engine.runner.forward_passes
    assert_same(drafted.ask(TEXT[:64], expected), expected)
    assert drafted.engine.runner.forward_passes - before == 2


@pytest.mark.parametrize(("room", "steps"), [(0, 3), more(10_000, 2), more(0, 2)])
def test_a_request_preempted_between_verify_and_fold(several, room, steps):
    drafted = drafting(several, "all")
    expected = several.alone(TEXT[:150], 25)
    number = drafted.submit(TEXT[:150], expected)
    for _ in range(steps):
        drafted.engine.step()
    state, request = drafted.engine.scheduler.state, drafted.engine.requests[number]
    assert state.drafting.pending_folds
    preempt(state, request, request, room)
    drafted.engine.run()
    assert request.output == tokens_of(expected)


def drafts_seen(runner) -> list[dict[int, list[int]]]:
    """What the heads of a runner draft from now on: of each step, by slot."""
    seen, drafts = [], runner.drafts

    def see(step):
        made = drafts(step)
        seen.append({slot: tokens.tolist() for slot, tokens in made.items()})
        return made

    runner.drafts = see
    return seen


def answer_of(core, prompt, max_tokens) -> list[int]:
    fields = {"temperature": 0.0, "max_tokens": max_tokens, "ignore_eos": True}
    core.submit(generate_request(request_id="r", prompt=np.array(prompt, "<i8").tobytes(), **fields))
    tokens: list[int] = []
    while len(tokens) < max_tokens:
        assert core.poll_ready() == []
        for output in core.step() if core.has_work else ():
            tokens += output.token_ids
    return tokens


def test_processes_draft_what_threads_draft(several):
    """All of them are told that the head is served; its own drafts, and the answer that there is without any."""
    engine = several.engine()
    engine.scheduler.state.drafting.drafter = LeftToTheHead(3)
    expected, seen = several.alone(TEXT[:70], 16), drafts_seen(engine.runner)
    assert_same(engine.ask(TEXT[:70], 16), expected)
    assert len(seen) > 4
    config = EngineConfig(
        model=str(several.opened.opened.folder),
        tensor_parallel_size=several.opened.size,
        exact=True,
        kv_cache_memory_bytes=16 << 20,
        speculative=MTP,
    )
    core = build_core(config)
    try:
        core.start(lambda: None)
        assert isinstance(core._scheduler.state.drafting.drafter, MTPDrafter)
        core._scheduler.state.drafting.drafter = LeftToTheHead(3)
        made = drafts_seen(core._runner)
        assert answer_of(core, TEXT[:70], 16) == tokens_of(expected)
        assert made == seen
    finally:
        core.close()


@pytest.mark.more
def test_answers_with_the_drafter_that_is_served(several):
    """However deep it chooses to draft."""
    engine = several.engine()
    engine.scheduler.state.drafting.drafter = MTPDrafter(MTP, VerifyCost(0.0, 0.0), VerifyCost(0.0, 0.01))
    assert_same(engine.ask(TEXT[:70], 40), several.alone(TEXT[:70], 40))
    assert engine.scheduler.state.counters.spec_decode.num_drafts > 0
