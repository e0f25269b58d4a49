"""One tensor-parallel rank in a process of its own: `python -m cairn.engine.rank_worker ADDRESS LOG_LEVEL`.

Started by `ranks.build_ranked`, never by hand. ADDRESS is rank 0's ZMQ socket for this rank, in a directory that only
this user can enter. The first frame is the RankConfig; then the rank carries out every plan that comes. Standard input
is a pipe whose other end rank 0 holds open: when it closes, rank 0 is gone, and so is this process.
"""

import importlib
import logging
import os
import shutil
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, cast

import zmq

from cairn.engine.rank_wire import (
    Hello,
    RankConfig,
    RankFailed,
    RankReady,
    RankRefused,
    RankService,
    StepDone,
    ToRankZero,
    frames_of_config,
    frames_of_plans,
    frames_to_rank_zero,
)
from cairn.engine.step_pipeline import StepRunner
from cairn.engine.wire import MAX_FRAME_BYTES
from cairn.errors import ConfigError, EngineDead, ModelError
from cairn.step import StepPlan

if TYPE_CHECKING:
    from cairn.runner.runner import Observe, Runner

_CONFIG_SECONDS = 60.0
_LINGER_SECONDS = 2.0

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RankPlace:
    """Where a service finds itself. `folder`: a directory for sockets that only this user can enter.

    `runner.pool` is written by the rank's own thread while it carries out a plan; a service in a thread of its own
    may touch only pages that no plan names at that time.
    """

    rank: int
    tp_size: int
    folder: Path
    runner: "Runner"


ServiceFactory = Callable[[RankPlace, bytes], AbstractContextManager[object]]
"""Called with the rank's place and the service's settings. Raises ConfigError."""


class _Link:
    """This rank's end of the line to rank 0."""

    def __init__(self, context: "zmq.Context[zmq.Socket[bytes]]", address: str) -> None:
        self._socket = context.socket(zmq.PAIR)
        self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
        self._socket.setsockopt(zmq.LINGER, int(_LINGER_SECONDS * 1000))
        self._socket.connect(address)
        self._plans = frames_of_plans()
        self._outgoing = frames_to_rank_zero()

    def receive_config(self, seconds: float) -> RankConfig:
        if not self._socket.poll(int(seconds * 1000)):
            raise EngineDead(f"no configuration came within {seconds:g} s")
        return frames_of_config().decode(self._socket.recv())

    def receive(self) -> StepPlan:
        """The next plan. Waits as long as rank 0 lives: an idle engine has none, and needs no clock for it."""
        return self._plans.decode(self._socket.recv())

    def send(self, message: ToRankZero) -> None:
        self._socket.send(self._outgoing.encode(message))

    def close(self) -> None:
        self._socket.close()


def build_rank(config: RankConfig, observe: "Observe | None" = None) -> "Runner":
    """Joins the other ranks, then loads this rank's share of the model and allocates its memory.

    Raises ConfigError or ModelError, and EngineDead when not all ranks join in time.
    """
    # Here and not above: rank 0's module is imported where nothing of torch is wanted.
    from cairn.layers.process_ranks import gloo_rank
    from cairn.models.registry import open_model
    from cairn.runner.runner import Runner
    from cairn.runner.vision import open_vision

    communicator = gloo_rank(
        Path(config.rendezvous),
        config.rank,
        config.tp_size,
        join_seconds=config.join_seconds,
        seconds=config.step_seconds,
    )
    opened = open_model(Path(config.model), config.dtype, config.quantization)
    vision = None
    if config.encoder_bytes is not None:
        vision = open_vision(opened.folder, opened.dtype, config.encoder_bytes, config.rank)
    runner = Runner(
        opened.build(exact=config.exact, communicator=communicator),
        opened.layout(config.block_size, config.tp_size),
        config.num_pages,
        config.num_slots,
        config.exact,
        observe=observe,
        extra_pages=config.extra_pages,
        vision=vision,
    )
    runner.get_ready()
    return runner


def follow(runner: StepRunner, receive: Callable[[], StepPlan], send: Callable[[StepDone], None]) -> None:
    """Carries out plan after plan. Returns never; whatever the runner or the line raises comes out of here."""
    while True:
        plan = receive()
        runner.launch(plan)
        runner.draw(plan.step, {})
        runner.collect(plan.step)
        send(StepDone(plan.step))


def _load_service(service: RankService) -> ServiceFactory:
    module, _, name = service.factory.partition(":")
    try:
        return cast(ServiceFactory, getattr(importlib.import_module(module), name))
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"the rank's service {service.factory!r} cannot be imported: {error}") from error


def _serve(link: _Link) -> int:
    try:
        config = link.receive_config(_CONFIG_SECONDS)
        # What takes long to import comes before the word that this rank is there: the others then wait for nothing.
        importlib.import_module("cairn.runner.runner")
        link.send(Hello())
        with ExitStack() as services:
            try:
                runner = build_rank(config)
                place = RankPlace(config.rank, config.tp_size, Path(config.rendezvous).parent, runner)
                for service in config.services:
                    services.enter_context(_load_service(service)(place, service.settings))
            except ConfigError as error:
                link.send(RankRefused("model" if isinstance(error, ModelError) else "config", str(error)))
                return 2
            link.send(RankReady())
            follow(runner, link.receive, link.send)
    except EngineDead as error:
        # Mostly rank 0 has ended, or another rank has: not this rank's fault, and no news of how.
        logger.error("this rank ends: %s", error)
        link.send(RankFailed(str(error)))
        return 1
    except Exception as error:
        logger.exception("a rank has ended")
        link.send(RankFailed(f"{type(error).__name__}: {error}"))
        return 1
    return 0


def _exit_with_rank_zero(address: str) -> None:
    """Waits for rank 0's end, then cleans up what it may no longer be able to: the directory of sockets."""
    os.read(0, 1)
    shutil.rmtree(os.path.dirname(address.removeprefix("ipc://")), ignore_errors=True)
    os._exit(0)


def main(arguments: Sequence[str]) -> int:
    address, log_level = arguments
    # Rank 0 decides when this rank ends, as the server decides it for rank 0.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    threading.Thread(target=_exit_with_rank_zero, args=(address,), name="cairn-rank-zero-watch", daemon=True).start()
    logging.basicConfig(level=log_level, format="%(asctime)s %(levelname)s [rank] %(message)s")
    with zmq.Context() as context:
        link = _Link(context, address)
        try:
            return _serve(link)
        finally:
            link.close()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
