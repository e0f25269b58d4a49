"""A client's books in virtual time: when a core counts as silent, and what is left of questions."""

import asyncio

import pytest

from cairn.engine.client import EngineDeadlines, Mailbox, Switchboard
from cairn.engine.contract import GenerateOutput, GenerateRequest, TokenLogprobs
from cairn.engine.wire import Outputs
from cairn.errors import EngineDead
from virtual_time import run

SILENCE = 600.0


class LoopClock:
    def now(self):
        return asyncio.get_running_loop().time()


def board(max_open=8):
    sent = []
    deadlines = EngineDeadlines(silence=SILENCE, stats=5.0)
    return Switchboard(sent.append, max_open=max_open, deadlines=deadlines, clock=LoopClock()), sent


def request(name="r"):
    return GenerateRequest(request_id=name, prompt=bytes(8))


def test_a_core_that_owes_nothing_may_be_silent_for_ever():
    async def play():
        switchboard, _ = board()
        watching = asyncio.create_task(switchboard.watch())
        await asyncio.sleep(10 * SILENCE)
        assert switchboard.dead is None
        # its time begins with the first thing that it is asked
        stream = switchboard.generate(request())
        reading = asyncio.create_task(anext(stream))
        await asyncio.sleep(SILENCE - 1)
        assert switchboard.dead is None
        await asyncio.sleep(0.2 * SILENCE)
        assert switchboard.dead is not None and watching.done()
        with pytest.raises(EngineDead, match="said nothing"):
            await reading

    run(play())


def test_a_core_that_says_something_is_not_silent():
    async def play():
        switchboard, _ = board()
        watching = asyncio.create_task(switchboard.watch())
        stream = switchboard.generate(request())
        for _ in range(5):
            reading = asyncio.create_task(anext(stream))
            await asyncio.sleep(0.8 * SILENCE)
            switchboard.receive(Outputs([GenerateOutput(request_id="r", token_ids=[1], text="a")]))
            await reading
        assert switchboard.dead is None
        await stream.aclose()
        watching.cancel()

    run(play())


def test_questions_without_an_answer_leave_nothing_behind():
    async def play():
        switchboard, _ = board()
        for _ in range(200):
            with pytest.raises(EngineDead, match="counters within"):
                await switchboard.stats()
        assert not switchboard._queries

    run(play())


def test_what_is_told_of_the_prompt_outlives_a_merge():
    async def play():
        mailbox, told = Mailbox(), TokenLogprobs(width=1, token_ids=bytes(4), values=bytes(4), ranks=bytes(4))
        mailbox.put(GenerateOutput(request_id="r", token_ids=[1], text="a", prompt_logprobs=told))
        mailbox.put(GenerateOutput(request_id="r", token_ids=[2], text="b"))
        output = await mailbox.get()
        assert (output.token_ids, output.prompt_logprobs) == ([1, 2], told)

    run(play())
