"""Drafts change nothing: with `--exact` every logit is that of one token after the other, bit for bit, whatever is
drafted and however much of it is right. Without `--exact` tokens are the same, too.

The reference is a core that caches nothing, drafts nothing and serves one request at a time.
"""

from collections.abc import Iterator
from itertools import product

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cairn.models.registry import open_model
from cairn.scheduler.preempt import preempt
from doubles.drafters import KnowingDrafter, KnowingHead
from engine.test_exactness import OTHER, PIECES, TEXT, TOLERANCE, Engine, Loaded, assert_same, load
from engine.test_ranks_exactness import LoadedRanks
from models.covered import DRAFTS
from tiers import by_run, first, first_of, long, more

PATTERNS = {
    "all": lambda proposal: 99,
    "none": lambda proposal: 0,
    "alternating": lambda proposal: 99 * (proposal % 2),
    "rising": lambda proposal: proposal % 5,
}


@pytest.fixture(scope="module", params=[*first(2, DRAFTS.regular_families), *map(long, DRAFTS.long_families)])
def loaded(request, made_model) -> Loaded:
    return load(request.param, made_model)


def families(*names: str) -> list:
    """The first of them for every change, these others for `make test-more`, all others for the long run."""
    others = [family for family in DRAFTS.families if family not in names]
    return [*first(1, names), *map(long, others)]


WHOLE = [DRAFTS.families[0], *map(long, DRAFTS.families[1:])]
OTHERS = [*map(more, DRAFTS.regular_families[1:])]
HEAD_FIRST = families("nemotron_h+mtp", "lfm2", "qwen3_5+mtp", "gpt_oss")
PLAIN_FIRST = families("lfm2", "nemotron_h+mtp", "qwen3_5_moe", "gemma4")
"""For cases that are the scheduler's more than a family's: a model with a head first, and one without."""


def tokens_of(logits) -> list[int]:
    return [int(each.argmax()) for each in logits]


class Drafted:
    """An engine that drafts what is known of the answers, so much of it right as a pattern says."""

    def __init__(self, loaded, pattern="all", num_drafts=5, engine=Engine, **arguments) -> None:
        self.answers: dict[str, list[int]] = {}
        vocab_size = loaded.models[True].vocab_size
        self.engine = engine(loaded, **arguments)
        drafts = self.answers, num_drafts, PATTERNS[pattern], vocab_size
        has_head = loaded.models[True].head is not None
        self.drafter = KnowingHead(*drafts, self.engine.runner) if has_head else KnowingDrafter(*drafts)
        self.engine.scheduler.state.drafting.drafter = self.drafter

    def submit(self, prompt, expected, **params) -> int:
        """`expected`: the logits of the answer without drafts."""
        number = self.engine.submit(prompt, len(expected), **params)
        self.answers[str(number)] = tokens_of(expected)
        return number

    def ask(self, prompt, expected, **params):
        number = self.submit(prompt, expected, **params)
        self.engine.run()
        return self.engine.logits[number]

    @property
    def num_accepted(self) -> int:
        return self.engine.scheduler.state.counters.spec_decode.num_accepted_tokens


@pytest.mark.parametrize("loaded", WHOLE, indirect=True, scope="module")
@pytest.mark.parametrize(
    ("length", "pattern"),
    by_run(
        [(1, "all"), (63, "rising"), (64, "alternating"), (65, "none"), (130, "all")],
        [
            *((1, "rising"), (2, "all"), (2, "none"), (17, "alternating"), (17, "rising"), (63, "none"), (64, "all")),
            *((64, "rising"), (65, "alternating"), (130, "none"), (130, "rising")),
        ],
        product((1, 2, 17, 63, 64, 65, 130), PATTERNS),
    ),
)
def test_an_answer_has_the_logits_that_it_has_without_drafts(loaded, length, pattern):
    """The prompt as it is, wholly cached, and after its answer, whose states are those that folds have left."""
    drafted, prompt = Drafted(loaded, pattern), TEXT[:length]
    expected = loaded.alone(prompt, 24)
    for _ in range(2):
        assert_same(drafted.ask(prompt, expected), expected)
    following = prompt + tuple(tokens_of(expected)[:20]) + OTHER[:9]
    assert_same(drafted.ask(following, loaded.alone(following, 8)), loaded.alone(following, 8))
    assert (drafted.num_accepted > 0) is (pattern != "none")


@pytest.mark.parametrize("loaded", OTHERS, indirect=True, scope="module")
@pytest.mark.parametrize(("length", "pattern"), [(63, "rising"), (130, "all")])
def test_an_answer_of_each_family_has_the_logits_that_it_has_without_drafts(loaded, length, pattern):
    """Other lengths are edges of the scheduler's, not of a family's layers."""
    test_an_answer_has_the_logits_that_it_has_without_drafts(loaded, length, pattern)


