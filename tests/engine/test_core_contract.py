"""What an engine core does for its client: the core with a runner of tags."""

import pytest
from test_core import core as core_of
from test_core import request

from cairn.engine.contract import STEP_SIZES
from cairn.errors import InvalidRequest, Overloaded, QueueFull


def outputs_of(core):
    found = []
    for _ in range(500):
        if not core.has_work:
            core.idle()
            return found
        found += core.step()
    raise AssertionError("no end in sight")


def test_outputs_end_with_a_reason_a_report_and_timings():
    core = core_of()
    core.submit(request(max_tokens=5, ignore_eos=True))
    found = outputs_of(core)
    assert sum(len(output.token_ids) for output in found) == 5
    assert [output.finish_reason for output in found if output.finish_reason] == ["length"]
    last = found[-1]
    assert last.cache.prompt_tokens == 100 and last.timings.decode >= 0
    assert found[0].cache == last.cache and all(output.cache is None for output in found[1:-1])


def test_requests_side_by_side_each_end_once():
    core = core_of()
    for name in ("a", "b", "c"):
        core.submit(request(name=name, max_tokens=4, ignore_eos=True))
    found = outputs_of(core)
    assert sorted(output.request_id for output in found if output.finish_reason) == ["a", "b", "c"]


def test_a_repeated_prompt_is_cached():
    core = core_of()
    for name in ("a", "b"):
        core.submit(request(name=name, max_tokens=2, ignore_eos=True))
        last = outputs_of(core)[-1]
    assert (last.cache.cached_tokens, last.cache.reason) == (100, "none")


def test_aborts_are_silent_and_leave_nothing():
    core = core_of()
    core.submit(request(max_tokens=50, ignore_eos=True))
    core.step()
    core.abort("a")
    core.abort("nobody")
    assert all(output.request_id != "a" for output in outputs_of(core))
    stats = core.stats()
    assert (stats.num_running, stats.num_waiting, stats.pool.held_pages, stats.pool.open_sequences) == (0, 0, 0, 0)


def test_refusals_take_nothing():
    core = core_of(max_waiting=1)
    for wrong in ({"prompt": []}, {"prompt": [1 << 40]}, {"prompt": [1] * 100_000}):
        with pytest.raises(InvalidRequest) as caught:
            core.submit(request(**wrong))
        assert caught.value.param == "prompt"
    core.submit(request(name="a"))
    with pytest.raises(Overloaded):
        core.submit(request(name="b"))


def test_several_are_taken_together_or_not_at_all():
    core = core_of(max_waiting=3)
    together = [request(name=name, max_tokens=2, ignore_eos=True) for name in "ab"]
    for wrong, param in (([request(name="c", prompt=[1 << 40])], "prompt"), ([request(name="c", n=2)], "prompt")):
        with pytest.raises(InvalidRequest) as caught:
            core.submit(*together, *wrong)
        assert caught.value.param == param and not core.has_work
    core.submit(*together)
    with pytest.raises(QueueFull):
        core.submit(request(name="c"), request(name="d"))
    assert {output.request_id for output in outputs_of(core)} == {"a", "b"}


def test_counters_only_grow():
    core = core_of()
    before = core.stats()
    core.submit(request(max_tokens=3, ignore_eos=True))
    outputs_of(core)
    after = core.stats()
    assert after.tokens.generation - before.tokens.generation == 3
    assert after.tokens.prompt - before.tokens.prompt == 100
    assert after.prefix_cache.audits > before.prefix_cache.audits and after.steps.num_steps > before.steps.num_steps


def test_the_cache_is_emptied_only_when_nothing_is_held():
    core = core_of()
    core.submit(request(name="a", max_tokens=5, ignore_eos=True))
    core.step()
    held = core.stats().pool.held_pages
    assert held > 0 and core.reset_cache() == held
    outputs_of(core)
    core.submit(request(name="b", max_tokens=1, ignore_eos=True))
    assert outputs_of(core)[-1].cache.cached_tokens == 100, "a refused reset has dropped something"
    assert core.reset_cache() == 0
    stats = core.stats()
    assert stats.pool.free_pages == stats.pool.num_pages and stats.pool.cached_pages == 0
    core.submit(request(name="c", max_tokens=1, ignore_eos=True))
    assert outputs_of(core)[-1].cache.cached_tokens == 0


def test_every_step_is_counted_by_its_tokens():
    core = core_of()
    core.submit(request(name="a", max_tokens=3, ignore_eos=True))
    outputs_of(core)
    sizes = dict(zip((*STEP_SIZES, "more"), core.stats().steps.sizes, strict=True))
    # 100 tokens of the prompt and the first of the answer, then one each
    assert core.stats().steps.num_tokens == 103 and sizes[1] == 2 and sum(sizes.values()) == sizes[128] + 2 == 3
    core.submit(request(name="b", max_tokens=1, ignore_eos=True))
    outputs_of(core)
    grown = core.stats()
    assert grown.steps.num_tokens - 103 <= 1, "the prompt is cached"
