"""An engine whose core runs in a thread of this process."""

import asyncio
import logging
import queue
import threading
from collections.abc import Callable

from cairn.engine.client import CoreClient, EngineDeadlines
from cairn.engine.contract import (
    EngineConfig,
    EngineInfo,
    TextTokenizer,
)
from cairn.engine.core import Core
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


class ThreadTransport:
    """A `Transport` to a core that `build_core(config)` makes in a thread of its own. A thread cannot be killed: a core
    that hangs is given up, not ended."""

    def __init__(self, config: EngineConfig, build_core: Callable[[EngineConfig], Core]) -> None:
        self._config = config
        self._build_core = build_core
        self._link: _ThreadLink | None = None
        self._thread: threading.Thread | None = None

    async def start(self, receive: Callable[[FromCore], None], fail: Callable[[str], None]) -> EngineInfo:
        loop = asyncio.get_running_loop()
        built: asyncio.Future[EngineInfo] = loop.create_future()
        self._link = _ThreadLink(loop, receive)
        self._thread = threading.Thread(target=self._run, args=(self._link, built), name="cairn-core", daemon=True)
        self._thread.start()
        return await built

    def send(self, message: ToCore) -> None:
        assert self._link is not None, "start() first"
        if self._link.inbox.qsize() >= _LINE_BOUND and not isinstance(message, Abort | Shutdown):
            raise Overloaded("the engine core does not keep up with its messages: try again later")
        self._link.inbox.put(message)

    async def close(self, seconds: float) -> None:
        if self._link is not None and self._thread is not None:
            self._link.inbox.put(Shutdown())
            await asyncio.to_thread(self._thread.join, seconds)

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


def LocalEngine(
    config: EngineConfig,
    build_core: Callable[[EngineConfig], Core],
    tokenizer: TextTokenizer,
    *,
    deadlines: EngineDeadlines | None = None,
    clock: Clock | None = None,
) -> CoreClient:
    """An EngineClient around a core in a thread. `tokenizer` is used by the client's side only."""
    return CoreClient(ThreadTransport(config, build_core), lambda: tokenizer, deadlines, clock)
