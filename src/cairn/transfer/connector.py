"""Both roles of one engine as the scheduler sees them: see `contract.SchedulerSide`."""

import logging

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
from cairn.transfer.leases import LeaseState
from cairn.transfer.params import remote_request_id, split_reference
from cairn.transfer.producer import Producer

logger = logging.getLogger(__name__)


class Connector:
    """Role is a matter of the request, so every engine has both halves.

    Whoever speaks to it by way of a queue may give nonces and numbers of pulls, and so knows the answers of `offer`,
    `answer_lookup` and `pull` before they are carried out.
    """

    def __init__(self, producer: Producer, consumer: Consumer) -> None:
        self._producer = producer
        self._leases = producer.leases
        self._consumer = consumer
        self._ended: list[LeaseEnded] = []

    @property
    def is_idle(self) -> bool:
        """Whether nothing is open: then nobody needs to look before the next offer, pull or frame."""
        lookups = self._producer.lookups
        return self._leases.is_idle and not (self._ended or self._consumer.num_open or lookups.num_open)

    @property
    def is_serving(self) -> bool:
        """Whether a peer may be reading from here: then the links need `progress`."""
        return self._leases.may_be_read

    def fits(self, demand: LeaseDemand, promised: LeaseDemand = NO_DEMAND) -> bool:
        return self._leases.fits(demand, promised)

    def offer(self, offer: Offer, nonce: bytes | None = None) -> str:
        """`nonce`: 16 unpredictable bytes, never used before. An offer that does not fit under the cap ends at once:
        whoever made it has miscounted, and all other leases go on."""
        nonce = self._leases.new_nonce() if nonce is None else nonce
        if not self._leases.fits(LeaseDemand(offer.all_pages)):
            logger.error("%s: %d pages do not fit under the leases' cap", offer.request_id, len(offer.all_pages))
            return self._ended_at_once(offer, nonce)
        return remote_request_id(offer.request_id, self._leases.offer(offer, nonce))

    def withdraw(self, remote_request_id: str) -> None:
        if (known := split_reference(remote_request_id)) is not None:
            self._leases.withdraw_offer(*known)

    def answer_lookup(self, lookup: LookupId, offer: Offer | None, nonce: bytes | None = None) -> str | None:
        """`nonce` as for `offer`. `Producer.take_frames` has the frame to send after this."""
        if offer is None:
            self._producer.lookups.refuse(lookup)
            return None
        nonce = self._leases.new_nonce() if nonce is None else nonce
        if self._producer.lookups.grant(lookup, offer, nonce):
            return remote_request_id(offer.request_id, nonce)
        return self._ended_at_once(offer, nonce)

    def pull(self, spec: PullSpec, pull_id: PullId | None = None) -> PullId:
        """`pull_id`: a number that no other pull of this engine ever had."""
        return self._consumer.pull(spec, pull_id)

    def abort(self, pull: PullId) -> None:
        self._consumer.abort(pull)

    def events(self) -> list[Event]:
        """Drives everything once; see also `Producer.take_frames`."""
        events: list[Event] = list(self._consumer.tick())
        events += self._producer.lookups.take_requests()
        events += self._ended
        self._ended.clear()
        return events + self._leases.take_ended()

    def _ended_at_once(self, offer: Offer, nonce: bytes) -> str:
        reference = remote_request_id(offer.request_id, nonce)
        self._ended.append(LeaseEnded(reference, LeaseState.RELEASED.value))
        return reference
