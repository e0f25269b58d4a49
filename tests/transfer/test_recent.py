"""What a server remembers of sequences that ended: the deepest known beginning, and no more than it may."""

import random

import numpy as np
import pytest

from cairn.transfer.contract import ContentName
from cairn.transfer.digest import ContentDigest, SequenceIndex
from transfer.world import LAYOUT, PLAIN, keys

SALTED = ContentName("", "salt")


def marks(tokens, name=PLAIN):
    digest = ContentDigest(LAYOUT, name)
    digest.append(tokens)
    return digest.marks


@pytest.mark.parametrize(("known", "asked", "found"), [(400, 500, 384), (500, 400, 384), (64, 500, 64), (63, 500, 0)])
def test_the_deepest_common_mark_is_found(known, asked, found):
    recent, prompt = SequenceIndex(LAYOUT), keys(500)
    recent.remember(PLAIN, prompt[:known])
    name, tokens = recent.find_longest(marks(prompt[:asked])) or (PLAIN, prompt[:0])
    assert name == PLAIN and np.array_equal(tokens, prompt[:found])
    assert recent.find_longest(marks(prompt[:asked], SALTED)) is recent.find_longest(marks(keys(500, 1))) is None


def test_an_end_between_two_marks_is_found_first_and_by_its_digest_alone():
    recent, prompt = SequenceIndex(LAYOUT), keys(500)
    recent.remember(PLAIN, prompt[:431])
    end = ContentDigest(LAYOUT, PLAIN).of(prompt[:431])
    assert np.array_equal(recent.find_longest(marks(prompt), end)[1], prompt[:431])
    assert len(recent.find_longest(marks(prompt), ContentDigest(LAYOUT, PLAIN).of(prompt[:430]))[1]) == 384
    assert len(recent.find_longest(marks(prompt), ContentDigest(LAYOUT, SALTED).of(prompt[:431]))[1]) == 384
    assert len(recent.find_longest(b"", end)[1]) == 431


def test_nothing_is_found_for_nothing():
    assert SequenceIndex(LAYOUT).find_longest(b"") is None


def test_a_conversation_takes_the_place_of_its_own_beginnings():
    recent, prompt = SequenceIndex(LAYOUT), keys(1000)
    for turn in (200, 384, 400, 1000):
        recent.remember(PLAIN, prompt[:turn])
    assert len(recent._sequences) == 1 and recent._num_tokens == 1000
    fork = np.concatenate([prompt[:320], keys(300, 5)])
    recent.remember(PLAIN, fork)
    assert len(recent._sequences) == 2 and len(recent.find_longest(marks(prompt))[1]) == 960
    assert len(recent.find_longest(marks(fork))[1]) == 576


def test_what_was_used_last_stays_and_the_bounds_are_kept():
    recent = SequenceIndex(LAYOUT, max_sequences=3, max_tokens=10_000)
    for seed in range(3):
        recent.remember(PLAIN, keys(100, seed))
    assert recent.find_longest(marks(keys(100, 0))) is not None
    recent.remember(PLAIN, keys(100, 3))
    assert [recent.find_longest(marks(keys(100, seed))) is not None for seed in range(4)] == [True, False, True, True]
    recent.remember(PLAIN, keys(20_000, 9))
    assert len(recent._sequences) == 1 and recent._num_tokens == 10_000
    assert len(recent.find_longest(marks(keys(20_000, 9)))[1]) == 9984


def test_what_has_ended_again_was_used_last():
    recent = SequenceIndex(LAYOUT, max_sequences=2)
    for seed in (0, 1, 0, 2):
        recent.remember(PLAIN, keys(100, seed))
    assert [recent.find_longest(marks(keys(100, seed))) is not None for seed in (0, 1, 2)] == [True, False, True]


def test_the_array_that_was_given_may_change_later():
    recent, prompt = SequenceIndex(LAYOUT), keys(128)
    mine = prompt.copy()
    recent.remember(PLAIN, mine)
    mine[:] = 0
    assert np.array_equal(recent.find_longest(marks(prompt))[1], prompt)


def test_random_lives_never_tell_of_other_content_and_keep_their_bounds():
    rng = random.Random(7)
    recent = SequenceIndex(LAYOUT, max_sequences=6, max_tokens=2000)
    roots, found = [keys(800, seed) for seed in range(3)], 0
    for _ in range(400):
        root, cut = rng.choice(roots), rng.randrange(0, 800)
        sequence = np.concatenate([root[:cut], keys(rng.randrange(200), rng.randrange(5) + 10)])
        name = rng.choice([PLAIN, SALTED])
        if rng.random() < 0.5:
            recent.remember(name, sequence)
            # Whatever was remembered last is whole.
            kept = min(len(sequence), 2000) // 64 * 64
            assert not kept or len(recent.find_longest(marks(sequence, name))[1]) >= kept
        elif (known := recent.find_longest(marks(sequence, name))) is not None:
            found += 1
            assert known[0] == name and np.array_equal(known[1], sequence[: len(known[1])])
            assert len(known[1]) % 64 == 0 and len(known[1]) <= len(sequence)
        assert len(recent._sequences) <= 6 and recent._num_tokens <= 2000
        assert {known for known, _ in recent._places.values()} == set(recent._sequences)
    assert found > 20
