"""The producer's side of transfers: it answers what consumers ask, each by a connection of its own.

    claim with a lease      --> Leases: Granted or Refused
    claim without a lease   --> LookupRequest --> an offer: leased to the sender, Granted
                                             +--> nothing, or no answer in time: Refused(NOT_CACHED)

The cache belongs to the scheduler, which answers when it can; everything else is answered at once and in order. What a
connection has claimed is its own: nobody else can speak of it, and it is released when the connection is lost.
"""

import asyncio
import logging
from collections.abc import Callable

from cairn.transfer.contract import LookupId, LookupRequest, Peer
from cairn.transfer.digest import DIGEST_BYTES
from cairn.transfer.leases import Claimed, Lease, LeaseLimits, Leases
from cairn.transfer.session import explain_layouts
from cairn.transfer.stream import ConnectionLost, TlsStream
from cairn.transfer.wire import (
    GEOMETRY,
    HELLO,
    QUESTION,
    VERSION,
    Answer,
    Claim,
    Confirm,
    Decline,
    Denied,
    Done,
    FrameReader,
    Heartbeat,
    RefusalReason,
    Refused,
    Release,
    Reply,
    Request,
    Welcome,
    encode,
)
from cairn.types import Clock

ROOM_SECONDS = 5.0
"""How long a consumer may take no answers before its connection is closed."""

MAX_LOOKUPS = 64
"""Claims without a lease that are open at a time, of all consumers and of each; more are refused."""

LOOKUP_SECONDS = 2.0
"""How long one waits, well below the time after which a consumer gives up."""

logger = logging.getLogger(__name__)


class Producer:
    """Serves the consumers of one engine's pages, which are leased through `leases`. `emit` tells the scheduler of
    claims without a lease."""

    def __init__(
        self,
        me: Peer,
        limits: LeaseLimits,
        clock: Clock,
        random: Callable[[int], bytes],
        emit: Callable[[LookupRequest], None],
    ) -> None:
        self.leases = Leases(me.layout, limits, clock, random)
        self.frames = FrameReader()
        self._me = me
        self._emit = emit
        self._lookups: dict[LookupId, tuple[Claim, asyncio.Future[Claimed | None]]] = {}
        self._last_lookup = 0

    @property
    def is_idle(self) -> bool:
        """Whether there is no lease and no lookup that may end by itself, and none of which nobody has heard."""
        return self.leases.is_idle and not self._lookups

    async def look_up(self, claim: Claim) -> Claimed | RefusalReason:
        """Answer a claim without a lease. Waits for the scheduler, who looks into the cache."""
        if not claim.marks or len(claim.marks) % DIGEST_BYTES:
            return RefusalReason.OUT_OF_RANGE
        if len(self._lookups) >= MAX_LOOKUPS:
            return RefusalReason.NOT_CACHED
        self._last_lookup += 1
        lookup = LookupId(self._last_lookup)
        answer: asyncio.Future[Claimed | None] = asyncio.get_running_loop().create_future()
        self._lookups[lookup] = (claim, answer)
        self._emit(LookupRequest(lookup, claim.adapter, claim.marks, claim.start, claim.end))
        try:
            async with asyncio.timeout(LOOKUP_SECONDS):
                return await answer or RefusalReason.NOT_CACHED
        except TimeoutError:
            return RefusalReason.NOT_CACHED
        except asyncio.CancelledError:
            # the sender has gone, or wants it no more, after the answer
            if answer.done() and not answer.cancelled() and (claimed := answer.result()) is not None:
                self.leases.release(claimed.lease)
            raise
        finally:
            del self._lookups[lookup]

    def answer_lookup(self, lookup: LookupId, lease: Lease | None) -> None:
        """Give the lease of an offer that was made for it to the sender of the claim; None: nothing is cached of what
        was claimed. The lease ends, and nothing is given, when the lookup has ended or `Leases.grant` gives nothing."""
        claim, answer = self._lookups.get(lookup, (None, None))
        claimed = None
        if lease is not None:
            if claim is not None and answer is not None and not answer.done():
                claimed = self.leases.grant(claim, lease)
            if claimed is None:
                self.leases.release(lease)
        if answer is not None and not answer.done():
            answer.set_result(claimed)

    async def serve(self, stream: TlsStream) -> None:
        """Answer one consumer until its connection is lost. Never raises on what a peer does."""
        reason = "the connection is closed"
        try:
            if await self._greet(stream):
                await _Consumer(stream, self).serve()
        except ConnectionLost:
            pass
        except TimeoutError:
            reason = f"no answer was taken for {ROOM_SECONDS:g} s"
        except Exception:
            # One peer's doing must not end the thread that serves all of them.
            logger.exception("a consumer's connection")
        finally:
            stream.close(reason)

    async def _greet(self, stream: TlsStream) -> bool:
        """Whether the consumer is welcome. Raises ConnectionLost, TimeoutError."""
        while (hello := self.frames.decode(await stream.receive(), HELLO)) is None:
            pass
        me, refusal = self._me, None
        if hello.version != VERSION:
            refusal = f"protocol version {hello.version} here, {VERSION} there: run the same cairn on both"
        elif hello.layout != me.layout:
            # It is read at the other end.
            refusal = explain_layouts(me.geometry, self.frames.decode(hello.geometry, GEOMETRY))
        answer = None if refusal is None else Denied(hello.nonce, refusal)
        async with asyncio.timeout(ROOM_SECONDS):
            await stream.send(encode(answer or Welcome(hello.nonce, me)))
        return refusal is None


