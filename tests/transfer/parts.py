"""Pages of a run of tokens, as the records of transfers have them."""

import numpy as np

from cairn.cache.group_pages import GroupPages
from cairn.cache.layout import AttentionGroup
from cairn.transfer.links.contract import ReadState


def parts(pages, start=0, block=16):
    """Those of the tokens from `start` on; none where there are no pages."""
    numbers = np.asarray(pages, np.int32)
    return (GroupPages(AttentionGroup("full", block), start, numbers),) if len(numbers) else ()


def numbers(pages):
    """Page numbers, as records have them."""
    return np.asarray(pages, np.int32)


def polled(worker, pull):
    """The state of a read, which is driven."""
    ended = worker.poll(pull)
    return ReadState.READING if ended is None else ended.state


def granted_numbers(granted):
    """Per attention group the numbers that a grant lists."""
    return [each.tolist() for each in granted.pages]


def num_active(leases) -> int:
    """Leases that have not ended."""
    leases.expire()
    return len(leases._active)


def num_quarantined(consumer) -> int:
    """Pulls that have ended and whose pages may still be written to."""
    return sum(pull.is_over and pull.is_reading for pull in consumer._pulls.values())
