"""One transfer, from the consumer's side: a coroutine from a spec to its outcome, and on to its last write.

    handshaking -> claiming -> reading -> confirming -> done          what `_transfer` does, line by line
                                                                      (only a release ends behind the handshake)
    any of them -> failed                nothing can arrive any more
    reading     -> abandoned -> failed   a late write may still come: the pages stay in quarantine until the link says
                                         that none will

The outcome is known when it is done, failed or abandoned. Whatever is waited for before has a deadline, and nobody
waits for what is abandoned. What was read may be used when it is done alone: the producer has then confirmed that its
lease never lapsed before the last byte had arrived. A lost connection ends it at any time, and gives the lease back.
"""

import asyncio
import logging
from collections.abc import Callable
from typing import Any, Final

from cairn.transfer.claim import make_claim, plan_read
from cairn.transfer.contract import KvSource, PullEnded, PullId, PullSpec, ReadEnded, ReadOrder, Volume
from cairn.transfer.links.contract import LinkError, ReadState
from cairn.transfer.session import ConsumerTools, PeerFailed, ProducerSession
from cairn.transfer.wire import Claim, Confirm, Decline, Granted, Heartbeat, Refused, Release, Reply, Request

logger = logging.getLogger(__name__)


class PullLimits:
    """Times in seconds: `answer` and `read` are deadlines, `heartbeat` an interval; a peer that did not answer is not
    tried again for `retry_silent`."""

    answer: Final = 5.0
    read: Final = 30.0
    heartbeat: Final = 5.0
    retry_silent: Final = 10.0


