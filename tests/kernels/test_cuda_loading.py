"""Weights and images on a GPU: copied on a stream of their own, and encoded without the host waiting. Needs one."""

import numpy as np
import pytest
import torch

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    pytest.importorskip("transformers", reason="a vision tower is transformers' module")
    from cairn.models.random_weights.make_model import make_model

    made = tmp_path_factory.mktemp("models") / "qwen3_5_vl"
    make_model("qwen3_5_vl", made)
    return made


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("buffer_bytes", [1 << 16, 64 << 20])
def test_cuda_weights_are_the_plain_loaders(folder, dtype, buffer_bytes, monkeypatch):
    """Whole tensors, and halves of their rows and columns."""
    from cairn.models.sharding import TensorShard
    from cairn.models.weights import device_copy
    from cairn.models.weights.loader import WeightReader

    monkeypatch.setattr(device_copy, "BUFFER_BYTES", buffer_bytes)
    with WeightReader(folder, getattr(torch, dtype)) as reader:
        shapes = {name: header.shape for name, header in reader.headers.items()}
        wanted = [
            (name, shape, None if dim < 0 else TensorShard(dim, ((0, shape[dim] // 2),)))
            for name, shape in shapes.items()
            for dim in range(-1, len(shape))
            if dim < 0 or shape[dim] > 1
        ]

        def read_all():
            return [reader.load(*each) for each in wanted]

        plain = read_all()
        with device_copy.load_weights(reader, shapes, read_all, device_copy.stream_to(torch.device("cuda"))):
            copied = read_all()
    for tensor, other in zip(copied, plain, strict=True):
        assert tensor.device.type == "cuda" and torch.equal(tensor.cpu(), other)


def test_cuda_encodes_an_image_without_a_wait(folder):
    from cairn.runner.vision import open_vision

    host, device = (
        open_vision(folder, torch.float32, 0),
        open_vision(folder, torch.float32, 0, device=torch.device("cuda")),
    )
    rgb = np.random.default_rng(3).integers(0, 256, (96, 160, 3), dtype=np.uint8).tobytes()
    device._tower.encode(160, 96, rgb)  # what is compiled or allocated at first may wait
    torch.cuda.set_sync_debug_mode("error")
    try:
        grid, vectors = device._tower.encode(160, 96, rgb)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    expected_grid, expected = host._tower.encode(160, 96, rgb)
    assert grid == expected_grid
    torch.testing.assert_close(vectors.cpu(), expected, rtol=0, atol=1e-3)
