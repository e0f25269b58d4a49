"""The vision tower against transformers': its tensors by name, its vectors, and folders that do not fit."""

import json
import shutil
from functools import partial

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file
from transformers import AutoImageProcessor
from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5VisionConfig
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5VisionModel

from cairn.errors import ModelError
from cairn.models.image_processor import FILE, ImageProcessor
from cairn.models.qwen3_5_vision import PREFIX, load_tower, parse, read_vision, tensors
from cairn.runner.vision import send_arrays
from doubles.copy_stream import LateCopyStream
from doubles.counted_device import HostRead, counted_device

torch.set_num_threads(1)

VISION = {
    "depth": 2,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_heads": 4,
    "in_channels": 3,
    "patch_size": 16,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "out_hidden_size": 96,
    "num_position_embeddings": 64,
    "hidden_act": "gelu_pytorch_tanh",
    "deepstack_visual_indexes": [],
    "model_type": "qwen3_5",
}
PROCESSOR = {
    "image_processor_type": "Qwen2VLImageProcessorFast",
    "patch_size": 16,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
    "size": {"shortest_edge": 32 * 32, "longest_edge": 128 * 128},
}
SIZES = [(96, 160), (64, 64), (200, 30), (1, 1), (130, 129)]


@pytest.fixture(scope="module")
def reference():
    """transformers' tower with random weights."""
    torch.manual_seed(0)
    model = Qwen3_5VisionModel(Qwen3_5VisionConfig(**{k: v for k, v in VISION.items() if k != "model_type"}))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape) * (0.1 if parameter.dim() > 1 else 0.3))
    return model.train(False)


@pytest.fixture
def folder(tmp_path, reference):
    return checkpoint(tmp_path, reference)


def checkpoint(path, reference, vision=VISION, processor=PROCESSOR, weights=None):
    own = {PREFIX + name: tensor.clone() for name, tensor in reference.state_dict().items()}
    save_file(
        {"lm_head.weight": torch.zeros(2, 2), **(own if weights is None else weights)}, path / "model.safetensors"
    )
    (path / "config.json").write_text(json.dumps({"model_type": "qwen3_5", "vision_config": vision}))
    (path / FILE).write_text(json.dumps(processor))
    return path


def image(size, seed=0):
    width, height = size
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


def encoded(reference, folder, pictures, dtype):
    """What transformers gives, through its own processor as the folder names it."""
    processor = AutoImageProcessor.from_pretrained(folder, backend="pil", local_files_only=True)
    made = processor(images=[Image.fromarray(picture) for picture in pictures], return_tensors="pt")
    with torch.no_grad():
        vectors = reference.to(dtype)(made["pixel_values"].to(dtype), made["image_grid_thw"]).pooler_output
    reference.to(torch.float32)
    return [tuple(grid) for grid in made["image_grid_thw"].tolist()], vectors


def test_every_tensor_by_its_published_name(reference):
    theirs = {PREFIX + name: tuple(tensor.shape) for name, tensor in reference.state_dict().items()}
    assert tensors(parse(VISION)) == theirs


@pytest.mark.parametrize("bounds", [(1, 64 * 64), (256 * 256, 1 << 20), (1, 1), (100 * 100, 100 * 100)])
def test_a_request_may_bound_the_area(folder, tmp_path, bounds):
    """As a tower whose checkpoint says so, bit for bit; the next image is resized as before."""
    other = tmp_path / "other"
    shutil.copytree(folder, other)
    changed = PROCESSOR | {"size": {"shortest_edge": bounds[0], "longest_edge": bounds[1]}}
    (other / "preprocessor_config.json").write_text(json.dumps(changed))
    tower, theirs = load_tower(folder, torch.float32), load_tower(other, torch.float32)
    processor = ImageProcessor.parse(PROCESSOR)
    for seed, size in enumerate(SIZES):
        picture = image(size, seed)
        height, width, _ = picture.shape
        before = tower.encode(width, height, picture.tobytes())
        grid, vectors = tower.encode(width, height, picture.tobytes(), bounds)
        expected_grid, expected = theirs.encode(width, height, picture.tobytes())
        assert grid == expected_grid == processor.with_bounds(*bounds).grid(width, height)
        assert torch.equal(vectors, expected)
        after = tower.encode(width, height, picture.tobytes())
        assert before[0] == after[0] and torch.equal(before[1], after[1])


def test_vectors_are_theirs_bit_for_bit_alone_and_in_a_batch(reference, folder):
    tower = load_tower(folder, torch.float32)
    assert (tower.merge, tower.hidden_size) == (2, 96)
    pictures = [image(size, seed) for seed, size in enumerate(SIZES)]
    grids, batch = encoded(reference, folder, pictures, torch.float32)
    lengths = [ImageProcessor.parse(PROCESSOR).num_tokens(grid) for grid in grids]
    for picture, grid, theirs in zip(pictures, grids, batch.split(lengths), strict=True):
        height, width, _ = picture.shape
        own_grid, own = tower.encode(width, height, picture.tobytes())
        alone_grids, alone = encoded(reference, folder, [picture], torch.float32)
        assert own_grid == grid == alone_grids[0]
        assert torch.equal(own, alone)
        assert torch.equal(own, tower.encode(width, height, picture.tobytes())[1])
        torch.testing.assert_close(own, theirs, rtol=0, atol=1e-5)


def test_float32_error_is_that_of_transformers(reference, folder):
    picture = image((120, 70))
    _, exact = encoded(reference, folder, [picture], torch.float64)
    _, theirs = encoded(reference, folder, [picture], torch.float32)
    _, own = load_tower(folder, torch.float32).encode(120, 70, picture.tobytes())
    worst = (own.double() - exact).abs().max()
    assert worst <= 2 * (theirs.double() - exact).abs().max() + 1e-6
    assert exact.std() > 0.05


