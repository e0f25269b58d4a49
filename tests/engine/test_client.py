"""One contract for every EngineClient, run on the core in a thread and on the core in a process."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time

import numpy as np
import psutil
import pytest

from cairn.engine.client import CoreClient, EngineDeadlines, OutputQueue
from cairn.engine.contract import EngineConfig, GenerateOutput
from cairn.engine.process import ProcessTransport
from cairn.errors import ConfigError, EngineDead, InvalidRequest, ModelError, Overloaded, QueueFull
from doubles.byte_tokenizer import ByteTokenizer, load_byte_tokenizer
from doubles.echo_core import build_echo_core
from doubles.engine_requests import generate_request
from doubles.local_engine import LocalEngine
from tiers import more

ECHO_CORE = "doubles.echo_core:build_echo_core"


def request(text="hello", request_id="r", **fields):
    prompt = np.array(ByteTokenizer().encode(text), dtype="<i8").tobytes()
    return generate_request(request_id=request_id, prompt=prompt, **fields)


def run(scenario):
    """Run a coroutine with a deadline of its own."""

    async def with_deadline():
        async with asyncio.timeout(30):
            return await scenario

    return asyncio.run(with_deadline())


async def collect(engine, a_request):
    return [output async for output in engine.generate(a_request)]


async def first_output(engine, a_request):
    """The stream, with its first output already taken."""
    stream = engine.generate(a_request)
    await anext(stream)
    return stream


async def until(condition):
    while not await condition():
        await asyncio.sleep(0.01)


class Engines:
    """`make(model, **config)` gives an engine around a EchoCore that is not started yet."""

    def make(self, model="echo", deadlines=None, **config):
        raise NotImplementedError

    @contextlib.asynccontextmanager
    async def started(self, model="echo", **config):
        engine = self.make(model, **config)
        await engine.start()
        try:
            yield engine
        finally:
            await engine.stop(0)


class EngineClientContract:
    """What every engine has to hold."""

    def test_an_answer_comes_in_pieces_and_ends_with_a_reason(self):
        async def scenario():
            async with self.started() as engine:
                outputs = await collect(engine, request("hello"))
                assert "".join(output.text for output in outputs) == "hello"
                assert [output.finish_reason for output in outputs[:-1]] == [None] * (len(outputs) - 1)
                last = outputs[-1]
                assert last.finish_reason == "stop" and last.timings is not None
                assert last.cache.prompt_tokens == 5 and last.cache.reason == "never_seen"
                assert engine.info.architecture == "EchoForCausalLM"
                assert engine.tokenizer.decode([104, 105]) == "hi"

        run(scenario())

    def test_many_at_once(self):
        async def scenario():
            async with self.started(max_num_seqs=3) as engine:
                answers = await asyncio.gather(*(collect(engine, request(f"text {i}", str(i))) for i in range(20)))
                assert ["".join(o.text for o in outputs) for outputs in answers] == [f"text {i}" for i in range(20)]
                assert (await engine.stats()).num_running == 0

        run(scenario())

    def test_closing_early_aborts_in_the_core(self):
        async def scenario():
            async with self.started("echo:pause_after=2") as engine:
                stream = await first_output(engine, request())
                assert (await engine.stats()).num_running == 1
                await stream.aclose()
                await until(lambda: no_pages_held(engine))

        async def no_pages_held(engine):
            stats = await engine.stats()
            return stats.num_running == 0 and stats.pool.held_pages == 0

        run(scenario())

    def test_a_refusal_names_the_field_and_the_engine_lives(self):
        async def scenario():
            async with self.started(max_model_len=4) as engine:
                with pytest.raises(InvalidRequest) as caught:
                    await collect(engine, request("too long"))
                assert caught.value.param == "prompt"
                assert engine.dead is None
                assert len(await collect(engine, request("ok"))) > 0

        run(scenario())

    @pytest.mark.parametrize(
        ("model", "text"),
        [
            ("echo:fail_at_step=3", "RuntimeError: the echoing core's step"),
            ("echo:bad_audit=true", "AuditError: the echoing core"),
        ],
    )
    def test_the_cores_end_reaches_every_open_request(self, model, text):
        async def scenario():
            async with self.started(model + ",pause_after=1") as engine:
                if "step" in model:
                    readers = [collect(engine, request(request_id=str(i))) for i in range(3)]
                    results = await asyncio.gather(*readers, return_exceptions=True)
                    assert [type(result) for result in results] == [EngineDead] * 3
                    assert all(text in str(result) for result in results)
                assert text in await engine.wait_dead()
                assert text in engine.dead
                for later in (collect(engine, request()), engine.stats()):
                    with pytest.raises(EngineDead, match=text):
                        await later

        run(scenario())

    def test_a_model_that_cannot_be_served(self):
        engine = self.make("echo:refuse=true")
        with pytest.raises(ModelError, match="told to refuse"):
            run(engine.start())

    def test_a_crash_while_building(self):
        engine = self.make("echo:crash=true")
        with pytest.raises(EngineDead, match="could not be built: RuntimeError: the echoing core's build"):
            run(engine.start())

    def test_a_build_that_takes_too_long(self):
        engine = self.make("echo:build_seconds=0.6", deadlines=EngineDeadlines(start=0.2))
        with pytest.raises(EngineDead, match=r"not built within 0\.2 s"):
            run(engine.start())

    def test_stopping_lets_open_requests_finish_and_takes_no_new_ones(self):
        async def scenario():
            async with self.started() as engine:
                reader = asyncio.create_task(collect(engine, request("a long answer" * 20)))
                await asyncio.sleep(0)
                stopping = asyncio.create_task(engine.stop(10))
                await asyncio.sleep(0)
                with pytest.raises(Overloaded, match="shutting down"):
                    await collect(engine, request(request_id="new"))
                await stopping
                assert (await reader)[-1].finish_reason == "stop"
                assert "stopped" in engine.dead

        run(scenario())

    def test_a_core_that_falls_silent_is_given_up(self):
        async def scenario():
            model = "echo:stall_at_step=2,stall_seconds=1"
            async with self.started(model, deadlines=EngineDeadlines(silence=0.3, stats=0.1)) as engine:
                with pytest.raises(EngineDead, match="said nothing"):
                    await collect(engine, request())

        run(scenario())


class OnThisSide:
    """What it has to hold besides, by what is on this side of the way to the core, or behind it: the same for all."""

    def test_the_cache_is_emptied_only_when_nothing_is_held(self):
        async def scenario():
            async with self.started(model="echo:pause_after=1") as engine:
                stream = await first_output(engine, request("a long prompt"))
                assert await engine.reset_cache() == 1
                await stream.aclose()

                async def let_go():
                    return await engine.reset_cache() == 0

                await until(let_go)
                return await collect(engine, request("a long prompt", "again", max_tokens=1))

        assert run(scenario())[-1].cache.cached_tokens == 0

    def test_cancelling_the_reader_aborts_in_the_core(self):
        async def scenario():
            async with self.started("echo:pause_after=2") as engine:
                reader = asyncio.create_task(collect(engine, request()))
                await until(lambda: running(engine, 1))
                reader.cancel()
                await until(lambda: running(engine, 0))

        async def running(engine, count):
            return (await engine.stats()).num_running == count

        run(scenario())

    def test_too_many_requests_are_overload(self):
        async def scenario():
            async with self.started("echo:pause_after=1", max_num_seqs=1, max_waiting=1) as engine:
                streams = [await first_output(engine, request(request_id="a"))]
                waiting = asyncio.create_task(collect(engine, request(request_id="b")))
                await until(lambda: one_waits(engine))
                with pytest.raises(Overloaded):
                    await collect(engine, request(request_id="c"))
                waiting.cancel()
                await streams[0].aclose()

        async def one_waits(engine):
            return (await engine.stats()).num_waiting == 1

        run(scenario())

    def test_several_at_once_are_one_stream(self):
        async def scenario():
            async with self.started(max_num_seqs=2) as engine:
                texts, ends = {}, []
                async for output in engine.generate(request("ab", "a"), request("cd", "b"), request("ef", "c", n=2)):
                    answer = output.request_id, output.index
                    texts[answer] = texts.get(answer, "") + output.text
                    ends += [answer] if output.finish_reason else []
                assert texts == {("a", 0): "ab", ("b", 0): "cd", ("c", 0): "ef", ("c", 1): "fe"}
                assert sorted(ends) == sorted(texts)

        run(scenario())

    def test_several_at_once_are_refused_together(self):
        async def scenario():
            async with self.started("echo:pause_after=1", max_num_seqs=1, max_waiting=2) as engine:
                for wrong in ((1, 2, 3), (1, 2, 3, 4), (1, 1)):
                    with pytest.raises(InvalidRequest):
                        await anext(engine.generate(*(request(request_id=f"{name}") for name in wrong)))
                stream = engine.generate(request(request_id="a"), request(request_id="b"))
                await anext(stream)
                with pytest.raises(QueueFull):
                    await anext(engine.generate(request(request_id="c"), request(request_id="d")))
                await stream.aclose()
                await until(lambda: all_gone(engine))

        async def all_gone(engine):
            stats = await engine.stats()
            return stats.num_running == stats.num_waiting == 0

        run(scenario())

    def test_an_id_that_is_open_already_is_refused(self):
        async def scenario():
            async with self.started("echo:pause_after=1") as engine:
                stream = await first_output(engine, request())
                with pytest.raises(InvalidRequest, match="open already"):
                    await collect(engine, request())
                await stream.aclose()

        run(scenario())

    def test_the_accounting_is_recounted_once_per_idle_period(self):
        async def scenario():
            async with self.started() as engine:
                await until(lambda: audits(engine, 1))
                await asyncio.sleep(0.2)
                assert (await engine.stats()).prefix_cache.audits == 1
                await collect(engine, request())
                await until(lambda: audits(engine, 2))

        async def audits(engine, count):
            return (await engine.stats()).prefix_cache.audits == count

        run(scenario())

    def test_stopping_does_not_wait_longer_than_told(self):
        async def scenario():
            async with self.started("echo:pause_after=1") as engine:
                stream = await first_output(engine, request())
                await engine.stop(0.05)
                with pytest.raises(EngineDead, match="stopped"):
                    await anext(stream)

        run(scenario())

    def test_counters_have_a_deadline(self):
        async def scenario():
            model = "echo:stall_at_step=2,stall_seconds=0.8,pause_after=1"
            async with self.started(model, deadlines=EngineDeadlines(stats=0.1)) as engine:
                stream = await first_output(engine, request())
                await asyncio.sleep(0.05)
                with pytest.raises(EngineDead, match="did not tell its counters"):
                    await engine.stats()
                assert engine.dead is None
                await stream.aclose()

        run(scenario())


class TestLocalEngine(Engines, EngineClientContract, OnThisSide):
    def make(self, model="echo", deadlines=None, **config):
        return LocalEngine(EngineConfig(model=model, **config), build_echo_core, ByteTokenizer(), deadlines=deadlines)


class InProcesses(Engines):
    def make(self, model="echo", deadlines=None, core=ECHO_CORE, **config):
        transport = ProcessTransport(EngineConfig(model=model, **config), core=core)
        return CoreClient(transport, lambda: load_byte_tokenizer(model), deadlines)


@pytest.mark.more
class TestProcessEngineOnThisSide(InProcesses, OnThisSide):
    """Each starts a process."""


class TestProcessEngine(InProcesses, EngineClientContract):
    def test_a_killed_core_says_by_what(self):
        async def scenario():
            async with self.started("echo:die_at_step=2") as engine:
                with pytest.raises(EngineDead, match="SIGKILL"):
                    await collect(engine, request())
                assert "SIGKILL" in await engine.wait_dead()

        run(scenario())

    def test_signals_for_the_whole_group_leave_the_core_alone(self):
        async def scenario():
            async with self.started() as engine:
                os.kill(engine.transport.pid, signal.SIGINT)
                os.kill(engine.transport.pid, signal.SIGTERM)
                assert (await collect(engine, request()))[-1].finish_reason == "stop"

        run(scenario())

    @pytest.mark.parametrize(
        "core", ["doubles.echo_core:nothing", *map(more, ("cairn.engine.nowhere:build", "nonsense"))]
    )
    def test_a_core_that_cannot_be_imported(self, core):
        with pytest.raises(ConfigError, match="cannot be imported"):
            run(self.make(core=core).start())

    def test_a_tokenizer_that_cannot_be_loaded_ends_the_start(self):
        def refuse():
            raise ModelError("no tokenizer")

        async def scenario():
            engine = CoreClient(ProcessTransport(EngineConfig(model="echo:build_seconds=20"), core=ECHO_CORE), refuse)
            with pytest.raises(ModelError, match="no tokenizer"):
                await engine.start()
            assert not psutil.pid_exists(engine.transport.pid)

        run(scenario())

    def test_nothing_is_left_behind(self, tmp_path, monkeypatch):
        monkeypatch.setattr("tempfile.tempdir", str(tmp_path))

        async def scenario():
            async with self.started() as engine:
                (folder,) = tmp_path.iterdir()
                assert folder.stat().st_mode & 0o777 == 0o700
                pid = engine.transport.pid
            assert not psutil.pid_exists(pid)

        run(scenario())
        assert list(tmp_path.iterdir()) == []

    def test_a_temporary_folder_with_too_long_a_name(self, tmp_path, monkeypatch):
        long = tmp_path / ("x" * 120)
        long.mkdir()
        monkeypatch.setattr("tempfile.tempdir", str(long))
        with pytest.raises(ConfigError, match="TMPDIR"):
            run(self.make().start())

    def test_the_core_ends_with_its_client(self, tmp_path):
        script = (
            "import asyncio, os, sys\n"
            "from cairn.engine.contract import EngineConfig\n"
            "from doubles.byte_tokenizer import load_byte_tokenizer\n"
            "from cairn.engine.client import CoreClient\n"
            "from cairn.engine.process import ProcessTransport\n"
            "async def main():\n"
            f"    transport = ProcessTransport(EngineConfig(model='echo'), core='{ECHO_CORE}')\n"
            "    engine = CoreClient(transport, lambda: load_byte_tokenizer('echo'))\n"
            "    await engine.start()\n"
            "    print(transport.pid, flush=True)\n"
            "    os.kill(os.getpid(), 9)\n"
            "asyncio.run(main())\n"
        )
        environ = {**os.environ, "TMPDIR": str(tmp_path)}
        parent = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=30, env=environ)
        assert parent.returncode == -9, parent.stderr
        core = int(parent.stdout)
        deadline = time.monotonic() + 10
        while psutil.pid_exists(core) and psutil.Process(core).status() != psutil.STATUS_ZOMBIE:
            assert time.monotonic() < deadline, "the core has outlived its client"
            time.sleep(0.02)
        assert list(tmp_path.iterdir()) == []


del EngineClientContract, OnThisSide


def test_outputs_merge_while_the_reader_is_busy():
    async def scenario():
        mailbox = OutputQueue()
        for i in range(1000):
            mailbox.put(GenerateOutput(request_id="r", token_ids=[i], text=chr(97 + i % 26)))
        mailbox.fail(EngineDead("gone"))
        output = await mailbox.get()
        assert output.token_ids == list(range(1000)) and len(output.text) == 1000
        with pytest.raises(EngineDead, match="gone"):
            await mailbox.get()

    run(scenario())
