"""cairn's float32 logits against transformers' in float64, by every way a token can be computed.

The bar: cairn's largest error is at most twice transformers' own float32 error plus 1e-6, both in units of the
logits' standard deviation.
"""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from cairn.step import Image, Keep, Restore, Sample, SampleOnly
from cairn.types import SamplingParams
from models.qwen3_5_truth import parse_qwen, published_qwen, qwen_logits, qwen_weights, raw_qwen
from runner.harness import Driver, build_tiny, prompt, ranks

LENGTH = 150
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "dense": ("qwen3_5_text", {}),
    "nested-tied": ("qwen3_5", {"tie_word_embeddings": True, "linear_num_key_heads": 1}),
    "moe": ("qwen3_5_moe_text", {"layer_types": ["linear_attention", "full_attention"], "num_hidden_layers": 2}),
    "next": ("qwen3_next", {"mlp_only_layers": [1], "norm_topk_prob": False}),
    "one-value-head-each": ("qwen3_5", {"linear_num_value_heads": 2, "num_key_value_heads": 1}),
}
LONG = {"nested-tied": range(1, 4), "dense": range(3, 20), "moe": range(3, 20), "next": range(3, 10)}


def cases(short: int) -> list[Any]:
    found = [pytest.param(name, seed, id=f"{name}-{seed}") for name in MODELS for seed in range(short)]
    return found + [
        pytest.param(name, seed, id=f"{name}-{seed}", marks=pytest.mark.long)
        for name, seeds in LONG.items()
        for seed in seeds
        if seed >= short
    ]


@dataclass
class Truth:
    """float64 logits of every position of one prompt, and the error that cairn may have."""

    driver: Driver
    tokens: list[int]
    logits: Tensor
    bar: float

    def check(self, logits: Tensor, position: int) -> None:
        """`logits`: of the token at `position` - 1."""
        wanted = self.logits[position - 1]
        error = ((logits.double() - wanted).abs().max() / self.logits.std()).item()
        assert error <= self.bar, f"position {position}: error {error:.2e}, bar {self.bar:.2e}"


def truth(name: str, seed: int, exact: bool = False, size: int = 1, **driver: Any) -> Truth:
    model_type, changes = MODELS[name]
    raw = raw_qwen(model_type, **changes)
    config = parse_qwen(raw)
    weights = qwen_weights(config, seed)
    tokens = prompt(LENGTH, seed)
    theirs = published_qwen(raw, weights)
    narrow, wide = (qwen_logits(theirs, tokens, wide=wide) for wide in (False, True))
    their_error = ((narrow.double() - wide).abs().max() / wide.std()).item()
    if size > 1:
        ours: Driver = ranks(config, weights, size, exact, **driver)
    else:
        ours = Driver(config, build_tiny(config, weights, exact), exact, **driver)
    return Truth(ours, tokens, wide, 2 * their_error + 1e-6)


@pytest.mark.parametrize(("name", "seed"), cases(2))
def test_prefill_and_decode(name: str, seed: int) -> None:
    t = truth(name, seed, exact=seed % 2 == 1, num_pages=2048)
    driver, tokens = t.driver, t.tokens
    # In one go, with the hidden state of some positions on the way.
    whole = driver.sequence(0, LENGTH)
    files = {position: driver.file() for position in (1, 2, 3, 37, 63, 64, 65, 100, 128, 129)}
    (logits,) = driver.run(driver.row(whole, tokens), keeps=[Keep(0, p, pages) for p, pages in files.items()])
    t.check(logits, LENGTH)
    for position, pages in files.items():
        only = SampleOnly(1, Sample(SamplingParams(temperature=0.0), position))
        (logits,) = driver.run(restores=(Restore(1, pages),), sample_only=(only,))
        t.check(logits, position)
    # In chunks; off the grid where exact mode does not forbid it.
    cuts = [64, 128] if driver.exact else [1, 3, 50, 64, 127, 131]
    pieces = driver.sequence(2, LENGTH)
    for begin, end in zip([0, *cuts], [*cuts, LENGTH], strict=True):
        (logits,) = driver.run(driver.row(pieces, tokens[begin:end]))
        t.check(logits, end)
    # Token by token.
    stepped = driver.sequence(3, LENGTH)
    (logits,) = driver.run(driver.row(stepped, tokens[:90]))
    for position in range(90, LENGTH):
        (logits,) = driver.run(driver.row(stepped, tokens[position : position + 1], decode=True))
        t.check(logits, position + 1)