def test_bfloat16_keeps_the_angles_in_float32(reference, folder):
    picture = image((120, 70))
    _, own = load_tower(folder, torch.bfloat16).encode(120, 70, picture.tobytes())
    _, exact = encoded(reference, folder, [picture], torch.float32)
    assert own.dtype == torch.bfloat16
    assert (own.float() - exact).abs().max() < 0.05 * exact.abs().max()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_on_a_device_an_image_is_one_copy_there_and_none_back(folder, dtype):
    """On one that refuses whatever would have the host wait, or computes with something that is on the host."""
    device, copies = counted_device()
    host, tower = load_tower(folder, dtype), load_tower(folder, dtype, device, partial(send_arrays, device))
    for seed, size in enumerate(SIZES):
        picture = image(size, seed)
        height, width, _ = picture.shape
        copies.take()
        grid, vectors = tower.encode(width, height, picture.tobytes())
        assert copies.take() == (1, 0) and vectors.device.type == device.type
        expected_grid, expected = host.encode(width, height, picture.tobytes())
        assert grid == expected_grid and vectors.dtype == dtype
        bound = 1e-5 if dtype == torch.float32 else 0.02 * expected.abs().max().item()
        torch.testing.assert_close(vectors.cpu(), expected, rtol=0, atol=bound)
    tower.encode_largest(1, 5)
    assert copies.take() == (1, 1)  # the one back is this test's


def test_a_grid_on_the_device_would_be_read_by_the_host(folder):
    """The device of these tests refuses what transformers does with a grid that lies there."""
    device, _ = counted_device()
    tower = load_tower(folder, torch.float32, device, partial(send_arrays, device))
    with torch.inference_mode(), pytest.raises((HostRead, RuntimeError)):
        tower._module(torch.zeros(4, 1536).to(device), torch.tensor([[1, 2, 2]]).to(device))


def test_weights_are_copied_to_a_device_as_they_are_read(folder):
    """Two buffers, and the bytes of the plain loader."""
    stream = LateCopyStream()
    plain, copied = load_tower(folder, torch.bfloat16), load_tower(folder, torch.bfloat16, stream=stream)
    expected = plain._module.state_dict()
    assert expected.keys() == copied._module.state_dict().keys() and len(stream.buffers) == 2
    assert all(torch.equal(tensor, expected[name]) for name, tensor in copied._module.state_dict().items())


def test_weights_are_in_memory_of_their_own(folder):
    tower = load_tower(folder, torch.float32)
    before = tower.encode(64, 64, image((64, 64)).tobytes())[1]
    (folder / "model.safetensors").write_bytes(b"gone")
    assert torch.equal(before, tower.encode(64, 64, image((64, 64)).tobytes())[1])


def test_a_folder_without_vision(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "nemotron_h"}')
    assert load_tower(tmp_path, torch.float32) is None


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"depth": 0}, "depth"),
        ({"depth": "2"}, "depth"),
        ({"hidden_size": 65}, "hidden_size"),
        ({"num_position_embeddings": 63}, "num_position_embeddings"),
        ({"hidden_act": "relu"}, "hidden_act"),
        ({"in_channels": 1}, "in_channels"),
        ({"deepstack_visual_indexes": [1]}, "deepstack"),
        ({"patch_size": [16, 16]}, "patch_size"),
        ({"rope_parameters": {"rope_theta": 0}}, "rope_theta"),
        ({"rope_parameters": [1]}, "vision_config.rope_parameters"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "rope_type is 'yarn'"),
    ],
)
def test_configs_that_are_refused(changed, said):
    with pytest.raises(ModelError, match=said):
        parse(VISION | changed)


def test_weights_that_do_not_fit(tmp_path, reference):
    own = {PREFIX + name: tensor.clone() for name, tensor in reference.state_dict().items()}
    name = f"{PREFIX}blocks.1.attn.qkv.weight"
    cases = [
        ({key: value for key, value in own.items() if key != name}, "blocks.1.attn.qkv.weight .* is missing"),
        (own | {name: torch.zeros(3, 64)}, "blocks.1.attn.qkv.weight has shape"),
        (own | {f"{PREFIX}blocks.2.norm1.bias": torch.zeros(64)}, "blocks.2.norm1.bias is not part"),
        (own | {name: torch.zeros(192, 64, dtype=torch.int32)}, "I32"),
    ]
    for weights, said in cases:
        with pytest.raises(ModelError, match=said):
            load_tower(checkpoint(tmp_path, reference, weights=weights), torch.float32)


def test_processor_and_config_that_disagree(tmp_path, reference):
    for changed in ({"patch_size": 14}, {"merge_size": 1}, {"temporal_patch_size": 1}):
        with pytest.raises(ModelError, match="disagree"):
            load_tower(checkpoint(tmp_path, reference, processor=PROCESSOR | changed), torch.float32)
    (tmp_path / FILE).unlink()
    with pytest.raises(ModelError, match=FILE):
        load_tower(tmp_path, torch.float32)


@pytest.mark.parametrize("width", [95, "96"])
def test_vectors_as_wide_as_tokens(folder, width):
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(raw | {"text_config": {"hidden_size": 96}}))
    assert read_vision(folder).out_hidden_size == 96
    (folder / "config.json").write_text(json.dumps(raw | {"text_config": {"hidden_size": width}}))
    with pytest.raises(ModelError, match=rf"out_hidden_size 96 must be text_config.hidden_size {width!r}"):
        load_tower(folder, torch.float32)


def test_a_vision_config_that_is_no_object(tmp_path, reference):
    with pytest.raises(ModelError, match="vision_config"):
        load_tower(checkpoint(tmp_path, reference, vision=[1]), torch.float32)
