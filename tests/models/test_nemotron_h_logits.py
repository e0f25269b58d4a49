"""Nemotron-H's logits by every way a token can be computed: see `logits_bar`."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from cairn.layers.mamba2 import Mamba2
from models.logits_bar import (
    LENGTH,
    Truth,
    batches_of_mixed_lengths,
    full_hits,
    kept_everywhere,
    resumed_at_every_position,
    whole_in_chunks_and_token_by_token,
)
from models.nemotron_h_truth import logits_of, published
from runner.harness import Driver, build_tiny, parse, prompt, random_weights, raw_config

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "dense": ("M*-M", {}),
    "moe": ("ME*E", {}),
    "latent-moe-one-group": ("MEM*", {"moe_latent_size": 16, "n_groups": 1, "n_group": 1, "mlp_bias": True}),
}
SEEDS = {"dense": range(20), "moe": range(20), "latent-moe-one-group": range(3)}
FIRST_SEEDS = {"dense": 2, "moe": 2, "latent-moe-one-group": 1}
# `seed % 2` tells whether the kernels are the exact ones.
CASES = [
    pytest.param(name, seed, id=f"{name}-{seed}", marks=[pytest.mark.more] if seed >= FIRST_SEEDS[name] else [])
    for name in MODELS
    for seed in SEEDS[name]
]


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def truth(name: str, seed: int, exact: bool = False, **driver: Any) -> tuple[Driver, Truth]:
    pattern, changes = MODELS[name]
    raw = raw_config(pattern, **changes)
    config = parse(raw)
    weights, tokens = random_weights(config, seed), prompt(LENGTH, seed)
    theirs = published(raw, weights, clamp=False)
    found = Truth.of(tokens, *(logits_of(theirs, tokens, wide=wide) for wide in (False, True)))
    return Driver(config, build_tiny(config, weights, exact), exact, **driver), found


@pytest.mark.parametrize(("name", "seed"), CASES)
def test_prefill_and_decode(name: str, seed: int) -> None:
    driver, t = truth(name, seed, exact=seed % 2 == 1, num_pages=2048)
    whole_in_chunks_and_token_by_token(driver, t, (1, 2, 3, 37, 63, 64, 65, 100, 128, 129), stepped_from=90)


@pytest.mark.parametrize(("name", "seed"), CASES)
def test_batches_of_mixed_lengths(name: str, seed: int) -> None:
    batches_of_mixed_lengths(*truth(name, seed, num_slots=12))


@pytest.mark.parametrize(("name", "seed"), CASES)
def test_resumed_from_a_checkpoint_at_every_position(name: str, seed: int) -> None:
    length = 71
    driver, t = truth(name, seed, num_slots=length + 1, num_pages=4096)
    first, files = kept_everywhere(driver, t, length, prefilled=length)
    full_hits(driver, t, files)
    resumed_at_every_position(driver, t, first, files)


def bounded(mixer: Any, dt_min: float) -> Any:
    """With a lower bound of the time steps, if it is Mamba2."""
    return replace(mixer, dt_limit=(dt_min, math.inf)) if isinstance(mixer, Mamba2) else mixer


def test_the_lower_bound_of_time_steps_is_transformers_own() -> None:
    """With their lower bound cairn's prefill is the unmodified transformers'; without it, it is not."""
    pattern, changes = MODELS["dense"]
    raw = raw_config(pattern, **changes)
    config, tokens = parse(raw), prompt(LENGTH, 0)
    weights = random_weights(config, 0)
    theirs = published(raw, weights, clamp=True)
    t = Truth.of(tokens, *(logits_of(theirs, tokens, wide=wide) for wide in (False, True)))
    errors = []
    for dt_min in (0.001, 0.0):
        model = build_tiny(config, weights, False)
        layers = tuple((norm, bounded(mixer, dt_min)) for norm, mixer in model.layers)
        driver = Driver(config, replace(model, layers=layers), False)
        (logits,) = driver.run(driver.row(driver.sequence(0, LENGTH), tokens))
        errors.append(t.error(logits, LENGTH))
    assert errors[0] <= t.bar[-1] < errors[1] / 10
