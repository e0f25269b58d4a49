"""Drafts that are looked up, how many of them, and what is kept for them."""

from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from cairn.cache.sequence_blocks import Namespace
from cairn.errors import ConfigError
from cairn.scheduler.draft_cost import MeasuredCost, VerifyCost
from cairn.scheduler.draft_depth import DraftDepth, _DraftHistory
from cairn.scheduler.lookup_drafter import LookupDrafter, RecentAnswers, longest_match
from cairn.scheduler.request import Request, RequestStats, Spec
from cairn.scheduler.speculation import MAX_DRAFT_TOKENS, SpecDecodeCounters, SpeculativeConfig
from cairn.types import SamplingParams

FREE = VerifyCost(overhead=0.0, row=0.0)


def keys(tokens):
    return np.array(list(tokens), np.int64)


def make_request(prompt, output=(), prediction=(), namespace=None):
    spec = Spec(
        request_id="r",
        prompt=keys(prompt),
        sampling=SamplingParams(),
        max_tokens=1000,
        namespace=namespace or Namespace(),
        prediction=keys(prediction),
    )
    request = Request(spec, RequestStats(0.0, 1))
    # the one thing that a drafter reads of it
    request.sequence = SimpleNamespace(keys=keys([*prompt, *output]))
    request.output = list(output)
    return request


def go_on(request, tokens):
    request.output += tokens
    request.sequence.keys = request.keys()


def drafter(method="auto", cost=FREE, **bounds):
    sizes = {
        name: bounds.pop(name) for name in ("max_answer_tokens", "max_namespaces", "max_decodes") if name in bounds
    }
    return LookupDrafter(SpeculativeConfig(method=method, **bounds), cost, **sizes)


# -- the longest match -------------------------------------------------------------------------------------------------


def naive_match(tokens, end, least):
    best = None
    for place in range(1, len(tokens)):
        if tokens[place] < 0:
            continue
        length = 0
        while length < min(place, len(end)) and tokens[place - 1 - length] == end[-1 - length]:
            length += 1
        if length >= least and (best is None or length >= best[1]):
            best = place, length
    return best


@given(st.lists(st.integers(-1, 2), max_size=120), st.lists(st.integers(-1, 2), max_size=10), st.integers(1, 4))
@example([1] * 100, [1] * 10, 2)
@example([0, *[1] * 90], [0, *[1] * 9], 3)
@settings(max_examples=400, deadline=None)
def test_the_longest_and_then_the_latest_match(tokens, end, least):
    assert longest_match(keys(tokens), keys(end), least) == naive_match(tokens, end, least)


@given(st.lists(st.integers(0, 1), min_size=200, max_size=400), st.integers(1, 3))
@settings(max_examples=50, deadline=None)
def test_the_same_where_there_are_many_places(tokens, least):
    end = tokens[-32:]
    assert longest_match(keys(tokens), keys(end), least) == naive_match(tokens, end, least)


@given(st.lists(st.integers(-1, 3), min_size=2, max_size=60), st.lists(st.integers(0, 3), min_size=1, max_size=20))
@settings(max_examples=200, deadline=None)
def test_drafts_are_what_followed(prompt, output):
    request, tokens = make_request(prompt, output), [*prompt, *output]
    drafts = drafter("ngram", prompt_lookup_min=2, prompt_lookup_max=8).propose(request, 5, 1).tolist()
    match = naive_match(tokens, tokens[-8:], 2)
    if match is None:
        assert drafts == []
        return
    expected = [tokens[match[0] + i % (len(tokens) - match[0])] for i in range(5)]
    wrong = next((i for i, token in enumerate(expected) if token < 0), 5)
    wrong -= wrong == 4  # four are no number of drafts
    assert drafts == expected[:wrong] and drafts


def test_what_overlaps_its_end_goes_on_with_itself():
    assert drafter().propose(make_request([5, 1, 2, 3, 1, 2, 3]), 7, 1).tolist() == [1, 2, 3, 1, 2, 3, 1]


def test_few_numbers_of_drafts_are_proposed():
    """A verify pass is recorded for each of them."""
    request = make_request([1, 2, 3] * 20)
    numbers = {len(drafter(num_speculative_tokens=32).propose(request, most, 1)) for most in range(1, 33)}
    assert numbers == {1, 2, 3, 5, 7, 11, 15, 23, 31}


