"""Building the model: names as transformers saves them, and the same function whatever computes it."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from cairn.errors import ModelError
from cairn.models.decoder_builder import Execution, build_decoder
from cairn.models.sharding import TensorShard
from models.nemotron_h_truth import logits_of, published
from runner.harness import Driver, build_tiny, family, parse, prompt, random_weights, raw_config, tensors


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


RAW = raw_config("ME*-", moe_latent_size=16, mlp_bias=True, use_bias=True)


def test_a_checkpoint_saved_by_transformers_has_the_names_that_are_asked_for(tmp_path: Path) -> None:
    config = parse(RAW)
    weights = random_weights(config, 0)
    theirs = published(RAW, weights, clamp=False)
    theirs.save_pretrained(tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    assert saved.keys() == tensors(config).keys()
    driver = Driver(config, build_tiny(config, saved, exact=False), exact=False)
    tokens = prompt(90, 0)
    (found,) = driver.run(driver.row(driver.sequence(0, 90), tokens))
    torch.testing.assert_close(found, logits_of(theirs, tokens, wide=False)[-1], rtol=0, atol=3e-5)


def test_every_tensor_is_asked_for_once() -> None:
    config = parse(RAW)
    weights = random_weights(config, 0)
    asked: list[str] = []

    def load(name: str, shape: tuple[int, ...], shard: TensorShard | None = None) -> torch.Tensor:
        assert tuple(weights[name].shape) == shape
        asked.append(name)
        return weights[name].clone()

    build_decoder(family(config).spec(config), load, Execution(True, torch.float32))
    assert sorted(asked) == sorted(tensors(config))


def test_what_the_loader_raises_comes_through() -> None:
    def load(name: str, shape: tuple[int, ...], shard: TensorShard | None = None) -> torch.Tensor:
        raise ModelError(f"{name} is missing")

    with pytest.raises(ModelError, match=r"backbone\.embeddings\.weight is missing"):
        build_decoder(family(parse(RAW)).spec(parse(RAW)), load, Execution(False, torch.float32))


@pytest.mark.parametrize("exact", [False, True])
def test_the_fast_kernels_and_the_slow_ones_make_the_same_model(exact: bool) -> None:
    config = parse(raw_config("ME*-", time_step_limit=[0.01, 0.5]))
    weights = random_weights(config, 1)
    found = []
    for backend in ("cpu", "reference"):
        driver = Driver(config, build_tiny(config, weights, exact, backend=backend), exact)
        driver.runner.pool.zero_()
        one, two = driver.sequence(0, 100), driver.sequence(1, 100)
        logits = driver.run(driver.row(one, prompt(70, 2)), driver.row(two, prompt(64, 3)))
        logits += driver.run(driver.row(one, prompt(1, 4), decode=True), driver.row(two, prompt(9, 5)))
        found.append(torch.stack(logits))
    torch.testing.assert_close(found[0], found[1], rtol=0, atol=3e-5)
