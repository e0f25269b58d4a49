"""Images to vectors: encoded once, kept by content within a budget, the least recently used first to go."""

import hashlib
import json
import shutil

import numpy as np
import pytest
import torch

from cairn.runner.vision import CachedEncoder, RemoteEncoder, open_vision, tower_identity
from cairn.step import Image

HIDDEN = 8


class Encoder:
    """Vectors made of the pixels, so that every mix-up shows; one for each 2 x 2 pixels."""

    merge = 2
    hidden_size = HIDDEN

    def __init__(self):
        self.calls = []

    def encode(self, width, height, rgb, bounds=None):
        self.calls.append(hashlib.sha256(rgb).digest())
        pixels = torch.from_numpy(np.frombuffer(rgb, np.uint8).copy()).view(height, width, 3).float()
        sums = pixels.view(height // 2, 2, width // 2, 2, 3).sum((1, 3, 4)).flatten()
        return (1, height, width), sums[:, None] * torch.arange(1, HIDDEN + 1)


def image(seed, width=8, height=4, start=0):
    rgb = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8).tobytes()
    digest = hashlib.sha256(rgb).digest()
    return Image(start, width * height // 4, (1, height, width), digest, width, height, rgb)


SIZE = 8 * HIDDEN * 4
"""Bytes of one of these images' vectors."""


def expected(one):
    return Encoder().encode(one.width, one.height, one.rgb)[1]


def test_encoded_once_however_often_it_is_asked_for():
    encoder = Encoder()
    vision = CachedEncoder(encoder, 10 * SIZE)
    for _ in range(3):
        for seed in (1, 2):
            assert torch.equal(vision.encode(image(seed, start=seed * 100)), expected(image(seed)))
    assert len(encoder.calls) == 2
    assert (vision.counters.encodes, vision.counters.hits, vision.counters.cached_bytes) == (2, 4, 2 * SIZE)
    assert vision.merge == 2


def test_the_least_recently_used_goes_first():
    encoder = Encoder()
    vision = CachedEncoder(encoder, 2 * SIZE)
    for seed in (1, 2, 1, 3, 1, 2):
        assert torch.equal(vision.encode(image(seed)), expected(image(seed)))
    assert [seed for call in encoder.calls for seed in (1, 2, 3) if image(seed).digest == call] == [1, 2, 3, 2]
    assert (vision.counters.dropped, vision.counters.cached_bytes) == (2, 2 * SIZE)


@pytest.mark.parametrize("budget", [0, SIZE - 1])
def test_what_does_not_fit_is_encoded_each_time(budget):
    vision = CachedEncoder(Encoder(), budget)
    for _ in range(2):
        assert torch.equal(vision.encode(image(1)), expected(image(1)))
    assert (vision.counters.encodes, vision.counters.hits, vision.counters.cached_bytes) == (2, 0, 0)


def test_what_fits_to_the_last_byte_is_kept():
    vision = CachedEncoder(Encoder(), SIZE)
    for seed in (1, 1, 2, 2):
        vision.encode(image(seed))
    assert (vision.counters.encodes, vision.counters.hits, vision.counters.cached_bytes) == (2, 2, SIZE)


def test_a_large_image_does_not_push_out_what_it_cannot_replace():
    vision = CachedEncoder(Encoder(), 2 * SIZE)
    vision.encode(image(1))
    vision.encode(image(2, width=64))
    vision.encode(image(1))
    assert (vision.counters.encodes, vision.counters.hits) == (2, 1)


def test_bytes_never_exceed_the_budget():
    vision = CachedEncoder(Encoder(), 3 * SIZE + 7)
    rng = np.random.default_rng(0)
    kept = []
    for _ in range(200):
        seed, width = int(rng.integers(0, 4)), int(rng.choice([2, 8, 12]))
        one = image(seed, width=width)
        assert torch.equal(vision.encode(one), expected(one))
        kept.append(vision.counters.cached_bytes)
        assert vision.counters.cached_bytes == sum(vectors.nbytes for vectors in vision._cache.values()) <= 3 * SIZE + 7
    assert max(kept) > 2 * SIZE and vision.counters.hits > 10
    assert vision.counters.hits + vision.counters.encodes == 200


def test_a_prompt_that_says_otherwise_is_a_bug():
    one = image(1)
    for wrong in (
        Image(0, 7, one.grid, one.digest, 8, 4, one.rgb),
        Image(0, 8, (1, 8, 4), one.digest, 8, 4, one.rgb),
    ):
        with pytest.raises(ValueError, match="but its prompt says"):
            CachedEncoder(Encoder(), SIZE).encode(wrong)
    with pytest.raises(ValueError, match="negative"):
        CachedEncoder(Encoder(), -1)


def test_rank_0_has_all_of_it(tiny_model, tiny_vl_model):
    own = open_vision(tiny_vl_model, torch.float32, 1 << 20)
    other = open_vision(tiny_vl_model, torch.float32, 1 << 20, rank=1)
    assert isinstance(own, CachedEncoder) and isinstance(other, RemoteEncoder)
    assert own.merge == other.merge == 2
    with pytest.raises(ValueError, match="rank 0"):
        other.encode(image(1))
    assert open_vision(tiny_model, torch.float32, 0) is open_vision(tiny_model, torch.float32, 0, rank=1) is None


@pytest.mark.parametrize(
    "change", [{"num_heads": 2}, {"hidden_act": "silu"}, {"rope_parameters": {"rope_theta": 5000.0}}]
)
def test_an_identity_is_of_the_config_as_of_the_weights(tiny_model, tiny_vl_model, tmp_path, change):
    """None of these shows in a tensor's shape, and all of them change an image's vectors."""
    assert tower_identity(tiny_model) == ""
    for file in tiny_vl_model.iterdir():
        if file.suffix == ".safetensors" or file.name.endswith(".index.json"):
            (tmp_path / file.name).symlink_to(file)
    shutil.copy(tiny_vl_model / "config.json", tmp_path)
    own = tower_identity(tiny_vl_model)
    assert tower_identity(tmp_path) == own
    raw = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(raw | {"vision_config": raw["vision_config"] | change}))
    assert tower_identity(tmp_path) not in ("", own)