def test_what_stands_for_images_is_matched_and_never_drafted():
    request = make_request([7, -9, -9, 8, 1, 2, -4, -4, 3, 7, -9, -9, 8])
    assert drafter().propose(request, 16, 1).tolist() == [1, 2]
    assert drafter().propose(make_request([1, 2, -4, -4, 3, 1, 2]), 16, 1).tolist() == []


# -- sources -----------------------------------------------------------------------------------------------------------


def test_a_prediction_is_drafted_from_its_beginning():
    request = make_request([1, 2, 3], [50], prediction=range(50, 80))
    assert drafter().propose(request, 3, 1).tolist() == [51, 52, 53]
    assert drafter("ngram").propose(request, 3, 1).tolist() == []


def test_a_prediction_is_found_again_behind_what_is_new():
    request = make_request([1, 2, 3], [50, 51, 900, 901, 60, 61], prediction=range(50, 80))
    assert drafter().propose(request, 3, 1).tolist() == [62, 63, 64]


def test_a_prediction_comes_before_what_matches_as_well():
    request = make_request([50, 51, 52, 1], [50, 51], prediction=[9, 50, 51, 53])
    assert drafter(prompt_lookup_max=2).propose(request, 1, 1).tolist() == [53]


def test_answers_of_the_same_namespace_are_drafted():
    looked_up = drafter()
    looked_up.end(make_request([1, 2, 3], range(50, 80), namespace=Namespace(cache_salt="a")))
    request = make_request([1, 2, 3], [50], namespace=Namespace(cache_salt="a"))
    assert looked_up.propose(request, 3, 1).tolist() == [51, 52, 53]
    for other in (Namespace(), Namespace(cache_salt="b"), Namespace(adapter="a")):
        assert looked_up.propose(make_request([1, 2, 3], [50], namespace=other), 3, 1).tolist() == []


def test_the_latest_answer_is_what_is_drafted():
    looked_up = drafter()
    for after in (60, 70):
        looked_up.end(make_request([1, 2, 3], [50, 51, after, after + 1]))
    assert looked_up.propose(make_request([1, 2, 3], [50, 51]), 2, 1).tolist() == [70, 71]


def test_nothing_is_drafted_across_two_answers():
    looked_up = drafter()
    looked_up.end(make_request([1], [50, 51]))
    looked_up.end(make_request([2], [60, 61]))
    assert looked_up.propose(make_request([9], [50, 51]), 8, 1).tolist() == []


def test_ngram_keeps_no_answers():
    looked_up = drafter("ngram")
    looked_up.end(make_request([1, 2, 3], range(50, 80)))
    assert looked_up._answers.num_tokens == 0


def test_the_store_has_bounds():
    answers = RecentAnswers(max_tokens=10, max_namespaces=3)
    for number in range(100):
        answers.add(Namespace(cache_salt=str(number % 7)), np.arange(number))
        assert answers.num_tokens <= 30
    answers = RecentAnswers(max_tokens=10, max_namespaces=2)
    first, second, third = (Namespace(cache_salt=salt) for salt in "abc")
    answers.add(first, keys([1]))
    answers.add(second, keys([2]))
    assert answers.tokens(first).tolist()[-1] == 1
    answers.add(third, keys([3]))  # in the place of the second one, which was used least lately
    assert answers.tokens(second).tolist() == [] and answers.tokens(first).tolist()[-1] == 1
    answers.add(first, keys(range(20, 29)))
    assert answers.tokens(first).tolist()[1:] == list(range(20, 29))


def test_nothing_of_a_request_is_kept_behind_its_end_but_its_answer():
    looked_up = drafter()
    request = make_request([1, 2, 3], [50], prediction=range(50, 80))
    assert looked_up.propose(request, 4, 1).size
    looked_up.end(request)
    assert not looked_up._predictions and not looked_up._guesses and not looked_up._depth._histories


# -- depth -------------------------------------------------------------------------------------------------------------


