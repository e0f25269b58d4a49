"""The image processor's arithmetic against transformers' own, and what an image's identity depends on."""

import json
import random

import numpy as np
import pytest
from PIL import Image
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from cairn.errors import InvalidRequest, ModelError
from cairn.models.image_processor import FILE, ImageProcessor

TINY = {
    "image_processor_type": "Qwen2VLImageProcessorFast",
    "patch_size": 16,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
    "size": {"shortest_edge": 32 * 32, "longest_edge": 128 * 128},
}
PUBLISHED = TINY | {"size": {"shortest_edge": 65536, "longest_edge": 16777216}}
OLD = {"image_processor_type": "Qwen2VLImageProcessor", "min_pixels": 3136, "max_pixels": 12845056}


def theirs(raw):
    return Qwen2VLImageProcessorPil(**{name: value for name, value in raw.items() if name != "image_processor_type"})


@pytest.mark.parametrize("raw", [TINY, PUBLISHED, OLD], ids=["tiny", "published", "old"])
def test_grids_are_theirs_without_the_pixels(raw):
    processor, reference = ImageProcessor.parse(raw), theirs(raw)
    rng = random.Random(0)
    sides = [*range(1, 70), *(rng.randint(1, 5000) for _ in range(150))]
    asked = 0
    for width in sides:
        for height in rng.sample(sides, 40):
            if max(width, height) <= 200 * min(width, height):
                grid = processor.grid(width, height)
                assert grid[0] * grid[1] * grid[2] == reference.get_number_of_image_patches(height, width)
                assert grid[1] % processor.merge == grid[2] % processor.merge == 0
                assert processor.num_tokens(grid) * processor.merge**2 == grid[1] * grid[2]
                asked += 1
    assert asked > 4000


@pytest.mark.parametrize("size", [(96, 160), (64, 64), (1, 1), (1, 200), (200, 1), (33, 31), (500, 20), (300, 300)])
def test_grids_are_what_their_output_has(size):
    image = Image.fromarray(np.random.default_rng(0).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8))
    made = theirs(TINY)(images=[image], return_tensors="np")
    assert ImageProcessor.parse(TINY).grid(*size) == tuple(made["image_grid_thw"][0])


@pytest.mark.parametrize("size", [(1, 201), (201, 1), (1, 65535)])
def test_too_long_an_image(size):
    with pytest.raises(InvalidRequest, match="200 times"):
        ImageProcessor.parse(TINY).grid(*size)


def test_identity():
    processor = ImageProcessor.parse(TINY)
    pixels = bytes(range(12))
    digest = processor.digest(1, 4, pixels)
    assert len(digest) == 32 and digest == processor.digest(1, 4, bytes(pixels))
    others = [
        processor.digest(4, 1, pixels),
        processor.digest(2, 2, pixels),
        processor.digest(1, 4, pixels[:-1] + b"\0"),
        *(ImageProcessor.parse(TINY | changed).digest(1, 4, pixels) for changed in CHANGES),
    ]
    assert len({digest, *others}) == 1 + len(others)


CHANGES = [
    {"patch_size": 8},
    {"merge_size": 1},
    {"temporal_patch_size": 1},
    {"resample": 2},
    {"rescale_factor": 0.5},
    {"image_mean": [0.5, 0.5, 0.25]},
    {"image_std": [0.5, 0.25, 0.5]},
    {"size": {"shortest_edge": 1024, "longest_edge": 16385}},
    {"size": {"shortest_edge": 1023, "longest_edge": 16384}},
]


@pytest.mark.parametrize(
    ("changed", "field"),
    [
        ({"image_processor_type": "CLIPImageProcessor"}, "image_processor_type"),
        ({"image_processor_type": None}, "image_processor_type"),
        ({"do_resize": False}, "do_resize"),
        ({"do_convert_rgb": 1}, "do_convert_rgb"),
        ({"patch_size": 0}, "patch_size"),
        ({"patch_size": "16"}, "patch_size"),
        ({"merge_size": True}, "merge_size"),
        ({"temporal_patch_size": 1e9}, "temporal_patch_size"),
        ({"resample": 6}, "resample"),
        ({"size": {"shortest_edge": 2, "longest_edge": 1}}, "size.shortest_edge 2 is more than size.longest_edge 1"),
        ({"min_pixels": 1 << 20}, "min_pixels 1048576 is more than size.longest_edge 16384"),
        ({"max_pixels": 0}, "max_pixels must be an integer in 1"),
        ({"size": {"shortest_edge": 0, "longest_edge": 1}}, "shortest_edge"),
        ({"size": {"shortest_edge": 1, "longest_edge": 1 << 40}}, "longest_edge"),
        ({"size": 5}, "size"),
        ({"size": {"height": 224, "width": 224}}, "shortest_edge is missing; it must be an integer"),
        ({"size": {"shortest_edge": 1024}}, "longest_edge is missing; it must be an integer"),
        ({"min_pixels": 0}, "json: min_pixels must be an integer"),
        ({"image_mean": [1, 2]}, "image_mean"),
        ({"image_std": [0, 1, 1]}, "image_std"),
        ({"rescale_factor": float("nan")}, "rescale_factor"),
    ],
)
def test_settings_that_are_refused(changed, field):
    with pytest.raises(ModelError, match=field):
        ImageProcessor.parse(TINY | changed)


def test_files_that_are_refused(tmp_path):
    with pytest.raises(ModelError, match=FILE):
        ImageProcessor.read(tmp_path)
    for text in ("", "[]", "{", '"x"'):
        (tmp_path / FILE).write_text(text)
        with pytest.raises(ModelError, match=FILE):
            ImageProcessor.read(tmp_path)
    (tmp_path / FILE).write_text(json.dumps(TINY))
    assert ImageProcessor.read(tmp_path) == ImageProcessor.parse(TINY)
