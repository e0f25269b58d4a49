"""Qwen3.5's logits against transformers' in float64, by every way a token can be computed: see `logits_bar`."""

from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from cairn.kernels.contract import Kernels
from cairn.layers.gated_delta_net import GatedDeltaNet
from cairn.models.families.qwen3_5 import Qwen35Config
from cairn.step import Image
from models.logits_bar import (
    LENGTH,
    Truth,
    batches_of_mixed_lengths,
    kept_everywhere,
    resumed_at_every_position,
    steps,
    whole_in_chunks_and_token_by_token,
)
from models.qwen3_5_truth import parse_qwen, published_qwen, qwen_logits, qwen_truth, qwen_weights, raw_qwen
from runner.harness import Driver, build_tiny, prompt, ranks
from tiers import first_of, long, more

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "dense": ("qwen3_5_text", {}),
    "nested-tied": ("qwen3_5", {"tie_word_embeddings": True, "linear_num_key_heads": 1}),
    "moe": ("qwen3_5_moe_text", {"layer_types": ["linear_attention", "full_attention"], "num_hidden_layers": 2}),
    "next": ("qwen3_next", {"mlp_only_layers": [1], "norm_topk_prob": False}),
    "one-value-head-each": ("qwen3_5", {"linear_num_value_heads": 2, "num_key_value_heads": 1}),
}
# `seed % 2` tells whether the kernels are the exact ones.
EXACT_FIRST = ("dense", "moe")
LONG = {"nested-tied": range(1, 4), "dense": range(3, 20), "moe": range(3, 20), "next": range(3, 10)}


def cases(short: int) -> list[Any]:
    found = [
        pytest.param(
            name, seed, id=f"{name}-{seed}", marks=[] if seed == 0 or name in EXACT_FIRST else pytest.mark.more
        )
        for name in MODELS
        for seed in range(short)
    ]
    return found + [
        pytest.param(name, seed, id=f"{name}-{seed}", marks=pytest.mark.long)
        for name, seeds in LONG.items()
        for seed in seeds
        if seed >= short
    ]


@cache
def model(name: str, seed: int) -> tuple[Qwen35Config, dict[str, Tensor], Truth]:
    model_type, changes = MODELS[name]
    raw = raw_qwen(model_type, **changes)
    config = parse_qwen(raw)
    weights = qwen_weights(config, seed)
    return config, weights, qwen_truth(raw, weights, prompt(LENGTH, seed))


def truth(name: str, seed: int, exact: bool = False, size: int = 1, **driver: Any) -> tuple[Driver, Truth]:
    config, weights, found = model(name, seed)
    if size > 1:
        return ranks(config, weights, size, exact, **driver), found
    return Driver(config, build_tiny(config, weights, exact), exact, **driver), found


@pytest.mark.parametrize(("name", "seed"), cases(2))
def test_prefill_and_decode(name: str, seed: int) -> None:
    driver, t = truth(name, seed, exact=seed % 2 == 1, num_pages=2048)
    whole_in_chunks_and_token_by_token(driver, t, (1, 2, 3, 37, 63, 64, 65, 100, 128, 129), stepped_from=90)


@dataclass(frozen=True)
class WrongGates:
    """The kernels of another backend, but that in batches of one kind the delta rule writes or decays too much."""

    kernels: Kernels
    decode: bool
    more_beta: float = 0.0
    more_dt: float = 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.kernels, name)

    def gdn(self, q: Tensor, k: Tensor, v: Tensor, beta: Tensor, dt: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
        *_, batch, _ = rest
        if (batch.host.num_decodes > 0) == self.decode:
            beta, dt = beta + self.more_beta, dt + self.more_dt
        return self.kernels.gdn(q, k, v, beta, dt, *rest)


@pytest.mark.parametrize("wrong", [{}, {"more_beta": 2e-4}, {"more_dt": 2e-4}])
@pytest.mark.parametrize("decode", [False, True])
def test_the_bar_stops_what_is_no_rounding(decode: bool, wrong: dict[str, float]) -> None:
    config, weights, t = model("dense", 0)
    built = build_tiny(config, weights, False)
    kernels = WrongGates(built.kernels, decode, **wrong)
    layers = tuple(
        (norm, replace(mixer, kernels=kernels) if isinstance(mixer, GatedDeltaNet) else mixer)
        for norm, mixer in built.layers
    )
    driver = Driver(config, replace(built, layers=layers), False)
    if not wrong:
        whole_in_chunks_and_token_by_token(driver, t, (), stepped_from=90)
        return
    with pytest.raises(AssertionError, match="bar"):
        whole_in_chunks_and_token_by_token(driver, t, (), stepped_from=90)


@pytest.mark.parametrize(("name", "seed"), cases(1))
def test_batches_of_mixed_lengths(name: str, seed: int) -> None:
    batches_of_mixed_lengths(*truth(name, seed, num_slots=12))


@pytest.mark.parametrize(("name", "seed"), cases(1))
def test_resumed_from_a_checkpoint_at_every_position(name: str, seed: int) -> None:
    length = 71
    driver, t = truth(name, seed, num_slots=length + 1, num_pages=4096)
    resumed_at_every_position(driver, t, *kept_everywhere(driver, t, length, prefilled=length))


class GivenVectors:
    """Implements `VisionEncoder`: an image's vectors are known already."""

    merge = 2

    def __init__(self, vectors: dict[int, Tensor]) -> None:
        self.vectors = vectors

    def encode(self, image: Image) -> Tensor:
        return self.vectors[image.start]


def images_of(*places: tuple[int, int, int]) -> tuple[Image, ...]:
    """(first token, rows, columns) of each."""
    return tuple(Image(at, rows * columns, (1, 2 * rows, 2 * columns), b"", 0, 0, b"") for at, rows, columns in places)


YARN = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 50}


