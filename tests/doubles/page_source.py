"""A page source in memory that is as slow, as unreliable and as late as a test wants. It writes into the pages of a
`SimulatedRunner`, some at each look, and what it has not finished it leaves as rubbish."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from cairn.cache.layout import CacheLayout
from cairn.cache.sequence_blocks import SequenceBlocks
from cairn.keys import common_tokens
from cairn.scheduler.page_source import FetchEvent, FetchPlan, FetchRequest, FetchTarget
from cairn.step import GRID
from cairn.transfer.contract import ContentName, PagesFree, PullEnded, PullId
from cairn.types import Keys, RequestId
from doubles.simulated_runner import SimulatedRunner, prefill_tags

RUBBISH = -1


@dataclass(frozen=True, slots=True)
class Behaviour:
    """How one fetch goes. `looks`: so many looks at the events until it has ended, and `late` more until nothing is
    written any more. `position`: no more than so many tokens come, `failure`: none. `ignores_abort`: it goes on, and
    says at its end that all is well."""

    looks: int = 0
    late: int = 0
    position: int | None = None
    failure: str | None = None
    ignores_abort: bool = False


@dataclass(slots=True, eq=False)
class OpenFetch:
    """One that may still write to `target`."""

    request: FetchRequest
    target: FetchTarget
    behaviour: Behaviour
    position: int
    looks: int
    late: int
    ended: bool = False
    aborted: bool = False


def write(runner: SimulatedRunner, tokens: Sequence[int], target: FetchTarget, block_size: int) -> None:
    """Fill the target's pages with what prefill would leave of the beginning `tokens` of a prompt."""
    tags, states = prefill_tags(tokens)
    for part in target.pages:
        for number, page in enumerate(part.pages.tolist(), part.first_page):
            if number * block_size < len(tokens):
                known = tags[number * block_size : (number + 1) * block_size]
                runner.write_tokens(page, known + [None] * (block_size - len(known)))
    if tokens:
        runner.write_state(target.state_pages, states[-1])


class ScriptedSource:
    """A `PageSource`. `add` says what it has; `script` how the next fetches go, well where it is empty; `seconds` what
    it says that a fetch takes; `looks_left`: how often it is asked before it is ready. `fetches`: those that may still
    write. Like a peer it has states at multiples of 64 and at the ends of what was added."""

    def __init__(
        self, runner: SimulatedRunner, layout: CacheLayout, seconds: float = 0.0, promised: bool = False
    ) -> None:
        self.script: deque[Behaviour] = deque()
        self.looks_left = 0
        self.seconds = seconds
        self.promised = promised
        self.fetches: dict[PullId, OpenFetch] = {}
        self.declined: list[RequestId] = []
        self.started: list[RequestId] = []
        self._runner = runner
        self._layout = layout
        self._known: list[tuple[ContentName, Keys]] = []
        self._events: list[FetchEvent] = []

    def add(self, tokens: Sequence[int], name: ContentName = ContentName()) -> None:  # noqa: B008 - frozen
        self._known.append((name, np.array(tokens, np.int64)))

    # -- the protocol ----------------------------------------------------------------------------------------------

    @property
    def is_busy(self) -> bool:
        return self.looks_left > 0

    def is_ready(self, request: FetchRequest) -> bool:
        if self.looks_left:
            self.looks_left -= 1
        return not self.looks_left

    def may_have(self, request: FetchRequest) -> bool:
        return self._reach(request) > 0

    def plan(self, request: FetchRequest, sequence: SequenceBlocks) -> FetchPlan | None:
        position = self._reach(request)
        if position <= sequence.hit:
            return None
        num_pages = self._layout.pages_for(position) - self._layout.pages_for(min(position, sequence.matched))
        num_bytes = (num_pages + self._layout.pages_per_checkpoint) * self._layout.page_bytes
        return FetchPlan(position, num_bytes, self.seconds, self.promised, "the double")

    def start(self, request: FetchRequest, target: FetchTarget) -> PullId:
        fetch = PullId(len(self.started))
        self.started.append(request.request_id)
        behaviour = self.script.popleft() if self.script else Behaviour()
        position = self._reach(request)
        if behaviour.position is not None and behaviour.position < position:
            position = behaviour.position // GRID * GRID
        self.fetches[fetch] = OpenFetch(request, target, behaviour, position, behaviour.looks, behaviour.late)
        return fetch

    def abort(self, fetch: PullId) -> None:
        if fetch in self.fetches:
            self.fetches[fetch].aborted = True

    def decline(self, request: FetchRequest) -> None:
        self.declined.append(request.request_id)

    def events(self) -> list[FetchEvent]:
        for fetch, own in list(self.fetches.items()):
            self._look(fetch, own)
        events, self._events = self._events, []
        return events

    # -- how a fetch goes ------------------------------------------------------------------------------------------

    def _look(self, fetch: PullId, own: OpenFetch) -> None:
        fails = own.behaviour.failure is not None or (own.aborted and not own.behaviour.ignores_abort)
        if not own.ended:
            if own.looks > 0 and not (own.aborted and fails):
                own.looks -= 1
                self._spoil(own)
                return
            own.ended = True
            if fails:
                self._spoil(own)
                self._events.append(PullEnded(fetch, own.behaviour.failure or "aborted"))
            else:
                write(self._runner, own.request.keys[: own.position].tolist(), own.target, self._layout.block_size)
                self._events.append(PullEnded(fetch, None, own.position, own.position))
                own.late = 0  # nothing is written after a good end
        elif own.late > 0:
            own.late -= 1
            self._spoil(own)
        if own.late == 0:
            del self.fetches[fetch]
            self._events.append(PagesFree(fetch))

    def _spoil(self, own: OpenFetch) -> None:
        """Half of it is there: a wrong half."""
        for part in own.target.pages:
            for page in part.pages.tolist():
                self._runner.write_tokens(page, [RUBBISH] * self._layout.block_size)
        self._runner.write_state(own.target.state_pages, (RUBBISH, RUBBISH))

    def _reach(self, request: FetchRequest) -> int:
        """How many tokens of the prompt it has, with the state behind them."""
        reach = 0
        for name, keys in self._known:
            if name == request.name:
                shared = common_tokens(keys, request.keys)
                reach = max(reach, shared if shared == len(keys) else shared // GRID * GRID)
        return reach