def decode(looked_up, request, tokens, most=16, num_decodes=1):
    """Decodes `tokens`. The drafts of every verification, and how many of them were accepted."""
    verified, at = [], 0
    while at < len(tokens):
        room = len(tokens) - at - 1
        drafts = looked_up.propose(request, min(most, room), num_decodes).tolist() if room else []
        following = tokens[at : at + len(drafts)]
        accepted = next((i for i, pair in enumerate(zip(drafts, following, strict=True)) if pair[0] != pair[1]), None)
        accepted = len(drafts) if accepted is None else accepted
        if drafts:
            verified.append((len(drafts), accepted))
        go_on(request, tokens[at : at + accepted + 1])
        if drafts:
            looked_up.record(request, len(drafts), accepted)
        at += accepted + 1
    return verified


def steps_of(tokens, verified, cost):
    """In decode steps of one sequence."""
    saved = sum(accepted for _, accepted in verified)
    return len(tokens) - saved + sum(cost.extra(drafts) for drafts, _ in verified)


@pytest.mark.parametrize("vocab_size", [2, 30, 1000])
@pytest.mark.parametrize("length", [64, 256, 1000])
def test_a_text_that_cannot_be_predicted_costs_little(vocab_size, length):
    cost = VerifyCost()
    rng = np.random.default_rng(length)
    request = make_request(rng.integers(0, vocab_size, 2000).tolist())
    # each token comes a second time with a chance of 1 / vocab_size
    tokens = rng.integers(0, vocab_size, length).tolist()
    verified = decode(drafter(cost=cost), request, tokens)
    assert steps_of(tokens, verified, cost) <= 1.03 * length
    if vocab_size == 30:
        # .01 of a step for each token, and a draft of one token costs .285
        assert len(verified) <= 3 + length / 28


def test_it_is_tried_again_and_a_text_that_comes_to_quote_is_found_out():
    rng = np.random.default_rng(0)
    prompt = rng.integers(0, 30, 1000).tolist()
    request, looked_up = make_request(prompt), drafter(cost=VerifyCost())
    assert sum(accepted for _, accepted in decode(looked_up, request, rng.integers(0, 30, 500).tolist())) < 10
    verified = decode(looked_up, request, prompt[:300])
    assert steps_of(prompt[:300], verified, VerifyCost()) < 150


def test_what_is_accepted_is_drafted_deeper():
    prompt = np.random.default_rng(1).integers(0, 1000, 600).tolist()
    request = make_request([*prompt, *prompt[:4]])
    verified = decode(drafter(cost=VerifyCost()), request, prompt[4:], most=100)
    depths = [drafts for drafts, _ in verified[:-1]]
    assert depths[0] < 31 and max(depths) == 31
    assert steps_of(prompt[4:], verified, VerifyCost()) < len(prompt) / 5


def test_a_balance_bears_the_deepest_draft():
    """Of a small model on a processor without AVX512 31 drafts take twice as much as a balance else holds. What is
    accepted pays for them; what is not has lost no more than that."""
    cost = VerifyCost(overhead=1.3, row=0.135)
    prompt = np.random.default_rng(1).integers(0, 1000, 900).tolist()
    request, looked_up = make_request([*prompt, *prompt[:4]]), drafter(cost=cost)
    verified = decode(looked_up, request, prompt[4:], most=100)
    assert [drafts for drafts, _ in verified[-6:-1]] == [31] * 5
    assert steps_of(prompt[4:], verified, cost) < len(prompt) / 3.5
    history = looked_up._depth._histories[request]
    assert 3 < cost.extra(31) < history.balance <= cost.extra(32)


def test_an_edit_of_its_prompt_is_three_times_as_fast():
    text = np.random.default_rng(2).integers(0, 1000, 1200)
    edited = text.copy()
    edited[::60] = 5000
    request = make_request(text.tolist())
    verified = decode(drafter(cost=VerifyCost()), request, edited.tolist())
    assert steps_of(edited, verified, VerifyCost()) < len(edited) / 3


def cost_with_lookups(lookup):
    """After steps in which one takes so many decode steps, and others."""
    cost = MeasuredCost()
    for _ in range(200):
        cost.record_step(1, 0, 0.02)
        cost.record_lookup()
        cost.record_step(1, 0, 0.02 * (1 + lookup))
    assert abs(cost.lookup() - lookup) < 0.001
    return cost


