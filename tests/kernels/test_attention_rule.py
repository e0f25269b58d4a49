"""Which keys an `AttentionRule` lets a token see, and what it refuses."""

import pytest

from cairn.kernels.attention_rule import FULL, AttentionRule


def test_a_window_counts_the_token_itself() -> None:
    rule = AttentionRule(window=3)
    assert [rule.first_key(position) for position in range(6)] == [0, 0, 0, 1, 2, 3]
    assert rule.reach == 3


def test_a_chunk_begins_at_its_multiples() -> None:
    rule = AttentionRule(chunk=3)
    assert [rule.first_key(position) for position in range(7)] == [0, 0, 0, 3, 3, 3, 6]
    assert rule.reach == 3


def test_without_a_reach_all_is_seen() -> None:
    assert AttentionRule() == FULL and FULL.reach is None and FULL.first_key(10**6) == 0


@pytest.mark.parametrize("rule", [FULL, AttentionRule(window=5), AttentionRule(chunk=5), AttentionRule(window=1)])
def test_pairs_are_counted_as_they_are_seen(rule: AttentionRule) -> None:
    for start, end in ((0, 0), (0, 4), (0, 23), (3, 7), (9, 21)):
        assert rule.num_pairs(start, end) == sum(p - rule.first_key(p) + 1 for p in range(start, end))


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"window": 0}, "window: attention reaches over 1 token or more, not 0"),
        ({"chunk": -5}, "chunk: attention reaches over 1 token or more, not -5"),
        ({"window": 4, "chunk": 8}, "window and chunk: attention has one reach, not 4 and 8 tokens"),
        ({"scale": 0.0}, "scale: wants a positive number, not 0.0"),
        ({"scale": float("nan")}, "scale: wants a positive number, not nan"),
        ({"softcap": -1.0}, "softcap: wants a positive number, not -1.0"),
        ({"softcap": float("inf")}, "softcap: wants a positive number, not inf"),
    ],
)
def test_what_is_no_rule_is_named(fields: dict[str, float], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        AttentionRule(**fields)