@pytest.mark.parametrize("scaling", [{}, more(YARN)])
def test_images_stand_in_three_dimensions(scaling: dict[str, Any]) -> None:
    """Positions by hand: text counts up, an image counts its rows and columns from there, text goes on behind both.
    Scaled, the first image lies before the length that the model was trained for, and the second one behind it."""
    raw = raw_qwen("qwen3_5", layer_types=["full_attention", "linear_attention", "full_attention"])
    raw["text_config"]["rope_parameters"] |= scaling
    config = parse_qwen(raw)
    weights, tokens = qwen_weights(config, 5), prompt(LENGTH, 5)
    images = images_of((20, 3, 5), (60, 8, 2))
    positions = np.concatenate(
        [
            np.tile(np.arange(20), (3, 1)),
            20 + np.indices((1, 3, 5)).reshape(3, -1),
            np.tile(25 + np.arange(25), (3, 1)),
            50 + np.indices((1, 8, 2)).reshape(3, -1),
            np.tile(58 + np.arange(LENGTH - 76), (3, 1)),
        ],
        axis=1,
    )
    vectors = {image.start: torch.randn(image.length, 32, generator=torch.manual_seed(6)) for image in images}
    places = torch.cat([torch.arange(image.start, image.end) for image in images])
    for place in places.tolist():
        tokens[place] = -1 - place
    content = (torch.from_numpy(positions), places, torch.cat(list(vectors.values())))
    t = qwen_truth(raw, weights, tokens, content)
    driver = Driver(config, build_tiny(config, weights, exact=False), exact=False, vision=GivenVectors(vectors))
    # Before, inside, between and after images, and token by token.
    for cuts in ([LENGTH], [20, LENGTH], [27, 64, LENGTH], [40, 70, 140, LENGTH], [35, 76, *range(77, 90)]):
        track, begin = driver.sequence(0, LENGTH), 0
        for end in cuts:
            row = driver.row(track, tokens[begin:end], decode=end - begin == 1)
            (logits,) = driver.run(replace(row, images=images))
            t.check(logits, end)
            begin = end
    text = qwen_logits(published_qwen(raw, weights), [max(token, 0) for token in tokens], wide=True)
    assert t.error(text[-1], LENGTH) > 0.1


# One of each model, and both of one.
ON_RANKS = first_of(
    [
        ("dense", (2, False)),
        ("dense", (4, True)),
        ("nested-tied", (2, False)),
        ("moe", (4, True)),
        ("next", (2, False)),
        ("one-value-head-each", (4, True)),
    ],
    MODELS,
    [(2, False), (4, True)],
)


@pytest.mark.parametrize(
    ("name", "ranks_and_exact"), [*ON_RANKS, *(long(name, case) for case in ((2, True), (4, False)) for name in MODELS)]
)
def test_on_several_ranks(name: str, ranks_and_exact: tuple[int, bool]) -> None:
    size, exact = ranks_and_exact
    driver, t = truth(name, 1, exact, size)
    track = driver.sequence(0, LENGTH)
    t.check(driver.run(driver.row(track, t.tokens[:128]))[0], 128)
    t.check(driver.run(driver.row(track, t.tokens[128:140]))[0], 140)
    steps(driver, t, track, range(140, LENGTH))
    driver.runner.close()
