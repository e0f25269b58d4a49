"""Caches with tiers below them: what the pool has dropped, or a server that is gone had, comes back from there."""

import errno
from concurrent.futures import Future
from contextlib import contextmanager

import numpy as np
import pytest
from driver import alone
from faulty_files import FaultyFiles
from tier_world import TierWorld

from cairn.cache.audit import audit
from cairn.cache.layout import AttentionGroup
from cairn.cache.reasons import Reason
from cairn.cache.sequence_blocks import Namespace
from cairn.scheduler.page_source import FetchPlan
from cairn.scheduler.request import Phase
from cairn.tiers import demotion, promotion
from cairn.tiers.demotion import Demoter
from cairn.tiers.disk import DiskStore
from cairn.tiers.memory import CopyFailed
from tiers import first_of

PROMPT = [7 * i % 50 for i in range(200)]


def other(number: int, length: int = 300) -> list[int]:
    return [(number * 31 + 3 * i) % 50 for i in range(length)]


@pytest.fixture(params=["host", "disk"])
def tier(request, tmp_path):
    return {"host_pages": 4000} if request.param == "host" else {"folder": tmp_path}


def check_end(world: TierWorld) -> None:
    """Nothing is held, and all of the pool can be had."""
    state = world.driver.scheduler.state
    assert not state.requests and not world.driver.cache.pinned.pins
    audit(world.driver.cache)
    assert world.driver.cache.clear()


def hit_of(world: TierWorld, name: str) -> tuple[int, int]:
    """Tokens that the pool had, and that came from below."""
    sequence = world.driver.requests[name].stats.first_sequence
    return sequence.hit - sequence.received, sequence.received


