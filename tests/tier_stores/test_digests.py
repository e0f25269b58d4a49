"""Names of entries: equal for equal content, different for everything else."""

import numpy as np
import pytest

from cairn.cache.events import KeyName
from cairn.cache.layout import AttentionGroup, CacheLayout
from cairn.tiers.digests import MAX_RECENT, EntryNames, named_images, stride_of
from cairn.transfer.contract import ContentName, NamedImage
from cairn.transfer.digest import ContentDigest

NAMES = EntryNames(bytes(32), bytes(range(32)), 64)
KEYS = np.arange(300, dtype=np.int64)


def all_names(path) -> list[bytes]:
    return [*path.chunks, *(path.state(position) for position in range(1, len(path.keys) + 1))]


def test_chunks_are_named_as_other_servers_name_them():
    digest = ContentDigest(NAMES.identity, ContentName())
    digest.append(KEYS)
    marks = digest.marks
    assert NAMES.path(ContentName(), KEYS).chunks == [marks[at : at + 32] for at in range(0, len(marks), 32)]
    wide = EntryNames(bytes(32), b"", 128).path(ContentName(), KEYS)
    assert wide.chunks == [marks[32:64], marks[96:128]]


def test_all_names_of_a_path_differ():
    path = NAMES.path(ContentName(), KEYS)
    names = all_names(path)
    assert len(set(names)) == len(names) == 4 + 300
    assert path.before(0) == b"" and path.before(2) == path.mark(2) == path.chunks[1]


def test_a_beginning_has_the_same_names():
    long, short = NAMES.path(ContentName(), KEYS), NAMES.path(ContentName(), KEYS[:200])
    assert long.chunks[:3] == short.chunks and long.mark(0) == short.mark(0)
    assert all(long.state(position) == short.state(position) for position in (1, 63, 64, 65, 200))


@pytest.mark.parametrize("stride", [64, 128])
def test_what_was_named_before_changes_no_name(stride):
    random, names = np.random.default_rng(stride), EntryNames(bytes(32), b"", stride)
    images = (NamedImage(70, 100, b"i" * 32),)
    paths = [np.zeros(0, np.int64)]
    for _ in range(200):
        above = paths[random.integers(len(paths))]
        keys = np.concatenate([above[: random.integers(len(above) + 1)], random.integers(0, 2, random.integers(300))])
        name = ContentName(salt=random.choice([None, "a"]), images=images[: random.integers(2)])
        ours, fresh = names.path(name, keys.copy()), EntryNames(bytes(32), b"", stride).path(name, keys)
        assert ours.chunks == fresh.chunks and ours.state(len(keys)) == fresh.state(len(keys))
        paths.append(keys)
    assert 0 < len(names._recent) <= MAX_RECENT


@pytest.mark.parametrize("place", [0, 63, 64, 130])
def test_another_token_changes_all_names_from_there_on(place):
    other = KEYS.copy()
    other[place] += 1
    ours, theirs = NAMES.path(ContentName(), KEYS), NAMES.path(ContentName(), other)
    assert [a == b for a, b in zip(ours.chunks, theirs.chunks, strict=True)] == [
        64 * (n + 1) <= place for n in range(4)
    ]
    for position in range(1, 301):
        assert (ours.state(position) == theirs.state(position)) == (position <= place)


def test_namespaces_identities_and_secrets_have_names_of_their_own():
    paths = [
        NAMES.path(ContentName(), KEYS),
        NAMES.path(ContentName(salt=""), KEYS),
        NAMES.path(ContentName(salt="a"), KEYS),
        NAMES.path(ContentName(adapter="a"), KEYS),
        EntryNames(bytes(31) + b"1", NAMES.secret, 64).path(ContentName(), KEYS),
        EntryNames(NAMES.identity, b"other", 64).path(ContentName(salt="a"), KEYS),
    ]
    names = [name for path in paths for name in [*all_names(path), path.mark(0)]]
    assert len(set(names)) == len(names)
    unsalted = EntryNames(NAMES.identity, b"other", 64).path(ContentName(), KEYS)
    assert unsalted.chunks == paths[0].chunks, "the secret is for salts alone"


def test_images_count_by_what_they_are():
    def path(base, digest, start=60, length=10):
        keys = KEYS.copy()
        keys[start : start + length] = base - np.arange(length)
        return NAMES.path(ContentName(images=(NamedImage(start, length, digest),)), keys)

    one, same, other = path(-1, b"a" * 32), path(-500, b"a" * 32), path(-1, b"b" * 32)
    assert all_names(one) == all_names(same), "numbers are this process's own"
    assert [one.state(p) == other.state(p) for p in (60, 61, 66, 100, 300)] == [True] + [False] * 4


class Images:
    """Numbers of images as `ImageKeys` gives them: (first number, length)."""

    def __init__(self, **images):
        self.images = images

    def name(self, key):
        for digest, (base, length) in self.images.items():
            if 0 <= base - key < length:
                return KeyName(digest.encode(), base - key, 7)
        return None


def test_images_are_found_among_key_tokens():
    names = Images(a=(-1, 4), b=(-5, 3))
    keys = np.array([1, -1, -2, -3, -4, -5, -6, -7, 2, -1, -2, -3, -4, -1, -2], np.int64)
    assert named_images(keys, names) == (
        NamedImage(1, 4, b"a"),
        NamedImage(5, 3, b"b"),
        NamedImage(9, 4, b"a"),
        NamedImage(13, 2, b"a"),
    )
    assert named_images(np.array([1, 2]), names) == ()
    assert named_images(np.array([1, -100]), names) is None


@pytest.mark.parametrize(("block_size", "stride"), [(16, 64), (64, 64), (48, 192), (128, 128), (1, 64), (7, 448)])
def test_a_chunk_has_whole_pages(block_size, stride):
    layout = CacheLayout(block_size, 64, 1, (AttentionGroup("full", block_size),), 8, 100, 1)
    assert stride_of(layout) == stride
