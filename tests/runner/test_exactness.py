"""Exact mode: the same bits, however a sequence came to be where it is."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from cairn.kernels.sampling.metadata import SamplingMetadata
from cairn.step import SAMPLED, PageCopy, Restore, Save, Snapshot
from cairn.types import SamplingParams
from doubles.hand_plans import SampleOnly, WholeRow
from runner.harness import GREEDY, Driver, prompt, tiny
from tiers import first, more

# Two groups and one, dense and experts, sizes that fill no vector, and models without one kind of layer.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "hybrid": ("M*-ME*", {}),
    "one-group": (
        "ME*-",
        {
            "n_groups": 1,
            "mamba_num_heads": 5,
            "mamba_head_dim": 7,
            "ssm_state_size": 9,
            "moe_latent_size": 20,
            "n_routed_experts": 6,
        },
    ),
    "no-attention": ("M-M", {"use_bias": True, "num_pages": 512}),
    "no-recurrence": ("*E*", {}),
    # of numbers that a product reads as float32
    "states-in-float16": ("M*-M", {"mamba_ssm_cache_dtype": "float16"}),
    "many-query-heads": ("M*M*", {"num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 10}),
}


@pytest.fixture(params=MODELS)
def driver(request: pytest.FixtureRequest) -> Driver:
    pattern, changes = MODELS[request.param]
    return tiny(pattern, exact=True, **{"num_pages": 4096, "num_slots": 16} | changes)


def alone(driver: Driver, tokens: list[int], decode: Sequence[int] = (), slot: int = 0) -> tuple[list[Tensor], Tensor]:
    """Logits of a prefill in one go and of each decode step after it, and the bytes of the state at the end."""
    track = driver.sequence(slot, len(tokens) + len(decode))
    found = driver.run(driver.row(track, tokens))
    for token in decode:
        found += driver.run(driver.row(track, [token], decode=True))
    return found, saved(driver, slot)


def saved(driver: Driver, slot: int) -> Tensor:
    pages = driver.file()
    driver.run(saves=(Save(slot, pages),))
    return driver.file_bytes(pages)


def equal(found: list[Tensor], wanted: list[Tensor]) -> bool:
    return len(found) == len(wanted) and all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


def test_the_self_test_passes(driver: Driver) -> None:
    driver.runner.get_ready()


@pytest.mark.parametrize("length", [65, 128, 129, *map(more, (200, 323))])
def test_chunked_equals_whole(driver: Driver, length: int) -> None:
    tokens = prompt(length, length)
    wanted, state = alone(driver, tokens)
    for chunk in (64, 128):
        track = driver.sequence(1, length)
        for begin in range(0, length, chunk):
            found = driver.run(driver.row(track, tokens[begin : begin + chunk]))
        assert equal(found, wanted)
        assert torch.equal(saved(driver, 1), state)


@pytest.mark.parametrize("seed", first(2, range(6)))
def test_batched_equals_alone(driver: Driver, seed: int) -> None:
    """Sequences of random lengths, prefilled in random chunks while others already decode."""
    random = np.random.default_rng(seed)
    count = int(random.integers(2, 12))
    lengths = [int(random.choice([1, 2, 15, 16, 17, 63, 64, 65, 100, 128, 190])) for _ in range(count)]
    prompts = [prompt(length, seed * 100 + i) for i, length in enumerate(lengths)]
    answers = [prompt(int(random.integers(0, 6)), seed * 100 + 50 + i) for i in range(count)]
    wanted = [alone(driver, *pair) for pair in zip(prompts, answers, strict=True)]
    tracks = [driver.sequence(slot, 200) for slot in range(count)]
    found: list[list[Tensor]] = [[] for _ in range(count)]
    while any(t.position < len(p) + len(a) for t, p, a in zip(tracks, prompts, answers, strict=True)):
        rows, owners = [], []
        for index in random.permutation(count):
            track, text = tracks[index], prompts[index]
            done = track.position - len(text)
            if done == len(answers[index]) or random.random() < 0.3:
                continue
            if done >= 0:
                rows.append(driver.row(track, answers[index][done : done + 1], decode=True))
            else:
                end = min(len(text), track.position + 64 * int(random.integers(1, 4)))
                rows.append(driver.row(track, text[track.position : end], sample=end == len(text)))
            if rows[-1].sample is not None:
                owners.append(index)
        if rows:
            for index, logits in zip(owners, driver.run(*rows), strict=True):
                found[index].append(logits)
    for slot, (logits, state) in enumerate(wanted):
        assert equal(found[slot], logits)
        assert torch.equal(saved(driver, slot), state)


def test_kept_state_equals_that_of_a_run_that_ends_there(driver: Driver) -> None:
    length = 140
    tokens = prompt(length, 7)
    positions = [*range(1, 71), 96, 127, 128, 129, 140]
    files = {position: driver.file() for position in positions}
    before = driver.runner.forward_passes
    whole = driver.sequence(0, length)
    found = driver.run(driver.row(whole, tokens), snapshots=[Snapshot(0, p, pages) for p, pages in files.items()])
    assert driver.runner.forward_passes == before + 1
    for position in positions:
        _, state = alone(driver, tokens[:position], slot=1)
        assert torch.equal(driver.file_bytes(files[position]), state), position
    assert equal(found, alone(driver, tokens, slot=2)[0])


def test_snapshots_in_a_later_chunk_and_in_decode_rows(driver: Driver) -> None:
    tokens = prompt(180, 8)
    track, other = driver.sequence(0, 200), driver.sequence(1, 200)
    driver.run(driver.row(track, tokens[:64]))
    driver.run(driver.row(other, tokens[:30]))
    files = {position: driver.file() for position in (65, 100, 128, 177, 180)}
    at_31 = driver.file()
    snapshots = [Snapshot(1, position, pages) for position, pages in sorted(files.items(), reverse=True)]
    rows = [driver.row(other, [tokens[30]], decode=True), driver.row(track, tokens[64:])]
    driver.run(*rows, snapshots=[*snapshots, Snapshot(0, 31, at_31)])
    for position, pages in files.items():
        assert torch.equal(driver.file_bytes(pages), alone(driver, tokens[:position], slot=2)[1]), position
    assert torch.equal(driver.file_bytes(at_31), alone(driver, tokens[:30], tokens[30:31], slot=2)[1])


@pytest.mark.parametrize("hit", [64, 192, more(128)])
def test_resumed_equals_uncached(driver: Driver, hit: int) -> None:
    """Restore at c, read the keys and values of c..m from shared pages, write from m on in a page of one's own."""
    tokens, answer = prompt(230, 9), prompt(12, 10)
    wanted, state = alone(driver, tokens, answer)
    matched = 210  # inside a page, shared up to here; the first writer went on with other tokens
    first = driver.sequence(1, 250)
    file = driver.file()
    driver.run(driver.row(first, tokens[:matched] + prompt(40, 11)), snapshots=[Snapshot(0, hit, file)])
    second = driver.sequence(2, 250)
    copies = ()
    if driver.layout.groups:
        shared = matched // 16
        second.pages = np.concatenate([first.pages[:shared], second.pages[shared:]])
        copies = (PageCopy(int(first.pages[shared]), int(second.pages[shared])),)
        before = driver.runner.pool[first.pages.tolist()].clone()
    second.position, second.kv_write_from = hit, matched
    found = driver.run(driver.row(second, tokens[hit:]), copies=copies, restores=(Restore(2, file),))
    for token in answer:
        found += driver.run(driver.row(second, [token], decode=True))
    assert equal(found, wanted)
    assert torch.equal(saved(driver, 2), state)
    if driver.layout.groups:
        assert torch.equal(driver.runner.pool[first.pages.tolist()], before)


