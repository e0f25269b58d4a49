"""Rounds of every fault on the memory link, with a clock that stands still unless told."""

from collections import Counter

import pytest
from faults import EFFECTS, FAULTS, effects, play

ROUNDS = 200


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_nothing_hangs_and_nothing_is_wrong(fault):
    seen = Counter()
    for seed in range(ROUNDS):
        try:
            seen.update(effects(play(fault, seed)))
        except Exception as error:
            raise AssertionError(f"{fault.__name__}, seed {seed}: {error}") from error
    assert seen[EFFECTS[fault]] >= ROUNDS / 10, f"the fault struck in few of {ROUNDS} rounds: {seen}"


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_failure_is_a_clear_error_where_the_policy_says_so(fault):
    failed = 0
    for seed in range(10):
        r = play(fault, seed, "fail")
        failed += sum(request.finish == "error" for request in r.d.ended.values())
    assert failed or EFFECTS[fault] != "failed"
