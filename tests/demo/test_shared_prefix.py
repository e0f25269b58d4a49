import pytest
from demo.shared_prefix import SeenPaths, Shared, branch, common_length
from hypothesis import given
from hypothesis import strategies as st

TOKENS = st.lists(st.integers(0, 2), max_size=8)


@given(TOKENS, TOKENS)
def test_common_length_is_the_longest_equal_beginning(left, right):
    length = common_length(left, right)
    assert left[:length] == right[:length]
    assert left[: length + 1] != right[: length + 1] or length == min(len(left), len(right))


def test_branch_shares_exactly_what_it_is_told():
    branched = branch(range(10), 4, [4, 4, 7, 8, 9, 9], 7)
    assert branched == [0, 1, 2, 3, 7, 8, 9]


def test_branch_refuses_a_tail_that_is_too_short():
    with pytest.raises(AssertionError):
        branch(range(10), 4, [7], 7)


def test_nothing_is_shared_with_what_nobody_sent():
    assert SeenPaths().shared(None, [1, 2, 3]) == Shared(prompts=0, paths=0)


def test_the_last_token_of_an_answer_is_not_computed():
    seen = SeenPaths()
    seen.note(None, [1, 2, 3], [4, 5, 6])
    assert seen.shared(None, [1, 2, 3, 4, 5, 6, 7]) == Shared(prompts=3, paths=5)
    assert seen.shared(None, [1, 2, 9]) == Shared(prompts=2, paths=2)


def test_the_longest_of_several_paths_counts_for_each_number():
    seen = SeenPaths()
    seen.note(None, [1, 2], [3, 4, 5])
    seen.note(None, [1, 2, 3, 9], [9])
    assert seen.shared(None, [1, 2, 3, 4, 4]) == Shared(prompts=3, paths=4)


def test_salts_share_nothing():
    seen = SeenPaths()
    seen.note("one", [1, 2, 3], [4])
    assert seen.shared("two", [1, 2, 3]) == Shared(0, 0)
    assert seen.shared(None, [1, 2, 3]) == Shared(0, 0)
    assert seen.shared("one", [1, 2, 3]) == Shared(3, 3)