@pytest.mark.parametrize(("lookup", "expected"), [(0.0, 400), (0.01, 4 + 396 / 8), (0.15, 4 + 3 + (396 - 56) / 64)])
def test_lookups_that_lead_nowhere_take_little_time(lookup, expected):
    """They are an eighth of a percent of it, or as rare as one in 64 tokens."""
    cost = cost_with_lookups(lookup)
    depth, request, num_lookups = DraftDepth(cost, max_decodes=8), make_request([1, 2]), 0
    for token in range(400):
        if depth.may_draft(request, 1) and depth.may_look(request):
            num_lookups += 1
            depth.miss(request)
        go_on(request, [token])
    assert abs(num_lookups - expected) <= 2


def test_lookups_are_on_the_balance():
    """Of a model whose steps are short, where four in a row are two percent of an answer."""
    depth, request, num_lookups = DraftDepth(cost_with_lookups(0.9), max_decodes=8), make_request([1, 2]), 0
    for token in range(400):
        if depth.may_draft(request, 1) and depth.may_look(request):
            num_lookups += 1
            depth.miss(request)
        go_on(request, [token])
    assert 3 <= num_lookups <= 1 + (depth._histories[request].balance + 0.9 * num_lookups) / 0.9
    assert 0.9 * num_lookups <= 0.7 + 0.01 * 400 + 0.9


def test_steps_all_of_which_have_a_lookup_tell_what_a_step_takes():
    cost = MeasuredCost()
    cost.record_step(1, 0, 0.5)  # held up
    for _ in range(200):
        cost.record_lookup()
        cost.record_step(1, 0, 0.02)
    cost.record_step(1, 6, 0.02 * (1 + cost.extra(6)))
    assert abs(cost._unit * (1 + cost.lookup()) - 0.02) < 0.001


def test_a_verification_counts_as_what_it_has_taken():
    """Here and there in a text one takes longer than many in a row, by which it is known."""
    cost = steps_taken(MeasuredCost(), 0.3, 0.02, count=600)
    depth, request = DraftDepth(cost, 8), make_request(list(range(50)))
    assert depth.may_draft(request, 1) and depth.choose(request, 40, 4, 1) == 4
    balance = depth._histories[request].balance
    for times in (1.0, 3.0):
        depth.record_step(cost.record_step(1, 4, cost._unit * (1 + times * cost.extra(4))))
        depth.record(request, 4, 1)
        spent = balance + 1 - depth._histories[request].balance
        assert abs(spent - times * cost.extra(4)) < 0.1
        balance = depth._histories[request].balance
        assert depth.may_draft(request, 1)


def test_a_draft_that_pays_has_every_token_looked_up_again():
    cost = cost_with_lookups(0.05)
    depth, request = DraftDepth(cost, max_decodes=8), make_request([1, 2] * 8)
    for _ in range(6):
        depth.may_draft(request, 1)
        depth.miss(request)
    assert depth.may_draft(request, 1) and not depth.may_look(request)
    go_on(request, [3] * 16)
    assert depth.may_draft(request, 1) and depth.may_look(request)
    depth.record(request, 4, 4)
    go_on(request, [4])
    assert depth.may_draft(request, 1) and depth.may_look(request)


def test_it_says_for_how_long_there_is_nothing_to_do():
    """Until the next lookup; and until what each token earns, .01 of a step, has paid what is owed."""
    depth, request = DraftDepth(VerifyCost(overhead=0.2, row=0.1), max_decodes=8), make_request([1, 2] * 8)
    assert depth.idle_tokens(request) == 0
    assert depth.may_draft(request, 1)
    depth._histories[request].balance = 0.65
    depth.record(request, 5, 0)
    assert not depth.may_draft(request, 1) and depth.idle_tokens(request) == 5  # .7 of .65
    go_on(request, [3] * 4)
    assert not depth.may_draft(request, 1) and depth.idle_tokens(request) == 1
    go_on(request, [3])
    assert depth.may_draft(request, 1) and depth.may_look(request) and depth.idle_tokens(request) == 0
    depth, request = DraftDepth(cost_with_lookups(0.01), max_decodes=8), make_request([1, 2] * 8)
    for _ in range(5):
        assert depth.may_draft(request, 1) and depth.idle_tokens(request) == 0
        depth.miss(request)
    assert depth.idle_tokens(request) == 8