class Pull:
    """One transfer: `run`, then `drain`, by one `task`. Call `look` again and again meanwhile: a link makes no progress
    by itself. `is_over`: the outcome is known; `is_reading`: bytes may arrive in the own pages."""

    def __init__(
        self, pull: PullId, spec: PullSpec, tools: ConsumerTools, session_with: Callable[[KvSource], ProducerSession]
    ) -> None:
        """`session_with` returns the session with a server, and raises PeerFailed where there is none."""
        self.id = pull
        self.spec = spec
        self.is_over = False
        self.is_reading = False
        self.failure: str | None = None
        self.session: ProducerSession | None = None
        self._session_with = session_with
        self._tools = tools
        self._claim: int | None = None
        self._grant: Granted | None = None
        self._volume: Volume | None = None
        self._read: asyncio.Future[ReadEnded] = tools.event_loop.create_future()
        self.task: asyncio.Task[None] | None = None

    @property
    def outcome(self) -> PullEnded:
        """Before a grant its position is that of what the lease promises."""
        promised, grant = 0 if self.spec.source.nonce is None else len(self.spec.keys), self._grant
        position, checkpoint = (promised, None) if grant is None else (grant.position, grant.checkpoint_position)
        return PullEnded(self.id, self.failure, position, checkpoint, self._volume)

    def abort(self) -> None:
        """Give the transfer up."""
        if not self.is_over and self.failure is None:
            self.failure = "aborted"
            # one that has not begun looks at it first
            if self.task is not None and self.session is not None:
                self.task.cancel()

    def look(self) -> None:
        """Drive the link."""
        if self.is_reading:
            try:
                ended = self._tools.worker.poll(self.id)
            except Exception:
                logger.exception("the read of transfer %d of %s", self.id, self.spec.request_id)
                ended = ReadEnded(self.id, ReadState.FAILED)
            if ended is not None:
                self.is_reading = False
                self._read.set_result(ended)

    async def run(self) -> None:
        """Returns when the outcome is known; a lease that has not been confirmed is given back."""
        try:
            if self.failure is None:
                await self._transfer()
        except asyncio.CancelledError:
            if self.failure is None:
                # not this transfer is given up, but the thread ends
                raise
        except PeerFailed as failure:
            self.failure = str(failure)
        except Exception as error:
            # One peer's doing must not end the thread that serves all of them.
            logger.exception("transfer %d of %s", self.id, self.spec.request_id)
            self.failure = f"{type(error).__name__}: {error}"
        self.is_over = True
        if self.failure is not None:
            self._tell(Release)
            if self.is_reading:
                self._tools.worker.cancel(self.id)
                self.look()

    async def drain(self) -> None:
        """Returns when no write can come any more."""
        if self.is_reading:
            await self._read_ended()

    async def _transfer(self) -> None:
        """Returns when it is done. Raises PeerFailed."""
        spec = self.spec
        self.session = self._session_with(spec.source)
        peer = await self.session.opened()
        if peer.engine_id != spec.source.engine_id:
            raise PeerFailed("the peer is another engine than the one that made the offer: it has restarted")
        if spec.release_only:
            await self._ask(Decline(spec.source.request_id or "", spec.source.nonce or b""), "declining")
            return
        record = make_claim(spec, self._tools.me.layout)
        if record is None:
            raise PeerFailed("there is too little to ask for")
        self._claim = self.session.new_number()
        granted = await self._ask(record, "claiming", self._claim)
        order = plan_read(spec, self.id, peer, granted) if isinstance(granted, Granted) else None
        if order is None or not isinstance(granted, Granted):
            raise PeerFailed("the peer's grant is not what was claimed")
        self._grant = granted
        if order.remote or order.remote_checkpoint is not None:
            await self._read_pages(order, self.session)
        await self._ask(Confirm(self._claim), "confirming")

    async def _read_pages(self, order: ReadOrder, session: ProducerSession) -> None:
        """Returns when all bytes have arrived. Raises PeerFailed."""
        try:
            self._tools.worker.start(order)
        except LinkError as error:
            raise PeerFailed(f"the pages cannot be read: {error}") from error
        self.is_reading = True
        self.look()
        try:
            async with asyncio.timeout(PullLimits.read):
                ended = await self._read_ended(session.closed)
        except TimeoutError:
            raise PeerFailed(f"the read took longer than {PullLimits.read:g} s") from None
        if ended is None:
            raise session.failure or PeerFailed("the session has ended")
        if ended.state is not ReadState.DONE:
            raise PeerFailed(f"the link failed while reading{ended.failure and ': '}{ended.failure}")
        self._volume = ended.volume

    async def _read_ended(self, *ends: asyncio.Future[Any]) -> ReadEnded | None:
        """How the read has ended; None if one of `ends` is done before. The peer is told now and then that it is still
        read from: that keeps the lease, and some links end a read only with its help."""
        while not self._read.done() and not any(end.done() for end in ends):
            waits: set[asyncio.Future[Any]] = {self._read, *ends}
            done, _ = await asyncio.wait(waits, timeout=PullLimits.heartbeat, return_when=asyncio.FIRST_COMPLETED)
            if not done:
                self._tell(Heartbeat)
        return self._read.result() if self._read.done() else None

    async def _ask(self, request: Request, doing: str, number: int | None = None) -> Reply:
        """Raises PeerFailed where the answer is a refusal, or none comes in time."""
        assert self.session is not None
        seconds = PullLimits.answer
        try:
            reply = await self.session.ask(request, seconds, number)
        except TimeoutError:
            # The next transfer begins with a new handshake: the peer may have forgotten this session.
            self.session.close(PeerFailed("the peer did not answer", is_silent=True))
            raise PeerFailed(f"no answer within {seconds:g} s while {doing}") from None
        if isinstance(reply, Refused):
            if isinstance(request, Claim | Confirm):
                # nothing to give back: the lease is not ours, or no longer
                self._claim = None
            raise PeerFailed(f"refused by the peer: {reply.reason.value}")
        return reply

    def _tell(self, kind: type[Heartbeat] | type[Release]) -> None:
        """Say something of the claim that needs no answer."""
        if self._claim is not None and self.session is not None:
            self.session.tell(kind(self._claim), PullLimits.answer)
