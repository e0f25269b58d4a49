"""What every `SchedulerSide` must do with leases: a subclass says how one is made."""

import numpy as np

from cairn.transfer.contract import ContentName, LeaseDemand, LeaseEnded, Offer, OfferedCheckpoint, SchedulerSide
from transfer.parts import parts

CAP = 20


def pages(start: int, end: int) -> np.ndarray:
    return np.arange(start, end, dtype=np.int32)


def offer(start: int, end: int, request_id: str = "cmpl-1") -> Offer:
    """One of the pages [start, end), the last two of which are those of its checkpoint."""
    tokens = np.arange(16 * (end - 2 - start))
    checkpoint = OfferedCheckpoint(len(tokens), pages(end - 2, end))
    return Offer(request_id, ContentName(), tokens, parts(pages(start, end - 2)), (checkpoint,))


class SchedulerSideContract:
    def side(self, max_pages: int) -> SchedulerSide:
        """A new one with this cap."""
        raise NotImplementedError

    def fits(self, side, num_new, start=0, end=0, promised=()):
        demand = LeaseDemand(pages(start, end), num_new)
        return side.fits(demand, *(LeaseDemand(*each) for each in promised))

    def test_leases_fit_up_to_the_cap_and_a_page_counts_once(self):
        side = self.side(CAP)
        first = side.offer(offer(0, 12))
        assert self.fits(side, 8) and not self.fits(side, 9)
        assert self.fits(side, 8, 0, 12) and not self.fits(side, 9, 0, 12)
        second = side.offer(offer(0, 12, "cmpl-2"))
        assert second != first and self.fits(side, 8) and not self.fits(side, 9)
        side.withdraw(first)
        assert side.events() == [LeaseEnded(first, "released")] and not self.fits(side, 9)
        side.withdraw(second)
        side.withdraw("cmpl-1~" + "0" * 32)
        side.withdraw(first)
        assert side.events() == [LeaseEnded(second, "released")] and self.fits(side, 20)

    def test_while_nothing_is_leased_one_offer_may_exceed_the_cap(self):
        side = self.side(CAP)
        assert self.fits(side, CAP + 1) and self.fits(side, 1, 0, 10 * CAP)
        reference = side.offer(offer(0, 2 * CAP))
        assert side.events() == [], "it is leased"
        assert not self.fits(side, 1) and not self.fits(side, 0, 0, 2 * CAP)
        side.withdraw(reference)
        assert side.events() == [LeaseEnded(reference, "released")] and self.fits(side, CAP + 1)

    def test_beside_a_lease_none_may_exceed_it(self):
        side = self.side(CAP)
        side.offer(offer(0, 3))
        assert self.fits(side, CAP - 3) and not self.fits(side, CAP + 1) and not self.fits(side, CAP - 2)

    def test_what_is_promised_counts_as_if_it_were_leased(self):
        side = self.side(CAP)
        for promised in ((pages(0, 5), 0), (pages(0, 0), 5), (pages(0, 2), 3)):
            assert self.fits(side, CAP - 5, promised=[promised])
            assert not self.fits(side, CAP - 4, promised=[promised])
            assert not self.fits(side, CAP + 1, promised=[promised]), "it would not be alone"
        assert self.fits(side, CAP - 5, 0, 5, promised=[(pages(0, 5), 0)]), "a page counts once"
        assert self.fits(side, CAP + 1, promised=[(pages(0, 0), 0)]), "that is nothing"
        side.offer(offer(0, 5))
        assert self.fits(side, CAP - 10, 0, 5, promised=[(pages(0, 5), 5)])
        assert not self.fits(side, CAP - 9, 0, 5, promised=[(pages(0, 5), 5)])
