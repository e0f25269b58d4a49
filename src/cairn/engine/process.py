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
from typing import Any

import zmq

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

    Frames wait in a bounded outbox when the core does not read. `threads`: how many its number crunching may use. The
    socket is read in the event loop's own turn: pyzmq's sockets for asyncio take two more to wake a task.
    """

    def __init__(self, config: EngineConfig, *, core: str = "cairn.engine.build:build_core", threads: int = 1) -> None:
        self._config = config
        self._core = core
        self._threads = threads
        self._folder: Path | None = None
        self._child: ChildProcess | None = None
        self._context: zmq.Context[Any] | None = None
        self._outbox: deque[bytes] = deque()
        self._first: asyncio.Future[bytes] | None = None
        self._receive: Callable[[FromCore], None] | None = None
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
        self._context = zmq.Context()
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
        loop, ended = asyncio.get_running_loop(), _wait_exit(self._child)
        self._receive, self._fail, self._first = receive, fail, loop.create_future()
        loop.add_reader(self._child.socket.getsockopt(zmq.FD), self._exchange)
        self._post(config)
        info = await self._receive_ready(self._first, ended)
        self._tasks.append(asyncio.create_task(self._report_exit(ended, fail)))
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
            self._stop_reading(child)
            child.request_exit(kill=True)
            await asyncio.to_thread(child.process.wait)
            child.close()
        if self._context is not None:
            self._context.destroy(linger=0)
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _post(self, frame: bytes) -> None:
        self._outbox.append(frame)
        if self._flush() & zmq.POLLIN:
            asyncio.get_running_loop().call_soon(self._exchange)

    def _flush(self) -> int:
        """Send what is posted as far as the core takes it. Returns what the socket can do now."""
        assert self._child is not None
        socket = self._child.socket
        while (events := int(socket.getsockopt(zmq.EVENTS))) & zmq.POLLOUT and self._outbox:
            socket.send(self._outbox.popleft(), zmq.NOBLOCK)
        return events

    def _exchange(self) -> None:
        """Pass on a frame of the core, if there is one. The descriptor of a ZMQ socket tells of changes alone: it has
        to be asked until nothing is left."""
        child = self._child
        if child is None or self._receive is None or not self._flush() & zmq.POLLIN:
            return
        frame: bytes = child.socket.recv(zmq.NOBLOCK)
        try:
            if self._first is not None and not self._first.done():
                self._first.set_result(frame)
            else:
                self._receive(self._incoming.decode(frame))
        except EngineDead as error:  # nothing sensible can come after it
            self._stop_reading(child)
            self._fail(str(error))
        finally:
            # behind what comes of it, which goes out before another one that is there already
            asyncio.get_running_loop().call_soon(self._exchange)

    def _stop_reading(self, child: ChildProcess) -> None:
        if self._receive is not None:
            asyncio.get_running_loop().remove_reader(child.socket.getsockopt(zmq.FD))
            self._receive = None

    async def _receive_ready(self, reading: "asyncio.Future[bytes]", ended: "asyncio.Future[int]") -> EngineInfo:
        """The core's first message. Raises ConfigError or ModelError when it refuses, EngineDead when it just ends."""
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
