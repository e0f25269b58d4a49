"""The other ranks as rank 0 sees them: each a process, and a socket to it."""

import logging
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec
import zmq

from cairn.engine.rank_wire import (
    Hello,
    RankConfig,
    RankFailed,
    RankReady,
    RankRefused,
    StepDone,
    ToRankZero,
    follower_plan,
    frames_of_config,
    frames_of_plans,
    frames_to_rank_zero,
)
from cairn.engine.wire import MAX_FRAME_BYTES
from cairn.errors import CairnError, ConfigError, EngineDead
from cairn.step import StepPlan
from cairn.types import Clock

_LOOK_SECONDS = 0.1
_LAST_WORDS_SECONDS = 0.5

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RankDeadlines:
    """How long rank 0 waits for another rank, in seconds. `hello`: until its process runs and has imported torch;
    `ready`: until it has its weights; `stop`: until it has ended by itself. What a step may take is in the RankConfig.
    """

    hello: float = 120.0
    ready: float = 1800.0
    stop: float = 5.0


class Follower:
    """Another rank as rank 0 sees it: a process, and a PAIR socket in the private folder."""

    def __init__(
        self, context: "zmq.Context[zmq.Socket[bytes]]", config: RankConfig, deadlines: RankDeadlines, clock: Clock
    ) -> None:
        self.rank = config.rank
        self._clock = clock
        self._deadlines = deadlines
        self._step_seconds = config.step_seconds
        self._incoming = frames_to_rank_zero()
        self._socket = context.socket(zmq.PAIR)
        self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
        self._socket.setsockopt(zmq.LINGER, 0)
        # One plan at a time is on its way; more than a few can only mean that nobody reads them.
        self._socket.setsockopt(zmq.SNDHWM, 4)
        self._socket.setsockopt(zmq.SNDTIMEO, int(config.step_seconds * 1000))
        self._config = frames_of_config().encode(config)
        address = f"ipc://{Path(config.rendezvous).parent}/rank-{config.rank}"
        level = logging.getLevelName(logger.getEffectiveLevel())
        # -P: a module of that name lying in the current directory must not get in the way.
        command = (sys.executable, "-P", "-m", "cairn.engine.rank_worker", address, level)
        try:
            self._socket.bind(address)
            self.process = subprocess.Popen(command, stdin=subprocess.PIPE)
        except zmq.ZMQError as error:
            self._socket.close()
            raise ConfigError(f"no socket can be made at {address}: {error}; set TMPDIR to another place") from error
        except BaseException:
            # an open socket would keep the context from ever ending
            self._socket.close()
            raise

    def configure(self) -> None:
        """Gives the rank its configuration as soon as its process is there to take it."""
        self._wait(zmq.POLLOUT, self._deadlines.hello, "started")
        self._send(self._config, "configuration")

    def expect_hello(self) -> None:
        self._expect(Hello(), self._deadlines.hello, "started")

    def expect_ready(self) -> None:
        """Raises ConfigError or ModelError where the rank refuses its configuration."""
        self._expect(RankReady(), self._deadlines.ready, "built")

    def expect_done(self, step: int) -> None:
        self._expect(StepDone(step), self._step_seconds, f"done with step {step}")

    def post(self, plan: bytes) -> None:
        """`plan`: its frame."""
        self._send(plan, "plan")

    def end(self) -> str | None:
        """How the rank's process has ended, or None while it runs."""
        code = self.process.poll()
        if code is None:
            return None
        how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        return f"rank {self.rank} has ended: {how}"

    def last_words(self, seconds: float) -> str | None:
        """Why the rank has given up, if it says so within `seconds`."""
        if self._socket.poll(int(seconds * 1000)):
            message = self._incoming.decode(self._socket.recv())
            if isinstance(message, RankFailed):
                return f"rank {self.rank} has failed: {message.text}"
        return None

    def let_go(self, kill: bool) -> None:
        """Tells the process to end, or ends it."""
        if kill:
            self.process.kill()
        if self.process.stdin is not None:
            self.process.stdin.close()

    def close(self) -> None:
        """Returns when the process has ended. `let_go` first."""
        try:
            self.process.wait(self._deadlines.stop)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self._socket.close()

    def _send(self, frame: bytes, what: str) -> None:
        try:
            self._socket.send(frame)
        except zmq.Again:
            raise EngineDead(f"rank {self.rank} has taken no {what} for {self._step_seconds:g} s") from None

    def _expect(self, wanted: ToRankZero, seconds: float, what: str) -> None:
        message = self._receive(seconds, what)
        if isinstance(message, RankRefused):
            raise message.error()
        if isinstance(message, RankFailed):
            raise EngineDead(f"rank {self.rank} has failed: {message.text}")
        if message != wanted:
            raise EngineDead(f"rank {self.rank} has sent {message} instead of {wanted}")

    def _receive(self, seconds: float, what: str) -> ToRankZero:
        self._wait(zmq.POLLIN, seconds, what)
        return self._incoming.decode(self._socket.recv())

    def _wait(self, event: int, seconds: float, what: str) -> None:
        """Until the socket can do this. Raises EngineDead when the process ends before, or it takes longer."""
        deadline = self._clock.now() + seconds
        while True:
            left = deadline - self._clock.now()
            if self._socket.poll(max(0, int(min(left, _LOOK_SECONDS) * 1000)), event):
                return
            if (end := self.end()) is not None:
                # What it said last may have come in between.
                if event == zmq.POLLIN and self._socket.poll(int(_LAST_WORDS_SECONDS * 1000)):
                    return
                raise EngineDead(end)
            if left <= 0:
                raise EngineDead(f"rank {self.rank} was not {what} within {seconds:g} s")


class Followers:
    """All ranks but 0, started together in one folder and ended together."""

    def __init__(self, config: RankConfig, deadlines: RankDeadlines, clock: Clock) -> None:
        self.folder = Path(config.rendezvous).parent
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._plans = frames_of_plans()
        self._all: list[Follower] = []
        try:
            for rank in range(1, config.tp_size):
                own = msgspec.structs.replace(config, rank=rank)
                self._all.append(Follower(self._context, own, deadlines, clock))
            for follower in self._all:
                follower.configure()
        except BaseException:
            self.close(kill=True)
            raise

    def __iter__(self) -> Iterator[Follower]:
        return iter(self._all)

    def post(self, plan: StepPlan) -> None:
        frame = self._plans.encode(follower_plan(plan))
        for follower in self._all:
            if (end := follower.end()) is not None:
                raise EngineDead(end)
            follower.post(frame)

    def cause(self, error: Exception) -> str:
        """Rank 0 mostly learns of a loss by a broken line; what has happened is known elsewhere."""
        said = [words for each in self._all if (words := each.last_words(_LAST_WORDS_SECONDS)) is not None]
        ends = [end for each in self._all if (end := each.end()) is not None]
        killed = [end for end in ends if "killed" in end]
        text = str(error) if isinstance(error, CairnError) else f"{type(error).__name__}: {error}"
        return (killed or said or ends or [text])[0]

    def close(self, kill: bool) -> None:
        for follower in self._all:
            follower.let_go(kill)
        for follower in self._all:
            follower.close()
        self._context.term()
        shutil.rmtree(self.folder, ignore_errors=True)