class TestPromotion:
    def test_what_the_pool_has_dropped_comes_back(self, tier):
        world = TierWorld(num_pages=60, **tier)
        first = world.answer(PROMPT, name="first")
        world.answer(other(1), name="other")
        world.driver.cache.clear()
        assert world.answer(PROMPT, name="again") == first
        assert hit_of(world, "again") == (0, 200)
        assert world.stores[0].counters.hits == 1 and world.stores[0].counters.hit_tokens == 200
        check_end(world)

    def test_a_longer_prompt_goes_on_from_there(self, tier):
        world = TierWorld(**tier)
        world.answer(PROMPT)
        world.driver.cache.clear()
        longer = PROMPT + other(2, 70)
        assert world.answer(longer, name="longer") == alone(longer, False)
        assert hit_of(world, "longer") == (0, 200)
        check_end(world)

    def test_only_what_the_pool_lacks_is_read(self, tier):
        world = TierWorld(**tier)
        world.answer(PROMPT + other(3, 150), boundaries=[150])
        world.driver.cache.clear()
        world.answer(PROMPT[:150])
        read = world.stores[0].counters.read_bytes
        world.answer(PROMPT + other(3, 150), name="whole")
        assert hit_of(world, "whole")[1] >= 200
        pages = world.driver.layout.pages_for(350) - 150 // 16 + 3
        assert world.stores[0].counters.read_bytes - read <= pages * 64

    def test_a_state_alone_is_read_where_keys_and_values_are_here(self, tier):
        world = TierWorld(**tier)
        prompt = PROMPT + other(3, 150)
        world.answer(prompt, boundaries=[200])
        cache = world.driver.cache
        node = next(node for node in cache.tree.nodes() if node.end == 200 and node.checkpoint is not None)
        cache.checkpoints.queue.remove(node.checkpoint)
        cache.checkpoints._drop(node.checkpoint)
        read = world.stores[0].counters.read_bytes
        fork = PROMPT + other(4, 50)
        assert world.answer(fork, name="fork") == alone(fork, False)
        assert hit_of(world, "fork")[1] > 0
        assert world.stores[0].counters.read_bytes - read == 3 * 64, "the state and nothing else"
        check_end(world)

    def test_a_request_that_nothing_is_known_of_is_computed(self, tier):
        world = TierWorld(**tier)
        world.answer(PROMPT)
        assert world.answer(other(9), name="new") == alone(other(9), False)
        assert hit_of(world, "new") == (0, 0)
        assert world.driver.requests["new"].stats.first_sequence.reason is Reason.NEVER_SEEN

    def test_what_takes_longer_than_computing_is_not_fetched(self, tier):
        world = TierWorld(**tier)
        world.answer(PROMPT)
        world.driver.cache.clear()
        world.context.speed.seconds_per_token = 1e-9
        longer = PROMPT + other(2, 70)
        assert world.answer(longer, name="longer") == alone(longer, False)
        assert hit_of(world, "longer") == (0, 0)
        # of what comes after it, three tokens in the place of an answer, no tier knew anything
        assert world.first("longer").lost == {Reason.TIER_SLOW: 200, Reason.REWRITTEN: 3, Reason.NEVER_SEEN: 67}
        assert world.first("longer").reason is Reason.TIER_SLOW

    @pytest.mark.parametrize(
        ("per_token", "expected"),
        [(1e6, 1.0), (10.0, 1.0), (0.01, 0.1), (0.0005, 0.005)],
    )
    @pytest.mark.parametrize("pace", [0.0, 40.0, 1e9])
    def test_a_read_rests_as_long_as_its_request_can_wait(self, tier, per_token, expected, pace, monkeypatch):
        """A second, or a twentieth of what computing takes where that is less."""
        rested = list[float]()

        @contextmanager
        def seen(rests):
            rested.append(rests)
            yield

        monkeypatch.setattr(promotion, "resting_at_most", seen)
        world = TierWorld(**tier)
        world.answer(PROMPT)
        world.driver.cache.clear()
        world.lanes.pace(pace)
        world.context.speed.seconds_per_token = per_token
        plans, plan = list[FetchPlan](), world.source.plan
        monkeypatch.setattr(world.source, "plan", lambda *asked: plans.append(plan(*asked)) or plans[-1])
        assert world.answer(PROMPT, name="again") == alone(PROMPT, False)
        assert hit_of(world, "again")[1] == 200
        busy = plans[-1].num_bytes * promotion._FIRST_RATES[world.context.stores[0].name]
        assert rested == [pytest.approx(expected / busy)]
        assert plans[-1].seconds == pytest.approx(promotion.LATENCY_SECONDS + busy * (1 + min(pace, rested[0])))

    def test_a_hit_of_the_pool_is_not_called_slow(self, tier):
        world = TierWorld(**tier)
        world.answer(PROMPT + other(3, 150), boundaries=[150])
        world.driver.cache.clear()
        world.answer(PROMPT[:150])
        world.context.speed.seconds_per_token = 1e-9
        world.answer(PROMPT + other(3, 150), name="whole")
        assert hit_of(world, "whole") == (150, 0) and world.first("whole").lost == {Reason.TIER_SLOW: 200}

    def test_what_was_given_up_says_so(self, tier):
        world = TierWorld(immediate=False, **tier)
        world.answer(PROMPT)
        world.driver.cache.clear()
        name = world.driver.submit(PROMPT)
        world.driver.scheduler.poll()
        world.lanes.names.run()
        world.driver.scheduler.poll()
        world.driver.clock.advance(1000.0)
        world.driver.scheduler.poll()
        self.finish(world)
        assert world.driver.output(name) == alone(PROMPT, False)
        assert world.first(name).lost == {Reason.TIER_FAILED: 200}
        check_end(world)

    def test_salts_share_nothing(self, tier):
        world = TierWorld(**tier)
        world.answer(PROMPT, namespace=Namespace(cache_salt="a"))
        world.driver.cache.clear()
        for name, salt, expected in (("b", "b", 0), ("none", None, 0), ("a", "a", 200)):
            world.answer(PROMPT, name=name, namespace=Namespace(cache_salt=salt))
            assert hit_of(world, name)[1] == expected
            world.driver.cache.clear()

    def test_several_that_wait_are_fetched_in_their_order(self, tier):
        world = TierWorld(immediate=False, max_num_seqs=2, **tier)
        prompts = [other(number, 130) for number in range(4)]
        expected = [world.answer(prompt) for prompt in prompts]
        world.driver.cache.clear()
        names = [world.driver.submit(prompt) for prompt in prompts]
        world.driver.scheduler.poll()
        assert len(world.lanes.names.tasks) == 4 and not world.driver.scheduler.state.transfers.fetching
        world.lanes.names.run()
        world.driver.scheduler.poll()
        fetching = world.driver.scheduler.state.transfers.fetching.values()
        assert [fetch.request.id for fetch in fetching] == names[:2], "as many as there are slots"
        self.finish(world)
        assert [world.driver.output(name) for name in names] == expected
        check_end(world)

    def finish(self, world):
        state = world.driver.scheduler.state
        for _ in range(2000):
            world.driver.scheduler.poll()
            world.run_lanes()
            if world.driver.scheduler.has_work:
                world.driver.step()
            elif not state.requests:
                return world.settle()
        raise AssertionError("no end in sight")

    def test_a_plain_request_waits_for_no_tier(self, tier):
        world = TierWorld(immediate=False, **tier)
        world.answer(PROMPT)
        world.driver.cache.clear()
        slow = world.driver.submit(PROMPT)
        plain = world.driver.submit([1, 2, 3])
        for _ in range(20):
            world.driver.scheduler.poll()
            if world.driver.scheduler.has_work:
                world.driver.step()
        assert world.driver.requests[plain].phase is Phase.FINISHED
        assert world.driver.requests[slow].phase is Phase.WAITING, "nobody has looked for it yet"
        assert not world.driver.scheduler.has_work, "it does not turn in vain"
        self.finish(world)
        assert world.driver.output(slow) == alone(PROMPT, False)

    def test_pages_that_a_rank_may_still_write_to_are_nobodys(self, tier):
        """Its copy has failed, the request is computed, and what it was to fill comes free when that is over."""
        world, late = TierWorld(immediate=False, **tier), Future()
        world.answer(PROMPT)
        world.driver.cache.clear()
        name, copy_in = world.driver.submit(PROMPT), world.memory.copy_in

        def fail(pages, fill):
            raise CopyFailed("a rank is late", [late])

        world.memory.copy_in = fail
        state = world.driver.scheduler.state
        while not state.transfers.quarantine:
            world.driver.scheduler.poll()
            world.run_lanes()
        world.memory.copy_in = copy_in
        world.context.speed.seconds_per_token = 1e-9
        self.finish(world)
        assert world.driver.output(name) == alone(PROMPT, False)
        assert world.first(name).lost == {Reason.TIER_FAILED: 200}
        assert len(state.transfers.quarantine) == 1
        late.set_result("too late")
        world.driver.scheduler.poll()
        check_end(world)

    def test_a_read_that_never_ends_is_given_up(self, tier):
        world = TierWorld(immediate=False, **tier)
        world.answer(PROMPT)
        world.driver.cache.clear()
        world.context.speed.seconds_per_token = 0.001
        name = world.driver.submit(PROMPT)
        world.lanes.names.run()
        world.driver.scheduler.poll()
        assert world.driver.requests[name].phase is Phase.FETCHING
        world.driver.clock.advance(0.6)
        world.driver.scheduler.poll()
        assert world.driver.requests[name].phase is Phase.WAITING
        while world.driver.requests[name].phase is not Phase.FINISHED:
            world.driver.step()
        assert world.driver.output(name) == alone(PROMPT, False)
        state = world.driver.scheduler.state
        assert state.transfers.quarantine, "it may still be written to"
        world.run_lanes()
        world.driver.scheduler.poll()
        assert not state.transfers.quarantine
        world.settle()
        check_end(world)

    def test_an_aborted_request_leaves_nothing_behind(self, tier):
        for looks in range(4):
            world = TierWorld(immediate=False, **tier)
            world.answer(PROMPT)
            world.driver.cache.clear()
            name = world.driver.submit(PROMPT)
            for _ in range(looks):
                world.driver.scheduler.poll()
                world.run_lanes()
            world.driver.scheduler.abort(name)
            self.finish(world)
            assert not world.source._known and not world.source._fetches
            check_end(world)
            for store in world.stores:
                assert not isinstance(store, DiskStore) or store.close() is None


