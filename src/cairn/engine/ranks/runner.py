"""Rank 0 of a model that is cut among processes: it starts the others, and has each plan carried out by all.

    rank 0 (the engine's process)          rank 1, 2, ... (`worker`)
    |-- RankConfig ----------------------->|  read, torch imported
    |<------------------------ RankStarted-|
    |========= the ranks find each other, and each loads its share =====|
    |<------------------------- RankLoaded-|  or BuildRefused
    |========= on GPUs: the largest step, and two graphs ===============|
    |<------------------------ RankAtBarrier-|  while each of these is out: who is missing is missed here
    |<------------------ RankAvailableMemory-|
    |-- RankSizes ------------------------>|  of the rank that has least room
    |========= on GPUs: graph after graph is captured ==================|
    |<------------------------ RankAtBarrier-|  before and after each of them
    |<-------------------------- RankReady-|
    |-- plan ----------------------------->|  on GPUs while the step before it is out
    |========= the step: partial sums are put together ================|
    |<--------------------------- StepDone-|  all that the plan writes is written, on every rank

Between steps the others block on their sockets. A rank that ends, or keeps rank 0 waiting too long, ends the engine: on
GPUs, where no host waits for another rank within a step, by rank 0's wait for StepDone.
"""

import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import msgspec
import zmq

from cairn.engine.child_process import FINAL_FRAME_SECONDS, ChildProcess
from cairn.engine.ranks.wire import (
    RankAtBarrier,
    RankAvailableMemory,
    RankConfig,
    RankLoaded,
    RankReady,
    RankSizes,
    RankStarted,
    StepDone,
    follower_plan,
    frames_of_config,
    frames_of_plans,
    frames_of_sizes,
    frames_to_rank_zero,
)
from cairn.engine.ranks.worker import LoadedRank
from cairn.engine.wire import BuildRefused, Fatal
from cairn.errors import CairnError, EngineDead
from cairn.runner.contract import StepRunner
from cairn.step import StepPlan, StepResult, TokenMasks
from cairn.types import Clock, Keys, SystemClock

if TYPE_CHECKING:
    from cairn.engine.devices import Device
    from cairn.runner.runner import Observe, Runner

_Message = TypeVar("_Message")


@dataclass(frozen=True, slots=True)
class RankDeadlines:
    """How long rank 0 waits for another rank, in seconds. `hello`: until its process runs and has imported torch;
    `ready`: until it has its weights, until it has measured its room, and until it has its memory; `stop`: until it has
    ended by itself. What a step may take is in the RankConfig.
    """

    hello: float = 120.0
    ready: float = 1800.0
    stop: float = 5.0


class Follower:
    """Another rank as rank 0 sees it: a child process in the private folder."""

    def __init__(
        self, context: "zmq.Context[zmq.Socket[bytes]]", config: RankConfig, deadlines: RankDeadlines, clock: Clock
    ) -> None:
        self._deadlines = deadlines
        self._incoming = frames_to_rank_zero()
        self._config = frames_of_config().encode(config)
        self.child = ChildProcess(
            f"rank {config.rank}",
            "cairn.engine.ranks.worker",
            f"ipc://{Path(config.rendezvous).parent}/rank-{config.rank}",
            context=context,
            send_seconds=config.step_seconds,
            # One plan at a time is on its way; more than a few can only mean that nobody reads them.
            queued_frames=4,
            clock=clock,
        )

    def configure(self) -> None:
        """Sends the configuration as soon as the process runs."""
        self.child.wait_for(zmq.POLLOUT, self._deadlines.hello, "started")
        self.child.send(self._config, "configuration")

    def receive(self, wanted: type[_Message], seconds: float, what: str) -> _Message:
        """Waits for a message of the kind `wanted`. Raises ConfigError or ModelError where the rank refuses its
        configuration, and EngineDead when it fails or is late; `what`: what it has done then."""
        message = self._incoming.decode(self.child.receive(seconds, what))
        if isinstance(message, BuildRefused):
            raise message.error()
        if isinstance(message, Fatal):
            raise EngineDead(f"{self.child.name} has failed: {message.text}")
        if not isinstance(message, wanted):
            raise EngineDead(f"{self.child.name} has sent {message} instead of a {wanted.__name__}")
        return message

    def final_error(self) -> str | None:
        """Why the rank has failed, if its final frame says so."""
        frame = self.child.receive_final(FINAL_FRAME_SECONDS)
        message = None if frame is None else self._incoming.decode(frame)
        return f"{self.child.name} has failed: {message.text}" if isinstance(message, Fatal) else None


