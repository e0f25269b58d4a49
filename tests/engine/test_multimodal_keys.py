"""Images among key tokens: the same place of the same image has the same number, and no two others do."""

import hashlib

import numpy as np
import pytest

from cairn.engine.contract import ImageInput
from cairn.engine.multimodal_keys import ImageKeys
from cairn.errors import InvalidRequest

TOKEN = 7


def image(start, length=4, name=b"a", **fields) -> ImageInput:
    digest = hashlib.sha256(name).digest()
    plain = {"grid": (1, 2, 2 * length), "width": 2, "height": 1, "rgb": bytes(6), "digest": digest}
    return ImageInput(start=start, length=length, **(plain | fields))


def test_places_are_told_apart_and_found_again():
    keys = ImageKeys(TOKEN)
    prompt = np.arange(20, dtype=np.int64)
    first, images = keys.put_in(prompt, [image(2), image(8, 6, b"b"), image(15)])
    second, _ = keys.put_in(prompt, [image(0, 6, b"b"), image(10)])
    assert np.array_equal(first[2:6], first[15:19]) and np.array_equal(first[2:6], second[10:14])
    assert np.array_equal(first[8:14], second[0:6])
    assert len({*first[2:6].tolist(), *first[8:14].tolist()}) == 10
    assert (first[[0, 1, 6, 7, 14, 19]] == [0, 1, 6, 7, 14, 19]).all()
    assert [(each.start, each.end) for each in images] == [(2, 6), (8, 14), (15, 19)]
    for place in range(6):
        name = keys.name(int(first[8 + place]))
        assert (name.digest, name.place, name.token) == (images[1].digest, place, TOKEN)
    assert images[0].digest == images[2].digest != images[1].digest
    assert keys.name(-11) is None and keys.name(5) is None


def test_what_was_forgotten_gets_other_numbers():
    keys = ImageKeys(TOKEN, max_images=3)
    prompt = np.zeros(4, np.int64)
    given = {}
    for round_ in range(40):
        name = b"%d" % (round_ % 5)
        found, (named,) = keys.put_in(prompt, [image(0, 4, name)])
        for key in found.tolist():
            known = keys.name(key)
            assert known.digest == named.digest
            assert given.setdefault(key, name) == name, "a number was given twice"
    assert sum(keys.name(key) is not None for key in given) == 12


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ([image(17)], "no place"),
        ([image(3), image(6)], "no place"),
        ([image(-1)], "no place"),
        ([image(0, 0)], "no place"),
        ([image(0, digest=b"short")], "32 bytes"),
        ([image(0, rgb=bytes(5))], "pixels"),
        ([image(0, width=0, rgb=b"")], "no size"),
        ([image(0, grid=(0, 2, 2))], "no patches"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(wrong, says):
    with pytest.raises(InvalidRequest, match=says) as refused:
        ImageKeys(TOKEN).put_in(np.zeros(20, np.int64), wrong)
    assert f"images[{len(wrong) - 1}]" in str(refused.value)


def test_another_vision_model_sees_another_content():
    prompt = np.zeros(4, np.int64)
    seen = {ImageKeys(TOKEN, tower).put_in(prompt, [image(0)])[1][0].digest for tower in ("a", "b", "a")}
    assert len(seen) == 2
