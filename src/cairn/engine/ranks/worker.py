"""One tensor-parallel rank in a process of its own: `python -m cairn.engine.ranks.worker ADDRESS LOG_LEVEL`.

Started by `runner.build_ranked`, never by hand. ADDRESS is rank 0's ZMQ socket for this rank, in a directory that only
this user can enter. The first frame is the RankConfig; then the rank carries out every plan that comes. Standard input
is a pipe whose other end rank 0 holds open: when it closes, rank 0 is gone, and so is this process.
"""

import importlib
import logging
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from cairn.engine.child_process import ParentLink, load_function, run_child
from cairn.engine.ranks.wire import (
    RankConfig,
    RankReady,
    RankStarted,
    StepDone,
    ToRankZero,
    frames_of_config,
    frames_of_plans,
    frames_to_rank_zero,
)
from cairn.engine.wire import BuildRefused, Fatal
from cairn.errors import ConfigError, EngineDead
from cairn.runner.contract import StepRunner
from cairn.step import StepPlan

if TYPE_CHECKING:
    from cairn.runner.runner import Observe, Runner

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


def build_rank(config: RankConfig, observe: "Observe | None" = None) -> "Runner":
    """Joins the other ranks, then loads this rank's share of the model and allocates its memory.

    Raises ConfigError or ModelError, and EngineDead when not all ranks join in time.
    """
    # Here and not above: rank 0's module is imported where nothing of torch is wanted.
    from cairn.layers.process_ranks import join_gloo_ranks
    from cairn.models.registry import open_model
    from cairn.runner.runner import Runner
    from cairn.runner.vision import open_vision

    communicator = join_gloo_ranks(
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
        runner.run(plan)
        send(StepDone(plan.step))


def _serve(parent: ParentLink) -> int:
    outgoing, plans = frames_to_rank_zero(), frames_of_plans()

    def send(message: ToRankZero) -> None:
        parent.send(outgoing.encode(message))

    def receive() -> StepPlan:
        """The next plan. Waits as long as rank 0 lives: an idle engine has none, and needs no clock for it."""
        while (frame := parent.receive(None)) is None:
            continue
        return plans.decode(frame)

    try:
        config = frames_of_config().decode(parent.receive_config())
        # What takes long to import comes before the word that this rank is there: the others then wait for nothing.
        importlib.import_module("cairn.runner.runner")
        send(RankStarted())
        with ExitStack() as services:
            try:
                runner = build_rank(config)
                place = RankPlace(config.rank, config.tp_size, Path(config.rendezvous).parent, runner)
                for service in config.services:
                    make: ServiceFactory = load_function(service.factory, "the rank's service")
                    services.enter_context(make(place, service.settings))
            except ConfigError as error:
                send(BuildRefused.of(error))
                return 2
            send(RankReady())
            follow(runner, receive, send)
    except EngineDead as error:
        # Mostly rank 0 has ended, or another rank has: not this rank's fault, and no news of how.
        logger.error("this rank ends: %s", error)
        send(Fatal(str(error)))
        return 1
    except Exception as error:
        logger.exception("a rank has ended")
        send(Fatal(f"{type(error).__name__}: {error}"))
        return 1
    return 0


def main(arguments: Sequence[str]) -> int:
    return run_child(arguments, "rank", _serve)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
