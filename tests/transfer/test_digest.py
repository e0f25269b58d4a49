"""Digests are equal exactly when layout, name and tokens are."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cairn.transfer.contract import ContentName
from cairn.transfer.digest import DIGEST_BYTES, ContentDigest, content_digest, layout_hash
from transfer.world import LAYOUT, keys

NAMES = st.builds(ContentName, st.sampled_from(["", "a", "as"]), st.sampled_from([None, "", "s", "\ud800", "\0"]))
TOKENS = st.lists(st.integers(-5, 5), max_size=4)


@given(*[st.tuples(st.sampled_from([LAYOUT, b"M" * 32]), NAMES, TOKENS)] * 2)
def test_equal_only_when_everything_is(first, second):
    one, two = (content_digest(layout, name, np.array(tokens, np.int64)) for layout, name, tokens in (first, second))
    assert (one == two) == (first == second) and len(one) == DIGEST_BYTES


@pytest.mark.parametrize("cuts", [(), (1,), (63, 64, 65), (64, 128), (10, 20, 200)])
def test_marks_do_not_depend_on_how_the_tokens_came(cuts):
    tokens, name = keys(333), ContentName("a", "s")
    digest = ContentDigest(LAYOUT, name)
    for start, stop in zip((0, *cuts), (*cuts, 333), strict=True):
        digest.append(tokens[start:stop])
    expected = [content_digest(LAYOUT, name, tokens[:mark]) for mark in (64, 128, 192, 256, 320)]
    assert digest.marks == b"".join(expected)
    assert digest.value() == content_digest(LAYOUT, name, tokens) and digest.num_tokens == 333


def test_the_digest_is_the_same_on_every_machine():
    """Byte order and word size of the platform must not matter: pinned."""
    tokens = np.array([1, -2, 3], ">i8")
    assert content_digest(LAYOUT, ContentName(), tokens) == content_digest(LAYOUT, ContentName(), tokens.astype("<i8"))


def test_layout_hash_tells_facts_apart():
    facts = {"model": "x", "heads": 2, "dtype": "float32"}
    assert layout_hash(facts) == layout_hash(dict(reversed(facts.items())))
    others = [facts | {"heads": 3}, facts | {"heads": "2"}, facts | {"more": 1}, {"model": "x"}, {}]
    assert len({layout_hash(other) for other in [facts, *others]}) == 6
