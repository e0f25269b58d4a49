"""The scheduler's end of the transfers: two queues to the thread that owns sockets and links.

    core's thread                      transfer thread
    TransferPort  --- commands --->    TransferLoop  -> Connector -> link
                  <--- events -----

Names are given here, so that nobody has to wait for an answer: the number of a pull, the nonce of an offer.
"""

import queue
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from cairn.transfer.contract import AskId, ContentWant, Event, LeaseEnded, Offer, PullId, Want
from cairn.transfer.leased_pages import LeasedPages
from cairn.transfer.params import remote_request_id
from cairn.transfer.wire import NONCE_BYTES
from cairn.types import Pages


@dataclass(frozen=True, slots=True)
class MakeOffer:
    offer: Offer
    nonce: bytes


@dataclass(frozen=True, slots=True)
class Withdraw:
    remote_request_id: str


@dataclass(frozen=True, slots=True)
class Answer:
    ask: AskId
    offer: Offer | None
    nonce: bytes


@dataclass(frozen=True, slots=True)
class StartPull:
    want: Want | ContentWant
    pull: PullId


@dataclass(frozen=True, slots=True)
class Abort:
    pull: PullId


Command: TypeAlias = MakeOffer | Withdraw | Answer | StartPull | Abort


class TransferPort:
    """A `SchedulerSide`. `max_pages`: the share of the pool that leases may hold. `wake` is called after each command.

    What is in the queues is bounded by what the scheduler has open: an event or two for each pull, offer and ask.
    """

    def __init__(self, max_pages: int, random: Callable[[int], bytes], wake: Callable[[], None]) -> None:
        self.commands: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self.happened: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._max_pages = max_pages
        self._random = random
        self._wake = wake
        self._leased: dict[str, Pages] = {}
        self._pages = LeasedPages()
        self._pulls = 0

    @property
    def num_leased(self) -> int:
        """Distinct pages of offers that have not ended."""
        return len(self._pages)

    def has_room(self, pages: Pages, num_more: int = 0) -> bool:
        return self._pages.num_with(pages) + num_more <= self._max_pages

    def offer(self, offer: Offer) -> str:
        nonce = self._random(NONCE_BYTES)
        self._post(MakeOffer(offer, nonce))
        return self._lease(offer, nonce)

    def withdraw(self, remote_request_id: str) -> None:
        self._post(Withdraw(remote_request_id))

    def answer(self, ask: AskId, offer: Offer | None) -> str | None:
        nonce = self._random(NONCE_BYTES)
        self._post(Answer(ask, offer, nonce))
        return None if offer is None else self._lease(offer, nonce)

    def pull(self, want: Want | ContentWant) -> PullId:
        self._pulls += 1
        pull = PullId(self._pulls)
        self._post(StartPull(want, pull))
        return pull

    def abort(self, pull: PullId) -> None:
        self._post(Abort(pull))

    def events(self) -> list[Event]:
        events: list[Event] = []
        while not self.happened.empty():
            event = self.happened.get_nowait()
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