@pytest.mark.parametrize(("name", "seed"), cases(1))
def test_batches_of_mixed_lengths(name: str, seed: int) -> None:
    t = truth(name, seed, num_slots=12)
    driver, tokens = t.driver, t.tokens
    lengths = [1, 2, 63, 64, 65, 100, LENGTH]
    sequences = [driver.sequence(slot, LENGTH + 1) for slot in range(len(lengths))]
    logits = driver.run(*(driver.row(seq, tokens[:length]) for seq, length in zip(sequences, lengths, strict=True)))
    for row, length in zip(logits, lengths, strict=True):
        t.check(row, length)
    # Some go on with one token, some with chunks, one begins.
    late = driver.sequence(10, LENGTH)
    rows = [driver.row(seq, tokens[seq.position : seq.position + 1], decode=True) for seq in sequences[:3]]
    rows += [driver.row(seq, tokens[seq.position : seq.position + 21]) for seq in sequences[3:6]]
    rows.append(driver.row(late, tokens[:77]))
    for row, logits_row in zip(rows, driver.run(*rows), strict=True):
        t.check(logits_row, row.end)


@pytest.mark.parametrize(("name", "seed"), cases(1))
def test_resumed_from_a_checkpoint_at_every_position(name: str, seed: int) -> None:
    length = 71
    t = truth(name, seed, num_slots=length + 1, num_pages=4096)
    driver, tokens = t.driver, t.tokens
    first = driver.sequence(0, length)
    files = {position: driver.file() for position in range(1, length + 1)}
    driver.run(driver.row(first, tokens[:length]), keeps=[Keep(0, p, pages) for p, pages in files.items()])
    restores, rows = [], []
    for position in range(1, length):
        resumed = driver.sequence(position, length)
        resumed.position, resumed.kv_write_from, resumed.pages = position, length, first.pages
        restores.append(Restore(position, files[position]))
        rows.append(driver.row(resumed, tokens[position:length]))
    for logits in driver.run(*rows, restores=tuple(restores)):
        t.check(logits, length)


class GivenVectors:
    """Implements `Vision`: an image's vectors are known already."""

    merge = 2

    def __init__(self, vectors: dict[int, Tensor]) -> None:
        self.vectors = vectors

    def features(self, image: Image) -> Tensor:
        return self.vectors[image.start]


def images_of(*places: tuple[int, int, int]) -> tuple[Image, ...]:
    """(first token, rows, columns) of each."""
    return tuple(Image(at, rows * columns, (1, 2 * rows, 2 * columns), b"", 0, 0, b"") for at, rows, columns in places)


def test_images_stand_in_three_dimensions() -> None:
    """Positions by hand: text counts up, an image counts its rows and columns from there, text goes on behind both."""
    raw = raw_qwen("qwen3_5", layer_types=["full_attention", "linear_attention", "full_attention"])
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
    theirs = published_qwen(raw, weights)
    narrow, wide = (qwen_logits(theirs, tokens, wide, content) for wide in (False, True))
    bar = 2 * ((narrow.double() - wide).abs().max() / wide.std()).item() + 1e-6
    driver = Driver(config, build_tiny(config, weights, exact=False), exact=False, vision=GivenVectors(vectors))
    # Before, inside, between and after images, and token by token.
    for cuts in ([LENGTH], [20, LENGTH], [27, 64, LENGTH], [40, 70, 140, LENGTH], [35, 76, *range(77, 90)]):
        track, begin = driver.sequence(0, LENGTH), 0
        for end in cuts:
            row = driver.row(track, tokens[begin:end], decode=end - begin == 1)
            (logits,) = driver.run(replace(row, images=images))
            error = ((logits.double() - wide[end - 1]).abs().max() / wide.std()).item()
            assert error <= bar, f"{cuts}: position {end}: error {error:.2e}, bar {bar:.2e}"
            begin = end
    text = qwen_logits(theirs, [max(token, 0) for token in tokens], wide=True)
    assert (text[-1] - wide[-1]).abs().max() > 0.1 * wide.std()


def long(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.long)


@pytest.mark.parametrize(("size", "exact"), [(2, False), (4, True), long(2, True), long(4, False)])
@pytest.mark.parametrize("name", MODELS)
def test_on_several_ranks(name: str, size: int, exact: bool) -> None:
    t = truth(name, 1, exact, size)
    driver, tokens = t.driver, t.tokens
    track = driver.sequence(0, LENGTH)
    t.check(driver.run(driver.row(track, tokens[:128]))[0], 128)
    t.check(driver.run(driver.row(track, tokens[128:140]))[0], 140)
    for position in range(140, LENGTH):
        (logits,) = driver.run(driver.row(track, tokens[position : position + 1], decode=True))
        t.check(logits, position + 1)
    driver.runner.close()
