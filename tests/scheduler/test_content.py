"""What another server is given that asks for content: what is still here, and more than it has."""

import numpy as np
import pytest
from driver import Driver

from cairn.cache.group_pages import page_numbers
from cairn.transfer.contract import NO_DEMAND, ContentName, LookupId, LookupRequest

TEXT = list(range(100, 400))


class Side:
    """The connector in a test's hands."""

    def __init__(self):
        self.news, self.answers = [], []

    def fits(self, demand, promised=NO_DEMAND):
        return self.room

    def answer_lookup(self, lookup, offer):
        self.answers.append(offer)
        return None if offer is None else "reference"

    def events(self):
        news, self.news = self.news, []
        return news


class Known:
    """One sequence, whatever is asked for."""

    def __init__(self, name, keys):
        self.found = name, keys

    def find_longest(self, marks, end=None):
        return self.found


def answer(start=0, adapter="", length=256, cached=256, room=True):
    """What is answered to somebody who lacks tokens from `start` on of a sequence of so many, whose state is here."""
    driver = Driver(side=(side := Side()))
    side.room = room
    transfers = driver.scheduler.state.transfers
    transfers.sequences = Known(ContentName(), np.array(TEXT[:length]))
    if cached:
        driver.ask(TEXT[:cached], max_tokens=1)
    side.news.append(LookupRequest(LookupId(1), adapter, b"", start))
    driver.scheduler.poll()
    pinned = driver.cache.pinned
    assert not pinned.sequences and len(pinned.pins) == len(transfers.offers) == (side.answers != [None])
    (made,) = side.answers
    return made


@pytest.mark.parametrize("start", [0, 64, 255])
def test_what_is_here_is_offered_with_its_state(start):
    made = answer(start)
    assert len(made.keys) == 256 and len(page_numbers(made.pages)) == 16
    assert [checkpoint.position for checkpoint in made.checkpoints] == [256]


def test_what_is_here_in_part_is_offered_up_to_the_grid():
    made = answer(length=290)
    assert len(made.keys) == 256


@pytest.mark.parametrize("asked", [{"start": 256}, {"adapter": "other"}, {"cached": 0}, {"room": False}])
def test_nothing_is_offered_that_is_of_no_use_of_another_adapter_gone_or_without_room(asked):
    assert answer(**asked) is None


def test_a_state_behind_what_the_other_side_can_name_is_not_offered():
    """It knows the digests of 64, 128, ... tokens, and of 290: none for the 250 that are here."""
    assert answer(length=290, cached=250) is None
