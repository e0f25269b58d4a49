"""A core in a process of its own, joined by the msgpack wire over a private ZMQ socket."""

import asyncio
import contextlib
import os
import shutil
import tempfile
import threading
from collections import deque
from collections.abc import Callable
from pathlib import Path

import zmq
import zmq.asyncio

from cairn.engine.child_process import FINAL_FRAME_SECONDS, ChildProcess, describe_exit
from cairn.engine.contract import EngineConfig, EngineInfo
from cairn.engine.cpu_threads import thread_variables
from cairn.engine.wire import (
    Abort,
    BuildRefused,
    Fatal,
    FromCore,
    Ready,
    Shutdown,
    ToCore,
    encode_config,
    frames_from_core,
    frames_to_core,
)
from cairn.errors import ConfigError, EngineDead, Overloaded

__all__ = ["ProcessTransport"]

_OUTBOX_BOUND = 1024


class ProcessTransport:
    """A `Transport` to a core that `core` (`package.module:function`) makes in a child process.

    Frames wait in a bounded outbox when the core does not read. `threads`: how many its number crunching may use.
    """

    def __init__(self, config: EngineConfig, *, core: str = "cairn.engine.build:build_core", threads: int = 1) -> None:
        self._config = config
        self._core = core
        self._threads = threads
        self._folder: Path | None = None
        self._child: ChildProcess | None = None
        self._context: zmq.asyncio.Context | None = None
        self._outbox: deque[bytes] = deque()
        self._news = asyncio.Event()
        self._incoming = frames_from_core()
        self._outgoing = frames_to_core()
        self._tasks: list[asyncio.Task[None]] = []
        self._is_closing = False

    @property
    def pid(self) -> int | None:
        """The core's process id."""
        return None if self._child is None else self._child.process.pid

    async def start(self, receive: Callable[[FromCore], None], fail: Callable[[str], None]) -> EngineInfo:
        config = encode_config(self._config)
        self._context = zmq.asyncio.Context()
        try:
            self._folder = Path(tempfile.mkdtemp(prefix="cairn-"))
        except OSError as error:
            raise ConfigError(f"no folder for sockets can be made: {error.strerror}; set TMPDIR to a place") from error
        self._child = ChildProcess(
            "the engine core",
            "cairn.engine.worker",
            f"ipc://{self._folder}/core",
            self._core,
            context=self._context,
            environ={**os.environ, **thread_variables(self._threads, os.environ)},
        )
        socket, ended = self._child.socket, _wait_exit(self._child)
        self._post(config)
        self._tasks.append(asyncio.create_task(self._write(socket)))
        info = await self._receive_ready(socket, ended)
        self._tasks.append(asyncio.create_task(self._report_exit(ended, fail)))
        self._tasks.append(asyncio.create_task(self._read(socket, receive, fail)))
        return info

    def send(self, message: ToCore) -> None:
        if len(self._outbox) >= _OUTBOX_BOUND and not isinstance(message, Abort | Shutdown):
            raise Overloaded("the engine core does not keep up with its messages: try again later")
        self._post(self._outgoing.encode(message))

    async def close(self, seconds: float) -> None:
        child = self._child
        if child is not None and seconds > 0:
            self.send(Shutdown())
            self._is_closing = True
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await _wait_exit(child)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks.clear()
        if child is not None:
            child.request_exit(kill=True)
            await asyncio.to_thread(child.process.wait)
            child.close()
        if self._context is not None:
            self._context.destroy(linger=0)
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _post(self, frame: bytes) -> None:
        self._outbox.append(frame)
        self._news.set()

    async def _write(self, socket: zmq.asyncio.Socket) -> None:
        """Send what is posted, until cancelled."""
        while True:
            await self._news.wait()
            while self._outbox:
                await socket.send(self._outbox[0])
                self._outbox.popleft()
            self._news.clear()

    async def _receive_ready(self, socket: zmq.asyncio.Socket, ended: "asyncio.Future[int]") -> EngineInfo:
        """The core's first message. Raises ConfigError or ModelError when it refuses, EngineDead when it just ends."""
        reading: asyncio.Future[bytes] = asyncio.ensure_future(socket.recv())
        waiting: set[asyncio.Future[object]] = {reading, ended}  # type: ignore[arg-type]
        try:
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            if not reading.done():
                await asyncio.wait({reading}, timeout=FINAL_FRAME_SECONDS)
            if not reading.done():
                raise EngineDead(f"the engine core ended before it was built: {describe_exit(ended.result())}")
            message = self._incoming.decode(reading.result())
        finally:
            reading.cancel()
        match message:
            case Ready(info):
                return info
            case BuildRefused():
                raise message.error()
            case Fatal(text):
                raise EngineDead(f"the engine core could not be built: {text}")
            case _:
                raise EngineDead(f"the engine core began with a {type(message).__name__} frame")

    async def _report_exit(self, ended: "asyncio.Future[int]", fail: Callable[[str], None]) -> None:
        """Report an exit that was not requested."""
        code = await ended
        await asyncio.sleep(FINAL_FRAME_SECONDS)
        if not self._is_closing:
            fail(f"the engine core has ended: {describe_exit(code)}")

    async def _read(
        self, socket: zmq.asyncio.Socket, receive: Callable[[FromCore], None], fail: Callable[[str], None]
    ) -> None:
        """Pass on the core's messages, until one cannot be read."""
        try:
            while True:
                receive(self._incoming.decode(await socket.recv()))
                await asyncio.sleep(0)  # what comes of it goes out before another one that is there already
        except EngineDead as error:
            fail(str(error))


def _wait_exit(child: ChildProcess) -> "asyncio.Future[int]":
    """The process's exit code, once there is one."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[int] = loop.create_future()

    def tell(code: int) -> None:
        if not future.done():
            future.set_result(code)

    def wait() -> None:
        code = child.process.wait()
        with contextlib.suppress(RuntimeError):  # the event loop is closed
            loop.call_soon_threadsafe(tell, code)

    threading.Thread(target=wait, name="cairn-core-watch", daemon=True).start()
    return future