@pytest.mark.parametrize("length", [1, 15, 63, 64, 65, 130])
def test_full_hit_without_a_forward_pass(driver: Driver, length: int) -> None:
    tokens = prompt(length, 12)
    file = driver.file()
    track = driver.sequence(0, length)
    wanted = driver.run(driver.row(track, tokens), snapshots=[Snapshot(0, length, file)])
    token = driver.result.sampled[0].token
    passes = driver.runner.forward_passes
    others = [SampleOnly(slot, SamplingMetadata(GREEDY, 1)) for slot in (1, 2)]
    only = SampleOnly(5, SamplingMetadata(GREEDY, length))
    found = driver.run(restores=(Restore(5, file),), sample_only=(*others, only))
    assert driver.runner.forward_passes == passes
    assert torch.equal(found[-1], wanted[0])
    assert driver.result.sampled[-1].token == token


def test_a_saved_state_goes_on_as_its_source(driver: Driver) -> None:
    tokens, answer = prompt(70, 13), prompt(5, 14)
    wanted, state = alone(driver, tokens, answer)
    source = driver.sequence(0, 80)
    driver.run(driver.row(source, tokens))
    target = driver.sequence(3, 80)
    target.position = source.position
    copies = tuple(PageCopy(int(a), int(b)) for a, b in zip(source.pages, target.pages, strict=True))
    copies = copies if driver.layout.groups else ()
    found, file = [wanted[0]], driver.file()
    driver.run(saves=(Save(0, file),))
    rows = [driver.row(source, prompt(1, 15), decode=True), driver.row(target, answer[:1], decode=True)]
    found += driver.run(*rows, copies=copies, restores=(Restore(3, file),))[1:]
    for token in answer[1:]:
        found += driver.run(driver.row(target, [token], decode=True))
    assert equal(found, wanted)
    assert torch.equal(saved(driver, 3), state)


