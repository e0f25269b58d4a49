"""An engine whose core runs in a thread of this process."""

import asyncio
import logging
import queue
import threading
from collections.abc import AsyncIterator, Callable

from cairn.engine.client import EngineDeadlines, Switchboard
from cairn.engine.contract import (
    CacheView,
    EngineConfig,
    EngineCore,
    EngineInfo,
    EngineStats,
    GenerateOutput,
    GenerateRequest,
    TextTokenizer,
)
from cairn.engine.core_loop import run_core
from cairn.engine.wire import Abort, Fatal, FromCore, Shutdown, ToCore
from cairn.errors import ConfigError, EngineDead, Overloaded
from cairn.types import Clock

__all__ = ["LocalEngine"]

_LINE_BOUND = 1024
_SEND_SECONDS = 60.0

logger = logging.getLogger(__name__)


class _ThreadLink:
    """The core's end: a queue in, calls into the client's event loop out, each way bounded."""

    def __init__(self, loop: asyncio.AbstractEventLoop, receive: Callable[[FromCore], None]) -> None:
        self._loop = loop
        self._receive = receive
        self._room = threading.BoundedSemaphore(_LINE_BOUND)
        self.inbox: queue.SimpleQueue[ToCore | None] = queue.SimpleQueue()

    def wake(self) -> None:
        self.inbox.put(None)

    def receive(self, seconds: float) -> ToCore | None:
        try:
            return self.inbox.get(timeout=seconds) if seconds else self.inbox.get_nowait()
        except queue.Empty:
            return None

    def send(self, message: FromCore) -> None:
        if not self._room.acquire(timeout=_SEND_SECONDS):
            raise EngineDead(f"the client has taken nothing for {_SEND_SECONDS} s")
        self.call(self._deliver, message)

    def call(self, function: Callable[..., None], *arguments: object) -> None:
        try:
            self._loop.call_soon_threadsafe(function, *arguments)
        except RuntimeError as error:
            raise EngineDead("the client's event loop has been closed") from error

    def _deliver(self, message: FromCore) -> None:
        self._room.release()
        self._receive(message)


class LocalEngine:
    """An EngineClient around `build_core(config)`, which is called in the core's own thread.

    `tokenizer` is used by the client's side only. A thread cannot be killed: a core that hangs is given up, not ended.
    """

    def __init__(
        self,
        config: EngineConfig,
        build_core: Callable[[EngineConfig], EngineCore],
        tokenizer: TextTokenizer,
        *,
        deadlines: EngineDeadlines | None = None,
        clock: Clock | None = None,
    ) -> None:
        self._config = config
        self._build_core = build_core
        self._tokenizer = tokenizer
        self._deadlines = deadlines or EngineDeadlines()
        self._switchboard = Switchboard(self._send, max_open=0, deadlines=self._deadlines, clock=clock)
        self._info: EngineInfo | None = None
        self._link: _ThreadLink | None = None
        self._thread: threading.Thread | None = None
        self._watching: asyncio.Task[None] | None = None

    @property
    def info(self) -> EngineInfo:
        assert self._info is not None, "start() first"
        return self._info

    @property
    def tokenizer(self) -> TextTokenizer:
        return self._tokenizer

    @property
    def dead(self) -> str | None:
        return self._switchboard.dead

    async def start(self) -> None:
        loop = asyncio.get_running_loop()
        built: asyncio.Future[EngineInfo] = loop.create_future()
        self._link = _ThreadLink(loop, self._switchboard.receive)
        self._thread = threading.Thread(target=self._run, args=(self._link, built), name="cairn-core", daemon=True)
        self._thread.start()
        try:
            async with asyncio.timeout(self._deadlines.start):
                self._info = await built
                self._switchboard.max_open = self._info.max_num_seqs + self._info.max_waiting
        except TimeoutError:
            self._switchboard.fail(f"the engine core was not built within {self._deadlines.start} s", asked_for=True)
            self._link.inbox.put(Shutdown())
            raise EngineDead(self._switchboard.dead) from None
        self._watching = asyncio.create_task(self._switchboard.watch())

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
        if self._link is None or self._thread is None:
            return
        await self._switchboard.drain(drain_seconds)
        self._link.inbox.put(Shutdown())
        await asyncio.to_thread(self._thread.join, self._deadlines.stop)
        self._switchboard.fail("the engine has been stopped", asked_for=True)
        await self._switchboard.aclose()
        if self._watching is not None:
            self._watching.cancel()

    def _send(self, message: ToCore) -> None:
        assert self._link is not None, "start() first"
        if self._link.inbox.qsize() >= _LINE_BOUND and not isinstance(message, Abort):
            raise Overloaded("the engine core does not keep up with its messages: try again later")
        self._link.inbox.put(message)

    def _run(self, link: _ThreadLink, built: "asyncio.Future[EngineInfo]") -> None:
        try:
            try:
                core = self._build_core(self._config)
            except ConfigError as error:
                link.call(_settle, built, error)
                return
            except Exception as error:
                logger.exception("the engine core could not be built")
                dead = EngineDead(f"the engine core could not be built: {type(error).__name__}: {error}")
                link.call(_settle, built, dead)
                return
            link.call(_settle, built, core.info)
            run_core(core, link)
        except Exception as error:
            logger.exception("the engine core has ended")
            try:
                link.send(Fatal(f"{type(error).__name__}: {error}"))
            except EngineDead as gone:
                logger.error("nobody is left to be told: %s", gone)


def _settle(built: "asyncio.Future[EngineInfo]", result: EngineInfo | Exception) -> None:
    if built.done():
        return
    if isinstance(result, Exception):
        built.set_exception(result)
    else:
        built.set_result(result)
