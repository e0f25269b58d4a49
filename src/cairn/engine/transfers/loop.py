"""The thread that owns sockets and links: it carries out the scheduler's commands, serves other servers, drives reads.

    core's thread                      transfer thread
    TransferLoop's  --- commands --->  its event loop  -> Producer, Consumer -> link
    SchedulerSide   <--- events -----
                    ---- Leases ----------------------^

The scheduler never waits for an answer: pulls are numbered, and leases made and counted at once. The thread runs an
asyncio loop. It blocks while nothing is open, and polls while something is, because a link makes no progress by itself
and never reports a peer that stands still.
"""

import asyncio
import contextlib
import logging
import threading
from collections import deque
from collections.abc import Callable
from typing import TypeVarTuple

from cairn.engine.transfers.side_channel import SideChannel
from cairn.transfer.consumer import Consumer
from cairn.transfer.contract import NO_DEMAND, Event, LeaseDemand, LookupId, Offer, PullId, PullSpec
from cairn.transfer.params import split_reference
from cairn.transfer.producer import Producer
from cairn.transfer.ranks import RankedWorker
from cairn.types import Clock

_READING_SECONDS = 0.001
_SERVING_SECONDS = 0.005
_LINGERING_SECONDS = 0.1
_STOP_SECONDS = 5.0

_Arguments = TypeVarTuple("_Arguments")

logger = logging.getLogger(__name__)


class ClockedLoop(asyncio.SelectorEventLoop):
    """An event loop whose deadlines are those of `clock`."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self._clock = clock

    def time(self) -> float:
        return self._clock.now()


class EventQueue:
    """What the scheduler has not heard of yet. `notify` is called when there is something. Bounded by what the
    scheduler has open: an event or two for each pull and lookup."""

    def __init__(self) -> None:
        self._events: deque[Event] = deque()
        self.notify: Callable[[], None] = lambda: None

    def put(self, event: Event) -> None:
        self._events.append(event)
        self.notify()

    def take(self) -> list[Event]:
        return [self._events.popleft() for _ in range(len(self._events))]


class TransferLoop:
    """A `SchedulerSide`, and what is behind it: `turn` does everything once that does not come by a socket; `start`
    makes a thread that does so until `stop`. Leases are one object for both threads; what concerns pulls and lookups is
    done by `event_loop`, and so in order. `failure`: why the thread has ended. `enter_thread`: see `PoolMemory`."""

    def __init__(
        self,
        event_loop: asyncio.AbstractEventLoop,
        producer: Producer,
        consumer: Consumer,
        events: EventQueue,
        channel: SideChannel,
        ranks: RankedWorker,
        enter_thread: Callable[[], None],
    ) -> None:
        self.event_loop = event_loop
        self.producer = producer
        self.consumer = consumer
        self.failure: str | None = None
        self._leases = producer.leases
        self._events = events
        self._channel = channel
        self._ranks = ranks
        self._enter_thread = enter_thread
        self._pulls = 0
        self._changed = asyncio.Event()
        self._stopping = False
        self._thread: threading.Thread | None = None
        channel.listen(producer.serve)

    def fits(self, demand: LeaseDemand, promised: LeaseDemand = NO_DEMAND) -> bool:
        return self._leases.fits(demand, promised)

    def offer(self, offer: Offer) -> str:
        lease = self._leases.offer(offer)
        self._post(self._leases.expire)
        return lease.reference

    def withdraw(self, remote_request_id: str) -> None:
        if (known := split_reference(remote_request_id)) is not None:
            self._leases.decline(*known)
            self._post(self._leases.expire)

    def answer_lookup(self, lookup: LookupId, offer: Offer | None) -> str | None:
        lease = None if offer is None else self._leases.offer(offer)
        self._post(self.producer.answer_lookup, lookup, lease)
        return None if lease is None else lease.reference

    def pull(self, spec: PullSpec) -> PullId:
        self._pulls += 1
        pull = PullId(self._pulls)
        self._post(self.consumer.pull, spec, pull)
        return pull

    def abort(self, pull: PullId) -> None:
        self._post(self.consumer.abort, pull)

    def events(self) -> list[Event]:
        return [*self._events.take(), *self._leases.take_ended()]

    @property
    def dropped(self) -> int:
        """Frames that were no record of the protocol, and connections that ended before their peer was
        authenticated."""
        readers = (self.producer.frames, self.consumer.frames, self._ranks.frames)
        return self._channel.dropped + sum(frames.dropped for frames in readers)

    def start(self, notify: Callable[[], None]) -> None:
        """`notify` is called when there are events for the scheduler."""
        self._events.notify = notify
        self._thread = threading.Thread(target=self._run, name="cairn-transfer", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread; close link and sockets. The memory must stay: reads may still write to it."""
        if self._thread is not None:
            self._stopping = True
            self._post(self._leases.expire)
            self._thread.join(_STOP_SECONDS)
            if self._thread.is_alive():
                logger.warning("the transfer thread did not end within %g s", _STOP_SECONDS)
                return
        writing = self._ranks.link.close()
        if writing:
            logger.warning("%d reads were still under way", writing)
        if self._thread is None:
            self._channel.close()
            self.event_loop.close()

    def turn(self) -> None:
        """Drive the links, and look at what time has done."""
        self.consumer.look()
        if self._leases.expire():
            self._events.notify()
        self._ranks.serve(self._leases.may_be_read)

    def _post(self, command: Callable[[*_Arguments], object], *arguments: *_Arguments) -> None:
        """Have the thread carry it out, and look again at what is open."""

        def carry_out() -> None:
            command(*arguments)
            self._changed.set()

        # the thread may have ended, which `KvTransfer.check` reports
        with contextlib.suppress(RuntimeError):
            self.event_loop.call_soon_threadsafe(carry_out)

    @property
    def _timeout(self) -> float | None:
        """Seconds until the next turn at the latest, None for ever."""
        if self.consumer.num_open:
            return _READING_SECONDS
        if not self.producer.is_idle:
            return _SERVING_SECONDS
        return _LINGERING_SECONDS if self._leases.may_be_read else None

    def _run(self) -> None:
        try:
            self._enter_thread()
            with asyncio.Runner(loop_factory=lambda: self.event_loop) as runner:
                runner.run(self._serve())
        except Exception as error:
            logger.exception("the transfer thread has ended")
            self.failure = f"{type(error).__name__}: {error}"
            self._events.notify()

    async def _serve(self) -> None:
        try:
            while not self._stopping:
                self.turn()
                self._changed.clear()
                seconds = self._timeout
                # an asyncio.timeout costs as much as the turn
                timer = None if seconds is None else self.event_loop.call_later(seconds, self._changed.set)
                await self._changed.wait()
                if timer is not None:
                    timer.cancel()
        finally:
            self._channel.close()
