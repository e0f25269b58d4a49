"""An engine whose core runs in a process of its own, joined by the msgpack wire over a private ZMQ socket."""

import asyncio
import contextlib
import logging
import os
import shutil
import signal
import sys
import tempfile
from collections import deque
from collections.abc import AsyncIterator, Callable

import zmq
import zmq.asyncio

from cairn.engine.client import EngineDeadlines, Switchboard
from cairn.engine.contract import (
    CacheView,
    EngineConfig,
    EngineInfo,
    EngineStats,
    GenerateOutput,
    GenerateRequest,
    TextTokenizer,
)
from cairn.engine.sizing import thread_variables
from cairn.engine.wire import (
    MAX_FRAME_BYTES,
    Abort,
    Fatal,
    FromCore,
    Ready,
    Refused,
    Shutdown,
    ToCore,
    config_frames,
    frames_from_core,
    frames_to_core,
)
from cairn.errors import ConfigError, EngineDead, Overloaded
from cairn.types import Clock

__all__ = ["ProcessEngine"]

_OUTBOX_BOUND = 1024
_LAST_WORDS_SECONDS = 0.5

logger = logging.getLogger(__name__)


class _Line:
    """The client's end of the wire: a PAIR socket in a fresh directory that only this user can enter.

    Frames wait in a bounded outbox when the core does not read, so that handing one over never blocks.
    """

    def __init__(self) -> None:
        self._folder = tempfile.mkdtemp(prefix="cairn-")
        self.address = f"ipc://{self._folder}/core"
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.PAIR)
        self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
        self._outbox: deque[bytes] = deque()
        self._news = asyncio.Event()
        self._incoming = frames_from_core()
        self._outgoing = frames_to_core()
        try:
            self._socket.bind(self.address)
        except zmq.ZMQError as error:
            self.close()
            raise ConfigError(
                f"no socket can be made at {self.address}: {error}; set TMPDIR to another place"
            ) from error

    def post_config(self, config: EngineConfig) -> None:
        self._post(config_frames().encode(config))

    def post(self, message: ToCore) -> None:
        """Raises Overloaded when too much waits already; an Abort or a Shutdown is always taken."""
        if len(self._outbox) >= _OUTBOX_BOUND and not isinstance(message, Abort | Shutdown):
            raise Overloaded("the engine core does not keep up with its messages: try again later")
        self._post(self._outgoing.encode(message))

    async def write(self) -> None:
        """Send what is posted, until cancelled."""
        while True:
            await self._news.wait()
            while self._outbox:
                await self._socket.send(self._outbox[0])
                self._outbox.popleft()
            self._news.clear()

    async def read(self) -> FromCore:
        return self._incoming.decode(await self._socket.recv())

    def close(self) -> None:
        self._context.destroy(linger=0)
        shutil.rmtree(self._folder, ignore_errors=True)

    def _post(self, frame: bytes) -> None:
        self._outbox.append(frame)
        self._news.set()


