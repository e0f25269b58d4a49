"""float32 logits of the families made of parts against transformers' in float64, by every way a token can be computed.

The bar: cairn's largest error is at most twice transformers' own float32 error plus 1e-6, both in units of the
logits' standard deviation.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from cairn.step import Keep, Restore, Sample, SampleOnly
from cairn.types import SamplingParams
from models.decoder_families import (
    Tiny,
    TinyDriver,
    falcon,
    granite,
    lfm2,
    logits_of,
    prompt,
    published,
    qwen3,
    tiny,
)

LENGTH = 150
BIASED = {"attention_bias": True, "mamba_proj_bias": True}
MODELS: Mapping[str, Callable[[], dict[str, Any]]] = {
    "granite": granite,
    "granite-dense": partial(
        granite,
        num_local_experts=0,
        position_embedding_type="rope",
        mamba_n_groups=2,
        tie_word_embeddings=False,
        **BIASED,
    ),
    "granite-attention": partial(granite, layer_types=["attention", "attention"], num_hidden_layers=2),
    "falcon": partial(falcon, attention_bias=True, mlp_bias=True),
    "falcon-normed": partial(falcon, mamba_rms_norm=True, mamba_n_groups=1, tie_word_embeddings=True),
    "falcon-biased": partial(falcon, projectors_bias=True, mlp_bias=True, mamba_conv_bias=False, **BIASED),
    "lfm2": lfm2,
    "lfm2-biased": partial(
        lfm2, conv_bias=True, conv_L_cache=4, tie_embedding=False, block_ff_dim=56, block_auto_adjust_ff_dim=False
    ),
    "qwen3": qwen3,
    "qwen3-tied": partial(qwen3, tie_word_embeddings=True, attention_bias=True),
}


@dataclass
class Truth:
    """float64 logits of every position of one prompt, and the error that cairn may have."""

    tiny: Tiny
    tokens: list[int]
    logits: Tensor
    bar: float

    def check(self, logits: Tensor, position: int) -> None:
        """`logits`: of the token at `position` - 1."""
        wanted = self.logits[position - 1]
        error = ((logits.double() - wanted).abs().max() / self.logits.std()).item()
        assert error <= self.bar, f"position {position}: error {error:.2e}, bar {self.bar:.2e}"


LONG = ("granite-attention", "falcon-normed", "falcon-biased", "qwen3")


@pytest.fixture(
    scope="module", params=[pytest.param(name, marks=pytest.mark.long if name in LONG else ()) for name in MODELS]
)
def truth(request: pytest.FixtureRequest) -> Truth:
    model = tiny(MODELS[request.param](), seed=len(request.param))
    theirs, tokens = published(model), prompt(LENGTH, 1)
    narrow, wide = logits_of(theirs, tokens, wide=False), logits_of(theirs, tokens, wide=True)
    return Truth(model, tokens, wide, 2 * ((narrow.double() - wide).abs().max() / wide.std()).item() + 1e-6)


def full_hits(driver: TinyDriver, files: Mapping[int, Any], truth: Truth) -> None:
    """Straight from a checkpoint's hidden state to logits, without a forward pass."""
    passes = driver.runner.forward_passes
    for position, pages in files.items():
        only = SampleOnly(5, Sample(SamplingParams(temperature=0.0), position))
        (logits,) = driver.run(restores=(Restore(5, pages),), sample_only=(only,))
        truth.check(logits, position)
    assert driver.runner.forward_passes == passes


