from dataclasses import replace

import pytest
from demo.checks import check_default, check_exact
from demo.client import Reply
from demo.job import AGAIN, BRANCHED, ONE_TOKEN, Outcome
from demo.shared_prefix import Shared


def outcome(label, length, shared, cached, *, part="a", passes=12, answer=(1, 2), paths=None):
    reply = Reply(tuple(range(length)), tuple(answer), "text", cached, "none", 0.1, passes)
    return Outcome(part, label, Shared(shared, shared if paths is None else paths), reply)


def good():
    return [
        outcome("first", 300, 0, 0),
        outcome(AGAIN, 300, 300, 300),
        outcome(ONE_TOKEN, 300, 300, 300, passes=0),
        outcome(BRANCHED, 400, 200, 192, part="b"),
        outcome("chat", 400, 200, 192, part="c", paths=211),
    ]


def broken(checks):
    return [check.promise for check in checks if not check.kept]


def changed(index, **changes):
    outcomes = good()
    outcomes[index] = replace(outcomes[index], reply=replace(outcomes[index].reply, **changes))
    return outcomes


def test_all_is_well():
    checks = check_exact(good(), {"no-cache": good(), "align": good()})
    assert broken(checks) == []
    assert len(checks) == 6


@pytest.mark.parametrize("changes", [{"answer_ids": (1, 3)}, {"prompt_ids": (5, 6)}])
def test_another_answer_is_noticed_and_named(changes):
    checks = check_exact(good(), {"no-cache": changed(4, **changes)})
    assert broken(checks) == ["all 5 answers are identical with 'no-cache', token for token"]
    assert checks[0].against == ("c, chat",)


def test_a_missing_answer_is_noticed():
    with pytest.raises(ValueError):
        check_exact(good(), {"no-cache": good()[:-1]})


@pytest.mark.parametrize(
    ("index", "changes", "promise"),
    [
        (1, {"cached_tokens": 299}, "the second identical prompt"),
        (2, {"forward_passes": 1}, "without a forward pass"),
        (2, {"cached_tokens": 256}, "without a forward pass"),
        (3, {"cached_tokens": 128}, "at the second sighting"),
        (4, {"cached_tokens": 136}, "shares with an earlier prompt"),
        (4, {"cached_tokens": 212}, "shares with an earlier prompt"),
    ],
)
def test_each_promise_can_be_broken(index, changes, promise):
    found = broken(check_exact(changed(index, **changes), {}))
    assert any(promise in text for text in found), found


def test_without_exact_answers_count_as_shared():
    assert broken(check_default(good())) == []
    assert len(broken(check_default(changed(4, cached_tokens=147)))) == 1
    assert broken(check_default(changed(4, cached_tokens=148))) == []
