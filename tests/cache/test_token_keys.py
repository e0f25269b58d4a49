"""Keys of four bytes and of eight: runs of both widths in one tree, and what is told apart."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cairn.cache.group_pages import GroupPages
from cairn.cache.layout import AttentionGroup
from cairn.cache.tree import NARROW, WIDE, Node, TokenKey, common_prefix, split, walk

EDGES = [0, 1, -1, 2**31 - 1, 2**31, -(2**31), -(2**31) - 1, 2**32, 2**32 + 1, 2**63 - 1, -(2**63)]
"""Some of these have the lower four bytes of others."""

sequences = st.lists(st.one_of(st.sampled_from(EDGES), st.integers(0, 2)), min_size=1, max_size=12)


def keys(tokens):
    return np.array(tokens, np.int64)


@pytest.mark.parametrize("token", EDGES)
def test_a_run_is_narrow_where_all_of_it_fits(token):
    fits = -(2**31) <= token < 2**31
    made = TokenKey(keys([5, token, 7]))
    assert made.width == (NARROW if fits else WIDE) and made.tokens.tolist() == [5, token, 7]
    assert made.slice_raw(1, 3) == made.tokens[1:].tobytes()


def test_a_run_of_nothing():
    nothing = TokenKey(keys([]))
    assert len(nothing) == 0 and nothing.slice_raw(0, 0) == b""


def test_every_other_key_of_an_array():
    assert TokenKey(keys([1, 2**40, 2, 2**40])[::2]).tokens.tolist() == [1, 2]
    assert TokenKey(keys([1, 2, 2**40, 4])[::2]).tokens.tolist() == [1, 2**40]


def common(ours, theirs):
    """How many numbers both begin with."""
    pairs = list(zip(ours, theirs, strict=False))
    return next((place for place, (a, b) in enumerate(pairs) if a != b), len(pairs))


@given(sequences, sequences, st.integers(0, 3))
def test_the_common_prefix_is_that_of_the_numbers(ours, theirs, position):
    key = TokenKey(keys(ours))
    raw = TokenKey(keys(theirs)).slice_raw(0, len(theirs))
    assert common_prefix(raw, len(theirs), key.tokens, position) == common(ours[position:], theirs)


class Tree:
    """All sequences, each of which is cut where another one leaves it, with their pages."""

    def __init__(self):
        self.root = Node(None, b"", 0, 0)

    def add(self, tokens):
        key = TokenKey(keys(tokens))
        found = walk(self.root, key)
        node = found.path[-1] if found.path else self.root
        if found.ever_matched < node.end:
            node, _ = split(node, found.ever_matched)
        if found.ever_matched < len(tokens):
            child = Node(node, key.slice_raw(found.ever_matched, len(tokens)), found.ever_matched, len(tokens))
            pages = np.arange(found.ever_matched, len(tokens), dtype=np.int32)
            child.pages = (GroupPages(AttentionGroup("full", 1), found.ever_matched, pages),)
            node.adopt(child)

    def nodes(self):
        stack = [self.root]
        while stack:
            node = stack.pop()
            stack += node.children
            if node is not self.root:
                yield node


@given(st.lists(sequences, min_size=1, max_size=12), st.randoms())
def test_a_tree_of_both_widths_finds_what_a_list_finds(added, random):
    tree = Tree()
    for tokens in added:
        tree.add(tokens)
    for tokens in [*added, [random.choice(EDGES) for _ in range(5)]]:
        longest = max(common(tokens, other) for other in added)
        found = walk(tree.root, TokenKey(keys(tokens)))
        assert found.ever_matched == found.matched == longest
        assert [token for node in found.path for token in node.keys().tolist()][:longest] == tokens[:longest]
    for node in tree.nodes():
        assert node.parent.child(node.key()) is node and node.key() == int(node.keys()[0])
        assert node.keys(-1).tolist() == node.keys().tolist()[-1:]
    assert tree.root.child(77) is None
    # leaves first, until nothing is left
    while leaves := [node for node in tree.nodes() if not node.children]:
        leaf = random.choice(leaves)
        leaf.parent.disown(leaf)
    assert len(tree.root.children) == 0