class _Consumer:
    """One consumer, as it is served. `_claims`: its leases, and `_lookups`: what it waits for, by their questions'
    numbers."""

    def __init__(self, stream: TlsStream, producer: Producer) -> None:
        self._stream = stream
        self._producer = producer
        self._leases = producer.leases
        self._claims: dict[int, Lease] = {}
        self._lookups: dict[int, asyncio.Task[None]] = {}

    async def serve(self) -> None:
        """Raises ConnectionLost and, when no answer is taken, TimeoutError."""
        try:
            while True:
                question = self._producer.frames.decode(await self._stream.receive(), QUESTION)
                if question is None:
                    continue
                number, record = question.number, question.record
                if number in self._claims or number in self._lookups:
                    await self._reply(number, Refused(RefusalReason.USED))
                elif isinstance(record, Claim) and record.nonce is None and len(self._lookups) < MAX_LOOKUPS:
                    self._look_up(number, record)
                else:
                    await self._reply(number, self._answer(number, record))
        finally:
            for task in self._lookups.values():
                task.cancel()
            for lease in self._claims.values():
                self._leases.release(lease)

    async def _reply(self, number: int, reply: Reply) -> None:
        async with asyncio.timeout(ROOM_SECONDS):
            await self._stream.send(encode(Answer(number, reply)))

    def _answer(self, number: int, request: Request) -> Reply:
        refusal: RefusalReason | None
        match request:
            case Claim(nonce=None):
                # as many wait already
                return Refused(RefusalReason.NOT_CACHED)
            case Claim():
                return self._claimed(number, self._leases.claim(request))
            case Heartbeat(claim=claim):
                refusal = self._leases.heartbeat(self._claims.get(claim))
            case Confirm(claim=claim):
                refusal = self._leases.confirm(self._claims.pop(claim, None))
            case Release(claim=claim):
                if (task := self._lookups.pop(claim, None)) is not None:
                    task.cancel()
                if (lease := self._claims.pop(claim, None)) is not None:
                    self._leases.release(lease)
                return Done()
            case Decline():
                refusal = self._leases.decline(request.request_id, request.nonce)
        return Done() if refusal is None else Refused(refusal)

    def _claimed(self, number: int, claimed: Claimed | RefusalReason) -> Reply:
        if isinstance(claimed, RefusalReason):
            return Refused(claimed)
        self._claims[number] = claimed.lease
        return claimed.granted

    def _look_up(self, number: int, claim: Claim) -> None:
        async def answer() -> None:
            try:
                claimed = await self._producer.look_up(claim)
                await self._reply(number, self._claimed(number, claimed))
            except TimeoutError:
                self._stream.close(f"no answer was taken for {ROOM_SECONDS:g} s")
            except ConnectionLost:
                # `serve` hears of it, too
                pass
            finally:
                self._lookups.pop(number, None)

        self._lookups[number] = asyncio.get_running_loop().create_task(answer())