class ProcessEngine:
    """An EngineClient whose core is made by `core` (`package.module:function`) in a child process.

    The child is a fresh interpreter, never a fork, and ends by itself when this process does. `load_tokenizer` gets
    the model's folder and is called here, in a thread. `threads` is how many the core's number crunching may use.
    """

    def __init__(
        self,
        config: EngineConfig,
        load_tokenizer: Callable[[str], TextTokenizer],
        *,
        core: str = "cairn.engine.build:build_core",
        threads: int = 1,
        deadlines: EngineDeadlines | None = None,
        clock: Clock | None = None,
    ) -> None:
        self._config = config
        self._load_tokenizer = load_tokenizer
        self._core = core
        self._threads = threads
        self._deadlines = deadlines or EngineDeadlines()
        self._switchboard = Switchboard(self._send, max_open=0, deadlines=self._deadlines, clock=clock)
        self._info: EngineInfo | None = None
        self._tokenizer: TextTokenizer | None = None
        self._line: _Line | None = None
        self._process: asyncio.subprocess.Process | None = None
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def info(self) -> EngineInfo:
        assert self._info is not None, "start() first"
        return self._info

    @property
    def tokenizer(self) -> TextTokenizer:
        assert self._tokenizer is not None, "start() first"
        return self._tokenizer

    @property
    def dead(self) -> str | None:
        return self._switchboard.dead

    @property
    def pid(self) -> int | None:
        """The core's process id, for whoever wants to look at it."""
        return None if self._process is None else self._process.pid

    async def start(self) -> None:
        try:
            async with asyncio.timeout(self._deadlines.start):
                await self._bring_up()
        except BaseException as error:
            await self._tear_down()
            if isinstance(error, TimeoutError):
                raise EngineDead(f"the engine core was not built within {self._deadlines.start} s") from None
            raise

    def generate(self, *requests: GenerateRequest) -> AsyncIterator[GenerateOutput]:
        return self._switchboard.generate(*requests)

    async def stats(self) -> EngineStats:
        return await self._switchboard.stats()

    async def cache_view(self, max_paths: int) -> CacheView:
        return await self._switchboard.cache_view(max_paths)

    async def reset_cache(self) -> int:
        return await self._switchboard.reset_cache()

    async def wait_dead(self) -> str:
        return await self._switchboard.wait_dead()

    async def stop(self, drain_seconds: float) -> None:
        if self._process is None or self._line is None:
            return
        if self.dead is None:
            await self._switchboard.drain(drain_seconds)
            self._line.post(Shutdown())
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._deadlines.stop):
                    await self._process.wait()
        await self._tear_down()

    async def _bring_up(self) -> None:
        self._line = line = _Line()
        self._process = process = await self._spawn(line.address)
        line.post_config(self._config)
        self._tasks.append(asyncio.create_task(line.write()))
        loading = asyncio.create_task(asyncio.to_thread(self._load_tokenizer, self._config.model))
        greeting = asyncio.create_task(_greeting(line, process))
        try:
            info, self._tokenizer = await asyncio.gather(greeting, loading)
        finally:
            greeting.cancel()
            loading.cancel()
            await asyncio.gather(greeting, loading, return_exceptions=True)
        self._info, self._switchboard.max_open = info, info.max_num_seqs + info.max_waiting
        self._tasks += [
            asyncio.create_task(self._read(line)),
            asyncio.create_task(self._watch_exit(process)),
            asyncio.create_task(self._switchboard.watch()),
        ]

    async def _spawn(self, address: str) -> asyncio.subprocess.Process:
        level = logging.getLevelName(logger.getEffectiveLevel())
        # -P: a module of that name lying in the current directory must not get in the way.
        return await asyncio.create_subprocess_exec(
            *(sys.executable, "-P", "-m", "cairn.engine.worker", address, self._core, level),
            stdin=asyncio.subprocess.PIPE,
            env={**os.environ, **thread_variables(self._threads, os.environ)},
        )

    def _send(self, message: ToCore) -> None:
        assert self._line is not None, "start() first"
        self._line.post(message)

    async def _read(self, line: _Line) -> None:
        try:
            while True:
                self._switchboard.receive(await line.read())
        except EngineDead as error:
            self._switchboard.fail(str(error))

    async def _watch_exit(self, process: asyncio.subprocess.Process) -> None:
        code = await process.wait()
        # What the core said last may still be on its way.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_LAST_WORDS_SECONDS):
                await self._switchboard.wait_dead()
        self._switchboard.fail(f"the engine core has ended: {_exit_text(code)}")

    async def _tear_down(self) -> None:
        self._switchboard.fail("the engine has been stopped", asked_for=True)
        await self._switchboard.aclose()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks.clear()
        if self._process is not None:
            if self._process.returncode is None:
                self._process.kill()
            await self._process.wait()
            if self._process.stdin is not None:
                self._process.stdin.close()
        if self._line is not None:
            self._line.close()
            self._line = None


async def _greeting(line: _Line, process: asyncio.subprocess.Process) -> EngineInfo:
    """The core's first word. Raises ConfigError or ModelError when it refuses, EngineDead when it just ends."""
    reading = asyncio.create_task(line.read())
    ending = asyncio.create_task(process.wait())
    try:
        await asyncio.wait({reading, ending}, return_when=asyncio.FIRST_COMPLETED)
        if not reading.done():
            await asyncio.wait({reading}, timeout=_LAST_WORDS_SECONDS)
        if not reading.done():
            raise EngineDead(f"the engine core ended before it was built: {_exit_text(ending.result())}")
        message = reading.result()
    finally:
        reading.cancel()
        ending.cancel()
        await asyncio.gather(reading, ending, return_exceptions=True)
    match message:
        case Ready(info):
            return info
        case Refused():
            raise message.error()
        case Fatal(text):
            raise EngineDead(f"the engine core could not be built: {text}")
        case _:
            raise EngineDead(f"the engine core began with a {type(message).__name__} frame")


def _exit_text(code: int) -> str:
    return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