class TestDemotion:
    def test_ends_and_boundaries_are_kept_below_and_few_places_of_the_grid(self, tier):
        world = TierWorld(**tier)
        world.answer(other(1, 400), boundaries=[100])
        entries = [entry.facts for entry in world.stores[0]._index]
        states = sorted(facts.position for facts in entries if facts.tail is not None)
        assert states == [64, 100, 320, 384, 400, 403], "of the grid fewer and fewer the farther from the end"
        assert sorted(facts.position for facts in entries if facts.tail is None) == [64, 128, 192, 256, 320, 384]
        grid = [node.end for node in world.driver.cache.tree.nodes() if node.checkpoint is not None]
        assert {64, 128, 192, 256, 320, 384} <= set(grid)

    def test_prompts_that_part_where_nothing_says_so_are_hit_below(self, tier):
        world = TierWorld(**tier)
        world.answer(other(1, 400))
        world.driver.cache.clear()
        world.answer(other(1, 390) + other(5, 100), name="parts")
        assert hit_of(world, "parts") == (0, 384)

    def test_an_end_is_worth_its_writing_whatever_lies_before_it(self, tier, monkeypatch):
        above, pays = [], Demoter._pays
        monkeypatch.setattr(Demoter, "_pays", lambda *given: above.append(given[-2:]) or pays(*given))
        TierWorld(**tier).answer(other(1, 400), boundaries=[100])
        assert {state.position: start for state, start in above}[400] == 100

    def test_what_was_hit_is_kept_too(self, tier):
        world = TierWorld(**tier)
        world.answer(other(1, 400))
        world.answer(other(1, 200) + other(5, 100))
        states = {entry.facts.position for entry in world.stores[0]._index if entry.facts.tail is not None}
        assert 192 in states, "a place on the grid that somebody has resumed from"

    def test_pages_are_pinned_only_while_they_are_copied(self, tier):
        world = TierWorld(immediate=False, **tier)
        name = world.driver.submit(PROMPT)
        pins = world.driver.cache.pinned.pins
        while world.driver.requests[name].phase is not Phase.FINISHED:
            world.driver.scheduler.poll()
            world.driver.step()
        world.driver.scheduler.poll()
        assert not pins and world.lanes.names.tasks
        world.lanes.names.run()
        world.driver.scheduler.poll()
        assert len(pins) == 1 and world.lanes.copies.tasks
        world.lanes.copies.run()
        world.driver.scheduler.poll()
        assert not pins and world.lanes.writes.tasks, "nobody holds pages for a disk"
        world.settle()
        assert world.stores[0].counters.num_entries > 3

    def test_there_is_little_to_do_between_two_steps(self, tier, monkeypatch):
        monkeypatch.setattr(demotion, "SLICE_ENTRIES", 5)
        world, asked, pages = TierWorld(immediate=False, **tier), [0], Demoter._pages
        monkeypatch.setattr(Demoter, "_pages", lambda *given: asked.append(asked.pop() + 1) or pages(*given))
        name = world.driver.submit(other(1, 3000), max_tokens=1)
        while world.driver.requests[name].phase is not Phase.FINISHED:
            world.driver.step()
        lanes, looked, num_entries = world.lanes, [], 0
        while not world.demoter.is_idle:
            asked[0] = 0
            world.driver.scheduler.poll()
            assert sum(len(each.tasks) for each in (lanes.names, lanes.copies, lanes.writes)) <= 3
            looked.append(asked[0])
            num_entries = max(num_entries, world.stores[0].counters.num_entries)
            world.run_lanes()
        assert max(looked) == 5, "entries whose pages are looked up"
        assert num_entries >= 3000 // 64 and sum(looked) == num_entries
        check_end(world)

    def test_a_disk_that_stands_still_holds_nothing_up(self, tier):
        world = TierWorld(num_pages=60, immediate=False, **tier)
        world.lanes.writes.run = lambda: 0
        for number in range(12):
            name = world.driver.submit(other(number))
            while world.driver.requests[name].phase is not Phase.FINISHED:
                world.driver.scheduler.poll()
                world.lanes.names.run()
                world.lanes.copies.run()
                if world.driver.scheduler.has_work:
                    world.driver.step()
            assert world.driver.output(name) == alone(other(number), False)
        assert len(world.lanes.writes.tasks) <= 3
        assert len(world.driver.cache.pinned.pins) <= 1

    def test_a_request_gets_the_pages_that_are_being_copied(self):
        world = TierWorld(num_pages=24, host_pages=400, immediate=False)
        name = world.driver.submit(other(1, 250), max_tokens=2)
        while world.driver.requests[name].phase is not Phase.FINISHED:
            world.driver.step()
        world.driver.scheduler.poll()
        world.lanes.names.run()
        world.driver.scheduler.poll()
        assert world.driver.cache.pinned.pins
        name = world.driver.submit(other(2, 350), max_tokens=2)
        for _ in range(5):
            world.driver.scheduler.poll()
            world.lanes.names.run()
            if world.driver.scheduler.has_work:
                world.driver.step()
        assert world.driver.requests[name].phase is Phase.WAITING and not world.driver.scheduler.has_work
        TestPromotion().finish(world)
        assert world.driver.output(name) == alone(other(2, 350), False, max_tokens=2)
        check_end(world)

    def test_a_path_that_goes_while_it_waits_is_given_up(self, tier):
        world = TierWorld(immediate=False, **tier)
        name = world.driver.submit(PROMPT)
        while world.driver.requests[name].phase is not Phase.FINISHED:
            world.driver.step()
        world.driver.scheduler.poll()
        world.driver.cache.clear()
        world.settle()
        assert world.demoter.dropped["gone"] == 1 and not world.stores[0].counters.num_entries

    def test_what_does_not_pay_is_written_seldom(self):
        num_states = []
        for seconds in (0.0, 1e9):
            world = TierWorld(host_pages=4000)
            for kind in range(16):
                world.context.worth.spend(kind, seconds)
            for number in range(20):
                world.answer(other(number))
            num_states.append(sum(entry.facts.tail is not None for entry in world.stores[0]._index))
        assert 2 <= num_states[1] <= num_states[0] // 4

    def test_a_path_larger_than_the_tier_is_not_begun(self):
        world = TierWorld(host_pages=20)
        world.answer(other(1, 400))
        positions = [entry.facts.position for entry in world.stores[0]._index]
        assert positions == [64, 64], "a place on the way, up to which it fits"
        world.answer(other(2, 100))
        assert max(entry.facts.position for entry in world.stores[0]._index) >= 100


