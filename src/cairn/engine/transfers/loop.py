"""The thread that owns sockets and links: it carries out the scheduler's commands, serves other servers, drives reads.

    core's thread                      transfer thread
    TransferPort  --- commands --->    TransferLoop  -> Producer, Consumer -> link
                  <--- events -----
                  ---- Leases ------------------------------^

The scheduler never waits for an answer: the port numbers the pulls, and leases are made and counted at once. The
thread blocks while nothing is open, and polls while something is, because a link makes no progress by itself and never
reports a peer that stands still.
"""

import logging
import queue
import threading
from collections.abc import Callable

from cairn.engine.transfers.side_channel import Incoming, TlsSideChannel
from cairn.transfer.consumer import Consumer
from cairn.transfer.contract import (
    NO_DEMAND,
    Event,
    LeaseDemand,
    LookupId,
    Offer,
    PullId,
    PullSpec,
)
from cairn.transfer.links.contract import Link
from cairn.transfer.params import remote_request_id, split_reference
from cairn.transfer.producer import Producer
from cairn.transfer.ranks import RankedWorker

_READING_SECONDS = 0.001
_SERVING_SECONDS = 0.005
_LINGERING_SECONDS = 0.05
_STOP_SECONDS = 5.0

logger = logging.getLogger(__name__)


class TransferPort:
    """A `SchedulerSide`. Leases are one object for both threads; what concerns pulls and lookups goes to the transfer
    thread, which calls `carry_out`. `wake` is called when there is something for it.

    The queues are bounded by what the scheduler has open: an event or two for each pull and lookup.
    """

    def __init__(self, producer: Producer, consumer: Consumer, wake: Callable[[], None]) -> None:
        self._commands: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._producer = producer
        self._leases = producer.leases
        self._consumer = consumer
        self._wake = wake
        self._pulls = 0

    @property
    def num_leased(self) -> int:
        """Distinct pages of leases whose end the scheduler has not heard of."""
        return self._leases.num_pages

    def fits(self, demand: LeaseDemand, promised: LeaseDemand = NO_DEMAND) -> bool:
        return self._leases.fits(demand, promised)

    def offer(self, offer: Offer) -> str:
        reference = remote_request_id(offer.request_id, self._leases.offer(offer))
        self._wake()
        return reference

    def withdraw(self, remote_request_id: str) -> None:
        if (known := split_reference(remote_request_id)) is not None:
            self._leases.withdraw_offer(*known)
            self._wake()

    def answer_lookup(self, lookup: LookupId, offer: Offer | None) -> str | None:
        lookups = self._producer.lookups
        if offer is None:
            self._post(lambda: lookups.refuse(lookup))
            return None
        nonce = self._leases.offer(offer)
        self._post(lambda: lookups.grant(lookup, offer, nonce))
        return remote_request_id(offer.request_id, nonce)

    def pull(self, spec: PullSpec) -> PullId:
        self._pulls += 1
        pull = PullId(self._pulls)
        self._post(lambda: self._consumer.pull(spec, pull))
        return pull

    def abort(self, pull: PullId) -> None:
        self._post(lambda: self._consumer.abort(pull))

    def events(self) -> list[Event]:
        events: list[Event] = []
        while not self._events.empty():
            events.append(self._events.get_nowait())
        return [*events, *self._leases.take_ended()]

    def carry_out(self) -> bool:
        """For the transfer thread: do what was posted, drive everything once. Returns whether there are events for the
        scheduler; see also `Producer.take_frames`."""
        while not self._commands.empty():
            self._commands.get_nowait()()
        events: list[Event] = [*self._consumer.tick(), *self._producer.lookups.take_requests()]
        for event in events:
            self._events.put(event)
        return bool(events) or self._leases.has_ended

    def _post(self, command: Callable[[], object]) -> None:
        self._commands.put(command)
        self._wake()


class TransferLoop:
    """`turn` does everything once; `start` makes a thread that does so until `stop`. `notify` is called when there are
    events for the scheduler. `failure`: why the thread has ended. `enter_thread`: see `PoolMemory`."""

    def __init__(
        self,
        port: TransferPort,
        channel: TlsSideChannel,
        producer: Producer,
        consumer: Consumer,
        link: Link,
        ranks: RankedWorker,
        enter_thread: Callable[[], None],
    ) -> None:
        self._port = port
        self._channel = channel
        self._producer = producer
        self._consumer = consumer
        self._link = link
        self._ranks = ranks
        self._enter_thread = enter_thread
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None
        self.notify: Callable[[], None] | None = None
        self.failure: str | None = None

    @property
    def dropped(self) -> int:
        """Frames that were no record of the protocol, and connections that ended before their peer was
        authenticated."""
        return self._channel.dropped + self._producer.sessions.dropped + self._consumer.dropped + self._ranks.dropped

    @property
    def num_skipped(self) -> int:
        """Pulls that were not tried, because their peer had not answered lately."""
        return self._consumer.num_skipped

    @property
    def num_open(self) -> int:
        """Pulls whose pages may still be written to, those under way included."""
        return self._consumer.num_open

    def start(self) -> None:
        self._thread = threading.Thread(target=self._run, name="cairn-transfer", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread; close link and sockets. The memory must stay: reads may still write to it."""
        self._stopping.set()
        self._channel.wake()
        if self._thread is not None:
            self._thread.join(_STOP_SECONDS)
            if self._thread.is_alive():
                logger.warning("the transfer thread did not end within %g s", _STOP_SECONDS)
                return
        writing = self._link.close()
        if writing:
            logger.warning("%d reads were still under way", writing)
        self._channel.close()

    def turn(self, seconds: float | None = 0.0) -> None:
        """Wait for at most `seconds` (None: for ever) for something to do, and do it."""
        for incoming in self._channel.receive(seconds):
            try:
                self._handle(incoming)
            except Exception:
                # One peer's doing must not end the thread that serves all of them.
                logger.exception("a frame from %s", incoming.address or "a consumer")
        if self._port.carry_out() and self.notify is not None:
            self.notify()
        for sender, frame in self._producer.take_frames():
            self._channel.reply(sender, frame)
        self._ranks.serve(self._producer.leases.may_be_read)

    @property
    def timeout(self) -> float | None:
        """Seconds that the next turn may wait, None for ever."""
        if self._consumer.num_open:
            return _READING_SECONDS
        if not self._producer.is_idle:
            return _SERVING_SECONDS
        return _LINGERING_SECONDS if self._producer.leases.may_be_read else None

    def _run(self) -> None:
        try:
            self._enter_thread()
            while not self._stopping.is_set():
                self.turn(self.timeout)
        except Exception as error:
            logger.exception("the transfer thread has ended")
            self.failure = f"{type(error).__name__}: {error}"
            if self.notify is not None:
                self.notify()

    def _handle(self, incoming: Incoming) -> None:
        match incoming:
            case Incoming(sender=bytes(sender), lost=None):
                reply = self._producer.receive(sender, incoming.frame)
                if reply is not None:
                    self._channel.reply(sender, reply)
            case Incoming(sender=bytes(sender)):
                self._producer.sessions.forget(sender)
            case Incoming(address=(_, _) as address, lost=None):
                self._consumer.receive(address, incoming.frame)
            case Incoming(address=(_, _) as address, lost=str(reason)):
                self._consumer.lose(address, reason)
