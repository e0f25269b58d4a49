"""Every record of a plan does what it says, and plans that cannot be carried out are refused."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from cairn.cache.layout import CacheLayout
from cairn.errors import ConfigError
from cairn.kernels import exact
from cairn.layers.linear import Linear
from cairn.runner import self_test
from cairn.runner.runner import Runner
from cairn.step import Fork, FromStep, Keep, PageCopy, Restore, Row, Sample, SampledToken, SampleOnly, Save, StepPlan
from cairn.types import SamplingParams
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
    """A file is restored, forked, and saved as it is before the rows move on."""
    text = prompt(40, 0)
    track = driver.sequence(0, 64)
    at_20, saved = driver.file(), driver.file()
    driver.run(driver.row(track, text[:20]), keeps=[Keep(0, 20, at_20)])
    driver.run(driver.row(track, text[20:30]))
    other = driver.sequence(2, 64)
    other.position, other.pages, other.kv_write_from = 20, track.pages, 30
    row = driver.row(other, text[20:30])
    after = driver.file()
    driver.run(
        row, restores=(Restore(1, at_20),), forks=(Fork(1, 2),), saves=(Save(2, saved),), keeps=[Keep(0, 30, after)]
    )
    assert torch.equal(driver.file_bytes(saved), driver.file_bytes(at_20))
    assert not torch.equal(driver.file_bytes(after), driver.file_bytes(at_20))


def test_a_file_restored_and_saved_again_has_the_same_bytes() -> None:
    for pattern, changes in (("M*M", {}), ("M*M", {"n_groups": 1}), ("*-", {}), ("MM", {})):
        for dtype in (torch.float32, torch.bfloat16):
            driver = tiny(pattern, exact=False, dtype=dtype, num_pages=64, **changes)
            track = driver.sequence(0, 80)
            first, again = driver.file(), driver.file()
            driver.run(driver.row(track, prompt(77, 1)), keeps=[Keep(0, 70, first)])
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
    driver.run(*rows, sample_only=(SampleOnly(2, Sample(GREEDY, 9)),))
    assert [sampled.slot for sampled in driver.result.sampled] == [3, 1, 2]
    assert driver.result.step == driver.step
    assert driver.result.sampled[0] == SampledToken(3, int(driver.logits[0][1].argmax()))


def test_passes_and_steps_are_counted(driver: Driver) -> None:
    track = driver.sequence(0, 64)
    file = driver.file()
    driver.run(driver.row(track, prompt(20, 9)), keeps=[Keep(0, 20, file)])
    driver.run(restores=(Restore(1, file),), copies=(PageCopy(0, 100),), saves=(Save(0, driver.file()),))
    driver.run(sample_only=(SampleOnly(1, Sample(GREEDY, 20)),))
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


def good_row(driver: Driver) -> Row:
    return driver.row(driver.sequence(0, 64), prompt(20, 11))


BAD: dict[str, tuple[Callable[[Driver, Row], dict[str, Any]], str]] = {
    "copy": (lambda d, r: {"copies": (PageCopy(0, 128),)}, "pages must be in 0..127"),
    "restore slot": (lambda d, r: {"restores": (Restore(4, d.file()),)}, "slot 4 is not in 0..3"),
    "restore page": (lambda d, r: {"restores": (Restore(0, d.file() + 127),)}, "pages must be in 0..127"),
    "short file": (lambda d, r: {"saves": (Save(0, d.file()[:-1]),)}, "different pages"),
    "doubled page": (lambda d, r: {"saves": (Save(0, d.file() * 0),)}, "different pages"),
    "fork": (lambda d, r: {"forks": (Fork(-1, 0),)}, "slot -1"),
    "row slot": (lambda d, r: {"rows": (replace(r, slot=9),)}, "slot 9"),
    "empty row": (lambda d, r: {"rows": (replace(r, end=0),)}, "at least one token"),
    "negative start": (lambda d, r: {"rows": (replace(r, start=-20, end=0),)}, "from position 0 on"),
    "long decode": (lambda d, r: {"rows": (replace(r, decode=True),)}, "exactly one token"),
    "token count": (lambda d, r: {"rows": (replace(r, end=21),)}, "tokens of shape"),
    "token id": (lambda d, r: {"rows": (replace(r, tokens=r.tokens + 97),)}, "token ids must be in 0..96"),
    "few pages": (lambda d, r: {"rows": (replace(r, pages=(r.pages[0][:1],)),)}, "1 pages, 2 are needed"),
    "row page": (lambda d, r: {"rows": (replace(r, pages=(r.pages[0] - 5,)),)}, "pages must be in 0..127"),
    "groups": (lambda d, r: {"rows": (replace(r, pages=()),)}, "0 page lists for 1 attention groups"),
    "kv_write_from": (lambda d, r: {"rows": (replace(r, kv_write_from=-1),)}, "kv_write_from -1"),
    "twice": (lambda d, r: {"rows": (r, r)}, "more than one row"),
    "row and sample_only": (
        lambda d, r: {"rows": (r,), "sample_only": (SampleOnly(0, Sample(GREEDY, 1)),)},
        "more than one row or sample_only",
    ),
    "keep row": (lambda d, r: {"rows": (r,), "keeps": (Keep(1, 5, d.file()),)}, "the plan has 1 rows"),
    "keep at start": (lambda d, r: {"rows": (r,), "keeps": (Keep(0, 0, d.file()),)}, "position must be in 1..20"),
    "keep behind": (lambda d, r: {"rows": (r,), "keeps": (Keep(0, 21, d.file()),)}, "position must be in 1..20"),
    "sample_only": (lambda d, r: {"sample_only": (SampleOnly(4, Sample(GREEDY, 1)),)}, "slot 4"),
    "from nowhere": (
        lambda d, r: {"rows": (replace(r, start=20, end=21, tokens=FromStep(1), decode=True),)},
        "last token is of step None",
    ),
    "many from a step": (lambda d, r: {"rows": (replace(r, tokens=FromStep(1)),)}, "FromStep gives one token"),
}


@pytest.mark.parametrize("name", BAD)
def test_impossible_plans_are_refused_and_nothing_is_done(driver: Driver, name: str) -> None:
    make, text = BAD[name]
    records = make(driver, good_row(driver))
    before = driver.runner.pool.clone()
    with pytest.raises(ValueError, match=text):
        driver.runner.run(StepPlan(1, **records))
    assert torch.equal(driver.runner.pool, before)
    assert (driver.runner.steps, driver.runner.forward_passes) == (0, 0)


def test_a_token_can_be_fed_only_from_the_slots_last_step(driver: Driver) -> None:
    track = driver.sequence(0, 64)
    driver.run(driver.row(track, prompt(10, 12)))  # step 1
    file = driver.file()
    fed = replace(driver.row(track, FromStep(1), decode=True), sample=None)
    for plan in (
        StepPlan(2, rows=(replace(fed, tokens=FromStep(0)),)),
        StepPlan(2, rows=(replace(fed, slot=1),)),
        StepPlan(2, rows=(fed,), restores=(Restore(0, file),)),
        StepPlan(1, rows=(fed,)),
    ):
        with pytest.raises(ValueError, match="step"):
            driver.runner.run(plan)
    driver.runner.run(StepPlan(2, rows=(replace(fed, slot=1),), forks=(Fork(0, 1),)))
    driver.runner.run(StepPlan(3, rows=(fed,)))
    with pytest.raises(ValueError, match="last token is of step None"):
        driver.runner.run(StepPlan(4, rows=(fed,)))
    driver.runner.run(StepPlan(4, sample_only=(SampleOnly(0, Sample(GREEDY, 12)),)))
    driver.runner.run(StepPlan(5, restores=(Restore(0, file),)))
    with pytest.raises(ValueError, match="last token is of step None"):
        driver.runner.run(StepPlan(6, rows=(replace(fed, tokens=FromStep(4)),)))


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
    monkeypatch.setattr(
        self_test, "find_dependent_height", lambda weight, bias, generator: 64 if bias is None else None
    )
    biased = Linear(exact, torch.randn(24, 32), torch.randn(24), (24, 32))
    assert self_test.check_row_independence([biased, biased]) == 1
    with pytest.raises(ConfigError, match=r"weight of shape \[24, 32\] in tiles of 64 rows"):
        self_test.check_row_independence([biased, replace(biased, bias=None)])


def test_the_draw_does_not_depend_on_the_batch(driver: Driver) -> None:
    params = SamplingParams(temperature=1.0, seed=7)
    text = prompt(30, 15)

    def row(slot: int) -> Row:
        return replace(driver.row(driver.sequence(slot, 32), text), sample=Sample(params, 30))

    alone = driver.submit(row(0)).sampled[0].token
    crowd = driver.submit(*(driver.row(driver.sequence(slot, 32), prompt(8, slot)) for slot in (0, 1)), row(2))
    assert crowd.sampled[2].token == alone