def test_lookups_of_several_sequences_are_in_the_same_steps():
    """Each that has nothing to propose could look again with every token; while none drafts, they do with every
    fourth."""
    depth, requests = DraftDepth(VerifyCost(), max_decodes=8), [make_request([1, 2] * 8) for _ in range(2)]
    for num_decodes, idle in ((1, 0), (2, 4)):
        for request in requests[:num_decodes]:
            assert depth.may_draft(request, num_decodes) and depth.may_look(request)
            depth.miss(request)
            assert depth.idle_tokens(request) == idle


def test_what_was_not_proposed_is_compared_with_what_is_decoded():
    """A verification is too dear for what short matches are expected to bring, until guesses turn out right."""
    prompt = np.random.default_rng(0).integers(0, 1000, 600).tolist()
    dear = VerifyCost(overhead=1.2, row=0.05)
    request, looked_up = make_request([*prompt, 5000, *prompt[:2]]), drafter(cost=dear)
    assert looked_up.propose(request, 16, 1).tolist() == []
    for token in prompt[2:13]:
        go_on(request, [token])
        looked_up._depth.may_draft(request, 1)
    history = looked_up._depth._histories[request]
    before = history.balance
    assert history.acceptance.looked_at[1] == 0
    assert len(looked_up.propose(request, 16, 1)) > 0
    # eleven tokens, less what their verification would have taken
    assert history.acceptance.accepted[1] == 11 and history.balance == min(3.0, before + 11 - dear.extra(11))


def test_a_guess_that_is_wrong_saves_nothing():
    prompt = np.random.default_rng(0).integers(0, 1000, 600).tolist()
    request, looked_up = make_request([*prompt, 5000, *prompt[:2]]), drafter(cost=VerifyCost(overhead=1.2, row=0.05))
    assert looked_up.propose(request, 16, 1).tolist() == []
    history = looked_up._depth._histories[request]
    go_on(request, [prompt[2], 7000])
    before = history.balance
    looked_up.propose(request, 16, 1)
    assert (history.acceptance.accepted[1], history.acceptance.looked_at[1]) == (1, 2)
    assert history.balance == pytest.approx(before + 0.02) and not looked_up._guesses


def test_with_many_sequences_nothing_is_drafted():
    request = make_request([1, 2, 3, 4] * 8)
    looked_up = drafter(max_decodes=4)
    assert [len(looked_up.propose(request, 3, number)) for number in (1, 4, 5, 0)] == [3, 3, 0, 0]


def test_the_load_makes_drafts_dearer():
    depth = DraftDepth(VerifyCost(), max_decodes=64)
    request = make_request([1, 2])
    chosen = []
    for num_decodes in (1, 2, 8, 64):
        assert depth.may_draft(request, num_decodes)
        chosen.append(depth.choose(request, 4, 16, num_decodes))
    assert chosen == sorted(chosen, reverse=True) and chosen[0] > 0 and chosen[-1] == 0


def test_a_verification_that_costs_more_is_not_asked_for():
    request = make_request([1, 2, 3] * 4)
    assert drafter(cost=VerifyCost(overhead=40.0)).propose(request, 16, 1).size == 0


def test_no_more_is_drafted_than_may_be():
    request = make_request([1, 2, 3] * 4)
    assert [len(drafter().propose(request, most, 1)) for most in (0, 1, 5, 100)] == [0, 1, 5, 31]
    assert drafter(num_speculative_tokens=3).propose(request, 100, 1).size == 3


# -- the configuration, and the counts ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"method": "medusa"}, "method: must be auto, mtp, ngram, suffix or none, not 'medusa'"),
        ({"num_speculative_tokens": 0}, "num_speculative_tokens: must be 1 to 32, not 0"),
        ({"num_speculative_tokens": MAX_DRAFT_TOKENS + 1}, "num_speculative_tokens: must be 1 to 32, not 33"),
        ({"prompt_lookup_min": 0}, "prompt_lookup_min: must be 1 to 64, not 0"),
        ({"prompt_lookup_max": 65}, "prompt_lookup_max: must be 1 to 64, not 65"),
        ({"prompt_lookup_min": 5, "prompt_lookup_max": 4}, "prompt_lookup_min: must be at most prompt_lookup_max"),
    ],
)
def test_what_cannot_be_configured(fields, said):
    with pytest.raises(ConfigError, match=f"^--speculative-config: {said}"):
        SpeculativeConfig(**fields)


