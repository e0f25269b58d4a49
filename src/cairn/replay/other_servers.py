"""The servers that a replayed one exchanged pages with."""

from cairn.transfer.contract import (
    NO_DEMAND,
    Event,
    LeaseDemand,
    LeaseEnded,
    LookupId,
    Offer,
    PagesFree,
    PullEnded,
    PullId,
    PullSpec,
)


class OtherServers:
    """A `SchedulerSide`: what other servers gave is there at once, and they take at once what is leased to them.

    `promised`: by request, the number of prompt tokens that are available after its pull. `pending`: events that nobody
    has asked for.
    """

    def __init__(self) -> None:
        self.promised: dict[str, int] = {}
        self.pending: list[Event] = []
        self._num_pulls = 0

    def fits(self, demand: LeaseDemand, promised: LeaseDemand = NO_DEMAND) -> bool:
        return True

    def offer(self, offer: Offer) -> str:
        self.pending.append(LeaseEnded(offer.request_id, "released"))
        return offer.request_id

    def withdraw(self, remote_request_id: str) -> None:
        pass

    def answer_lookup(self, lookup: LookupId, offer: Offer | None) -> str | None:
        return None

    def pull(self, spec: PullSpec) -> PullId:
        self._num_pulls += 1
        pull, end = PullId(self._num_pulls), self.promised.pop(spec.request_id)
        self.pending += [PullEnded(pull, None, end, end), PagesFree(pull)]
        return pull

    def abort(self, pull: PullId) -> None:
        pass

    def events(self) -> list[Event]:
        events, self.pending = self.pending, []
        return events
