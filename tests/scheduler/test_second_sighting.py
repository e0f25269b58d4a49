"""The bar: with free memory every request hits within 63 tokens of all it shares with any earlier path, and exactly
there where that is an earlier prompt, an earlier prompt with its computed answer, or a boundary that was declared of
what a request computed."""

import pytest
from driver import Driver
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

SEGMENTS = [tuple(range(1000 * i, 1000 * i + length)) for i, length in enumerate((1, 30, 64, 65, 150, 200))]
TURN = st.tuples(
    st.integers(0, 20),  # which earlier path to start from
    st.floats(0, 1),  # how much of it
    st.lists(st.integers(0, len(SEGMENTS) - 1), max_size=3),
    st.sampled_from([1, 2, 64, 65, 130]),  # tokens to generate
    st.floats(0, 1),  # where a message ends
)


def common(one, other) -> int:
    pairs = zip(one, other, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


def runs(max_examples):
    """A test of random turns."""
    given_turns = given(
        turns=st.lists(TURN, min_size=2, max_size=7),
        block_size=st.sampled_from([1, 16, 48]),
        budget=st.sampled_from([70, 128, 2048]),
    )
    how = settings(max_examples=max_examples, deadline=None, suppress_health_check=[HealthCheck.too_slow])
    return lambda test: how(given_turns(test))


@runs(7)
def test_every_request_hits_within_63_tokens(turns, block_size, budget):
    check_hits(turns, block_size, budget)


@pytest.mark.more
@runs(100)
def test_every_request_of_more_turns_hits_within_63_tokens(turns, block_size, budget):
    check_hits(turns, block_size, budget)


def check_hits(turns, block_size, budget):
    driver = Driver(num_pages=20_000, block_size=block_size, max_num_batched_tokens=budget)
    paths, exact_ends = [()], set()
    for start, share, parts, max_tokens, boundary in turns:
        earlier = paths[start % len(paths)]
        prompt = earlier[: round(share * len(earlier))] + tuple(t for part in parts for t in SEGMENTS[part])
        if not prompt:
            continue
        ends = (max(1, round(boundary * len(prompt))),)
        request = driver.ask(prompt, max_tokens=max_tokens, boundaries=ends)
        shared = max(common(prompt, path) for path in paths)
        hit = request.stats.first_sequence.hit
        assert shared - 63 <= hit <= shared
        if prompt[:shared] in exact_ends:
            assert hit == shared
        computed = (*prompt, *request.output[:-1])
        paths.append(computed)
        exact_ends |= {prompt, computed}
        if ends[0] >= hit:
            # What was cached is not computed again: there is no state at an end that was declared inside it only now.
            exact_ends.add(prompt[: ends[0]])
