"""How many tokens: of a prefill chunk, and of a sequence that the pool can hold."""

from cairn.cache.layout import CacheLayout
from cairn.step import GRID


def chunk_end(start: int, limit: int, budget: int) -> int:
    """Where a prefill chunk from `start` ends: at `limit` if the budget (tokens) reaches it, else on the 64-token
    grid. Equal to `start` if the budget reaches neither."""
    end = min(limit, start + budget)
    if end < limit:
        end = end // GRID * GRID
    return max(start, end)


def capacity_tokens(layout: CacheLayout, num_pages: int) -> int | None:
    """The longest sequence that fits a pool of `num_pages` all by itself, one page a group left for copy on write.
    None if nothing bounds it (no attention)."""
    if not layout.groups:
        return None
    low, high = 0, num_pages * max(group.tokens_per_page for group in layout.groups)
    room = num_pages - len(layout.groups)
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if layout.pages_for(middle) <= room else (low, middle - 1)
    return low
