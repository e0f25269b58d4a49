"""One tensor-parallel rank in a process of its own: `python -m cairn.engine.ranks.worker ADDRESS LOG_LEVEL`.

Started by `runner.load_ranks`, never by hand. ADDRESS is rank 0's ZMQ socket for this rank, in a directory that only
this user can enter. The first frame is the RankConfig, the second the RankSizes; then the rank carries out every plan
that comes. Standard input is a pipe whose other end rank 0 holds open: when it closes, rank 0 is gone, and so is this
process.
"""

import importlib
import logging
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from cairn.engine.child_process import ParentLink, freeze_heap, load_function, run_child
from cairn.engine.ranks.wire import (
    RankAtBarrier,
    RankAvailableMemory,
    RankConfig,
    RankLoaded,
    RankReady,
    RankSizes,
    RankStarted,
    StepDone,
    ToRankZero,
    frames_of_config,
    frames_of_plans,
    frames_of_sizes,
    frames_to_rank_zero,
)
from cairn.engine.wire import BuildRefused, Fatal
from cairn.errors import ConfigError, EngineDead
from cairn.runner.contract import StepRunner
from cairn.step import StepPlan
from cairn.types import SystemClock

if TYPE_CHECKING:
    from cairn.engine.decode_capture import Barrier
    from cairn.engine.devices import Device
    from cairn.runner.runner import Observe, Runner

logger = logging.getLogger(__name__)

_POLL_SECONDS = 50e-6
"""Between two looks at a step that is out and at plans that come."""

_STOP_SECONDS = 5.0


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
    computes_on_host: bool


ServiceFactory = Callable[[RankPlace, bytes], AbstractContextManager[object]]
"""Called with the rank's place and the service's settings. Raises ConfigError."""


@contextmanager
def service_thread(name: str, serve: Callable[[], None], stop: Callable[[], None]) -> Iterator[None]:
    """A service in a thread of its own, which `stop` has return, as long as the context is open. If it fails, so does
    this process, and with it the engine."""

    def run() -> None:
        try:
            serve()
        except Exception:
            logger.exception("the rank's thread for %s has ended", name)
            os._exit(1)

    thread = threading.Thread(target=run, name=f"cairn-rank-{name}", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop()
        thread.join(_STOP_SECONDS)


class LoadedRank:
    """A rank that has joined the others and loaded its share of the model; its memory is not allocated yet. `device`:
    what it computes on."""

    def __init__(self, config: RankConfig, device: "Device | None" = None) -> None:
        """`device`: None unless it has been chosen.

        Raises ConfigError or ModelError, and EngineDead when not all ranks join in time.
        """
        # Here and not above: rank 0's module is imported where nothing of torch is wanted.
        from cairn.engine.devices import (
            LoadedModel,
            as_served,
            choose_device,
            explain_out_of_memory,
            kept_weights,
            open_encoder,
        )
        from cairn.layers.process_ranks import join_ranks
        from cairn.models.registry import open_model

        engine = config.engine
        self._config = config
        opened = open_model(Path(engine.model), engine.dtype, engine.quantization, kept_weights(engine))
        opened = as_served(engine, opened)
        if config.serves_mtp:
            opened = opened.with_head()
        self.device = device or choose_device(engine, opened, config.rank)
        if self.device.is_gpu:
            # Ranks are of this machine: nobody else needs to reach the port at which NCCL's find each other.
            os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
        communicator = join_ranks(
            Path(config.rendezvous),
            config.rank,
            config.tp_size,
            self.device.place,
            join_seconds=config.join_seconds,
            seconds=config.step_seconds,
            exact=engine.exact,
        )
        with explain_out_of_memory(self.device):
            model = opened.build(
                exact=engine.exact,
                communicator=communicator,
                backend=self.device.backend,
                device=self.device.place,
            )
            vision = open_encoder(engine, opened, self.device, config.rank)
        make_graphs = None if config.graphs is None else load_function(config.graphs, "what makes graphs")
        self._loaded = LoadedModel(engine, opened, self.device, model, vision, make_graphs)

    def measure_available_memory(self, barrier: "Barrier") -> int:
        """See `devices.LoadedModel`; all ranks do it at the same time."""
        return self._loaded.measure_available_memory(barrier)

    def allocate(self, sizes: RankSizes, observe: "Observe | None", barrier: "Barrier") -> "Runner":
        """A runner with memory of these sizes and with graphs, the same on all ranks. Raises ConfigError or ModelError,
        and EngineDead when another rank is lost meanwhile."""
        return self._loaded.allocate(sizes.num_pages, sizes.num_slots, observe, SystemClock(), barrier)


def follow(
    runner: StepRunner,
    receive: Callable[[bool], StepPlan | None],
    send: Callable[[StepDone], None],
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Carries out plan after plan. Returns never; whatever the runner or the line raises comes out of here.

    `receive` gives the next plan; if it may not wait, None where none has come. A plan is launched as soon as it comes,
    also while the step before it is out, and a step is said to be done as soon as it is: how long one may take is for
    rank 0 to say, which ends this process.
    """
    out: deque[int] = deque()
    while True:
        plan = receive(not out)
        if plan is not None:
            runner.launch(plan)
            runner.sample(plan.step, {})
            out.append(plan.step)
        elif runner.is_complete:
            runner.collect(out[0])
            send(StepDone(out.popleft()))
        else:
            sleep(_POLL_SECONDS)


def _serve(parent: ParentLink) -> int:
    outgoing, plans = frames_to_rank_zero(), frames_of_plans()

    def send(message: ToRankZero) -> None:
        parent.send(outgoing.encode(message))

    def at_barrier(what: str) -> None:
        send(RankAtBarrier(what))

    def receive_frame() -> bytes:
        """Waits as long as rank 0 lives: an idle engine has no plan, and needs no clock for it."""
        while (frame := parent.receive(None)) is None:
            continue
        return frame

    def receive(may_wait: bool) -> StepPlan | None:
        frame = receive_frame() if may_wait else parent.receive(0)
        return None if frame is None else plans.decode(frame)

    try:
        config = frames_of_config().decode(parent.receive_config())
        # What takes long to import comes before the word that this rank is there: the others then wait for nothing.
        importlib.import_module("cairn.runner.runner")
        send(RankStarted())
        with ExitStack() as services:
            try:
                rank = LoadedRank(config)
                send(RankLoaded())
                if rank.device.is_gpu:
                    send(RankAvailableMemory(rank.measure_available_memory(at_barrier)))
                sizes = frames_of_sizes().decode(receive_frame())
                runner = rank.allocate(sizes, None, at_barrier)
                folder, on_host = Path(config.rendezvous).parent, rank.device.backend is None
                place = RankPlace(config.rank, config.tp_size, folder, runner, on_host)
                for service in config.services:
                    make: ServiceFactory = load_function(service.factory, "the rank's service")
                    services.enter_context(make(place, service.settings))
            except ConfigError as error:
                send(BuildRefused.of(error))
                return 2
            freeze_heap()
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