class TestRestart:
    def test_another_server_goes_on_from_the_folder(self, tmp_path):
        first = TierWorld(folder=tmp_path)
        expected = first.answer(PROMPT)
        second = TierWorld(folder=tmp_path)
        assert second.answer(PROMPT, name="again") == expected
        assert hit_of(second, "again") == (0, 200)

    @pytest.mark.parametrize("block_size", [8, 16, 48, 128])
    def test_with_any_block_size(self, tmp_path, block_size):
        prompt = other(3, 500)
        expected = TierWorld(folder=tmp_path, block_size=block_size).answer(prompt, boundaries=[100, 333])
        second = TierWorld(folder=tmp_path, block_size=block_size)
        fork = prompt[:333] + other(8, 60)
        assert second.answer(fork, name="fork") == alone(fork, False)
        assert hit_of(second, "fork") == (0, 333)
        assert second.answer(prompt, name="again") == expected
        assert sum(hit_of(second, "again")) == 500

    def test_both_tiers_share_the_work(self, tmp_path):
        first = TierWorld(host_pages=60, folder=tmp_path)
        answers = [first.answer(other(number)) for number in range(8)]
        assert first.stores[0].counters.drops["replaced"] > 0, "the host has not room for all"
        first.driver.cache.clear()
        assert [first.answer(other(number)) for number in range(8)] == answers
        host, disk = first.stores
        assert disk.counters.hits > 0 and host.counters.hits + disk.counters.hits == 8

    def test_exact_answers_are_those_without_a_cache(self, tmp_path):
        prompt = other(3, 333)
        plain = alone(prompt, True)
        assert TierWorld(folder=tmp_path, exact=True).answer(prompt, boundaries=[100]) == plain
        second = TierWorld(folder=tmp_path, exact=True)
        for number, text in enumerate((prompt, prompt[:100] + other(9, 40), prompt + other(5, 30), prompt[:250])):
            assert second.answer(text, name=f"x{number}") == alone(text, True)
        assert hit_of(second, "x0") == (0, 333)
        assert sum(hit_of(second, "x1")) == 64, "off the grid a state serves a prompt that ends there"


