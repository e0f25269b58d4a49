"""Pages of a run of tokens, as the records of transfers have them."""

import numpy as np

from cairn.cache.group_pages import GroupPages
from cairn.cache.layout import AttentionGroup


def parts(pages, start=0, block=16):
    """Those of the tokens from `start` on; none where there are no pages."""
    numbers = np.asarray(pages, np.int32)
    return (GroupPages(AttentionGroup("full", block), start, numbers),) if len(numbers) else ()
