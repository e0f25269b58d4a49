"""One transfer, from the consumer's side, as one state machine.

    RESOLVING -> HANDSHAKING -> CLAIMING -> READING -> CONFIRMING -> DONE
                      |             +---- nothing to read ---^
                      +---- only a release ---------------------------^
    any of them -> FAILED            nothing can arrive any more
    READING     -> ABANDONED         a late write may still come: the pages stay in quarantine
    ABANDONED   -> FAILED            the link says that none will

The outcome is known in DONE, FAILED and ABANDONED. Every state but ABANDONED has a deadline, and nobody waits for
ABANDONED. What was read may be used in DONE alone: the producer has then confirmed that its lease never lapsed before
the last byte had arrived. A lost connection ends it in every state, and gives the lease back.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping
from enum import Enum
from types import MappingProxyType
from typing import Any, Final

from cairn.transfer.claim import make_claim, plan_read
from cairn.transfer.contract import KvSource, PullEnded, PullId, PullSpec, ReadEnded, ReadOrder, Volume
from cairn.transfer.links.contract import LinkError, ReadState
from cairn.transfer.session import ConsumerTools, PeerFailed, ProducerSession
from cairn.transfer.wire import Claim, Confirm, Decline, Granted, Heartbeat, Refused, Release, Reply, Request

logger = logging.getLogger(__name__)


class PullState(Enum):
    """Where a transfer is, and what is true there."""

    RESOLVING = "resolving"
    """Nothing was sent; the host has not been checked."""
    HANDSHAKING = "handshaking"
    """The peer may be spoken to; it has not proved itself."""
    CLAIMING = "claiming"
    """The claim is sent; the lease may be ours or not."""
    READING = "reading"
    """The lease is ours; bytes arrive in the own pages."""
    CONFIRMING = "confirming"
    """All bytes have arrived; the producer has to confirm that the lease never lapsed."""
    DONE = "done"
    """Confirmed. The pages may be used."""
    FAILED = "failed"
    """Nothing may be used. No write can come; the pages are free."""
    ABANDONED = "abandoned"
    """Nothing may be used, and bytes may still arrive: the pages are in quarantine."""


TRANSITIONS: Mapping[PullState, frozenset[PullState]] = MappingProxyType(
    {
        PullState.RESOLVING: frozenset({PullState.HANDSHAKING, PullState.FAILED}),
        PullState.HANDSHAKING: frozenset({PullState.CLAIMING, PullState.DONE, PullState.FAILED}),
        PullState.CLAIMING: frozenset({PullState.READING, PullState.CONFIRMING, PullState.FAILED}),
        PullState.READING: frozenset({PullState.CONFIRMING, PullState.FAILED, PullState.ABANDONED}),
        PullState.CONFIRMING: frozenset({PullState.DONE, PullState.FAILED}),
        PullState.ABANDONED: frozenset({PullState.FAILED}),
        PullState.DONE: frozenset(),
        PullState.FAILED: frozenset(),
    }
)


class PullLimits:
    """Times in seconds: `answer` and `read` are deadlines, `heartbeat` an interval; a peer that did not answer is not
    tried again for `retry_silent`."""

    answer: Final = 5.0
    read: Final = 30.0
    heartbeat: Final = 5.0
    retry_silent: Final = 10.0


class Pull:
    """One transfer: `run`, then `drain`, by one `task`. Call `look` again and again meanwhile: a link makes no progress
    by itself. `is_silent`: it failed because the peer did not answer."""

    def __init__(
        self, pull: PullId, spec: PullSpec, tools: ConsumerTools, session_with: Callable[[KvSource], ProducerSession]
    ) -> None:
        """`session_with` returns the session with a server, and raises PeerFailed where there is none."""
        self.id = pull
        self.spec = spec
        self.state = PullState.RESOLVING
        self.failure: str | None = None
        self.is_silent = False
        self.session: ProducerSession | None = None
        self._session_with = session_with
        self._tools = tools
        self._claim: int | None = None
        self._grant: Granted | None = None
        self._volume: Volume | None = None
        self._read: asyncio.Future[ReadEnded] = tools.event_loop.create_future()
        self._aborted = False
        self.task: asyncio.Task[None] | None = None

    @property
    def outcome(self) -> PullEnded:
        """Before a grant its position is that of what the lease promises."""
        promised, grant = 0 if self.spec.source.nonce is None else len(self.spec.keys), self._grant
        position, checkpoint = (promised, None) if grant is None else (grant.position, grant.checkpoint_position)
        return PullEnded(self.id, self.failure, position, checkpoint, self._volume)

    @property
    def is_over(self) -> bool:
        """Whether the outcome is known."""
        return self.state in (PullState.DONE, PullState.FAILED, PullState.ABANDONED)

    def abort(self) -> None:
        """Give the transfer up."""
        if not self.is_over and not self._aborted:
            self._aborted = True
            # one that has not begun looks at `_aborted` first
            if self.task is not None and self.state is not PullState.RESOLVING:
                self.task.cancel()

    def look(self) -> None:
        """Drive the link."""
        if self.state in (PullState.READING, PullState.ABANDONED) and not self._read.done():
            try:
                ended = self._tools.worker.poll(self.id)
            except Exception:
                logger.exception("the read of transfer %d of %s", self.id, self.spec.request_id)
                ended = ReadEnded(self.id, ReadState.FAILED)
            if ended is not None:
                self._read.set_result(ended)

    async def run(self) -> None:
        """Returns when the outcome is known."""
        try:
            await self._transfer()
        except asyncio.CancelledError:
            if not self._aborted:
                raise
            self._fail("aborted")
        except PeerFailed as failure:
            self.is_silent = failure.is_silent
            self._fail(str(failure))
        except Exception as error:
            # One peer's doing must not end the thread that serves all of them.
            logger.exception("transfer %d of %s", self.id, self.spec.request_id)
            self._fail(f"{type(error).__name__}: {error}")

    async def drain(self) -> None:
        """Returns when no write can come any more. Some links end a read only with the peer's help, so it is told now
        and then."""
        while self.state is PullState.ABANDONED and not self._read.done():
            await asyncio.wait({self._read}, timeout=PullLimits.heartbeat)
            if self._claim is not None and self.session is not None and not self._read.done():
                self.session.tell(Heartbeat(self._claim), PullLimits.answer)
        if self.state is PullState.ABANDONED:
            self._to(PullState.FAILED)

    async def _transfer(self) -> None:
        """Returns when it is DONE."""
        if self._aborted:
            raise PeerFailed("aborted")
        spec = self.spec
        self.session = self._session_with(spec.source)
        self._to(PullState.HANDSHAKING)
        peer = await self.session.opened()
        if peer.engine_id != spec.source.engine_id:
            raise PeerFailed("the peer is another engine than the one that made the offer: it has restarted")
        if spec.release_only:
            await self._ask(Decline(spec.source.request_id or "", spec.source.nonce or b""))
            self._to(PullState.DONE)
            return
        record = make_claim(spec, self._tools.me.layout)
        if record is None:
            raise PeerFailed("there is too little to ask for")
        self._to(PullState.CLAIMING)
        self._claim = self.session.new_number()
        granted = await self._ask(record, self._claim)
        order = plan_read(spec, self.id, peer, granted) if isinstance(granted, Granted) else None
        if order is None or not isinstance(granted, Granted):
            raise PeerFailed("the peer's grant is not what was claimed")
        self._grant = granted
        if order.remote or order.remote_checkpoint is not None:
            await self._read_pages(order, self._claim)
        self._to(PullState.CONFIRMING)
        await self._ask(Confirm(self._claim))
        self._to(PullState.DONE)

    async def _read_pages(self, order: ReadOrder, claim: int) -> None:
        """Returns when all bytes have arrived. Raises PeerFailed."""
        assert self.session is not None
        try:
            self._tools.worker.start(order)
        except LinkError as error:
            raise PeerFailed(f"the pages cannot be read: {error}") from error
        self._to(PullState.READING)
        self.look()
        if not self._read.done():
            await self._wait_for_read(self.session, claim)
        ended = self._read.result()
        if ended.state is not ReadState.DONE:
            raise PeerFailed(f"the link failed while reading{ended.failure and ': '}{ended.failure}")
        self._volume = ended.volume

    async def _wait_for_read(self, session: ProducerSession, claim: int) -> None:
        beats = self._tools.event_loop.create_task(self._beat(claim))
        try:
            limit = PullLimits.read
            ends: set[asyncio.Future[Any]] = {self._read, beats, session.closed}
            await asyncio.wait(ends, timeout=limit, return_when=asyncio.FIRST_COMPLETED)
            if not self._read.done():
                refusal = beats.result() if beats.done() else PeerFailed(f"the read took longer than {limit:g} s")
                raise session.failure or refusal
        finally:
            beats.cancel()

    async def _beat(self, claim: int) -> PeerFailed:
        """Extends the lease now and then. Returns when the peer says that it has ended, or is gone."""
        while True:
            await asyncio.sleep(PullLimits.heartbeat)
            try:
                await self._ask(Heartbeat(claim))
            except PeerFailed as failure:
                if not failure.is_silent:
                    return failure

    async def _ask(self, request: Request, number: int | None = None) -> Reply:
        """Raises PeerFailed where the answer is a refusal, or none comes in time."""
        assert self.session is not None
        seconds = PullLimits.answer
        try:
            reply = await self.session.ask(request, seconds, number)
        except TimeoutError:
            reason = f"no answer within {seconds:g} s while {self.state.value}"
            raise PeerFailed(reason, is_silent=True) from None
        if isinstance(reply, Refused):
            if isinstance(request, Claim | Confirm):
                # nothing to give back: the lease is not ours, or no longer
                self._claim = None
            raise PeerFailed(f"refused by the peer: {reply.reason.value}")
        return reply

    def _fail(self, failure: str) -> None:
        """Give the lease back."""
        self.failure = failure
        if self._claim is not None and self.session is not None:
            self.session.tell(Release(self._claim), PullLimits.answer)
        is_reading = self.state is PullState.READING
        if is_reading:
            self._tools.worker.cancel(self.id)
            self.look()
        self._to(PullState.ABANDONED if is_reading and not self._read.done() else PullState.FAILED)

    def _to(self, state: PullState) -> None:
        """Change the state; the only place that does."""
        if state not in TRANSITIONS[self.state]:
            raise AssertionError(f"{self.spec.request_id}: {self.state.value} -> {state.value} is not a transition")
        self.state = state
