"""Every record of a plan does what it says, and plans that cannot be carried out are refused."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from cairn.cache.layout import CacheLayout
from cairn.errors import ConfigError
from cairn.kernels import exact
from cairn.kernels.sampling.metadata import SamplingMetadata
from cairn.layers.linear import Linear
from cairn.runner.row_independence import check_row_independence
from cairn.runner.runner import Runner
from cairn.step import (
    SAMPLED,
    Admit,
    DecodeRows,
    Fold,
    FoldSnapshot,
    Image,
    PageCopy,
    PrefillRow,
    Restore,
    SampledToken,
    Samples,
    Save,
    Score,
    Snapshot,
    StepPlan,
    TableUpdate,
    VerifyRow,
)
from cairn.types import SamplingParams
from doubles.hand_plans import SampleOnly, WholeRow
from runner.harness import GREEDY, Driver, prompt, tiny


@pytest.fixture
def driver() -> Driver:
    return tiny("M*E", exact=False, num_pages=128, num_slots=4)


def pages(driver: Driver, *numbers: int) -> np.ndarray:
    return np.array(numbers[: driver.layout.pages_per_checkpoint], dtype=np.int32)


def test_copies_are_carried_out_in_order(driver: Driver) -> None:
    pool = driver.runner.pool
    pool.random_(0, 256)
    before = pool.clone()
    driver.run(copies=(PageCopy(1, 2), PageCopy(2, 3), PageCopy(4, 1)))
    assert torch.equal(pool[1:4], before[[4, 1, 1]])
    assert torch.equal(pool[[0, *range(4, 128)]], before[[0, *range(4, 128)]])


def test_the_order_of_a_plan(driver: Driver) -> None:
    """A file is restored, and saved as it is before the rows move on."""
    text = prompt(40, 0)
    track = driver.sequence(0, 64)
    at_20, saved = driver.file(), driver.file()
    driver.run(driver.row(track, text[:20]), snapshots=[Snapshot(0, 20, at_20)])
    driver.run(driver.row(track, text[20:30]))
    other = driver.sequence(2, 64)
    other.position, other.pages, other.kv_write_from = 20, track.pages, 30
    row = driver.row(other, text[20:30])
    after = driver.file()
    driver.run(row, restores=(Restore(2, at_20),), saves=(Save(2, saved),), snapshots=[Snapshot(0, 30, after)])
    assert torch.equal(driver.file_bytes(saved), driver.file_bytes(at_20))
    assert not torch.equal(driver.file_bytes(after), driver.file_bytes(at_20))


def test_a_step_without_rows_says_so(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    """`build_metadata` does of all others."""
    begun = list[int]()
    monkeypatch.setattr(driver.model.kernels, "begin_step", begun.append)
    driver.run(driver.row(driver.sequence(0, 64), prompt(20, 0)))
    assert begun == []
    driver.run(sample_only=(SampleOnly(0, SamplingMetadata(GREEDY, 20)),))
    assert begun == [0]


@pytest.mark.parametrize("settles", [True, False])
def test_the_state_of_a_full_hit_comes_after_its_first_token(driver: Driver, settles: bool) -> None:
    """By `settle`, or with the next plan, before it writes to pages."""
    text = prompt(20, 0)
    file, saved, others = driver.file(), driver.file(), driver.file()
    driver.run(driver.row(driver.sequence(0, 64), text), snapshots=[Snapshot(0, 20, file)])
    cold = driver.result.sampled[0].token
    driver.run(driver.row(driver.sequence(1, 64), prompt(30, 1)), snapshots=[Snapshot(0, 30, others)])
    live = driver.runner._live.tensors[1:]
    assert live and not any(torch.equal(part[0], part[2]) for part in live)
    only = SampleOnly(2, SamplingMetadata(GREEDY, 20))
    driver.run(restores=(Restore(2, file),), sample_only=(only,))
    assert driver.result.sampled[0] == SampledToken(2, cold)
    assert not any(torch.equal(part[0], part[2]) for part in live)
    if settles:
        driver.runner.settle()
        assert all(torch.equal(part[0], part[2]) for part in live)
    overwritten = tuple(PageCopy(int(source), int(page)) for source, page in zip(others, file, strict=True))
    driver.run(copies=overwritten, saves=(Save(2, saved),))
    assert all(torch.equal(part[0], part[2]) for part in live)
    assert torch.equal(driver.file_bytes(file), driver.file_bytes(others))
    assert not torch.equal(driver.file_bytes(saved), driver.file_bytes(others))


def test_the_state_of_a_slot_that_nobody_is_in_any_more_does_not_come(driver: Driver) -> None:
    file = driver.file()
    driver.run(driver.row(driver.sequence(0, 64), prompt(20, 0)), snapshots=[Snapshot(0, 20, file)])
    live = driver.runner._live.tensors[1:]
    driver.run(restores=(Restore(2, file),), sample_only=(SampleOnly(2, SamplingMetadata(GREEDY, 20)),))
    driver.runner.settle(has_slots=False)
    driver.run(driver.row(driver.sequence(1, 64), prompt(30, 1)))
    assert not any(torch.equal(part[0], part[2]) for part in live)


def test_a_file_restored_and_saved_again_has_the_same_bytes() -> None:
    for pattern, changes in (("M*M", {}), ("M*M", {"n_groups": 1}), ("*-", {}), ("MM", {})):
        for dtype in (torch.float32, torch.bfloat16):
            driver = tiny(pattern, exact=False, dtype=dtype, num_pages=64, **changes)
            track = driver.sequence(0, 80)
            first, again = driver.file(), driver.file()
            driver.run(driver.row(track, prompt(77, 1)), snapshots=[Snapshot(0, 70, first)])
            driver.run(restores=(Restore(1, first),))
            driver.run(saves=(Save(1, again),))
            assert torch.equal(driver.file_bytes(first), driver.file_bytes(again))
            assert len(driver.file_bytes(first).unique()) > 20


def test_keys_and_values_below_kv_write_from_are_not_written(driver: Driver) -> None:
    driver.runner.pool.zero_()
    track = driver.sequence(0, 100)
    track.kv_write_from = 70
    driver.run(driver.row(track, prompt(90, 2)))
    one = driver.runner.pool[track.pages.tolist()].view(torch.float32)
    by_token = one.view(len(track.pages), 2, 1, 2, 16, 16).transpose(1, 4).reshape(len(track.pages) * 16, -1)
    written = by_token.ne(0).any(-1)
    assert written.nonzero().flatten().tolist() == list(range(70, 90))


def test_a_row_from_position_0_forgets_what_the_slot_held(driver: Driver) -> None:
    text = prompt(50, 3)
    fresh = driver.run(driver.row(driver.sequence(0, 64), text))
    driver.run(driver.row(driver.sequence(1, 64), prompt(60, 4)))
    assert torch.equal(driver.run(driver.row(driver.sequence(1, 64), text))[0], fresh[0])
    one = driver.run(driver.row(driver.sequence(0, 16), text[:1]))[0]
    by_decode = driver.run(driver.row(driver.sequence(1, 16), text[:1], decode=True))[0]
    torch.testing.assert_close(by_decode, one, rtol=1e-4, atol=1e-4)


def test_results_are_in_plan_order_rows_first(driver: Driver) -> None:
    tracks = [driver.sequence(slot, 32) for slot in (3, 1, 0)]
    driver.run(driver.row(driver.sequence(2, 32), prompt(9, 5)))
    rows = [driver.row(tracks[0], prompt(5, 6)), driver.row(tracks[1], prompt(1, 7), decode=True)]
    rows.append(driver.row(tracks[2], prompt(7, 8), sample=False))
    driver.run(*rows, sample_only=(SampleOnly(2, SamplingMetadata(GREEDY, 9)),))
    assert [sampled.slot for sampled in driver.result.sampled] == [3, 1, 2]
    assert driver.result.step == driver.step
    assert driver.result.sampled[0] == SampledToken(3, int(driver.logits[0][1].argmax()))


def test_passes_and_steps_are_counted(driver: Driver) -> None:
    track = driver.sequence(0, 64)
    file = driver.file()
    driver.run(driver.row(track, prompt(20, 9)), snapshots=[Snapshot(0, 20, file)])
    driver.run(restores=(Restore(1, file),), copies=(PageCopy(0, 100),), saves=(Save(0, driver.file()),))
    driver.run(sample_only=(SampleOnly(1, SamplingMetadata(GREEDY, 20)),))
    driver.run()
    assert (driver.runner.forward_passes, driver.runner.steps) == (1, 4)


def test_bfloat16_follows_float32() -> None:
    text = prompt(100, 10)
    wide, narrow = tiny("M*ME", exact=False), tiny("M*ME", exact=False, dtype=torch.bfloat16)
    wanted = wide.run(wide.row(wide.sequence(0, 128), text))[0]
    track = narrow.sequence(0, 128)
    narrow.run(narrow.row(track, text[:70], sample=False))
    for token in text[70:]:
        found = narrow.run(narrow.row(track, [token], decode=True))[0]
    assert found.dtype == torch.float32
    assert (found - wanted).abs().max() < 0.25 * wanted.std()


def ints(*numbers: int) -> np.ndarray:
    return np.array(numbers, np.int32)


def admit(slot: int = 0, *numbers: int) -> Admit:
    return Admit(slot, (ints(*(numbers or (0, 1))),), GREEDY)


def prefill(slot: int = 0, start: int = 0, num_tokens: int = 20, **fields: Any) -> PrefillRow:
    return PrefillRow(slot, start, np.arange(num_tokens), **{"kv_write_from": 0} | fields)


def decode(slot: int = 0, start: int = 20, token: int = 5, write_from: int = 0) -> DecodeRows:
    return DecodeRows(ints(slot), ints(start), np.array([token]), ints(write_from))


def samples(slots: tuple[int, ...], positions: tuple[int, ...]) -> Samples:
    return Samples(ints(*slots), ints(*positions), np.zeros(len(slots), np.bool_))


def verify(slot: int = 0, start: int = 20, tokens: tuple[int, ...] = (5, 6, 7)) -> VerifyRow:
    return VerifyRow(slot, start, np.array(tokens, np.int64), 0)


NEW = {"admits": (admit(),)}
ROW = NEW | {"prefills": (prefill(),)}
PICTURE = Image(0, 4, (1, 4, 4), b"", 8, 8, b"")

BAD: dict[str, tuple[Callable[[Driver], dict[str, Any]], str]] = {
    "admit slot": (lambda d: {"admits": (admit(4),)}, "slot 4 is not in 0..3"),
    "admit page": (lambda d: {"admits": (admit(0, 128),)}, "pages must be in 0..127"),
    "groups": (lambda d: {"admits": (Admit(0, (), GREEDY),)}, "0 page lists for 1 attention groups"),
    "copy": (lambda d: {"copies": (PageCopy(0, 128),)}, "pages must be in 0..127"),
    "restore slot": (lambda d: {"restores": (Restore(4, d.file()),)}, "slot 4 is not in 0..3"),
    "restore page": (lambda d: {"restores": (Restore(0, d.file() + 127),)}, "pages must be in 0..127"),
    "short file": (lambda d: {"saves": (Save(0, d.file()[:-1]),)}, "different pages"),
    "doubled page": (lambda d: {"saves": (Save(0, d.file() * 0),)}, "different pages"),
    "update of nobody": (lambda d: {"table_updates": (TableUpdate(1, 0, 0, ints(3)),)}, "nobody was admitted"),
    "update group": (lambda d: NEW | {"table_updates": (TableUpdate(0, 1, 2, ints(3)),)}, "group 1 of 1"),
    "update page": (lambda d: NEW | {"table_updates": (TableUpdate(0, 0, 2, ints(128)),)}, "pages must be in 0..127"),
    "update behind": (lambda d: NEW | {"table_updates": (TableUpdate(0, 0, 3, ints(3)),)}, "do not go on from the 2"),
    "update before": (lambda d: NEW | {"table_updates": (TableUpdate(0, 0, 0, ints(3)),)}, "do not go on from the 2"),
    "empty update": (lambda d: NEW | {"table_updates": (TableUpdate(0, 0, 2, ints()),)}, "do not go on from the 2"),
    "row slot": (lambda d: {"prefills": (prefill(9),)}, "slot 9"),
    "row of nobody": (lambda d: NEW | {"prefills": (prefill(1),)}, "nobody was admitted to slot 1"),
    "empty row": (lambda d: NEW | {"prefills": (prefill(num_tokens=0),)}, "at least one token"),
    "negative start": (lambda d: NEW | {"prefills": (prefill(start=-20),)}, "from position 0 on"),
    "columns": (
        lambda d: NEW | {"decodes": msgspec.structs.replace(decode(), positions=ints())},
        "columns of different lengths",
    ),
    "token id": (lambda d: NEW | {"prefills": (replace(prefill(), tokens=np.arange(97, 99)),)}, "must be in 0..96"),
    "decode token id": (lambda d: NEW | {"decodes": decode(token=97)}, "must be in 0..96"),
    "no image": (lambda d: NEW | {"prefills": (replace(prefill(), tokens=np.array([3, -9])),)}, "where images are"),
    "no placeholder": (
        lambda d: ROW | {"admits": (replace(admit(), images=(PICTURE,)),)},
        "below 0 where images are",
    ),
    "few pages": (lambda d: ROW | {"admits": (admit(0, 3),)}, "1 pages, 2 are needed"),
    "few pages to decode": (lambda d: NEW | {"decodes": decode(start=32)}, "2 pages, 3 are needed"),
    "kv_write_from": (lambda d: NEW | {"prefills": (prefill(kv_write_from=-1),)}, "kv_write_from -1"),
    "score": (lambda d: NEW | {"prefills": (prefill(score=Score(np.arange(21), 1)),)}, "21 tokens are to be scored"),
    "twice": (lambda d: NEW | {"prefills": (prefill(), prefill())}, "more than one row"),
    "prefill and decode": (lambda d: ROW | {"decodes": decode()}, "more than one row"),
    "two samples": (lambda d: ROW | {"samples": samples((0, 0), (20, 20))}, "more than one sample"),
    "sample elsewhere": (lambda d: ROW | {"samples": samples((0,), (19,))}, "position 19, but its row ends at 20"),
    "sample columns": (lambda d: ROW | {"samples": samples((0,), ())}, "columns of different lengths"),
    "snapshot row": (lambda d: ROW | {"snapshots": (Snapshot(1, 5, d.file()),)}, "the plan has 1 rows"),
    "snapshot at start": (lambda d: ROW | {"snapshots": (Snapshot(0, 0, d.file()),)}, "position must be in 1..20"),
    "snapshot behind": (lambda d: ROW | {"snapshots": (Snapshot(0, 21, d.file()),)}, "position must be in 1..20"),
    "sample slot": (lambda d: {"samples": samples((4,), (1,))}, "slot 4"),
    "sample of nobody": (lambda d: NEW | {"samples": samples((2,), (1,))}, "nobody was admitted to slot 2"),
    "one token to verify": (lambda d: NEW | {"verifies": (verify(tokens=(5,)),)}, "one draft at least"),
    "draft token id": (lambda d: NEW | {"verifies": (verify(tokens=(5, 97)),)}, "token ids in 0..96"),
    "few pages to verify": (lambda d: NEW | {"verifies": (verify(start=30),)}, "2 pages, 3 are needed"),
    "verify and prefill": (lambda d: ROW | {"verifies": (verify(),)}, "more than one row"),
    "verify sampled": (
        lambda d: NEW | {"verifies": (verify(),), "samples": samples((0,), (23,))},
        "its verify row samples already",
    ),
    "verify kept": (
        lambda d: NEW | {"verifies": (verify(),), "snapshots": (Snapshot(0, 21, d.file()),)},
        "those of its fold",
    ),
    "fold of nothing": (lambda d: NEW | {"folds": (Fold(0, 1),)}, "the plan before has no verify row"),
    "from nowhere": (lambda d: NEW | {"decodes": decode(token=SAMPLED)}, "last sampled token stands at None"),
}


VERIFIED = NEW | {"verifies": (verify(),)}
BAD_AFTER_VERIFY: dict[str, tuple[Callable[[Driver], dict[str, Any]], str]] = {
    "no token": (lambda d: {"folds": (Fold(0, 0),)}, "0 tokens of a row of 3"),
    "too many": (lambda d: {"folds": (Fold(0, 4),)}, "4 tokens of a row of 3"),
    "twice": (lambda d: {"folds": (Fold(0, 1), Fold(0, 1))}, "the plan before has no verify row"),
    "another slot": (lambda d: {"folds": (Fold(1, 1),)}, "the plan before has no verify row"),
    "snapshot at start": (lambda d: {"folds": (Fold(0, 2, (FoldSnapshot(20, d.file()),)),)}, "within 21..22"),
    "snapshot behind": (lambda d: {"folds": (Fold(0, 2, (FoldSnapshot(23, d.file()),)),)}, "within 21..22"),
    "falling snapshots": (
        lambda d: {"folds": (Fold(0, 2, (FoldSnapshot(22, d.file()), FoldSnapshot(21, d.file()))),)},
        "are to rise",
    ),
    "short file": (lambda d: {"folds": (Fold(0, 2, (FoldSnapshot(21, d.file()[:-1]),)),)}, "different pages"),
    "decode without fold": (lambda d: {"decodes": decode(start=21)}, "its state is at None"),
    "decode elsewhere": (lambda d: {"folds": (Fold(0, 1),), "decodes": decode(start=22)}, "its state is at 21"),
    "save without fold": (lambda d: {"saves": (Save(0, d.file()),)}, "its state is at None"),
}


@pytest.mark.parametrize("name", BAD_AFTER_VERIFY)
def test_after_drafts_a_slot_goes_on_from_its_fold(driver: Driver, name: str) -> None:
    make, text = BAD_AFTER_VERIFY[name]
    driver.checked.run(StepPlan(1, **VERIFIED))
    with pytest.raises(ValueError, match=text):
        driver.checked.run(StepPlan(2, **make(driver)))


def test_a_fold_that_comes_too_late_is_refused_by_the_runner_itself(driver: Driver) -> None:
    driver.runner.run(StepPlan(1, **VERIFIED))
    driver.runner.run(StepPlan(2))
    with pytest.raises(LookupError, match="the plan before it verified nothing"):
        driver.runner.launch(StepPlan(3, folds=(Fold(0, 1),)))


@pytest.mark.parametrize("name", BAD)
def test_impossible_plans_are_refused_and_nothing_is_done(driver: Driver, name: str) -> None:
    make, text = BAD[name]
    before = driver.runner.pool.clone()
    with pytest.raises(ValueError, match=text):
        driver.checked.run(StepPlan(1, **make(driver)))
    assert torch.equal(driver.runner.pool, before)
    assert (driver.runner.steps, driver.runner.forward_passes) == (0, 0)
    # what was refused counts for nothing, and the same plan without the fault is carried out
    driver.checked.run(StepPlan(1, **ROW))


def test_the_last_page_may_be_another_one(driver: Driver) -> None:
    """As after a copy on write, also with further pages behind it."""
    track = driver.sequence(0, 48)
    wanted = driver.run(driver.row(track, prompt(40, 16)))
    driver.submit(driver.row(driver.sequence(1, 40), prompt(20, 16)[:10]))
    other, pages = driver.sequence(1, 48), ints(60, 61, 62)
    driver.checked.run(StepPlan(10, admits=(Admit(1, (other.pages[:2],), GREEDY),)))
    update = TableUpdate(1, 0, 1, pages[1:])
    row = PrefillRow(1, 0, np.array(prompt(40, 16)), 0)
    driver.logits.clear()
    driver.checked.run(StepPlan(11, table_updates=(update,), prefills=(row,), samples=samples((1,), (40,))))
    assert torch.equal(driver.logits[0][1], wanted[0])
    first, second = (driver.runner.pool[page] for page in (int(track.pages[1]), 61))
    assert torch.equal(first, second)


def test_rows_that_are_all_sampled_are_read_once_and_give_what_their_slots_give() -> None:
    """The same array of slots says that no others are sampled: then hidden states are not looked up in the slots."""
    seen = []
    for is_same in (True, False):
        driver = tiny("M*E", exact=False, num_pages=128, num_slots=4)
        tracks = [driver.sequence(slot, 64) for slot in (2, 0, 3)]
        driver.run(*(driver.row(track, prompt(9 + number, number)) for number, track in enumerate(tracks)))
        slots, positions = ints(2, 0, 3), ints(9, 10, 11)
        decodes = DecodeRows(slots, positions, np.array([5, 6, 7]), ints(0, 0, 0))
        sampled = Samples(slots if is_same else slots.copy(), positions + 1, np.zeros(3, np.bool_))
        plan = StepPlan(2, decodes=decodes, samples=sampled)
        assert plan.samples_rows is is_same
        driver.logits.clear()
        result = driver.checked.run(plan)
        logits = torch.stack([logits for _, logits in driver.logits])
        seen.append((logits, driver.runner._live.hidden.clone(), result.tokens.tolist()))
    (logits, hidden, tokens), (wanted_logits, wanted_hidden, wanted_tokens) = seen
    assert torch.equal(logits, wanted_logits) and torch.equal(hidden, wanted_hidden) and tokens == wanted_tokens
    row = PrefillRow(1, 0, np.array(prompt(4, 1)), 0)
    assert not StepPlan(3, decodes=decodes, samples=sampled, prefills=(row,)).samples_rows


def test_a_token_can_be_fed_only_where_the_slots_last_one_was_drawn_for(driver: Driver) -> None:
    track = driver.sequence(0, 64)
    driver.run(driver.row(track, prompt(10, 12)))
    file = driver.file()
    run, fed = driver.checked.run, decode(start=10, token=SAMPLED)
    same = {"admits": (Admit(0, (track.pages,), GREEDY),)}
    for plan in (
        StepPlan(2, decodes=msgspec.structs.replace(fed, positions=ints(9))),
        StepPlan(2, decodes=msgspec.structs.replace(fed, slots=ints(1)), admits=(admit(1),)),
        StepPlan(2, decodes=fed, restores=(Restore(0, file),)),
        StepPlan(2, decodes=fed, **same),
        StepPlan(1, decodes=fed),
    ):
        with pytest.raises(ValueError, match=r"last sampled token|does not follow step 1"):
            run(plan)
    run(StepPlan(3, decodes=fed))
    with pytest.raises(ValueError, match="last sampled token stands at 10"):
        run(StepPlan(4, decodes=msgspec.structs.replace(fed, positions=ints(11))))
    run(StepPlan(4, samples=samples((0,), (11,))))
    run(StepPlan(5, restores=(Restore(0, file),)))
    with pytest.raises(ValueError, match="last sampled token stands at None"):
        run(StepPlan(6, decodes=msgspec.structs.replace(fed, positions=ints(11))))


def test_exact_mode_refuses_a_prefill_off_the_grid() -> None:
    exact = tiny("M*", exact=True, num_pages=32, num_slots=2)
    track = exact.sequence(0, 100)
    exact.run(exact.row(track, prompt(40, 13)))
    with pytest.raises(ValueError, match="multiple of 64"):
        exact.run(exact.row(track, prompt(10, 14)))


def test_sizes_that_do_not_fit_the_model_are_refused(driver: Driver) -> None:
    layout = driver.layout
    for wrong in (
        replace(layout, page_bytes=layout.page_bytes * 2),
        replace(layout, header_bytes=layout.header_bytes + 4),
        replace(layout, state_bytes=layout.state_bytes * 2),
        replace(layout, groups=()),
    ):
        with pytest.raises(ValueError, match="layout"):
            Runner(driver.model, wrong, 8, 2, exact=False)
    for pages_, slots, is_exact in ((0, 2, False), (8, 0, False), (8, 2, True)):
        with pytest.raises(ValueError, match=r"num_pages|exact"):
            Runner(driver.model, layout, pages_, slots, exact=is_exact)
    assert isinstance(layout, CacheLayout)


def test_exact_mode_is_for_float32_only() -> None:
    with pytest.raises(ConfigError, match="--dtype float32"):
        tiny("M", exact=True, dtype=torch.bfloat16)


def test_the_self_test_names_the_shape_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exact, "find_dependent_height", lambda _, bias, generator: 64 if bias is None else None)
    biased = Linear(exact, torch.randn(24, 32), torch.randn(24), (24, 32))
    assert check_row_independence([biased, biased]) == 1
    with pytest.raises(ConfigError, match=r"products of 64 rows with a weight of shape \[24, 32\]"):
        check_row_independence([biased, replace(biased, bias=None)])


def test_the_draw_does_not_depend_on_the_batch(driver: Driver) -> None:
    params = SamplingParams(temperature=1.0, seed=7)
    text = prompt(30, 15)

    def row(slot: int) -> WholeRow:
        return replace(driver.row(driver.sequence(slot, 32), text), sample=SamplingMetadata(params, 30))

    alone = driver.submit(row(0)).sampled[0].token
    crowd = driver.submit(*(driver.row(driver.sequence(slot, 32), prompt(8, slot)) for slot in (0, 1)), row(2))
    assert crowd.sampled[2].token == alone