class TestFaults:
    def test_a_damaged_entry_is_computed_and_written_again(self, tmp_path):
        first = TierWorld(folder=tmp_path)
        expected = first.answer(PROMPT)
        for file in tmp_path.glob("*.seg"):
            damaged = bytearray(file.read_bytes())
            damaged[-100] ^= 1
            file.write_bytes(damaged)
        second = TierWorld(folder=tmp_path)
        assert second.answer(PROMPT, name="again") == expected
        assert hit_of(second, "again") == (0, 0) and second.stores[0].counters.drops["damaged"] == 1
        assert second.first("again").reason is Reason.TIER_FAILED
        second.driver.cache.clear()
        assert second.answer(PROMPT, name="third") == expected and hit_of(second, "third") == (0, 200)
        check_end(second)

    @pytest.mark.parametrize("call", ["create", "write_all", "sync", "rename", "read_into", "open"])
    def test_a_broken_disk_costs_hits_alone(self, tmp_path, call):
        files = FaultyFiles()
        world = TierWorld(folder=tmp_path, files=files)
        world.answer(PROMPT)
        files.fail[call] = errno.EIO
        for number in range(4):
            world.driver.cache.clear()
            assert world.answer(PROMPT) == alone(PROMPT, False)
            assert world.answer(other(number)) == alone(other(number), False)
        check_end(world)

    def test_a_lane_that_fails_costs_hits_alone(self, tier):
        world = TierWorld(**tier)
        world.answer(PROMPT)

        def fail(pages, fill=None):
            raise MemoryError

        world.memory.copy_out = world.memory.copy_in = fail
        world.driver.cache.clear()
        assert world.answer(PROMPT) == alone(PROMPT, False)
        assert world.answer(other(1)) == alone(other(1), False)
        assert world.demoter.dropped["failed"] >= 1
        check_end(world)

    def test_arrays_are_not_mixed_up(self, tier):
        """Many prompts that share much, one after the other, in a pool that holds two of them."""
        world = TierWorld(num_pages=60, **tier)
        draw = np.random.default_rng(5)
        for _ in range(40):
            length = int(draw.integers(1, 4))
            prompt = [token for part in draw.integers(0, 3, length) for token in other(int(part), 90)]
            assert world.answer(prompt) == alone(prompt, False)
        assert world.stores[0].counters.hits > 5
        check_end(world)


