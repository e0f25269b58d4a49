"""How many drafts are left to a model's head, when a lookup comes first, and what both may lose together."""

import numpy as np
import pytest

from cairn.scheduler.draft_cost import MeasuredCost, VerifyCost
from cairn.scheduler.mtp_drafter import MTPDrafter
from cairn.scheduler.speculation import SpeculativeConfig
from cairn.step import DRAFTED
from scheduler.test_speculation import FREE, go_on, make_request

HEAD = VerifyCost(0.3, 0.1)
"""In decode steps."""


COSTS = VerifyCost(), HEAD


def drafter(method="mtp", cost=None, head_cost=HEAD, **config):
    made = MTPDrafter(SpeculativeConfig(method=method, **config), cost or VerifyCost(), head_cost)
    for _ in range(4):
        made.record_step(1, 0, 1.0)
    return made


def decode(drafts_by, request, tokens, right, costs=COSTS, seed=0):
    """Decodes `tokens`, of which the head knows each next one with a chance of `right`. Returns how many decode steps
    it took, at what `costs`: of a lookup's and of the head's drafts; and how many drafts of the head there were."""
    random, at, taken, num_left = np.random.default_rng(seed), 0, 0.0, 0
    while at < len(tokens):
        room = len(tokens) - at - 1
        drafts = drafts_by.propose(request, room, 1).tolist() if room else []
        by_head = drafts[:1] == [DRAFTED]
        if by_head:
            hits = random.random(len(drafts)) < right
            num_left += len(drafts)
        else:
            hits = np.array(drafts) == np.array(tokens[at : at + len(drafts)])
        accepted = len(drafts) if all(hits) else int(np.argmin(hits))
        go_on(request, tokens[at : at + accepted + 1])
        seconds = 1 + (costs[by_head].extra(len(drafts)) if drafts else 0.0)
        drafts_by.record_step(1, len(drafts), seconds)
        if drafts:
            drafts_by.record(request, len(drafts), accepted)
        taken, at = taken + seconds, at + accepted + 1
    return taken, num_left


def texts(length, seed=1):
    """A prompt and an answer in which nothing comes twice."""
    tokens = np.random.default_rng(seed).permutation(4 * length).tolist()
    return make_request(tokens[:length]), tokens[length : 2 * length]


def test_a_head_that_is_right_is_asked_for_more():
    request, tokens = texts(600)
    taken, num_left = decode(drafter(), request, tokens, right=0.9)
    assert taken < 0.6 * len(tokens) and num_left > len(tokens) / 2
    # what half of its drafts are worth: one at a time
    request, tokens = texts(600)
    some, fewer = decode(drafter(), request, tokens, right=0.5)
    assert taken < some < 1.03 * len(tokens) and 0 < fewer < num_left


@pytest.mark.parametrize("method", ["mtp", "auto"])
@pytest.mark.parametrize("length", [64, 256, 1000])
def test_a_head_that_knows_nothing_costs_little(method, length):
    request, tokens = texts(length)
    drafts_by = drafter(method)
    taken, num_left = decode(drafts_by, request, tokens, right=0.0)
    assert taken <= 1.03 * length and num_left <= 3 + length / 20
    # the next request begins with what is known
    request, tokens = texts(length, seed=2)
    taken, num_left = decode(drafts_by, request, tokens, right=0.0)
    assert taken <= 1.02 * length and num_left <= 3 + length / 20


def test_steps_without_drafts_come_now_and_then_to_be_compared_with():
    left, made = MTPDrafter(SpeculativeConfig(method="mtp"), FREE, FREE), []
    request = make_request(list(range(50)))
    for _ in range(4 + 2 * 65):
        made.append(len(left.propose(request, 5, 1)))
        left.record_step(1, made[-1], 1.0)
        left.record(request, made[-1], made[-1])
        go_on(request, [1])
    assert made == [0] * 4 + ([5] * 64 + [0]) * 2


