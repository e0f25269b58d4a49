"""Checkpoints that a client holds: they go last, for as long as they are used, and never beyond their share."""

import pytest
from simulation import Request, Simulation

from cairn.cache.checkpoint import Kind
from cairn.cache.eviction import LeastRecentlyUsed
from cairn.cache.placement import Auto, placement_for
from cairn.cache.retained import RETAINED_SHARE
from cairn.types import Boundary

LONG = tuple(range(1000, 1200))


def simulation(num_pages=400, exact=False, **layout) -> Simulation:
    return Simulation.build(num_pages, Auto(), LeastRecentlyUsed(), exact, **layout)


def run(sim: Simulation, prompt, *boundaries, name="r") -> Request:
    request = sim.start(name, tuple(prompt), boundaries=boundaries)
    if request.computed < len(prompt):
        assert sim.prefill(request, len(prompt))
    sim.finish(request)
    sim.apply()
    sim.check()
    return request


def hit(sim: Simulation, prompt) -> int:
    """How much of `prompt` is cached; asking is a use of it."""
    request = sim.start("probe", tuple(prompt))
    sim.end(request)
    sim.apply()
    return request.lease.hit


def fill(sim: Simulation, count: int) -> None:
    """Other people's prompts, each of them once."""
    for number in range(count):
        run(sim, range(10_000 * (number + 1), 10_000 * (number + 1) + 150), name=f"o{number}")


def positions(sim: Simulation) -> set[int]:
    return {checkpoint.position for checkpoint in sim.cache.checkpoints.retained}


def test_what_is_held_outlives_what_is_not():
    sim = simulation(num_pages=200)
    run(sim, LONG, Boundary(100, retain_seconds=300))
    run(sim, range(5000, 5200), Boundary(100))
    fill(sim, 12)
    assert sim.cache.checkpoints.evicted[Kind.MESSAGE_END] > 0
    assert positions(sim) == {100}
    assert hit(sim, range(5000, 5200)) == 0
    assert hit(sim, LONG) == 100


def test_after_its_time_it_is_like_any_other():
    sim = simulation(num_pages=200)
    run(sim, LONG, Boundary(100, retain_seconds=300))
    sim.clock.advance(299)
    fill(sim, 6)
    assert positions(sim) == {100}
    sim.clock.advance(1)
    fill(sim, 12)
    assert positions(sim) == set() and hit(sim, LONG) == 0


def test_a_use_after_its_time_holds_nothing():
    """Nothing may have happened in between that would have looked at the clock."""
    sim = simulation(num_pages=200)
    run(sim, LONG, Boundary(100, retain_seconds=300))
    sim.clock.advance(300)
    assert hit(sim, LONG) == 200
    assert positions(sim) == set()


@pytest.mark.parametrize("deeper", [False, True])
def test_each_use_holds_it_anew_also_one_that_goes_deeper(deeper):
    sim = simulation(num_pages=200)
    run(sim, LONG, Boundary(100, retain_seconds=300))
    for _ in range(5):
        sim.clock.advance(200)
        run(sim, LONG if deeper else (*LONG[:100], 1, 2, 3))
    fill(sim, 12)
    assert positions(sim) == {100}
    assert hit(sim, LONG) >= 100


def test_the_longer_of_two_times_counts():
    sim = simulation()
    run(sim, LONG, Boundary(100, retain_seconds=3600))
    run(sim, LONG[:150], Boundary(100, retain_seconds=300))
    (held,) = sim.cache.checkpoints.retained
    assert held.retained_until == 3600 and held.retain_seconds == 3600


def test_what_is_there_already_is_held_when_it_is_asked_for():
    sim = simulation(num_pages=200)
    run(sim, LONG, Boundary(100))
    assert positions(sim) == set()
    again = run(sim, LONG, Boundary(100, retain_seconds=300), Boundary(150, retain_seconds=300))
    assert positions(sim) == {100}  # none was kept at 150, and nothing is computed again for it
    assert again.lease.retained_breakpoints == {100}


