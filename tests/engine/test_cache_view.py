"""How a look at the cache travels: the core, the loop that slices it between steps, the wire, and a process."""

import asyncio
from collections import deque

import numpy as np
import pytest
from test_core import core as core_of
from test_core import request
from tree_core import TreeCore

from cairn.engine.client import CoreClient
from cairn.engine.contract import EngineConfig
from cairn.engine.core_loop import run_core
from cairn.engine.process import ProcessTransport
from cairn.engine.wire import CacheQuery, CacheReply, Outputs, Shutdown, Submit, frames_from_core, frames_to_core
from cairn.errors import EngineDead
from doubles.byte_tokenizer import ByteTokenizer


@pytest.fixture
def core():
    return core_of()


def answer(core, **arguments):
    core.submit(request(max_tokens=2, ignore_eos=True, **arguments))
    found = []
    while core.has_work:
        found += core.step()
    return found[-1].cache


def whole(core, most=500):
    *nothing, view = core.cache_view(most)
    assert set(nothing) == {None}
    return view


def test_a_core_shows_what_it_did(core):
    assert whole(core).visits == [] and whole(core).tree.paths == 0
    reports = [answer(core, name=name) for name in ("a", "b")]
    view = whole(core)
    assert [visit.number for visit in view.visits] == [2, 1]
    for visit, report in zip(view.visits, reversed(reports), strict=True):
        assert (visit.prompt, visit.hit, visit.matched) == (
            report.prompt_tokens,
            report.cached_tokens,
            report.matched_tokens,
        )
        assert (visit.reason, visit.lost) == (report.reason, report.lost_tokens)
        assert sum(visit.lost.values()) + visit.hit + visit.received == visit.prompt
    assert sum(part.prompt for part in view.history) == 200 and sum(part.hit for part in view.history) == 100
    assert view.tree.paths == len(view.paths) + view.tree.below.paths + sum(path.below.paths for path in view.paths)
    assert view.paths and view.paths[0].checkpoints and view.pool.pages == core.info.cache.num_pages
    assert core.stats().prefix_cache.lost_tokens["never_seen"] == sum(
        report.lost_tokens.get("never_seen", 0) for report in reports
    )


def test_a_core_shows_no_more_than_asked_for(core):
    for first in range(4):
        answer(core, name=f"r{first}", prompt=[first + 1] * 100)
    assert len(whole(core, 2).paths) == 2 and whole(core, 2).tree.tokens == whole(core).tree.tokens


class Line:
    """A core's link that says its messages when they are due, and hears what is sent."""

    def __init__(self, messages):
        self.messages, self.sent = deque(messages), []

    def receive(self, seconds):
        if self.messages:
            return self.messages.popleft()
        return Shutdown() if self.heard(CacheReply) else None

    def wake(self):
        pass

    def send(self, message):
        self.sent.append(message)

    def heard(self, kind):
        return [message for message in self.sent if isinstance(message, kind)]


def test_steps_go_on_between_the_slices():
    core = TreeCore(EngineConfig(model="echo"), 5000)
    line = Line([Submit([request(max_tokens=50, ignore_eos=True)]), None, CacheQuery(7, 100)])
    run_core(core, line)
    [reply] = line.heard(CacheReply)
    slices = -(-reply.view.tree.nodes // 1024)
    assert reply.number == 7 and len(reply.view.paths) == 100 and slices >= 5
    steps = [message for message in line.sent[: line.sent.index(reply)] if isinstance(message, Outputs)]
    assert len(steps) >= slices


@pytest.mark.parametrize("wrong", [0, 5001, -1])
def test_the_wire_holds_a_query_to_its_range(wrong):
    frames = frames_to_core()
    assert frames.decode(frames.encode(CacheQuery(1, 5000))) == CacheQuery(1, 5000)
    with pytest.raises(EngineDead):
        frames.decode(frames.encode(CacheQuery(1, wrong)))


def test_the_wire_brings_a_view_as_it_was():
    core = TreeCore(EngineConfig(model="echo"), 3000)
    core.visit(1)
    view, frames = whole(core), frames_from_core()
    assert frames.decode(frames.encode(CacheReply(3, view))) == CacheReply(3, view)


def test_a_view_from_a_process():
    async def look():
        transport = ProcessTransport(EngineConfig(model="echo"), core="doubles.echo_core:build_echo_core")
        engine = CoreClient(transport, ByteTokenizer)
        await engine.start()
        try:
            async for _ in engine.generate(request(max_tokens=2, prompt=np.arange(50).tolist())):
                pass
            return await asyncio.gather(*(engine.cache_view(most) for most in (1, 500)))
        finally:
            await engine.stop(0)

    for view in asyncio.run(look()):
        assert view.visits[0].prompt == 50 and view.paths[0].end == 51  # and what of the answer is known
