"""The engine's child processes: its core, the other ranks, and the one that checks grammars.

ChildProcess (parent)                            run_child (child)
binds a PAIR socket in a private folder          connects to it; frames go both ways
holds the child's standard input open            ends when that closes: the parent is gone
"""

import contextlib
import faulthandler
import gc
import logging
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import zmq

from cairn.engine.wire import MAX_FRAME_BYTES
from cairn.errors import ConfigError, EngineDead
from cairn.types import Clock, SystemClock

FINAL_FRAME_SECONDS = 0.5
"""A child's last frame may still be on its way when it has ended."""

CONFIG_SECONDS = 60.0
"""How long a child waits for its configuration, the first frame."""

_LOOK_SECONDS = 0.1
_SEND_SECONDS = 60.0
_LINGER_SECONDS = 2.0

logger = logging.getLogger(__name__)


class ChildLate(EngineDead):
    """A child runs, but has missed a deadline."""


class ChildProcess:
    """A fresh interpreter that runs `module`, never a fork, and the PAIR socket to it at `address` (`ipc://...`, in a
    directory that only this user can enter). It ends by itself when this process does. One thread only.

    `name`: what messages call it. `send_seconds`: how long it may take nothing. `queued_frames`: most that wait for it.
    Whoever uses the socket in an event loop uses nothing but `process` and what ends it besides.
    """

    def __init__(
        self,
        name: str,
        module: str,
        address: str,
        *arguments: str,
        context: "zmq.Context[Any]",
        send_seconds: float = _SEND_SECONDS,
        queued_frames: int = 1000,
        environ: Mapping[str, str] | None = None,
        stderr: int | None = None,
        clock: Clock | None = None,
    ) -> None:
        """Raises ConfigError where there can be no socket at `address`, and OSError where no process can be started."""
        self.name = name
        self._clock = clock or SystemClock()
        self._send_seconds = send_seconds
        self.socket: Any = context.socket(zmq.PAIR)
        self.socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.setsockopt(zmq.SNDHWM, queued_frames)
        self.socket.setsockopt(zmq.SNDTIMEO, int(send_seconds * 1000))
        level = logging.getLevelName(logger.getEffectiveLevel())
        # -P: a module of that name lying in the current directory must not get in the way.
        command = (sys.executable, "-P", "-m", module, address, level, *arguments)
        try:
            self.socket.bind(address)
            self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stderr=stderr, env=environ)
        except (zmq.ZMQError, UnicodeEncodeError) as error:
            self.socket.close()
            raise ConfigError(f"no socket can be made at {address}: {error}; set TMPDIR to another place") from error
        except BaseException:
            # an open socket would keep the context from ever ending
            self.socket.close()
            raise

    def send(self, frame: bytes, what: str) -> None:
        """Raises EngineDead when the child takes nothing."""
        try:
            self.socket.send(frame)
        except zmq.Again:
            raise EngineDead(f"{self.name} has taken no {what} for {self._send_seconds:g} s") from None

    def receive(self, seconds: float, what: str) -> bytes:
        """The next frame. `what`: what it has done then. Raises ChildLate, and EngineDead when it has ended."""
        self.wait_for(zmq.POLLIN, seconds, what)
        frame: bytes = self.socket.recv()
        return frame

    def wait_for(self, event: int, seconds: float, what: str) -> None:
        """Until the socket can do this. Raises as `receive` does."""
        deadline = self._clock.now() + seconds
        while True:
            left = deadline - self._clock.now()
            if self.socket.poll(max(0, int(min(left, _LOOK_SECONDS) * 1000)), event):
                return
            if (end := self.exit_reason()) is not None:
                if event == zmq.POLLIN and self.socket.poll(int(FINAL_FRAME_SECONDS * 1000)):
                    return
                raise EngineDead(end)
            if left <= 0:
                raise ChildLate(f"{self.name} was not {what} within {seconds:g} s")

    def receive_final(self, seconds: float) -> bytes | None:
        """A frame that comes within `seconds`, when nothing is expected any more."""
        return self.socket.recv() if self.socket.poll(int(seconds * 1000)) else None

    def exit_reason(self) -> str | None:
        """How the process has ended, or None while it runs."""
        code = self.process.poll()
        return None if code is None else f"{self.name} has ended: {describe_exit(code)}"

    def request_exit(self, kill: bool) -> None:
        """Closes its standard input, at which it exits by itself, or kills it."""
        if kill:
            self.process.kill()
        if self.process.stdin is not None:
            self.process.stdin.close()

    def close(self, seconds: float = 0.0) -> None:
        """Returns when the process has ended: by itself within `seconds`, else killed."""
        self.request_exit(kill=not seconds)
        try:
            self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.socket.close()