@pytest.mark.parametrize("exact", [False, True])
def test_whole_in_chunks_and_token_by_token(truth: Truth, exact: bool) -> None:
    driver, tokens = truth.tiny.driver(exact), truth.tokens
    whole = driver.sequence(0, LENGTH)
    files = {position: driver.file() for position in (1, 2, 63, 64, 65, 128, 149, LENGTH)}
    keeps = [Keep(0, position, pages) for position, pages in files.items()]
    (logits,) = driver.run(driver.row(whole, tokens), keeps=keeps)
    truth.check(logits, LENGTH)
    full_hits(driver, files, truth)
    cuts = [64, 128] if exact else [1, 3, 50, 64, 127, 131]
    pieces = driver.sequence(2, LENGTH)
    for begin, end in zip([0, *cuts], [*cuts, LENGTH], strict=True):
        (logits,) = driver.run(driver.row(pieces, tokens[begin:end]))
        truth.check(logits, end)
    stepped = driver.sequence(3, LENGTH)
    (logits,) = driver.run(driver.row(stepped, tokens[:120]))
    for position in range(120, LENGTH):
        (logits,) = driver.run(driver.row(stepped, tokens[position : position + 1], decode=True))
        truth.check(logits, position + 1)


def test_batches_of_mixed_lengths(truth: Truth) -> None:
    driver, tokens = truth.tiny.driver(exact=False, num_slots=12), truth.tokens
    lengths = [1, 2, 63, 64, 65, 100, LENGTH]
    sequences = [driver.sequence(slot, LENGTH + 1) for slot in range(len(lengths))]
    logits = driver.run(*(driver.row(seq, tokens[:length]) for seq, length in zip(sequences, lengths, strict=True)))
    for row, length in zip(logits, lengths, strict=True):
        truth.check(row, length)
    # Some go on with one token, some with chunks, one begins.
    late = driver.sequence(10, LENGTH)
    rows = [driver.row(seq, tokens[seq.position : seq.position + 1], decode=True) for seq in sequences[:3]]
    rows += [driver.row(seq, tokens[seq.position : seq.position + 21]) for seq in sequences[3:6]]
    rows.append(driver.row(late, tokens[:77]))
    for row, logits_row in zip(rows, driver.run(*rows), strict=True):
        truth.check(logits_row, row.end)


def test_resumed_from_a_checkpoint_at_every_position(truth: Truth) -> None:
    length = 71
    driver, tokens = truth.tiny.driver(exact=False, num_slots=length + 1, num_pages=4096), truth.tokens
    first = driver.sequence(0, length)
    files = {position: driver.file() for position in range(1, length + 1)}
    # Prefill to a place off the grid, then steps that hand out states, too.
    driver.run(driver.row(first, tokens[:67]), keeps=[Keep(0, p, files[p]) for p in range(1, 68)])
    for position in range(67, length):
        row = driver.row(first, tokens[position : position + 1], decode=True)
        driver.run(row, keeps=[Keep(0, position + 1, files[position + 1])])
    full_hits(driver, {position: files[position] for position in (1, 64, 66, 68, length)}, truth)
    restores, rows = [], []
    for position in range(1, length):
        resumed = driver.sequence(position, length)
        resumed.position, resumed.kv_write_from, resumed.pages = position, length, first.pages
        restores.append(Restore(position, files[position]))
        rows.append(driver.row(resumed, tokens[position:length]))
    for logits in driver.run(*rows, restores=tuple(restores)):
        truth.check(logits, length)


@pytest.mark.parametrize("size", [pytest.param(2, marks=pytest.mark.long), 4])
def test_cut_among_ranks(truth: Truth, size: int) -> None:
    """The bar of one rank; on one thread a rank."""
    driver, tokens = truth.tiny.ranks(size, exact=True), truth.tokens
    whole, file = driver.sequence(0, LENGTH), driver.file()
    found = [(130, driver.run(driver.row(whole, tokens[:130]), keeps=[Keep(0, 64, file)])[0])]
    for position in range(130, 140):
        row = driver.row(whole, tokens[position : position + 1], decode=True)
        found.append((position + 1, driver.run(row)[0]))
    resumed = driver.sequence(1, LENGTH)
    resumed.position, resumed.kv_write_from, resumed.pages = 64, 130, whole.pages
    found.append((130, driver.run(driver.row(resumed, tokens[64:130]), restores=(Restore(1, file),))[0]))
    driver.runner.close()
    assert torch.equal(found[0][1], found[-1][1]), "resumed on the grid, every bit is the same"
    for position, logits in found:
        truth.check(logits, position)
