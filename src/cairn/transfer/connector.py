"""Both roles of one engine as the scheduler sees them: see `contract.SchedulerSide`."""

from cairn.transfer.consumer import Consumer
from cairn.transfer.contract import Event, LeaseEnded, Offer, PullId, Want
from cairn.transfer.lease import LeaseBook
from cairn.transfer.params import remote_request_id

__all__ = ["Connector"]


class Connector:
    """Role is a matter of the request, so every engine has both halves."""

    def __init__(self, leases: LeaseBook, consumer: Consumer) -> None:
        self._leases = leases
        self._consumer = consumer
        self._nonces: dict[str, bytes] = {}

    @property
    def is_idle(self) -> bool:
        """Whether nothing is open: then nobody needs to look before the next offer or pull."""
        return not self._nonces and not self._consumer.num_open

    def has_room(self, num_pages: int) -> bool:
        return self._leases.has_room(num_pages)

    def offer(self, offer: Offer) -> str:
        nonce = self._leases.offer(offer)
        reference = remote_request_id(offer.request_id, nonce)
        self._nonces[reference] = nonce
        return reference

    def withdraw(self, remote_request_id: str) -> None:
        if (nonce := self._nonces.get(remote_request_id)) is not None:
            self._leases.withdraw(nonce)

    def pull(self, want: Want) -> PullId:
        return self._consumer.pull(want)

    def abort(self, pull: PullId) -> None:
        self._consumer.abort(pull)

    def events(self) -> list[Event]:
        events: list[Event] = list(self._consumer.tick())
        for ended in self._leases.take_ended():
            reference = remote_request_id(ended.request_id, ended.nonce)
            del self._nonces[reference]
            events.append(LeaseEnded(reference, ended.state.value))
        return events
