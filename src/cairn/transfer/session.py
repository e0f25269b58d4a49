"""The consumer's end of a connection to a producer: it shakes hands, then asks, and hands out the answers.

The other end has proved that it holds the secret before any frame is sent. What is asked has a deadline of its asker's;
when the connection is lost, all that waits fails at once, and the producer releases what was claimed by it.
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec

from cairn.cache.layout import CacheLayout
from cairn.transfer.contract import Peer, WorkerSide
from cairn.transfer.geometry import find_difference
from cairn.transfer.peers import Address
from cairn.transfer.stream import ConnectionLost, TlsStream
from cairn.transfer.wire import (
    ANSWER,
    HELLO_ANSWER,
    NONCE_BYTES,
    VERSION,
    Denied,
    FrameReader,
    Hello,
    Question,
    Reply,
    Request,
    encode,
)

HANDSHAKE_SECONDS = 5.0
"""How long connecting and the answer to Hello may take."""

_SILENT_SECONDS = 1.0
_OTHER_LAYOUT = "the layouts differ: both sides must serve the same model with the same dtype and quantization"


class PeerFailed(Exception):
    """Why nothing can be had of a peer. `is_silent`: it has not answered in the time it had."""

    def __init__(self, reason: str, *, is_silent: bool = False) -> None:
        super().__init__(reason)
        self.is_silent = is_silent


def explain_layouts(remote: CacheLayout, local: CacheLayout | None) -> str:
    """Why two hashes of layouts differ, as far as the geometries tell. `local`: None where it cannot be read."""
    if local is None:
        return _OTHER_LAYOUT
    if (difference := find_difference(remote, local)) is not None:
        return difference
    there, here = (each.page_bytes // each.page_units // each.block_size for each in (remote, local))
    if there != here and remote.header_bytes == local.header_bytes:
        return (
            f"the layouts differ: a kv head has {there} bytes a token at the peer, {here} here: both sides must serve "
            "the same model, and both or neither with the head that drafts: have --speculative-config say mtp, or "
            "suffix, on both"
        )
    return _OTHER_LAYOUT


@dataclass(frozen=True, slots=True)
class ConsumerTools:
    """What all sessions and transfers of an engine share: `me`, this server; `worker`, who reads for it; how it
    connects to producers, whose hosts may be connected to, in `event_loop`, and raises ConnectionLost; `random(n)`, n
    unpredictable bytes."""

    me: Peer
    worker: WorkerSide
    connect: Callable[[Address], Awaitable[TlsStream]]
    random: Callable[[int], bytes]
    event_loop: asyncio.AbstractEventLoop
    frames: FrameReader = field(default_factory=FrameReader)


class ProducerSession:
    """`engine_id`: the engine that is expected at `address`, then the one that is there. `heard` is called for each
    frame that comes, `ended` once. Begins to connect at once. `closed`: done once it has ended."""

    def __init__(
        self,
        address: Address,
        engine_id: str,
        tools: ConsumerTools,
        heard: Callable[[], None],
        ended: Callable[["ProducerSession", PeerFailed], None],
    ) -> None:
        self.address = address
        self.engine_id = engine_id
        self.peer: Peer | None = None
        self.failure: PeerFailed | None = None
        self._tools = tools
        self._event_loop = tools.event_loop
        self._heard = heard
        self._ended = ended
        self._stream: TlsStream | None = None
        self._open: asyncio.Future[Peer] = tools.event_loop.create_future()
        self._waiting: dict[int, asyncio.Future[Reply]] = {}
        self._told: set[asyncio.Task[None]] = set()
        self._last_number = 0
        self.closed = tools.event_loop.create_task(self._run())

    async def opened(self) -> Peer:
        """Waits for the handshake, which has a deadline. Raises PeerFailed."""
        return await asyncio.shield(self._open)

    def new_number(self) -> int:
        """For `ask`, where the number must be known before the answer."""
        self._last_number += 1
        return self._last_number

    async def ask(self, request: Request, seconds: float, number: int | None = None) -> Reply:
        """The answer, for which there are so many seconds, those until there is room for the question included. Raises
        PeerFailed when the session has ended or ends, TimeoutError."""
        number = self.new_number() if number is None else number
        if self.failure is not None or self.peer is None or self._stream is None:
            raise self.failure or PeerFailed("the session is not open")
        answer: asyncio.Future[Reply] = self._event_loop.create_future()
        self._waiting[number] = answer
        try:
            async with asyncio.timeout(seconds):
                await self._stream.send(encode(Question(number, request)))
                return await answer
        except ConnectionLost as lost:
            raise self.failure or PeerFailed(str(lost)) from lost
        finally:
            del self._waiting[number]
            answer.cancel()

    def tell(self, request: Request, seconds: float) -> None:
        """Ask something whose answer nobody waits for. If it does not get through, its lease runs out."""

        async def ask() -> None:
            with contextlib.suppress(PeerFailed, TimeoutError):
                await self.ask(request, seconds)

        if self.failure is None:
            task = self._event_loop.create_task(ask())
            self._told.add(task)
            task.add_done_callback(self._told.discard)

    def close(self, failure: str | PeerFailed) -> None:
        """End the session, and all that waits for it; later calls do nothing."""
        if self.failure is not None:
            return
        self.failure = failure if isinstance(failure, PeerFailed) else PeerFailed(failure)
        everybody: list[asyncio.Future[Any]] = [self._open, *self._waiting.values()]
        for waiting in everybody:
            if not waiting.done():
                waiting.set_exception(self.failure)
                # nobody may be left who asks
                waiting.exception()
        if self._stream is not None:
            self._stream.close(str(self.failure))
        self.closed.cancel()
        self._ended(self, self.failure)

    async def _run(self) -> None:
        began = self._event_loop.time()
        try:
            async with asyncio.timeout(HANDSHAKE_SECONDS):
                stream = await self._greet()
            while True:
                frame = await stream.receive()
                self._heard()
                answer = self._tools.frames.decode(frame, ANSWER)
                waiting = None if answer is None else self._waiting.get(answer.number)
                if answer is None or waiting is None or waiting.done():
                    self._tools.frames.dropped += answer is not None
                else:
                    waiting.set_result(answer.record)
        except TimeoutError:
            self.close(PeerFailed(f"no answer to the handshake within {HANDSHAKE_SECONDS:g} s", is_silent=True))
        except ConnectionLost as lost:
            # A refusal comes at once; what took longer was silence.
            was_silent = self.peer is None and self._event_loop.time() - began >= _SILENT_SECONDS
            self.close(PeerFailed(str(lost), is_silent=was_silent))
        except PeerFailed as failure:
            self.close(failure)

    async def _greet(self) -> TlsStream:
        """The stream to a producer that serves the same layout. Raises ConnectionLost, PeerFailed."""
        me = self._tools.me
        hello = Hello(
            VERSION, me.engine_id, self._tools.random(NONCE_BYTES), me.layout, msgspec.Raw(encode(me.geometry))
        )
        self._stream = stream = await self._tools.connect(self.address)
        await stream.send(encode(hello))
        while True:
            answer = self._tools.frames.decode(await stream.receive(), HELLO_ANSWER)
            self._heard()
            if answer is not None and answer.answers == hello.nonce:
                break
        if isinstance(answer, Denied):
            raise PeerFailed(f"refused by the peer: {answer.text}")
        if answer.peer.layout != me.layout:
            raise PeerFailed(explain_layouts(answer.peer.geometry, me.geometry))
        self.peer, self.engine_id = answer.peer, answer.peer.engine_id
        self._open.set_result(self.peer)
        return stream