def test_what_is_over_the_quota_is_an_ordinary_checkpoint():
    sim = simulation(num_pages=200)
    quota = sim.cache.checkpoints.retained.quota
    assert quota == 200 * RETAINED_SHARE
    leases = [
        run(sim, range(1000 * i, 1000 * i + 80), Boundary(60, retain_seconds=300), name=f"r{i}").lease for i in range(5)
    ]
    # 60 tokens are 15 pages, a checkpoint 2: two prompts fit into 50 pages, a third does not
    assert [lease.retained_breakpoints for lease in leases] == [{60}, {60}, set(), set(), set()]
    assert sim.cache.checkpoints.retained.num_pages() == 34
    assert hit(sim, range(4000, 4080)) == 80  # kept all the same
    fill(sim, 12)
    assert [hit(sim, range(1000 * i, 1000 * i + 80)) for i in range(5)] == [60, 60, 0, 0, 0]
    sim.clock.advance(601)
    assert run(sim, range(7000, 7080), Boundary(60, retain_seconds=300)).lease.retained_breakpoints == {
        60
    }  # there is room again


@pytest.mark.parametrize(("position", "held"), [(192, {192}), (193, set())])
def test_the_quota_may_be_used_to_its_last_page(position, held):
    sim = simulation(num_pages=200)
    # a checkpoint is 2 pages of the 50, 192 tokens are 48
    assert run(sim, LONG, Boundary(position, retain_seconds=300)).lease.retained_breakpoints == held


def test_each_ends_at_its_own_time():
    sim = simulation()
    for start, seconds in ((1000, 300), (3000, 900), (5000, 600)):
        run(sim, range(start, start + 60), Boundary(50, retain_seconds=seconds))
    ends = []
    for _ in range(10):
        sim.clock.advance(100)
        sim.cache.checkpoints.end_expired_retentions()
        ends.append(len(sim.cache.checkpoints.retained))
    assert ends == [3, 3, 2, 2, 2, 1, 1, 1, 0, 0]


def test_what_was_held_for_long_is_held_anew_for_as_long_as_is_asked_for_now():
    sim = simulation()
    run(sim, LONG, Boundary(100, retain_seconds=3600))
    sim.clock.advance(3600)
    run(sim, LONG, Boundary(100, retain_seconds=300))
    (held,) = sim.cache.checkpoints.retained
    assert (held.retain_seconds, held.retained_until) == (300, 3900)


def test_a_use_of_what_is_above_holds_nothing_below_it_anew():
    sim = simulation()
    run(sim, LONG, Boundary(100, retain_seconds=300), Boundary(150, retain_seconds=300))
    sim.clock.advance(200)
    # what it leaves on the way to 150 is hit at 128
    assert run(sim, (*LONG[:140], 1, 2, 3)).lease.hit == 128
    assert {held.position: held.retained_until for held in sim.cache.checkpoints.retained} == {100: 500, 150: 300}


def test_what_is_held_goes_last_from_the_moment_on_and_no_longer():
    sim = simulation()
    for start in (1000, 3000):
        run(sim, range(start, start + 60))
    checkpoints, queue = sim.cache.checkpoints, sim.cache.checkpoints.queue
    first, second = sorted(queue, key=lambda checkpoint: checkpoint.last_used)
    assert checkpoints.retain(first, 300)
    assert queue.pop() is second
    checkpoints._touch(second)
    sim.clock.advance(300)
    sim.cache.checkpoints.end_expired_retentions()
    assert queue.pop() is first


def test_tokens_that_several_share_are_counted_once():
    sim = simulation(num_pages=200)
    ends = [Boundary(p, retain_seconds=300) for p in (40, 80, 120, 144)]
    assert run(sim, range(1000, 1150), *ends).lease.retained_breakpoints == {40, 80, 120, 144}
    assert sim.cache.checkpoints.retained.num_pages() == 36 + 4 * 2


def test_running_requests_come_before_what_is_held():
    """Held is no lock: a request that needs the pages gets them."""
    sim = simulation(num_pages=60)
    run(sim, range(1000, 1040), Boundary(30, retain_seconds=3600))
    assert positions(sim) == {30}
    request = sim.start("big", tuple(range(2000, 2230)))
    assert sim.prefill(request, 230)
    sim.check()
    assert positions(sim) == set()