def describe_exit(code: int) -> str:
    return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"


# -- the child ---------------------------------------------------------------------------------------------------------


class Waker:
    """Ends a poll from another thread: a pipe to oneself. `register` adds a socket to the poll. The polling thread owns
    everything but `wake`."""

    def __init__(self, register: Callable[[socket.socket], object]) -> None:
        self._waker, self._woken = socket.socketpair()
        self._waker.setblocking(False)
        self._woken.setblocking(False)
        register(self._woken)

    def fileno(self) -> int:
        """What the poll returns when it was woken; then call `clear`."""
        return self._woken.fileno()

    def wake(self) -> None:
        """For other threads."""
        # a full pipe wakes just as well, and after `close` nobody waits
        with contextlib.suppress(OSError):
            self._waker.send(b"\0")

    def clear(self) -> None:
        """Let the next poll wait again."""
        with contextlib.suppress(BlockingIOError):
            self._woken.recv(4096)

    def close(self) -> None:
        self._waker.close()
        self._woken.close()


class ParentLink:
    """The child's end. One thread only, but for `wake`."""

    def __init__(self, context: "zmq.Context[zmq.Socket[bytes]]", address: str) -> None:
        self._socket = context.socket(zmq.PAIR)
        self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
        self._socket.setsockopt(zmq.LINGER, int(_LINGER_SECONDS * 1000))
        self._socket.setsockopt(zmq.SNDTIMEO, int(_SEND_SECONDS * 1000))
        self._socket.connect(address)
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._waker = Waker(lambda end: self._poller.register(end, zmq.POLLIN))

    def receive(self, seconds: float | None) -> bytes | None:
        """The next frame; None when none comes within `seconds` (None: for ever), or `wake` is called."""
        ready = dict(self._poller.poll(None if seconds is None else int(seconds * 1000)))
        if self._waker.fileno() in ready:
            self._waker.clear()
        return self._socket.recv() if self._socket in ready else None

    def receive_config(self) -> bytes:
        """The first frame. Raises EngineDead when it does not come."""
        frame = self.receive(CONFIG_SECONDS)
        if frame is None:
            raise EngineDead(f"no configuration came within {CONFIG_SECONDS:g} s")
        return frame

    def send(self, frame: bytes) -> None:
        """Raises EngineDead when the parent does not take it."""
        try:
            self._socket.send(frame)
        except zmq.Again:
            raise EngineDead(f"the client has taken nothing for {_SEND_SECONDS} s") from None

    def wake(self) -> None:
        """End a `receive` that waits. For other threads."""
        self._waker.wake()

    def close(self) -> None:
        self._socket.close()
        self._waker.close()


def run_child(arguments: Sequence[str], label: str, serve: Callable[..., int]) -> int:
    """A child's `main`: serves the parent until that says otherwise, or is gone. Returns the exit code.

    `arguments`: address, log level, and what else `serve` gets after its `ParentLink`.
    """
    address, log_level, *more = arguments
    # The parent decides when this process ends; a Ctrl-C, or a service manager that signals the whole group, must not
    # take it away from a server that is still draining.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    threading.Thread(target=_exit_with_parent, args=(address,), name="cairn-parent-watch", daemon=True).start()
    if sys.stderr is not None:
        # A library's fault ends the process: its log is all that says which thread was where.
        faulthandler.enable()
    logging.basicConfig(level=log_level, format=f"%(asctime)s %(levelname)s [{label}] %(message)s")
    with zmq.Context() as context, contextlib.closing(ParentLink(context, address)) as link:
        return serve(link, *more)


def _exit_with_parent(address: str) -> None:
    """Waits for the parent's end, then cleans up what it no longer can: the socket and its directory."""
    os.read(0, 1)
    shutil.rmtree(Path(address.removeprefix("ipc://")).parent, ignore_errors=True)
    os._exit(1)


def freeze_heap() -> None:
    """Have garbage collections leave out what there is now, once a process has been built: each full one would go
    through some hundred thousand objects that never go, and every stream would wait 100 to 300 ms for it."""
    gc.collect()
    gc.freeze()


def load_function(path: str, what: str) -> Any:
    """`package.module:function` -> the function. Raises ConfigError; `what`: what it is."""
    module, _, name = path.partition(":")
    try:
        return getattr(import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"{what} {path!r} cannot be imported: {error}") from error
