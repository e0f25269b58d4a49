"""The engine loop: receive, step, send; audit when idle."""

import logging
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Protocol

from cairn.engine.contract import MAX_LOGPROB_ENTRIES, CacheView, GenerateOutput, GenerateRequest
from cairn.engine.core import Core
from cairn.engine.wire import (
    Abort,
    AwaitTools,
    CacheQuery,
    CacheReply,
    FromCore,
    Outputs,
    Refusal,
    ReleaseKvTransfer,
    Reset,
    ResetReply,
    Shutdown,
    StatsQuery,
    StatsReply,
    Submit,
    ToCore,
)
from cairn.errors import RequestError
from cairn.types import Clock, SystemClock

_IDLE_SECONDS = 1.0
_SETTLE_SECONDS = 0.05
_MESSAGES_PER_TURN = 256

logger = logging.getLogger(__name__)


class CoreLink(Protocol):
    """The core's end of its line to the client."""

    def receive(self, seconds: float) -> ToCore | None:
        """The next message, or None when none comes within `seconds`, or `wake` is called."""

    def wake(self) -> None:
        """End a `receive` that waits. For other threads."""

    def send(self, message: FromCore) -> None:
        """Raises EngineDead when the client does not take it."""


def run_core(core: Core, link: CoreLink, clock: Clock | None = None) -> None:
    """Turn `core` until Shutdown comes. Whatever the core raises in a step or an audit comes out of here.

    The accounting is recounted once per idle period, and only when nothing has changed for a moment: a request that
    follows on the heels of another does not wait for the audit.
    """
    core.start(link.wake)
    try:
        _turn(core, link, clock or SystemClock())
        core.write_back()
    finally:
        core.close()


class _CacheViews:
    """Answers cache queries, one slice of the oldest at a time. The client bounds how many are open."""

    def __init__(self, core: Core, link: CoreLink) -> None:
        self._core = core
        self._link = link
        self._queries: deque[CacheQuery] = deque()
        self._gathering: Iterator[CacheView | None] | None = None

    def __bool__(self) -> bool:
        return bool(self._queries)

    def add(self, query: CacheQuery) -> None:
        self._queries.append(query)

    def advance(self) -> None:
        """Gather one more slice; send the view when it is complete."""
        if self._gathering is None:
            self._gathering = self._core.cache_view(self._queries[0].max_paths)
        view = next(self._gathering)
        if view is not None:
            self._gathering = None
            self._link.send(CacheReply(self._queries.popleft().number, view))


def _turn(core: Core, link: CoreLink, clock: Clock) -> None:
    audited, changed = False, clock.now()
    views = _CacheViews(core, link)
    while True:
        busy = core.has_work or views
        message = link.receive(0.0 if busy else _IDLE_SECONDS if audited else _SETTLE_SECONDS)
        taken = 0
        while message is not None:
            if isinstance(message, Shutdown):
                return
            if _take(core, link, views, message):
                audited, changed = False, clock.now()
            taken += 1
            message = link.receive(0.0) if taken < _MESSAGES_PER_TURN else None
        for request_id, error in core.poll_ready():
            _refuse(link, request_id, error)
        if outputs := core.poll():
            _send_outputs(link, outputs)
        if views:
            views.advance()
        if core.has_work:
            _send_outputs(link, core.step())
            core.settle()
            audited, changed = False, clock.now()
        elif not audited and clock.now() - changed >= _SETTLE_SECONDS:
            core.idle()
            audited = True


def _send_outputs(link: CoreLink, outputs: Sequence[GenerateOutput]) -> None:
    """In one frame, or in several where log-probabilities of whole vocabularies would not fit into one. Without outputs
    a frame is the core's sign of life."""
    frame, num_entries = list[GenerateOutput](), 0
    for output in outputs:
        num_entries += output.num_logprob_entries
        if frame and num_entries > MAX_LOGPROB_ENTRIES:
            link.send(Outputs(frame))
            frame, num_entries = [], output.num_logprob_entries
        frame.append(output)
    link.send(Outputs(frame))


def _take(core: Core, link: CoreLink, views: _CacheViews, message: ToCore) -> bool:
    """Carry one message out; True when it may have changed the core."""
    match message:
        case Submit(requests):
            _submit(core, link, requests)
        case Abort(request_id):
            core.abort(request_id)
        case AwaitTools(request_id, index):
            core.await_tools(request_id, index)
        case ReleaseKvTransfer(params):
            core.release_kv_transfer(params)
        case StatsQuery(number):
            link.send(StatsReply(number, core.stats()))
            return False
        case CacheQuery():
            views.add(message)
            return False
        case Reset(number):
            link.send(ResetReply(number, core.reset_cache()))
    return True


def _submit(core: Core, link: CoreLink, requests: Sequence[GenerateRequest]) -> None:
    try:
        core.submit(*requests)
    except RequestError as error:
        _refuse(link, requests[0].request_id, error)


def _refuse(link: CoreLink, first: str, error: RequestError) -> None:
    logger.debug("request %s and what came with it refused: %s", first, error)
    link.send(Refusal.of(first, error))
