"""The engine core's own process: `python -m cairn.engine.worker ADDRESS MODULE:FUNCTION LOG_LEVEL`.

Started by `process.ProcessEngine`, never by hand. ADDRESS is the client's ZMQ socket, in a directory that only this
user can enter. The first frame is the EngineConfig; MODULE:FUNCTION makes an EngineCore of it. Standard input is a
pipe whose other end the client holds open: when it closes, the client is gone, and so is this process.
"""

import contextlib
import importlib
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from typing import cast

import zmq

from cairn.engine.contract import EngineConfig, EngineCore
from cairn.engine.core_loop import run_core
from cairn.engine.waker import Waker
from cairn.engine.wire import (
    MAX_FRAME_BYTES,
    Fatal,
    FromCore,
    Ready,
    Refused,
    ToCore,
    config_frames,
    frames_from_core,
    frames_to_core,
)
from cairn.errors import ConfigError, EngineDead

_CONFIG_SECONDS = 60.0
_SEND_SECONDS = 60.0
_LINGER_SECONDS = 2.0

logger = logging.getLogger(__name__)


class _SocketLink:
    """The core's end of the process wire."""

    def __init__(self, context: "zmq.Context[zmq.Socket[bytes]]", address: str) -> None:
        self._socket = context.socket(zmq.PAIR)
        self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
        self._socket.setsockopt(zmq.LINGER, int(_LINGER_SECONDS * 1000))
        self._socket.setsockopt(zmq.SNDTIMEO, int(_SEND_SECONDS * 1000))
        self._socket.connect(address)
        self._incoming = frames_to_core()
        self._outgoing = frames_from_core()
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._waker = Waker(self._poller)

    def wake(self) -> None:
        self._waker.wake()

    def receive(self, seconds: float) -> ToCore | None:
        frame = self._frame(seconds)
        return None if frame is None else self._incoming.decode(frame)

    def receive_config(self, seconds: float) -> EngineConfig:
        frame = self._frame(seconds)
        if frame is None:
            raise EngineDead(f"no configuration came within {seconds} s")
        return config_frames().decode(frame)

    def send(self, message: FromCore) -> None:
        try:
            self._socket.send(self._outgoing.encode(message))
        except zmq.Again:
            raise EngineDead(f"the client has taken nothing for {_SEND_SECONDS} s") from None

    def close(self) -> None:
        self._socket.close()
        self._waker.close()

    def _frame(self, seconds: float) -> bytes | None:
        ready = dict(self._poller.poll(int(seconds * 1000)))
        self._waker.take(ready)
        return self._socket.recv() if self._socket in ready else None


def load_factory(path: str) -> Callable[[EngineConfig], EngineCore]:
    """`package.module:function` -> the function. Raises ConfigError."""
    module, _, name = path.partition(":")
    try:
        return cast(Callable[[EngineConfig], EngineCore], getattr(importlib.import_module(module), name))
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"the engine core {path!r} cannot be imported: {error}") from error


def _serve(link: _SocketLink, factory: str) -> int:
    try:
        config = link.receive_config(_CONFIG_SECONDS)
        try:
            core = load_factory(factory)(config)
        except ConfigError as error:
            link.send(Refused.of(error))
            return 2
        link.send(Ready(core.info))
        run_core(core, link)
    except Exception as error:
        logger.exception("the engine core has ended")
        link.send(Fatal(f"{type(error).__name__}: {error}"))
        return 1
    return 0


def _exit_with_client(address: str) -> None:
    """Waits for the client's end, then cleans up what it no longer can: the socket and its directory."""
    os.read(0, 1)
    path = address.removeprefix("ipc://")
    with contextlib.suppress(OSError):
        os.unlink(path)
        os.rmdir(os.path.dirname(path))
    os._exit(1)


def main(arguments: Sequence[str]) -> int:
    address, factory, log_level = arguments
    # The client decides when the core ends; a Ctrl-C, or a service manager that signals the whole group, must not
    # take the core away from a server that is still draining.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    threading.Thread(target=_exit_with_client, args=(address,), name="cairn-client-watch", daemon=True).start()
    logging.basicConfig(level=log_level, format="%(asctime)s %(levelname)s [core] %(message)s")
    with zmq.Context() as context:
        link = _SocketLink(context, address)
        try:
            return _serve(link, factory)
        finally:
            link.close()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
