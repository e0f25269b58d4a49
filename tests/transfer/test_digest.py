"""Digests are equal exactly when layout, name and tokens are."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cairn.transfer.contract import ContentName, NamedImage
from cairn.transfer.digest import DIGEST_BYTES, ContentDigest, layout_hash
from transfer.world import LAYOUT, keys

NAMES = st.builds(ContentName, st.sampled_from(["", "a", "as"]), st.sampled_from([None, "", "s", "\ud800", "\0"]))
TOKENS = st.lists(st.integers(-5, 5), max_size=4)


@given(*[st.tuples(st.sampled_from([LAYOUT, b"M" * 32]), NAMES, TOKENS)] * 2)
def test_equal_only_when_everything_is(first, second):
    one, two = (ContentDigest(layout, name).of(np.array(tokens, np.int64)) for layout, name, tokens in (first, second))
    assert (one == two) == (first == second) and len(one) == DIGEST_BYTES


def test_each_part_of_a_name_counts_alone():
    named = itertools.product((LAYOUT, b"M" * 32), ("", "a", "as"), (None, "", "s", "\ud800", "\0"), ((), (0,), (115,)))
    digests = [
        ContentDigest(layout, ContentName(adapter, salt)).of(np.array(tokens, np.int64))
        for layout, adapter, salt, tokens in named
    ]
    assert len(set(digests)) == len(digests) == 90


@pytest.mark.parametrize("cuts", [(), (1,), (63, 64, 65), (64, 128), (10, 20, 200)])
def test_marks_do_not_depend_on_how_the_tokens_came(cuts):
    tokens, name = keys(333), ContentName("a", "s")
    digest = ContentDigest(LAYOUT, name)
    for start, stop in zip((0, *cuts), (*cuts, 333), strict=True):
        digest.append(tokens[start:stop])
    expected = [ContentDigest(LAYOUT, name).of(tokens[:mark]) for mark in (64, 128, 192, 256, 320)]
    assert digest.marks == b"".join(expected)
    assert digest.of() == ContentDigest(LAYOUT, name).of(tokens) and digest._num_tokens == 333


def test_the_digest_is_the_same_on_every_machine():
    """Byte order and word size of the platform must not matter: pinned."""
    tokens = np.array([1, -2, 3], ">i8")
    assert ContentDigest(LAYOUT, ContentName()).of(tokens) == ContentDigest(LAYOUT, ContentName()).of(
        tokens.astype("<i8")
    )


def test_layout_hash_tells_facts_apart():
    facts = {"model": "x", "heads": 2, "dtype": "float32"}
    assert layout_hash(facts) == layout_hash(dict(reversed(facts.items())))
    others = [facts | {"heads": 3}, facts | {"heads": "2"}, facts | {"more": 1}, {"model": "x"}, {}]
    assert len({layout_hash(other) for other in [facts, *others]}) == 6


# -- images ------------------------------------------------------------------------------------------------------------


def with_images(*images, length=200, base=-1000):
    """Keys with numbers of one process at the images' places, and the name that explains them."""
    keys = np.arange(length)
    named = []
    for start, size, digest in images:
        keys[start : start + size] = base - np.arange(size) - 50 * start
        named.append(NamedImage(start, size, digest * 32))
    return keys, ContentName(images=tuple(named))


def digest_of(keys, name):
    return ContentDigest(LAYOUT, name).of(keys)


def test_an_image_is_called_the_same_on_every_server():
    places = ((10, 70, b"a"), (100, 30, b"b"))
    one, other = with_images(*places), with_images(*places, base=-77_000)
    assert digest_of(*one) == digest_of(*other)
    growing = ContentDigest(LAYOUT, one[1])
    for part in np.array_split(one[0], 7):
        growing.append(part)
    assert growing.of() == digest_of(*other)
    marks = growing.marks
    for number in range(1, 4):
        end = 64 * number
        assert marks[32 * (number - 1) : 32 * number] == digest_of(other[0][:end], other[1])


def test_another_image_another_place_or_none_is_another_content():
    plain = with_images((10, 70, b"a"))
    others = [
        with_images((10, 70, b"b")),
        with_images((11, 70, b"a")),
        with_images((10, 69, b"a")),
        with_images((10, 35, b"a"), (45, 35, b"a")),
        (plain[0], ContentName()),
        (np.arange(200), ContentName()),
    ]
    assert len({digest_of(*each) for each in [plain, *others]}) == 7


def test_tokens_cannot_be_written_so_that_they_look_like_an_image():
    """The bytes of a digest as tokens behind a number below 0: where no image is named, they stay tokens."""
    keys, name = with_images((0, 1, b"a"), length=1)
    spelled = (-1).to_bytes(8, "little", signed=True) + b"a" * 32
    forged = np.frombuffer(spelled, "<i8")
    assert digest_of(forged, ContentName()) != digest_of(keys, name)
