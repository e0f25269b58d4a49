"""Rank 0 of a model that is cut among processes: it starts the others, and has each plan carried out by all.

    rank 0 (the engine's process)          rank 1, 2, ... (`rank_worker`)
    |-- RankConfig ----------------------->|  read, torch imported
    |<------------------------------ Hello-|
    |========= the ranks find each other, and each loads its share =====|
    |<-------------------------- RankReady-|  or RankRefused
    |-- plan ----------------------------->|
    |========= the step: partial sums are put together ================|
    |<--------------------------- StepDone-|  all that the plan writes is written, on every rank

Between steps the others block on their sockets. A rank that ends, or keeps rank 0 waiting too long, ends the engine.
"""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from cairn.engine.rank_followers import Followers, RankDeadlines
from cairn.engine.rank_wire import RankConfig
from cairn.engine.rank_worker import build_rank
from cairn.errors import EngineDead
from cairn.step import StepPlan, StepResult, TokenMasks
from cairn.types import Clock, SystemClock

if TYPE_CHECKING:
    from cairn.runner.runner import Observe, Runner


class RankedRunner:
    """Implements `StepRunner` for all ranks together. One thread only.

    `folder`: where the ranks' sockets are, a directory that only this user can enter; whoever adds services to ranks
    may put theirs there. `own`: rank 0's runner, for its pages; to run plans on it alone would be a mistake.
    """

    def __init__(self, own: "Runner", followers: Followers) -> None:
        self.forward_passes = 0
        self.steps = 0
        self.folder = followers.folder
        self.own = own
        self._followers = followers
        self._dead: str | None = None

    @property
    def pids(self) -> tuple[int, ...]:
        """The process ids of rank 1, 2, ..., for whoever wants to look at them."""
        return tuple(follower.process.pid for follower in self._followers)

    def run(self, plan: StepPlan, masks: TokenMasks | None = None) -> StepResult:
        """A step from its launch to its end."""
        self.launch(plan)
        self.draw(plan.step, masks or {})
        return self.collect(plan.step)

    def launch(self, plan: StepPlan) -> None:
        """All ranks begin the plan. Raises EngineDead when a rank is lost, and then whatever is called after it."""
        with self._losses():
            self._followers.post(plan)
            self.own.launch(plan)

    def draw(self, step: int, masks: TokenMasks) -> None:
        """Rank 0 draws, and tells the others. Raises as `launch` does."""
        with self._losses():
            self.own.draw(step, masks)

    def collect(self, step: int) -> StepResult:
        """Returns when every rank has carried the plan out. Raises as `launch` does."""
        with self._losses():
            result = self.own.collect(step)
            for follower in self._followers:
                follower.expect_done(step)
        self.forward_passes, self.steps = self.own.forward_passes, self.own.steps
        return result

    @contextmanager
    def _losses(self) -> Iterator[None]:
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


def build_ranked(
    config: RankConfig,
    observe: "Observe | None" = None,
    deadlines: RankDeadlines | None = None,
    clock: Clock | None = None,
) -> RankedRunner:
    """Starts the ranks 1 .. tp_size - 1 as processes and builds rank 0 here.

    Raises ConfigError or ModelError naming the flag or the file, whichever rank finds it, and EngineDead when a rank
    ends or is late; then no process is left behind.
    """
    folder = Path(tempfile.mkdtemp(prefix="cairn-ranks-"))
    config = msgspec.structs.replace(config, rank=0, rendezvous=str(folder / "rendezvous"))
    followers = Followers(config, deadlines or RankDeadlines(), clock or SystemClock())
    try:
        for follower in followers:
            follower.expect_hello()
        own = build_rank(config, observe)
        for follower in followers:
            follower.expect_ready()
    except BaseException:
        followers.close(kill=True)
        raise
    return RankedRunner(own, followers)