class Followers:
    """All ranks but 0, started together in one folder and ended together."""

    def __init__(self, config: RankConfig, deadlines: RankDeadlines, clock: Clock) -> None:
        self.folder = Path(config.rendezvous).parent
        self._deadlines = deadlines
        self._clock = clock
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._plans = frames_of_plans()
        self._all: list[Follower] = []
        try:
            for rank in range(1, config.tp_size):
                rank_config = msgspec.structs.replace(config, rank=rank)
                self._all.append(Follower(self._context, rank_config, deadlines, clock))
            for follower in self._all:
                follower.configure()
        except BaseException:
            self.close(kill=True)
            raise

    def __iter__(self) -> Iterator[Follower]:
        return iter(self._all)

    def receive(self, wanted: type[_Message], seconds: float, what: str) -> list[_Message]:
        """A message from each, all within `seconds`; see `Follower.receive`."""
        deadline, messages = self._clock.now() + seconds, list[_Message]()
        for each in self._all:
            left = max(0.0, deadline - self._clock.now()) if messages else seconds
            messages.append(each.receive(wanted, left, what))
        return messages

    def barrier(self, what: str) -> None:
        """Waits until each has reached `what`. Raises as `Follower.receive` does."""
        for arrived in self.receive(RankAtBarrier, self._deadlines.ready, what):
            if arrived.what != what:
                raise EngineDead(f"a rank is {arrived.what} while rank 0 is {what}")

    def send_sizes(self, sizes: RankSizes) -> None:
        frame = frames_of_sizes().encode(sizes)
        for follower in self._all:
            follower.child.send(frame, "sizes")

    def post(self, plan: StepPlan) -> None:
        frame = self._plans.encode(follower_plan(plan))
        for follower in self._all:
            if (end := follower.child.exit_reason()) is not None:
                raise EngineDead(end)
            follower.child.send(frame, "plan")

    def cause(self, error: Exception) -> str:
        """Why the ranks have failed. Rank 0 mostly sees only a broken connection: the other ranks know more."""
        errors = [text for each in self._all if (text := each.final_error()) is not None]
        exits = [reason for each in self._all if (reason := each.child.exit_reason()) is not None]
        killed = [reason for reason in exits if "killed" in reason]
        text = str(error) if isinstance(error, CairnError) else f"{type(error).__name__}: {error}"
        return (killed or errors or exits or [text])[0]

    def close(self, kill: bool) -> None:
        for follower in self._all:
            follower.child.request_exit(kill)
        for follower in self._all:
            follower.child.close(self._deadlines.stop)
        self._context.term()
        shutil.rmtree(self.folder, ignore_errors=True)