def test_counts():
    counters = SpecDecodeCounters()
    for drafts, accepted in ((4, 4), (4, 0), (2, 1)):
        counters.add(drafts, accepted)
    assert (counters.num_drafts, counters.num_draft_tokens, counters.num_accepted_tokens) == (3, 10, 5)
    assert counters.accepted_per_pos == [2, 1, 1, 1] + [0] * (MAX_DRAFT_TOKENS - 4)


def steps_taken(cost, overhead, row, num_decodes=1, unit=0.02, count=200, seed=0):
    """`cost` after steps with and without drafts that take so long, now and then much longer."""
    random = np.random.default_rng(seed)
    for step in range(count):
        drafts = int(random.integers(1, 17)) if step % 3 else 0
        plain = 1 + cost.row * (num_decodes - 1) if isinstance(cost, VerifyCost) else cost.decode(num_decodes)
        seconds = unit * (plain + (overhead + row * drafts if drafts else 0.0))
        cost.record_step(num_decodes, drafts, seconds * (5 if random.random() < 0.03 else random.uniform(0.97, 1.03)))
    return cost


@pytest.mark.parametrize(("overhead", "row"), [(0.05, 0.11), (0.1, 0.02), (0.9, 0.03), (0.25, 0.035)])
def test_what_verifying_takes_is_learned_from_steps(overhead, row):
    cost = steps_taken(MeasuredCost(), overhead, row)
    for drafts in (1, 4, 16):
        wanted = overhead + row * drafts
        assert abs(cost.extra(drafts) - wanted) < 0.15 * (1 + wanted), drafts
    assert cost.version > 0
    assert cost.most_drafts(cost.extra(7)) == 7


@pytest.mark.parametrize("num_decodes", [1, 4])
def test_the_fold_of_a_step_with_drafts_is_part_of_what_they_take(num_decodes):
    """Each step that verifies is followed by one that folds and drafts nothing, or all of them do both."""
    plain, overhead, row, fold = MeasuredCost().decode(num_decodes), 0.2, 0.03, 0.15
    for alone in (True, False):
        cost = MeasuredCost()
        for drafts in (1, 8, 3, 12) * 100:
            cost.record_step(num_decodes, 0, 0.02 * plain)
            verify = overhead + row * drafts
            cost.record_step(num_decodes, drafts, 0.02 * (plain + verify + (0 if alone else fold)), not alone)
            if alone:
                cost.record_step(num_decodes, 0, 0.02 * (plain + fold), True)
        for drafts in (2, 10):
            assert abs(cost.extra(drafts, num_decodes) - (overhead + fold + row * drafts)) < 0.02, (alone, drafts)


def test_folds_of_several_sequences_count_though_they_take_longer_than_a_step():
    cost, verify, fold = MeasuredCost(), 0.8, 1.2
    plain = cost.decode(8)
    for _ in range(60):
        cost.record_step(8, 0, 0.02 * plain)
        cost.record_step(8, 8, 0.02 * (plain + verify))
        cost.record_step(8, 0, 0.02 * (plain + fold), True)
    assert cost.extra(8, 8) / cost.decode(8) > 0.9 * (verify + fold) / plain