@pytest.mark.parametrize("loaded", PLAIN_FIRST, indirect=True, scope="module")
@pytest.mark.parametrize("num_drafts", [1, more(2), more(13), 32])
def test_chains_of_every_length_across_edges_of_chunks_and_pages(loaded, num_drafts):
    drafted = Drafted(loaded, num_drafts=num_drafts, block_size=48)
    expected = loaded.alone(TEXT[:40], 60)
    assert_same(drafted.ask(TEXT[:40], expected), expected)
    assert drafted.engine.runner.forward_passes <= 2 + -(-59 // (1 + num_drafts)) + 1


@pytest.mark.parametrize("loaded", PLAIN_FIRST, indirect=True, scope="module")
def test_requests_side_by_side(loaded):
    """Rows with drafts, rows without, and prompts in chunks in one batch."""
    drafted = Drafted(loaded, "rising", budget=150)
    prompts = [TEXT[:70], OTHER[:200], TEXT[:130] + OTHER[:33], TEXT[100:101], TEXT[:128]]
    numbers = []
    for index, prompt in enumerate(prompts):
        expected = loaded.alone(prompt, 10)
        number = drafted.submit(prompt, expected) if index % 2 == 0 else drafted.engine.submit(prompt, 10)
        numbers.append(number)
        drafted.engine.step()
    drafted.engine.run()
    for number, prompt in zip(numbers, prompts, strict=True):
        assert_same(drafted.engine.logits[number], loaded.alone(prompt, 10))
    assert drafted.num_accepted > 0


@pytest.mark.parametrize("loaded", HEAD_FIRST, indirect=True, scope="module")
@pytest.mark.parametrize(("room", "steps"), first_of([(0, 3), (10_000, 2)], (0, 10_000), (1, 2, 3, 4)))
def test_a_request_preempted_between_verify_and_fold(loaded, room, steps):
    drafted = Drafted(loaded)
    expected = loaded.alone(TEXT[:150], 25)
    number = drafted.submit(TEXT[:150], expected)
    for _ in range(steps):
        drafted.engine.step()
    request = drafted.engine.requests[number]
    assert drafted.engine.scheduler.state.drafting.pending_folds or steps == 1
    preempt(drafted.engine.scheduler.state, request, request, room)
    drafted.engine.run()
    assert request.output == tokens_of(expected)


@pytest.mark.parametrize("loaded", HEAD_FIRST, indirect=True, scope="module")
@pytest.mark.parametrize("max_examples", [2, more(5)])
def test_random_mixes_in_a_tiny_pool(loaded, max_examples):
    @settings(max_examples=max_examples, deadline=None, suppress_health_check=list(HealthCheck))
    @given(
        num_pages=st.sampled_from([26, 40, 90]),
        pattern=st.sampled_from(sorted(PATTERNS)),
        num_drafts=st.sampled_from([1, 4, 9]),
        mixes=st.lists(
            st.tuples(st.lists(st.integers(0, 4), min_size=1, max_size=3), st.sampled_from([1, 40]), st.integers(0, 4)),
            min_size=3,
            max_size=6,
        ),
    )
    def check(num_pages, pattern, num_drafts, mixes):
        drafted, expected = Drafted(loaded, pattern, num_drafts, num_pages=num_pages, budget=100), {}
        for parts, max_tokens, pause in mixes:
            prompt = tuple(token for part in parts for token in PIECES[part])
            alone = loaded.alone(prompt, max_tokens)
            expected[drafted.submit(prompt, alone)] = alone
            for _ in range(pause):
                if drafted.engine.scheduler.has_work:
                    drafted.engine.step()
        drafted.engine.run()
        for number, alone in expected.items():
            assert drafted.engine.requests[number].output == tokens_of(alone)
        assert drafted.engine.cache.clear(), "a page leaked"

    check()


@pytest.mark.parametrize("pattern", ["all", "rising"])
def test_without_exact_tokens_are_the_same_and_logits_within_the_tolerance(loaded, pattern):
    expected = loaded.alone(TEXT[:70], 24, exact=False)
    drafted = Drafted(loaded, pattern, exact=False)
    found = drafted.ask(TEXT[:70], expected)
    for one, other in zip(found, expected, strict=True):
        assert (one.cpu() - other).abs().max() <= TOLERANCE * other.std()
        best = other.topk(2).values
        if best[0] - best[1] < 10 * TOLERANCE * other.std():
            break
        assert one.argmax() == other.argmax()
    assert drafted.num_accepted > 0


@pytest.mark.parametrize("loaded", HEAD_FIRST, indirect=True, scope="module")
@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 1.0},
        {"temperature": 0.8, "top_k": 20, "top_p": 0.9, "min_p": 0.02},
        {"temperature": 1.0, "presence_penalty": 0.7, "repetition_penalty": 1.1},
    ],
    ids=["plain", "filters", "penalties"],
)
def test_what_is_drawn_by_chance_is_drawn_as_without_drafts(loaded, params):
    """A token's number is that of its position: so drafts change no text, whatever distribution it is drawn from."""
    plain = Engine(loaded)
    number = plain.submit(TEXT[:70], 24, seed=7, **params)
    plain.logits[7] = []
    plain.run()
    answer = plain.requests[number].output
    drafted = Drafted(loaded, "rising")
    other = drafted.engine.submit(TEXT[:70], 24, seed=7, **params)
    drafted.answers[str(other)], drafted.engine.logits[7] = answer, []
    drafted.engine.run()
    assert drafted.engine.requests[other].output == answer
    assert_same(drafted.engine.logits[7], plain.logits[7])
    assert drafted.num_accepted > 0


@pytest.fixture(scope="module", params=[("nemotron_h", 2), more(("lfm2", 4))])
def several(request, made_model) -> Iterator[LoadedRanks]:
    family, size = request.param
    loaded = LoadedRanks(open_model(made_model(family)), size)
    yield loaded
    for engine in loaded.engines:
        engine.runner.close()


def test_several_ranks(several):
    """All of them verify and fold the same drafts."""
    expected = several.alone(TEXT[:70], 24)
    drafted = Drafted(several, "rising", engine=lambda loaded, **arguments: loaded.engine(**arguments))
    assert_same(drafted.ask(TEXT[:70], expected), expected)
    following = TEXT[:70] + tuple(tokens_of(expected)[:20]) + OTHER[:9]
    assert_same(drafted.ask(following, several.alone(following, 8)), several.alone(following, 8))
    assert drafted.num_accepted > 0
