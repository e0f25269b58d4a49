"""The thread that owns sockets and links: it carries out the scheduler's commands, serves other servers, drives reads.

    core's thread                      transfer thread
    TransferPort  --- commands --->    TransferLoop  -> Connector -> link
                  <--- events -----

The port makes the ids (the number of a pull, the nonce of a lease), so the scheduler never waits for an answer. The
thread blocks while nothing is open, and polls while something is, because a link makes no progress by itself and never
reports a peer that stands still.
"""

import logging
import queue
import threading
from collections.abc import Callable
from typing import TypeAlias

from cairn.engine.transfers.side_channel import Incoming, TlsSideChannel
from cairn.transfer.connector import Connector
from cairn.transfer.consumer import Consumer
from cairn.transfer.contract import (
    NO_DEMAND,
    Event,
    LeaseDemand,
    LeaseEnded,
    LookupId,
    Offer,
    PullId,
    PullSpec,
)
from cairn.transfer.leases import LeasedPages
from cairn.transfer.links.contract import Link
from cairn.transfer.params import remote_request_id
from cairn.transfer.producer import Producer
from cairn.transfer.ranks import RankedWorker
from cairn.transfer.wire import NONCE_BYTES
from cairn.types import Pages

_READING_SECONDS = 0.001
_SERVING_SECONDS = 0.005
_LINGERING_SECONDS = 0.05
_STOP_SECONDS = 5.0

logger = logging.getLogger(__name__)

Command: TypeAlias = Callable[[Connector], object]
"""Called by the transfer thread with its connector."""


class TransferPort:
    """A `SchedulerSide`. `max_pages`: the connector's cap of all leases. `wake` is called after each command.

    The queues are bounded by what the scheduler has open: an event or two for each pull, lease and lookup.
    """

    def __init__(self, max_pages: int, random: Callable[[int], bytes], wake: Callable[[], None]) -> None:
        self.commands: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self.event_queue: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._random = random
        self._wake = wake
        self._leased: dict[str, Pages] = {}
        self._pages = LeasedPages(max_pages)
        self._pulls = 0

    @property
    def num_leased(self) -> int:
        """Distinct pages of leases that have not ended."""
        return len(self._pages)

    def fits(self, demand: LeaseDemand, promised: LeaseDemand = NO_DEMAND) -> bool:
        return self._pages.fits(demand, promised)

    def offer(self, offer: Offer) -> str:
        nonce = self._random(NONCE_BYTES)
        self._post(lambda connector: connector.offer(offer, nonce))
        return self._lease(offer, nonce)

    def withdraw(self, remote_request_id: str) -> None:
        self._post(lambda connector: connector.withdraw(remote_request_id))

    def answer_lookup(self, lookup: LookupId, offer: Offer | None) -> str | None:
        nonce = self._random(NONCE_BYTES)
        self._post(lambda connector: connector.answer_lookup(lookup, offer, nonce))
        return None if offer is None else self._lease(offer, nonce)

    def pull(self, spec: PullSpec) -> PullId:
        self._pulls += 1
        pull = PullId(self._pulls)
        self._post(lambda connector: connector.pull(spec, pull))
        return pull

    def abort(self, pull: PullId) -> None:
        self._post(lambda connector: connector.abort(pull))

    def events(self) -> list[Event]:
        events: list[Event] = []
        while not self.event_queue.empty():
            event = self.event_queue.get_nowait()
            if isinstance(event, LeaseEnded) and event.remote_request_id in self._leased:
                self._pages.remove(self._leased.pop(event.remote_request_id))
            events.append(event)
        return events

    def _lease(self, offer: Offer, nonce: bytes) -> str:
        reference = remote_request_id(offer.request_id, nonce)
        self._leased[reference] = offer.all_pages
        self._pages.add(offer.all_pages)
        return reference

    def _post(self, command: Command) -> None:
        self.commands.put(command)
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
        self._connector = Connector(producer, consumer)
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
        received = self._channel.receive(seconds)
        # Commands first: an offer is in the queue before its reference is sent anywhere, and its claim must find it.
        while not self._port.commands.empty():
            self._port.commands.get_nowait()(self._connector)
        for incoming in received:
            try:
                self._handle(incoming)
            except Exception:
                # One peer's doing must not end the thread that serves all of them.
                logger.exception("a frame from %s", incoming.address or "a consumer")
        events = self._connector.events()
        for event in events:
            self._port.event_queue.put(event)
        if events and self.notify is not None:
            self.notify()
        for sender, frame in self._producer.take_frames():
            self._channel.reply(sender, frame)
        self._ranks.serve(self._connector.is_serving)

    @property
    def timeout(self) -> float | None:
        """Seconds that the next turn may wait, None for ever."""
        if self._consumer.num_open:
            return _READING_SECONDS
        if not self._connector.is_idle:
            return _SERVING_SECONDS
        return _LINGERING_SECONDS if self._connector.is_serving else None

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
