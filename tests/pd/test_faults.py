"""Rounds of every fault on the memory link, with a clock that stands still unless told."""

from collections import Counter

import pytest
from faults import EFFECTS, FAULTS, effects, play

from tiers import more

ROUNDS = (range(30), more(range(30, 200)))


@pytest.mark.parametrize("rounds", ROUNDS, ids=lambda rounds: f"{len(rounds)} rounds")
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_nothing_hangs_and_nothing_is_wrong(fault, rounds):
    seen = Counter()
    for seed in rounds:
        try:
            seen.update(effects(play(fault, seed)))
        except Exception as error:
            raise AssertionError(f"{fault.__name__}, seed {seed}: {error}") from error
    few = len(rounds) / 10 if len(rounds) > 100 else 1
    assert seen[EFFECTS[fault]] >= few, f"the fault struck in few of {len(rounds)} rounds: {seen}"


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_failure_is_a_clear_error_where_the_policy_says_so(fault):
    failed = 0
    for seed in range(10):
        r = play(fault, seed, "fail")
        failed += sum(request.finish == "error" for request in r.d.ended.values())
    assert failed or EFFECTS[fault] != "failed"