class RankedRunner(StepRunner):
    """Implements `StepRunner` for all ranks together. One thread only.

    `folder`: where the ranks' sockets are, a directory that only this user can enter; whoever adds services to ranks
    may put theirs there. `local_runner`: rank 0's runner, for its pages; to run plans on it alone would be a mistake.
    """

    def __init__(self, local_runner: "Runner", followers: Followers, step_seconds: float) -> None:
        self.forward_passes = 0
        self.steps = 0
        self.folder = followers.folder
        self.local_runner = local_runner
        self._followers = followers
        self._step_seconds = step_seconds
        self._dead: str | None = None

    @property
    def pids(self) -> tuple[int, ...]:
        """The process ids of rank 1, 2, ..., for whoever wants to look at them."""
        return tuple(follower.child.process.pid for follower in self._followers)

    def launch(self, plan: StepPlan) -> None:
        """All ranks begin the plan. Raises EngineDead when a rank is lost, and then whatever is called after it."""
        with self._handle_loss():
            self._followers.post(plan)
            self.local_runner.launch(plan)

    def drafts(self, step: int) -> Mapping[int, Keys]:
        """Rank 0's, which are every rank's. See `StepRunner`."""
        return self.local_runner.drafts(step)

    def sample(self, step: int, masks: TokenMasks) -> None:
        """Rank 0 samples, and tells the others. Raises as `launch` does."""
        with self._handle_loss():
            self.local_runner.sample(step, masks)

    def collect(self, step: int) -> StepResult:
        """Returns when every rank has carried the plan out. Raises as `launch` does."""
        with self._handle_loss():
            # The others first: a GPU of rank 0 would wait for a rank that has ended.
            for done in self._followers.receive(StepDone, self._step_seconds, f"done with step {step}"):
                if done.step != step:
                    raise EngineDead(f"a rank is done with step {done.step}, and step {step} is the oldest")
            result = self.local_runner.collect(step)
        self.forward_passes, self.steps = self.local_runner.forward_passes, self.local_runner.steps
        return result

    @contextmanager
    def _handle_loss(self) -> Iterator[None]:
        if self._dead is not None:
            raise EngineDead(self._dead)
        try:
            yield
        except Exception as error:
            self._dead = self._followers.cause(error)
            self._followers.close(kill=True)
            raise EngineDead(self._dead) from error

    def close(self) -> None:
        """Ends the other ranks; nothing can be run any more. Without it they end when this process does."""
        if self._dead is None:
            self._dead = "the ranks have been stopped"
            self._followers.close(kill=False)
        self.local_runner.close()


class LoadedRanks:
    """All ranks with their weights, and without memory. A context manager: unless `allocate` has been called in it, no
    process is left behind.

    `available_memory`: on GPUs, the bytes for pool and running states of the rank that has fewest.
    """

    def __init__(
        self,
        config: RankConfig,
        local_rank: LoadedRank,
        followers: Followers,
        deadlines: RankDeadlines,
        available_memory: int | None,
    ) -> None:
        self.available_memory = available_memory
        self._config = config
        self._local_rank = local_rank
        self._followers = followers
        self._deadlines = deadlines
        self._runner: RankedRunner | None = None

    def allocate(self, sizes: RankSizes, observe: "Observe | None" = None) -> RankedRunner:
        """A runner with memory of these sizes on every rank. Raises ConfigError, ModelError and EngineDead, as
        `load_ranks` does."""
        self._followers.send_sizes(sizes)
        local_runner = self._local_rank.allocate(sizes, observe, self._followers.barrier)
        self._followers.receive(RankReady, self._deadlines.ready, "built")
        self._runner = RankedRunner(local_runner, self._followers, self._config.step_seconds)
        return self._runner

    def __enter__(self) -> "LoadedRanks":
        return self

    def __exit__(self, *_: object) -> None:
        if self._runner is None:
            self._followers.close(kill=True)


def load_ranks(
    config: RankConfig,
    device: "Device | None" = None,
    deadlines: RankDeadlines | None = None,
    clock: Clock | None = None,
) -> LoadedRanks:
    """Starts the ranks 1 .. tp_size - 1 as processes; all load their shares of the model, rank 0 here. `device`: rank
    0's, None unless it has been chosen.

    Raises ConfigError or ModelError naming the flag or the file, whichever rank finds it, and EngineDead when a rank
    ends or is late; then no process is left behind.
    """
    folder = Path(tempfile.mkdtemp(prefix="cairn-ranks-"))
    config = msgspec.structs.replace(config, rank=0, rendezvous=str(folder / "rendezvous"))
    deadlines = deadlines or RankDeadlines()
    followers = Followers(config, deadlines, clock or SystemClock())
    try:
        followers.receive(RankStarted, deadlines.hello, "started")
        local_rank = LoadedRank(config, device)
        # Before the first step together: whoever has refused would be waited for in it.
        followers.receive(RankLoaded, deadlines.ready, "loaded")
        available_memory = (
            _least_available_memory(local_rank, followers, deadlines) if local_rank.device.is_gpu else None
        )
    except BaseException:
        followers.close(kill=True)
        raise
    return LoadedRanks(config, local_rank, followers, deadlines, available_memory)


def _least_available_memory(local_rank: LoadedRank, followers: Followers, deadlines: RankDeadlines) -> int:
    available_memory = local_rank.measure_available_memory(followers.barrier)
    others = followers.receive(RankAvailableMemory, deadlines.ready, "measured")
    return min(available_memory, *(each.num_bytes for each in others))