WINDOW, CHUNK = AttentionGroup("window", 16, 40), AttentionGroup("chunk", 8, 64, True)


class TestWindows:
    """A state below has the pages within its reach with it."""

    @pytest.mark.parametrize(
        ("length", "states"),
        first_of([(1, 3), (64, 0), (100, 3), (128, 3), (199, 0)], (1, 64, 100, 128, 199), (3, 0)),
    )
    def test_a_prompt_comes_back_with_its_windows(self, tier, length, states):
        fields = {"limited": (WINDOW, CHUNK), "pages_per_checkpoint": states}
        world, prompt = TierWorld(num_pages=300, **tier, **fields), PROMPT[:length] if length > 1 else [*PROMPT, 5]
        first = world.answer(prompt, max_tokens=30)
        world.driver.cache.clear()
        for extra in ([], other(2, 70)):
            asked = [*prompt, *extra]
            found = world.answer(asked, name=f"again {len(extra)}", max_tokens=30)
            assert found == alone(asked, False, fields["limited"], max_tokens=30)
            assert hit_of(world, f"again {len(extra)}") == ((0, len(prompt)) if not extra else (len(prompt), 0))
        assert first == alone(prompt, False, fields["limited"], max_tokens=30)
        check_end(world)

    def test_of_the_windows_alone_is_read_what_is_within_reach(self, tier):
        world = TierWorld(num_pages=900, limited=(WINDOW, CHUNK), **tier)
        prompt = other(4, 1000)
        world.answer(prompt)
        world.driver.cache.clear()
        world.answer(prompt, name="again")
        assert hit_of(world, "again") == (0, 1000)
        # tokens 961 to 999 of the window, 960 to 999 of the chunk
        pages = -(-1000 // 16) + (63 - 60) + (125 - 120) + world.driver.layout.pages_per_checkpoint
        assert world.stores[0].counters.read_bytes == pages * world.driver.layout.page_bytes
        check_end(world)

    def test_what_the_pool_has_of_a_window_is_not_read_again(self, tier):
        world = TierWorld(num_pages=900, limited=(WINDOW, CHUNK), **tier)
        prompt = other(4, 300)
        world.answer(prompt)
        for known in (290, 270, 200):
            world.driver.cache.clear()
            world.answer(prompt[:known], max_tokens=1)
            assert world.answer(prompt, name=f"after {known}") == alone(prompt, False, limited=(WINDOW, CHUNK))
            assert hit_of(world, f"after {known}") == (known, 300 - known)
        check_end(world)

    def test_no_prompt_resumes_between_states(self, tier):
        """Without recurrent layers neither: keys and values of windows lie below with states alone."""
        fields = {"limited": (WINDOW,), "pages_per_checkpoint": 0}
        world = TierWorld(num_pages=300, **tier, **fields)
        world.answer(PROMPT)
        world.driver.cache.clear()
        # what it answers is not looked at: the runner of these tests has a recurrent state
        world.answer(PROMPT[:150], name="cut")
        assert hit_of(world, "cut") == (0, 128)
        check_end(world)
