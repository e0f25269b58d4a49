"""The engine core's own process: `python -m cairn.engine.worker ADDRESS LOG_LEVEL MODULE:FUNCTION`.

Started by `process.ProcessTransport`, never by hand. ADDRESS is the client's ZMQ socket, in a directory that only this
user can enter. The first frame is the EngineConfig; MODULE:FUNCTION makes a Core of it. Standard input is a
pipe whose other end the client holds open: when it closes, the client is gone, and so is this process.
"""

import logging
import sys
from collections.abc import Sequence

from cairn.engine.child_process import ParentLink, freeze_heap, load_function, run_child
from cairn.engine.core_loop import run_core
from cairn.engine.wire import (
    BuildRefused,
    Fatal,
    FromCore,
    Ready,
    ToCore,
    decode_config,
    frames_from_core,
    frames_to_core,
)
from cairn.errors import ConfigError

logger = logging.getLogger(__name__)


class _ProcessLink:
    """A `CoreLink` over the process wire."""

    def __init__(self, parent: ParentLink) -> None:
        self._parent = parent
        self._incoming = frames_to_core()
        self._outgoing = frames_from_core()
        self.wake = parent.wake

    def receive(self, seconds: float) -> ToCore | None:
        frame = self._parent.receive(seconds)
        return None if frame is None else self._incoming.decode(frame)

    def send(self, message: FromCore) -> None:
        self._parent.send(self._outgoing.encode(message))


def _serve(parent: ParentLink, factory: str) -> int:
    link = _ProcessLink(parent)
    try:
        config = decode_config(parent.receive_config())
        try:
            core = load_function(factory, "the engine core")(config)
        except ConfigError as error:
            link.send(BuildRefused.of(error))
            return 2
        freeze_heap()
        link.send(Ready(core.info))
        run_core(core, link)
    except Exception as error:
        logger.exception("the engine core has ended")
        link.send(Fatal(f"{type(error).__name__}: {error}"))
        return 1
    return 0


def main(arguments: Sequence[str]) -> int:
    return run_child(arguments, "core", _serve)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