def test_a_hold_survives_a_better_state_in_its_place():
    sim = simulation(exact=True)
    prompt = LONG[:64]
    request = sim.start("a", prompt)
    assert sim.prefill(request, 64)
    for token in LONG[64:]:
        assert sim.decode(request, token)
    sim.finish(request)
    sim.apply()
    (checkpoint,) = [c for c in sim.cache.checkpoints.queue if c.position > 64]
    assert sim.cache.checkpoints.retain(checkpoint, 300)
    # a prompt that ends right there computes the state by prefill, which serves others, too
    run(sim, (prompt + tuple(LONG[64:]))[: checkpoint.position])
    (held,) = sim.cache.checkpoints.retained
    assert held is not checkpoint and held.retained_until == 300 and checkpoint.retained_until is None


def test_in_exact_mode_the_grid_point_below_is_held():
    sim = simulation(exact=True)
    assert run(sim, LONG, Boundary(150, retain_seconds=300)).lease.retained_breakpoints == {128}
    assert hit(sim, (*LONG[:150], 1, 2, 3)) == 128


def test_a_model_without_a_state_holds_its_keys_and_values():
    sim = simulation(num_pages=200, state_bytes=0)
    run(sim, LONG, Boundary(100, retain_seconds=300))
    fill(sim, 12)
    assert positions(sim) == {100}
    assert hit(sim, LONG) >= 100


@pytest.mark.parametrize("mode", ["align", "all", "junction"])
def test_other_policies_hold_what_they_keep_anyway(mode):
    sim = Simulation.build(400, placement_for(mode, 16, False), LeastRecentlyUsed())
    run(sim, LONG, Boundary(192, retain_seconds=300), Boundary(100, retain_seconds=300))
    assert positions(sim) == set()
    assert run(sim, LONG, Boundary(192, retain_seconds=300)).lease.retained_breakpoints == {192}


def test_off_the_grid_what_a_client_marks_comes_before_other_ends():
    ends = [
        Boundary(70, "system_end"),
        *(Boundary(p) for p in range(101, 1000, 50)),
        Boundary(1007, retain_seconds=300),
    ]
    ends[3] = Boundary(ends[3].position, retain_seconds=300)
    ends[5] = Boundary(ends[5].position, "image_end")
    sim = simulation(num_pages=4000)
    request = sim.start("r", tuple(range(1100)), boundaries=ends)
    kinds = {w.position: w.kind for w in Auto().in_prefill(request.facts, 0, 1100) if w.position % 64}
    assert kinds == {
        1100: Kind.PROMPT_END,
        1007: Kind.BREAKPOINT,
        201: Kind.BREAKPOINT,
        70: Kind.SYSTEM_END,
        301: Kind.IMAGE_END,
        951: Kind.INNER_END,
    }


def test_ends_within_the_hit_take_nobodys_place():
    sim = simulation(num_pages=4000)
    ends = tuple(Boundary(p) for p in range(70, 1000, 70))
    run(sim, range(700), *ends[:10])
    marked = tuple(Boundary(end.position, retain_seconds=300 * (number < 4)) for number, end in enumerate(ends))
    request = sim.start("r", tuple(range(1000)), boundaries=marked)
    assert request.lease.hit == 700
    kinds = {w.position: w.kind for w in Auto().in_prefill(request.facts, 700, 1000) if w.position % 64}
    assert kinds == {1000: Kind.PROMPT_END, 980: Kind.MESSAGE_END, 910: Kind.INNER_END, 840: Kind.INNER_END,
                     770: Kind.INNER_END}  # fmt: skip


def test_inner_ends_are_taken_where_memory_is_idle():
    sim = simulation(num_pages=64)
    ends = (Boundary(30), Boundary(50), Boundary(77))
    run(sim, range(80), *ends)
    assert sim.cache.checkpoints.taken == {Kind.MESSAGE_END: 1, Kind.INNER_END: 2, Kind.GRID: 1, Kind.PROMPT_END: 1}