def test_both_kinds_of_drafts_lose_no_more_than_one():
    """Matches that lead to nothing, and a head that knows nothing: one balance bears both."""
    random = np.random.default_rng(3)
    request, tokens = make_request(random.integers(0, 30, 2000).tolist()), random.integers(0, 30, 1000).tolist()
    taken, num_left = decode(drafter("auto"), request, tokens, right=0.0)
    assert taken <= 1.03 * len(tokens) and num_left < 60


def test_drafts_that_cost_more_than_they_bring_are_not_asked_for():
    """A head all of whose drafts are right, each of which takes a decode step: the steps say so."""
    dear = VerifyCost(0.5, 1.0)
    cost = MeasuredCost()
    drafts_by = MTPDrafter(SpeculativeConfig(method="mtp"), cost)
    total = 0.0
    for seed in range(8):
        request, tokens = texts(300, seed)
        taken, num_left = decode(drafts_by, request, tokens, right=1.0, costs=(VerifyCost(), dear))
        total += taken
    assert taken <= 1.03 * len(tokens) and num_left < 10 and total <= 1.05 * 8 * len(tokens)
    # and of what is looked up nothing was learned
    assert cost.version == 0


def test_a_lookup_comes_first_with_auto_alone():
    prompt = list(range(100, 150)) + list(range(100, 120))
    found = drafter("auto", FREE, FREE).propose(make_request(prompt), 5, 1)
    assert found.tolist() == [120, 121, 122, 123, 124]
    unknown = make_request(list(range(50)))
    for method, request in (("auto", unknown), ("mtp", unknown), ("mtp", make_request(prompt))):
        left = drafter(method, FREE, FREE).propose(request, 5, 1)
        assert left.tolist() == [DRAFTED] * 5 and left.dtype == np.int64


def test_bounds_of_a_proposal():
    request = make_request(list(range(50)))
    free = drafter(cost=FREE, head_cost=FREE, num_speculative_tokens=4)
    # as many as passes are recorded for, and no more than was asked for
    assert [len(free.propose(request, most, 1)) for most in (0, 1, 3, 4, 30)] == [0, 1, 3, 3, 3]
    assert [len(free.propose(request, 30, number)) for number in (0, 8, 9)] == [0, 3, 0]
    assert free.max_decodes == 8


def test_what_both_kinds_take_is_learned_apart():
    cost, head_cost = MeasuredCost(), MeasuredCost()
    drafts_by = MTPDrafter(SpeculativeConfig(method="auto"), cost, head_cost)
    matching = make_request(list(range(100, 150)) + list(range(100, 120)))
    for _ in range(40):
        drafts_by.record_step(1, 0, 1.0)
        assert drafts_by.propose(matching, 5, 1)[0] != DRAFTED
        drafts_by.record_step(1, 5, 1.2)
    assert cost.version > 0 and head_cost.version == 0
    unknown = make_request(list(range(50)))
    drafts_by.end(matching)
    known = cost.extra(5), head_cost.extra(5)
    while len(left := drafts_by.propose(unknown, 5, 1)):
        assert left[0] == DRAFTED
        drafts_by.record_step(1, 5, 1.9)
        drafts_by.record_step(1, 0, 1.0)
    assert head_cost.extra(5) > known[1] + 0.2 and cost.extra(5) < known[0] + 0.05
    # of a step with both nobody can tell
    versions = cost.version, head_cost.version
    for _ in range(40):
        drafts_by.propose(matching, 5, 2)
        drafts_by.propose(unknown, 5, 2)
        drafts_by.record_step(2, 10, 1.9)
    assert (cost.version, head_cost.version) == versions


def test_nothing_is_kept_of_a_request_that_has_ended():
    request, drafts_by = make_request(list(range(50))), drafter("auto")
    drafts_by.propose(request, 5, 1)
    go_on(request, [7])
    drafts_by.end(request)
    assert not drafts_by._by_head and not drafts_by._depth._histories