def test_eight_sequences_soon_stop_to_draft_where_a_decode_step_is_shorter_than_it_was():
    """Milliseconds as they were measured: decode steps that took 2.8 take 1.8, as they do when nobody else wants the
    memory, and a verification of 15 drafts, all of which are right, 3.4 more as before. 23 tokens in 5.2 ms are less
    than 8 in 1.8. While what is given and what was learned before weighed more, 36 such verifications followed."""
    cost, request = MeasuredCost(), make_request(list(range(50)))
    depth = DraftDepth(cost, 8)

    def verify(decode, drafts):
        cost.record_step(8, drafts, decode + 0.0012 + 0.000145 * drafts, True)
        depth.record(request, drafts, drafts)

    for drafts in (15, 31, 15) * 20:
        assert depth.may_draft(request, 8)
        cost.record_step(8, 0, 0.0028)
        verify(0.0028, drafts)
    for _ in range(40):
        cost.record_step(8, 0, 0.0018)
    num_losses = 0
    while depth.may_draft(request, 8) and depth.choose(request, 1, 15, 8) and num_losses < 40:
        verify(0.0018, 15)
        num_losses += 1
    assert 0 < num_losses <= 8


def test_the_first_folds_count_in_full():
    cost, verify, fold = MeasuredCost(), 0.26, 0.2
    for _ in range(4):
        cost.record_step(1, 0, 0.02)
        cost.record_step(1, 2, 0.02 * (1 + verify))
        cost.record_step(1, 0, 0.02 * (1 + fold), True)
    assert verify + 0.5 * fold < cost.extra(2) < verify + fold


def test_sequences_that_draft_in_one_step_share_what_it_takes():
    """What a step with drafts takes however few they are is too much for one of eight sequences, not for all."""
    cost = VerifyCost(overhead=1.0, row=0.02)
    depth, requests = DraftDepth(cost, 8), [make_request(list(range(50))) for _ in range(8)]
    depth._histories.update({request: _DraftHistory(request.num_tokens, balance=2.0) for request in requests})

    def drafts(count):
        """Of the last one, after a step in which so many drafted."""
        for request in requests:
            assert depth.may_draft(request, 8)
        depth._num_proposed = count
        for request in requests[:count]:
            depth.record(request, 8, 4)
        assert depth.may_draft(requests[-1], 8)
        return depth.choose(requests[-1], 32, 11, 8)

    balance = depth._histories[requests[0]].balance
    assert drafts(1) <= 2 and drafts(8) > 8 and drafts(1) <= 2
    saved, shared, alone = 4 * cost.decode(8) / 8, 1 / 8 + 8 * 0.02, 1 + 8 * 0.02
    assert abs(depth._histories[requests[0]].balance - (balance + 3 * saved - shared - 2 * alone)) < 0.01
    assert abs(depth._histories[requests[-1]].balance - (balance + saved - shared)) < 0.01


def test_the_first_steps_show_that_nothing_given_holds():
    cost = steps_taken(MeasuredCost(), 2.5, 0.1, num_decodes=2, count=20)
    assert cost.extra(1, 2) > 3 * VerifyCost().extra(1, 2)


def test_what_a_busy_machine_has_shown_is_forgotten_where_nothing_is_drafted():
    cost = steps_taken(MeasuredCost(), 3.0, 0.1, count=60)
    assert cost.extra(1) > 2 * VerifyCost().extra(1)
    for _ in range(3000):
        cost.record_step(1, 0, 0.02)
    assert abs(cost.extra(1) - VerifyCost().extra(1)) < 0.1


def test_steps_of_one_sequence_say_nothing_of_steps_of_several():
    cost = steps_taken(MeasuredCost(), 0.05, 0.01)
    assert cost.extra(8, 2) == VerifyCost().extra(8)
    steps_taken(cost, 1.5, 0.05, num_decodes=4)
    assert cost.extra(8, 4) > 1.5 and cost.extra(8) < 0.3


def test_without_a_clock_that_goes_on_nothing_is_learned():
    cost = MeasuredCost()
    for drafts in (0, 5) * 50:
        cost.record_step(1, drafts, 0.0)
    assert cost.version == 0 and cost.extra(5) == VerifyCost().extra(5)


def test_depth_follows_what_steps_have_shown():
    """Where a row takes as long as a step, nothing is drafted but what is tried now and then."""
    for overhead, row, least, most in ((0.0, 1.0, 0, 2), (0.05, 0.01, 12, 16)):
        cost = steps_taken(MeasuredCost(), overhead, row, count=600)
        depth, request = DraftDepth(cost, 8), make_request(list(range(50)))
        num_drafts = depth.choose(request, 40, 16, 1) if depth.may_draft(request, 1) else 0
        assert least <= num_drafts <= most
