"""`KeyBuffer` against a plain list, whoever appends."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from cairn.keys import KeyBuffer

tokens = st.lists(st.integers(-(2**40), 2**40), max_size=12)


@given(
    prompt=tokens, output=tokens, copied=st.integers(0, 12), more=tokens, bounds=st.tuples(*[st.integers(0, 40)] * 2)
)
def test_a_slice_is_that_of_all_keys(
    prompt: list[int], output: list[int], copied: int, more: list[int], bounds: tuple[int, int]
) -> None:
    begin = np.array(prompt, np.int64)
    buffer, answer = KeyBuffer(begin), output[:copied]
    buffer.follow(answer, len(prompt))
    if copied % 2:
        assert buffer.keys.tolist() == prompt + answer  # what has been read lies in the buffer from then on
    answer += output[copied:]
    for token in more:
        buffer.append(token)
    start, end = sorted(min(bound, buffer.num_tokens) for bound in bounds)
    everything = prompt + output + more
    assert buffer.slice(start, end).tolist() == everything[start:end]
    assert buffer.slice(start, end).dtype == np.int64
    assert buffer.keys.tolist() == everything and begin.tolist() == prompt
