"""Pages of a run of tokens, cut and joined: each token lies in the page that it did before."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from cairn.cache.group_pages import GroupPages, join, page_numbers
from cairn.cache.layout import AttentionGroup

SIZES = st.sampled_from([1, 3, 4, 16])


def run(size: int, start: int, end: int, number: int = 100) -> GroupPages:
    """Tokens [start, end) in pages that count up from `number`."""
    group = AttentionGroup("full", size)
    return GroupPages(group, start, np.arange(number, number + group.pages_for(end) - start // size, dtype=np.int32))


def page_of(part: GroupPages, token: int) -> int:
    return int(part.pages[token // part.group.tokens_per_page - part.first_page])


@given(SIZES, st.integers(0, 40), st.integers(2, 60), st.data())
def test_a_cut_leaves_every_token_in_its_page(size, start, length, data):
    whole, end = run(size, start, start + length), start + length
    at = data.draw(st.integers(start + 1, end - 1))
    above, below = whole.split(at)
    assert (above.first_token, below.first_token, above.group, below.group) == (start, at, whole.group, whole.group)
    assert [page_of(above, token) for token in range(start, at)] == [
        page_of(whole, token) for token in range(start, at)
    ]
    assert [page_of(below, token) for token in range(at, end)] == [page_of(whole, token) for token in range(at, end)]
    # no page too many, and the one that is cut is in both
    assert len(above.pages) + len(below.pages) == len(whole.pages) + bool(at % size)
    for one, other in ((above, whole.upto(at)), (below, whole.drop_before(at))):
        assert one.first_token == other.first_token and np.array_equal(one.pages, other.pages)


@given(SIZES, st.integers(0, 40), st.integers(1, 60), st.integers(0, 110), st.integers(0, 110))
def test_a_span_has_the_pages_that_its_tokens_touch(size, first, length, start, end):
    whole = run(size, first, first + length)
    part = whole.span(start, end)
    # the last page may have room for some more
    tokens = range(max(start, first), min(end, whole.group.pages_for(first + length) * size))
    assert part.pages.tolist() == sorted({page_of(whole, token) for token in tokens})
    if tokens:
        assert part.first_token == tokens[0]


@given(SIZES, st.lists(st.integers(1, 20), min_size=1, max_size=6))
def test_of_joined_parts_the_later_one_has_the_page_that_both_list(size, lengths):
    ends = np.cumsum(lengths).tolist()
    parts = [run(size, start, end, 100 * i) for i, (start, end) in enumerate(zip([0, *ends], ends, strict=False))]
    whole = join(parts)
    assert whole.first_token == 0 and len(whole.pages) == whole.group.pages_for(ends[-1])
    for page, number in enumerate(whole.pages.tolist()):
        last = min((page + 1) * size, ends[-1]) - 1
        (owner,) = [part for part, end in zip(parts, ends, strict=True) if part.first_token <= last < end]
        assert number == page_of(owner, last)


def test_the_pages_of_all_groups():
    assert page_numbers([run(4, 0, 8), run(2, 0, 3, 200)]).tolist() == [100, 101, 200, 201]
    assert page_numbers(()).dtype == np.int32 and not len(page_numbers(()))
