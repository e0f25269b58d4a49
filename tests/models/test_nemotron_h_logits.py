"""cairn's float32 logits against transformers' in float64, by every way a token can be computed.

The bar: cairn's largest error is at most twice transformers' own float32 error plus 1e-6, both in units of the
logits' standard deviation.
"""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from cairn.models.nemotron_h_config import parse
from cairn.step import Keep, Restore, Sample, SampleOnly
from cairn.types import SamplingParams
from models.nemotron_h_truth import logits_of, published
from runner.harness import Driver, build_tiny, prompt, random_weights, raw_config

LENGTH = 150
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "dense": ("M*-M", {}),
    "moe": ("ME*E", {}),
    "latent-moe-one-group": ("MEM*", {"moe_latent_size": 16, "n_groups": 1, "n_group": 1, "mlp_bias": True}),
}
SEEDS = {"dense": range(20), "moe": range(20), "latent-moe-one-group": range(3)}
CASES = [pytest.param(name, seed, id=f"{name}-{seed}") for name in MODELS for seed in SEEDS[name]]


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


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


def truth(name: str, seed: int, exact: bool = False, **driver: Any) -> Truth:
    pattern, changes = MODELS[name]
    raw = raw_config(pattern, **changes)
    config = parse(raw)
    weights = random_weights(config, seed)
    tokens = prompt(LENGTH, seed)
    theirs = published(raw, weights, clamp=False)
    narrow = logits_of(theirs, tokens, wide=False)
    wide = logits_of(theirs, tokens, wide=True)
    their_error = ((narrow.double() - wide).abs().max() / wide.std()).item()
    ours = Driver(config, build_tiny(config, weights, exact), exact, **driver)
    return Truth(ours, tokens, wide, 2 * their_error + 1e-6)


def full_hits(driver: Driver, files: dict[int, Any], check: Truth) -> None:
    """Logits of every kept position, from its hidden state alone."""
    for position, pages in files.items():
        only = SampleOnly(1, Sample(SamplingParams(temperature=0.0), position))
        (logits,) = driver.run(restores=(Restore(1, pages),), sample_only=(only,))
        check.check(logits, position)


@pytest.mark.parametrize(("name", "seed"), CASES)
def test_prefill_and_decode(name: str, seed: int) -> None:
    t = truth(name, seed, exact=seed % 2 == 1, num_pages=2048)
    driver, tokens = t.driver, t.tokens
    # In one go, with the hidden state of some positions on the way.
    whole = driver.sequence(0, LENGTH)
    files = {position: driver.file() for position in (1, 2, 3, 37, 63, 64, 65, 100, 128, 129)}
    (logits,) = driver.run(driver.row(whole, tokens), keeps=[Keep(0, p, pages) for p, pages in files.items()])
    t.check(logits, LENGTH)
    full_hits(driver, files, t)
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


@pytest.mark.parametrize(("name", "seed"), CASES)
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


@pytest.mark.parametrize(("name", "seed"), CASES)
def test_resumed_from_a_checkpoint_at_every_position(name: str, seed: int) -> None:
    length = 71
    t = truth(name, seed, num_slots=length + 1, num_pages=4096)
    driver, tokens = t.driver, t.tokens
    first = driver.sequence(0, length)
    files = {position: driver.file() for position in range(1, length + 1)}
    driver.run(driver.row(first, tokens[:length]), keeps=[Keep(0, p, pages) for p, pages in files.items()])
    full_hits(driver, files, t)
    restores, rows = [], []
    for position in range(1, length):
        resumed = driver.sequence(position, length)
        resumed.position, resumed.kv_write_from, resumed.pages = position, length, first.pages
        restores.append(Restore(position, files[position]))
        rows.append(driver.row(resumed, tokens[position:length]))
    for logits in driver.run(*rows, restores=tuple(restores)):
        t.check(logits, length)


def test_the_lower_bound_of_time_steps_is_transformers_own() -> None:
    """With the switch that only tests use, cairn's prefill is the unmodified transformers'; without it, it is not."""
    pattern, changes = MODELS["dense"]
    raw = raw_config(pattern, **changes)
    config, tokens = parse(raw), prompt(LENGTH, 0)
    weights = random_weights(config, 0)
    theirs = published(raw, weights, clamp=True)
    narrow, wide = logits_of(theirs, tokens, wide=False), logits_of(theirs, tokens, wide=True)
    bar = 2 * ((narrow.double() - wide).abs().max() / wide.std()).item() + 1e-6
    errors = []
    for dt_min in (0.001, 0.0):
        driver = Driver(config, build_tiny(config, weights, False, dt_min=dt_min), False)
        (logits,) = driver.run(driver.row(driver.sequence(0, LENGTH), tokens))
        errors.append(((logits.double() - wide[-1]).abs().max() / wide.std()).item())
    assert errors[0] <= bar < errors[1] / 10
