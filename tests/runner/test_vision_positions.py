"""Positions among images against transformers' `get_rope_index` of Qwen3.5, whole prompts and every part of them."""

import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5Model

from cairn.runner.vision import mrope_positions
from cairn.step import Image


def theirs(length, images, merge):
    kinds = torch.zeros(1, length, dtype=torch.int64)
    for image in images:
        kinds[0, image.start : image.end] = 1
    model = SimpleNamespace(
        config=SimpleNamespace(vision_config=SimpleNamespace(spatial_merge_size=merge)),
        get_vision_position_ids=lambda *args, **kwargs: Qwen3_5Model.get_vision_position_ids(None, *args, **kwargs),
    )
    grids = torch.tensor([image.grid for image in images]) if images else None
    positions, delta = Qwen3_5Model.get_rope_index(model, torch.zeros_like(kinds), kinds, image_grid_thw=grids)
    return positions[:, 0].numpy(), int(delta[0, 0])


def layout(texts, grids, merge):
    """Images with so much text before each, and the last text behind them all."""
    images, place = [], 0
    for text, (height, width) in zip(texts, grids, strict=False):
        place += text
        length = height * width // merge**2
        images.append(Image(place, length, (1, height, width), b"", 0, 0, b""))
        place += length
    return images, place + texts[-1]


LAYOUTS = [
    ([7], [], 2),
    ([5, 3], [(4, 6)], 2),
    ([1, 2], [(2, 40)], 2),
    ([1, 2], [(40, 2)], 2),
    ([3, 2, 4], [(6, 10), (4, 4)], 2),
    ([0, 1, 0], [(2, 2), (8, 2)], 2),
    ([3, 2, 1, 9, 4], [(4, 4), (2, 8), (6, 6), (10, 4)], 1),
    ([3, 6, 2], [(9, 6), (3, 3)], 3),
]


@pytest.mark.parametrize(("texts", "grids", "merge"), LAYOUTS)
def test_positions_are_theirs_whole_and_in_parts(texts, grids, merge):
    images, length = layout(texts, grids, merge)
    expected, delta = theirs(length, images, merge)
    assert (mrope_positions(0, length, images, merge) == expected).all()
    for start in range(length):
        for end in range(start + 1, length + 1, 1 if length < 40 else 7):
            assert (mrope_positions(start, end, images, merge) == expected[:, start:end]).all(), (start, end)
    # what comes behind the prompt goes on from the largest of its positions
    behind = mrope_positions(length, length + 5, images, merge)
    assert (behind == np.arange(length, length + 5) + delta).all()


def test_random_prompts():
    rng = random.Random(0)
    for _ in range(200):
        merge = rng.choice([1, 2, 4])
        count = rng.randint(0, 6)
        texts = [rng.choice([0, 1, 2, 17]) if i == 0 else rng.choice([1, 2, 17]) for i in range(count)] + [
            rng.randint(1, 9)
        ]
        grids = [(merge * rng.randint(1, 9), merge * rng.randint(1, 9)) for _ in range(count)]
        images, length = layout(texts, grids, merge)
        expected, _ = theirs(length, images, merge)
        assert (mrope_positions(0, length, images, merge) == expected).all()
        start, end = sorted(rng.sample(range(length + 1), 2)) if length > 1 else (0, 1)
        assert (mrope_positions(start, end, images, merge) == expected[:, start:end]).all()
