"""Traces of both forms: times, lengths, and exactly as much in common as they say."""

import gzip
import itertools
import json

import pytest

from cairn.bench.datasets import TraceCut, read_trace_prompts
from cairn.bench.work import Vocabulary
from cairn.errors import ConfigError
from cairn.trace_rows import MOONCAKE_UNIT

# so many ids that two tokens are hardly ever equal by chance
VOCABULARY = Vocabulary.of_size(1_000_000)
HEADER = {"name": "made", "unit": 64, "n": 4}
ROWS = [
    {"t": 10.0, "s": 0, "in": 300, "out": 130, "v": 1, "h": [[5, 3], [90, 1]]},
    {"t": 12.0, "s": 1, "in": 330, "out": 10, "v": 1, "h": [[5, 3], [70, 2]]},
    {"t": 12.0, "s": 2, "in": 700, "out": 0, "v": 0, "h": [[5, 3], [90, 1], [200, 6]]},
    {"t": 110.0, "s": 3, "in": 20, "out": 64, "v": 0, "h": []},
]


@pytest.fixture
def write(tmp_path):
    def writing(lines, zipped=False):
        text = "\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines)
        path = tmp_path / "trace.jsonl"
        path.write_bytes(gzip.compress(text.encode()) if zipped else text.encode())
        return path

    return writing


def turns(path, seed=0, **cut):
    return [work.turns[0] for work in read_trace_prompts(path, TraceCut(**cut), VOCABULARY, seed)]


def in_common(one, other):
    pairs = zip(one, other, strict=False)
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))


@pytest.mark.parametrize("zipped", [False, True])
@pytest.mark.parametrize("divisor", [1, 3, 16, 64, 100, 128])
def test_prompts_share_what_the_trace_says(write, divisor, zipped):
    made = turns(write([HEADER, *ROWS], zipped), length_divisor=divisor)
    assert [turn.num_tokens for turn in made] == [max(1, n // divisor) for n in (300, 330, 700, 20)]
    assert [len(turn.prompt) for turn in made] == [turn.num_tokens for turn in made]
    assert [turn.max_tokens for turn in made] == [max(1, n // divisor) for n in (130, 10, 0, 64)]
    # three ids of 64 tokens, four, and none
    assert in_common(made[0].prompt, made[1].prompt) == 3 * 64 // divisor
    assert in_common(made[0].prompt, made[2].prompt) == 4 * 64 // divisor
    assert in_common(made[0].prompt, made[3].prompt) == 0


def test_paths_that_part_do_not_meet_again(write):
    """The same id after different ones is another token."""
    rows = [
        {**ROWS[0], "in": 192, "h": [[1, 1], [7, 1], [9, 1]]},
        {**ROWS[0], "in": 192, "h": [[1, 1], [8, 1], [9, 1]]},
    ]
    one, other = turns(write([HEADER, *rows]))
    assert in_common(one.prompt, other.prompt) == 64
    assert not set(one.prompt[64:]) & set(other.prompt[64:])
    one, other = turns(write([HEADER, *rows]), length_divisor=192)
    assert one.prompt != other.prompt, "the one token that is left knows all ids that it stands for"


def test_the_same_path_with_another_end_shares_the_path_only(write):
    one, other = turns(write([HEADER, ROWS[0], ROWS[0]]))
    assert in_common(one.prompt, other.prompt) == 4 * 64
    assert len(one.prompt) == 300


def test_times_are_kept(write):
    path = write([HEADER, *ROWS])
    assert [work.at for work in read_trace_prompts(path, TraceCut(), VOCABULARY, 0)] == [0.0, 2.0, 2.0, 100.0]
    assert [work.at for work in read_trace_prompts(path, TraceCut(speedup=4.0), VOCABULARY, 0)] == [0.0, 0.5, 0.5, 25.0]
    assert len(turns(path, duration=100.0)) == 3
    assert len(turns(path, duration=100.5)) == 4
    assert len(turns(path, most=2)) == 2


def test_mooncake(write):
    rows = [
        {"timestamp": 0, "input_length": 1200, "output_length": 5, "hash_ids": [1, 2, 3]},
        {"timestamp": 3000, "input_length": 1030, "output_length": 50, "hash_ids": [1, 2, 9]},
        {"timestamp": 3500, "input_length": 1500, "output_length": 50, "hash_ids": [1, 7]},
    ]
    path = write(rows)
    made = turns(path)
    assert [work.at for work in read_trace_prompts(path, TraceCut(), VOCABULARY, 0)] == [0.0, 3.0, 3.5]
    assert in_common(made[0].prompt, made[1].prompt) == 2 * MOONCAKE_UNIT
    assert in_common(made[0].prompt, made[2].prompt) == MOONCAKE_UNIT


def test_the_seed_decides(write):
    path = write([HEADER, *ROWS])
    assert turns(path, seed=3) == turns(path, seed=3)
    assert in_common(turns(path, seed=3)[0].prompt, turns(path, seed=4)[0].prompt) == 0


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ([], "is empty"),
        ([HEADER], "no requests"),
        (["nonsense"], "trace.jsonl:1 is no JSON"),
        (["[" * 100_000], "trace.jsonl:1 is no JSON"),
        (["7"], "trace.jsonl:1 must be a JSON object"),
        ([{"unit": 0}], ":1: `unit`"),
        ([HEADER, {**ROWS[0], "in": 0}], ":2: `in`"),
        ([HEADER, {**ROWS[0], "in": 10**9}], ":2: `in`"),
        ([HEADER, {**ROWS[0], "out": -1}], ":2: `out`"),
        ([HEADER, {**ROWS[0], "t": "soon"}], ":2: `t`"),
        ([HEADER, {**ROWS[0], "h": [[1]]}], ":2: `h`"),
        ([HEADER, {**ROWS[0], "h": [[1, -1]]}], ":2: `h`"),
        ([HEADER, {**ROWS[0], "h": 5}], ":2: `h`"),
        ([HEADER, ROWS[1], ROWS[0]], ":3: requests must be in order"),
        ([{"timestamp": 0, "input_length": 5, "output_length": 1, "hash_ids": "x"}], ":1: `hash_ids`"),
    ],
)
def test_a_trace_that_is_none(write, lines, said):
    with pytest.raises(ConfigError, match=said):
        turns(write(lines))


def test_a_file_that_is_cut_off(write):
    path = write([HEADER, *ROWS], zipped=True)
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(ConfigError, match=r"--dataset-path .* cannot be read"):
        turns(path)