def test_tokens_fed_from_the_step_that_sampled_them(driver: Driver) -> None:
    params = SamplingParams(temperature=0.8, top_k=20, top_p=0.9, seed=3)
    texts = {0: prompt(33, 16), 1: prompt(64, 17)}
    by_host: dict[int, list[int]] = {}
    for slot, text in texts.items():
        track = driver.sequence(slot, 100)
        row = driver.row(track, text)
        drawn = driver.submit(_with(row, params)).sampled[0].token
        by_host[slot] = [drawn]
        for _ in range(8):
            drawn = driver.submit(_with(driver.row(track, [drawn], decode=True), params)).sampled[0].token
            by_host[slot].append(drawn)
    tracks = {slot: driver.sequence(slot, 100) for slot in texts}
    result = driver.submit(*(_with(driver.row(tracks[slot], texts[slot]), params) for slot in texts))
    fed = {sampled.slot: [sampled.token] for sampled in result.sampled}
    for _ in range(8):
        rows = [_with(driver.row(tracks[slot], SAMPLED, decode=True), params) for slot in texts]
        for sampled in driver.submit(*rows).sampled:
            fed[sampled.slot].append(sampled.token)
    assert fed == by_host


def _with(row: WholeRow, params: SamplingParams) -> WholeRow:
    return replace(row, sample=SamplingMetadata(params, row.end))


def test_preempted_and_replayed_equals_undisturbed(driver: Driver) -> None:
    """The prompt by prefill, the answer so far by one-token steps."""
    tokens, answer = prompt(100, 18), prompt(9, 19)
    wanted, state = alone(driver, tokens, answer)
    again = driver.sequence(4, 120)
    driver.run(driver.row(again, prompt(50, 20)))  # the slot has been somebody else's
    again = driver.sequence(4, 120)
    found = driver.run(driver.row(again, tokens))
    for token in answer:
        found += driver.run(driver.row(again, [token], decode=True))
    assert equal(found, wanted)
    assert torch.equal(saved(driver, 4), state)
