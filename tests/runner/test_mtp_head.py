"""Keys and values of a head that drafts: the same bits however the tokens before them were computed, and written for no
more than one attention layer's work."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from cairn.layers.attention import Attention
from cairn.models.families.qwen3_5 import Qwen35Config
from cairn.step import DRAFTED, Fold, PageCopy, Restore, Save, Snapshot, StepPlan, VerifyRow
from models.qwen3_5_truth import parse_qwen, qwen_weights, raw_qwen
from runner.harness import Driver, Track, build_tiny, parse, prompt, random_weights, raw_config

LENGTH = 150
PROMPT = 140
TOKENS = prompt(LENGTH, 4)


def made(family: str, exact: bool) -> Driver:
    if family == "qwen3_5":
        config: Any = parse_qwen(raw_qwen("qwen3_5_text")).asking(serves_mtp=True)
        weights = qwen_weights(config, 2)
    else:
        config = parse(raw_config("ME*M-*", num_nextn_predict_layers=1)).asking(serves_mtp=True)
        weights = random_weights(config, 2)
    return Driver(config, build_tiny(config, weights, exact), exact)


@pytest.fixture(params=["qwen3_5", "nemotron_h"])
def driver(request: pytest.FixtureRequest) -> Driver:
    return made(request.param, exact=True)


def entries(driver: Driver, track: Track, end: int) -> Tensor:
    """Keys and values of the head for the tokens up to `end`, [end, 2, heads, dim]."""
    layer, pages = driver.runner._paged[-1], torch.from_numpy(track.pages.astype(np.int64))
    both = [part[pages].transpose(1, 2).flatten(0, 1)[:end] for part in (layer.keys, layer.values)]
    return torch.stack(both, 1)


def in_one_go(driver: Driver, slot: int = 0) -> Track:
    """The prompt in one row, and then token by token."""
    track = driver.sequence(slot, LENGTH + 8)
    driver.run(driver.row(track, TOKENS[:PROMPT]))
    for token in TOKENS[PROMPT:]:
        driver.run(driver.row(track, [token], decode=True))
    return track


def verify(driver: Driver, track: Track, drafts: Sequence[int], num_right: int, folds: Sequence[Fold] = ()) -> Fold:
    """Leave so many drafts to the head, which comes to these; of what follows the first are right."""
    head = driver.runner._head
    assert head is not None
    advance = type(head).advance

    def draft(rows: Sequence[VerifyRow], depth: int) -> None:
        advance(head, rows, depth)
        head.tokens[0] = drafts[depth]

    head.advance = draft  # type: ignore[method-assign]
    tokens = np.array([TOKENS[track.position], *[DRAFTED] * len(drafts)])
    driver.step += 1
    row = VerifyRow(track.slot, track.position, tokens, track.kv_write_from)
    driver.checked.run(StepPlan(driver.step, folds=tuple(folds), verifies=(row,)))
    track.position += 1 + num_right
    return Fold(track.slot, 1 + num_right)


def test_what_chunks_leave_is_what_one_row_leaves(driver: Driver) -> None:
    whole, pieces = in_one_go(driver), driver.sequence(1, LENGTH)
    for begin, end in ((0, 64), (64, 128), (128, PROMPT)):
        driver.run(driver.row(pieces, TOKENS[begin:end]))
    assert torch.equal(entries(driver, pieces, PROMPT), entries(driver, whole, PROMPT))
    assert entries(driver, whole, PROMPT).std() > 0.1


def test_who_begins_in_a_slot_reads_nothing_of_who_had_it(driver: Driver) -> None:
    whole, again = in_one_go(driver), driver.sequence(0, LENGTH)
    driver.run(driver.row(again, TOKENS[:PROMPT]))
    assert torch.equal(entries(driver, again, PROMPT), entries(driver, whole, PROMPT))


def test_rows_beside_others_leave_the_same(driver: Driver) -> None:
    whole, other = in_one_go(driver), driver.sequence(1, LENGTH)
    beside, one = driver.sequence(2, LENGTH), driver.sequence(3, LENGTH)
    driver.run(driver.row(other, TOKENS[5:75]))
    driver.run(driver.row(other, [7], decode=True), driver.row(one, TOKENS[:1]), driver.row(beside, TOKENS[:PROMPT]))
    driver.run(driver.row(other, [8], decode=True), driver.row(beside, TOKENS[PROMPT : PROMPT + 1], decode=True))
    assert torch.equal(entries(driver, beside, PROMPT + 1), entries(driver, whole, PROMPT + 1))
    assert torch.equal(entries(driver, one, 1), entries(driver, whole, 1))


@pytest.mark.parametrize("hit", [64, 128])
def test_a_hit_goes_on_from_the_checkpoints_hidden_state(driver: Driver, hit: int) -> None:
    """In another slot, whose own hidden state is another one, with pages that are copied where they are not full."""
    whole, file = driver.sequence(0, LENGTH), driver.file()
    driver.run(driver.row(whole, TOKENS[:PROMPT]), snapshots=[Snapshot(0, hit, file)])
    driver.run(driver.row(driver.sequence(1, LENGTH), TOKENS[3:90]))
    resumed = driver.sequence(1, LENGTH)
    resumed.position = resumed.kv_write_from = hit
    shared = hit // 16
    resumed.pages[:shared] = whole.pages[:shared]
    driver.run(driver.row(resumed, TOKENS[hit:PROMPT]), restores=(Restore(1, file),))
    assert torch.equal(entries(driver, resumed, PROMPT), entries(driver, whole, PROMPT))


def test_what_accepted_drafts_leave_is_what_decodes_leave(driver: Driver) -> None:
    """All, none or some of the drafts are right; those that were not, and the head's own hidden states, leave nothing
    that counts."""
    whole, drafted = in_one_go(driver), driver.sequence(1, LENGTH + 8)
    driver.run(driver.row(drafted, TOKENS[:PROMPT]))
    folds: list[Fold] = []
    for num_right, num_drafts in ((3, 3), (0, 2), (1, 3)):
        following = TOKENS[drafted.position + 1 :][:num_drafts]
        drafts = [*following[:num_right], *[(token + 1) % 97 for token in following[num_right:]]]
        folds = [verify(driver, drafted, drafts, num_right, folds)]
    file = driver.file()
    assert drafted.position == PROMPT + 7
    assert torch.equal(entries(driver, drafted, drafted.position), entries(driver, whole, drafted.position))
    driver.step += 1
    driver.checked.run(StepPlan(driver.step, folds=tuple(folds), saves=(Save(1, file),)))
    driver.run(driver.row(drafted, TOKENS[PROMPT + 7 : PROMPT + 8], decode=True), restores=(Restore(1, file),))
    assert torch.equal(entries(driver, drafted, PROMPT + 8), entries(driver, whole, PROMPT + 8))


def test_a_copied_page_has_the_heads_entries(driver: Driver) -> None:
    whole = in_one_go(driver)
    page = driver.allocate(1)
    driver.run(copies=(PageCopy(int(whole.pages[2]), int(page[0])),))
    copied = Track(0, np.concatenate([whole.pages[:2], page, whole.pages[3:]]))
    assert torch.equal(entries(driver, copied, LENGTH), entries(driver, whole, LENGTH))


def test_a_prompt_takes_one_more_layers_keys_and_no_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the head no query is answered, and no feed-forward computed, before it drafts."""
    driver = made("qwen3_5", exact=False)
    assert isinstance(driver.config, Qwen35Config)
    number, head = driver.config.layer_types.count("full_attention"), driver.model.head
    assert head is not None and driver.layout.bytes_per_token == (number + 1) * 2 * 2 * 16 * 4
    calls: dict[str, list[int]] = {"attention": [], "write_kv": []}
    kernels = driver.model.kernels
    for name, seen in calls.items():
        function = getattr(kernels, name)

        def count(*arguments: Any, function: Any = function, seen: list[int] = seen) -> Any:
            seen.append(len(arguments[0]))
            return function(*arguments)

        monkeypatch.setattr(kernels, name, count)
    track = driver.sequence(0, LENGTH)
    driver.run(driver.row(track, TOKENS[:PROMPT]))
    assert calls == {"attention": number * [PROMPT], "write_kv": (number + 1) * [PROMPT]}
    for seen in calls.values():
        seen.clear()
    verify(driver, track, [1, 2], 0)
    assert calls == {"attention": [1, 1] + number * [3], "write_kv": [1, 1] + (number + 1) * [3]}
    assert isinstance(head.attention, Attention) and head.attention.layer == number


def test_without_a_head_nothing_can_be_left_to_it() -> None:
    config = parse(raw_config("M*E"))
    driver = Driver(config, build_tiny(config, random_weights(config, 2), False), False)
    track = driver.sequence(0, LENGTH)
    driver.run(driver.row(track, TOKENS[:20]))
    row = VerifyRow(0, 20, np.array([1, DRAFTED]), 0)
    with pytest.raises(LookupError, match="step 2 leaves drafts to the model, which has no head for them"):
        driver.checked.run(StepPlan(2, verifies=(row,)))
    with pytest.raises(ValueError, match="one draft at least, and token ids in"):
        driver.checked.run(StepPlan(3, verifies=(VerifyRow(0, 20, np.array([1, 5, DRAFTED]), 0),)))
