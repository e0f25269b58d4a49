"""A client's books in virtual time: when a core counts as silent, and what is left of questions."""

import asyncio

import pytest

from cairn.engine.client import CoreClient, EngineDeadlines, OutputQueue
from cairn.engine.contract import EngineConfig, GenerateOutput, TokenLogprobs
from cairn.engine.wire import AwaitTools, Outputs
from cairn.errors import EngineDead, Overloaded
from doubles.byte_tokenizer import ByteTokenizer
from doubles.echo_core import build_echo_core
from doubles.engine_requests import generate_request
from virtual_time import run

SILENCE = 600.0


class LoopClock:
    def now(self):
        return asyncio.get_running_loop().time()


class Wire:
    """A transport to nobody."""

    def __init__(self):
        self.sent = []
        self.send = self.sent.append

    async def close(self, seconds):
        pass


async def started():
    """A client whose core says nothing."""
    client = CoreClient(Wire(), ByteTokenizer, EngineDeadlines(silence=SILENCE, stats=5.0), LoopClock())
    # as `start` leaves it, which needs a thread: in virtual time nobody waits for one
    client._info = build_echo_core(EngineConfig(model="echo")).info
    client._tokenizer = ByteTokenizer()
    client._watching = asyncio.create_task(client.watch())
    return client


def request(name="r"):
    return generate_request(request_id=name, prompt=bytes(8))


def test_a_core_that_owes_nothing_may_be_silent_for_ever():
    async def play():
        client = await started()
        await asyncio.sleep(10 * SILENCE)
        assert client.dead is None
        # its time begins with the first thing that it is asked
        stream = client.generate(request())
        reading = asyncio.create_task(anext(stream))
        await asyncio.sleep(SILENCE - 1)
        assert client.dead is None
        await asyncio.sleep(0.2 * SILENCE)
        assert client.dead is not None
        with pytest.raises(EngineDead, match="said nothing"):
            await reading

    run(play())


def test_a_core_that_says_something_is_not_silent():
    async def play():
        client = await started()
        stream = client.generate(request())
        for _ in range(5):
            reading = asyncio.create_task(anext(stream))
            await asyncio.sleep(0.8 * SILENCE)
            client.receive(Outputs([GenerateOutput(request_id="r", token_ids=[1], text="a")]))
            await reading
        assert client.dead is None
        await stream.aclose()
        await client.stop(0)

    run(play())


def test_questions_without_an_answer_leave_nothing_behind():
    async def play():
        client = await started()
        for _ in range(200):
            with pytest.raises(EngineDead, match="counters within"):
                await client.stats()
        assert not client._queries

    run(play())


def test_what_is_told_of_the_prompt_outlives_a_merge():
    async def play():
        queue, told = OutputQueue(), TokenLogprobs(width=1, token_ids=bytes(4), values=bytes(4), ranks=bytes(4))
        queue.put(GenerateOutput(request_id="r", token_ids=[1], text="a", prompt_logprobs=told))
        queue.put(GenerateOutput(request_id="r", token_ids=[2], text="b"))
        output = await queue.get()
        assert (output.token_ids, output.prompt_logprobs) == ([1, 2], told)

    run(play())


def tokens(*numbers):
    return Outputs([GenerateOutput(request_id="r", token_ids=[number]) for number in numbers])


def test_outputs_are_taken_while_the_reader_waits_and_at_no_other_time():
    """With their texts, and in order: what is not taken, and all behind it, is waited for."""

    async def play():
        client, taken = await started(), []

        def take(number, output):
            assert number == 0
            taken.append(output.text)
            return output.text != "c"

        stream = client.generate(request(), take=take)
        reading = asyncio.create_task(anext(stream))
        await asyncio.sleep(0)
        client.receive(tokens(*b"ab"))
        await asyncio.sleep(0)
        assert (taken, reading.done()) == (["a", "b"], False)
        client.receive(tokens(*b"cde"))
        assert (await reading).text == "cde" and taken == ["a", "b", "c"]
        client.receive(tokens(*b"f"))
        assert (await anext(stream)).text == "f" and taken == ["a", "b", "c"]
        await stream.aclose()
        await client.stop(0)

    run(play())


def test_what_fails_while_it_takes_an_output_fails_its_own_reader_alone():
    async def play():
        client = await started()
        streams = [client.generate(request(name), take=lambda number, output: 1 // 0) for name in "rs"]
        first, second = (asyncio.create_task(anext(stream)) for stream in streams)
        await asyncio.sleep(0)
        client.receive(tokens(*b"ab"))
        with pytest.raises(ZeroDivisionError):
            await first
        assert client.dead is None and not second.done()
        second.cancel()
        await asyncio.gather(second, return_exceptions=True)
        await client.stop(0)

    run(play())


def test_word_of_a_call_is_sent_once_and_never_in_the_way():
    def refuse(message):
        raise Overloaded("the core does not keep up")

    async def play():
        client = await started()
        client.await_tools("r", 2)
        assert client.transport.sent == [AwaitTools("r", 2)]
        client.transport.send = refuse
        client.await_tools("r")
        client.transport.send = client.transport.sent.append
        client.fail("it has ended")
        client.await_tools("r")
        assert len(client.transport.sent) == 1
        await client.stop(0)

    run(play())
