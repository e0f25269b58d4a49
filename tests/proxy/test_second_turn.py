"""How a conversation is recognized at its next turn: the trail, what the tap reads on the way, the memory of hints."""

import json
from itertools import pairwise

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cairn.proxy.hints import Hints, prefix_digests
from cairn.proxy.protocol import parse_body
from cairn.proxy.stream_inspector import AnswerSummary, StreamInspector
from cairn.types import ManualClock

HINT = {"engine": "e", "host": "h", "port": 1}


def trail(**body):
    return prefix_digests(parse_body(json.dumps(body).encode()))


def said(text=None, token_ids=None):
    return AnswerSummary(text, token_ids, None)


def test_text():
    end = trail(prompt="p" * 100).end(said("a" * 100))
    assert end in trail(prompt="p" * 100 + "a" * 100).marks
    assert end in trail(prompt="p" * 100 + "a" * 92 + "x").marks
    assert end not in trail(prompt="p" * 100 + "a" * 91 + "xx").marks
    assert end not in trail(prompt="p" * 99 + "a" * 101).marks
    assert trail(prompt="p").end(said("a")) is None


def test_token_ids():
    end = trail(prompt=list(range(100))).end(said("text", list(range(100, 200))))
    assert end in trail(prompt=list(range(192))).marks
    assert end not in trail(prompt=list(range(191))).marks
    # Without the answer's ids, where the prompt was known to end.
    assert trail(prompt=list(range(100))).end(said("text")) == trail(prompt=list(range(64))).marks[-1]
    assert trail(prompt="a" * 64).marks != trail(prompt=[97] * 64).marks


def test_messages():
    user, answer = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}
    end = trail(messages=[user]).end(said("hello"))
    assert trail(messages=[user, answer]).marks[-1] == end
    parts = answer | {"content": [{"type": "text", "text": "hel"}, {"type": "text", "text": "lo"}], "tool_calls": []}
    assert end in trail(messages=[user, parts, user]).marks
    assert end not in trail(messages=[user, answer | {"content": "hullo"}, user]).marks
    assert end not in trail(messages=[user, answer | {"role": "user"}, user]).marks
    assert end not in trail(messages=[user, answer], cache_salt="s").marks
    assert end not in trail(messages=[user, answer], model="m").marks
    assert trail(messages=[user]).end(said(None)) == trail(messages=[user]).marks[-1]


@settings(max_examples=50, deadline=None)
@given(st.text(max_size=300), st.text(max_size=300), st.text(max_size=100))
def test_a_longer_prompt_passes_where_the_shorter_ended(prompt, answer, question):
    end = trail(prompt=prompt).end(said(answer))
    assert end is None or end in trail(prompt=prompt + answer + question).marks


def test_a_trail_is_bounded():
    long = trail(prompt="x" * (1 << 21))
    assert len(long.marks) == 16384
    assert long.end(said("y" * 100)) == long.marks[-1]


@pytest.mark.parametrize("body", [{}, {"prompt": [1, "a"]}, {"messages": 3}, {"messages": [3]}, {"prompt": [1 << 64]}])
def test_no_prompt_no_trail(body):
    assert trail(**body) is None


# -- the tap ---------------------------------------------------------------------------------------------------------


def event(body):
    return b"data: " + json.dumps(body, ensure_ascii=False).encode() + b"\r\n\r\n"


STREAM = b"".join(
    [
        b": a comment\n\n",
        event({"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]}),
        event({"choices": [{"index": 0, "delta": {"content": "grüß"}, "token_ids": [1, 2]}]}),
        event({"choices": [{"index": 1, "delta": {"content": "another"}, "token_ids": [9]}]}),
        event({"choices": [{"index": 0, "delta": {"content": " dich"}, "token_ids": [3]}], "unknown": {"x": [1]}}),
        event({"choices": [{"index": 0, "delta": {}}], "kv_transfer_params": {"cairn_decode_hint": HINT}}),
        event({"choices": [], "usage": {"total_tokens": 3}, "kv_transfer_params": None}),
        b"data: [DONE]\n\n",
    ]
)


def tapped(*pieces, stream=True, length=None):
    tap = StreamInspector(stream, length)
    for piece in pieces:
        tap.feed(piece)
    return tap


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, len(STREAM)), max_size=6).map(sorted))
def test_a_stream_may_be_cut_anywhere(cuts):
    edges = [0, *cuts, len(STREAM)]
    tap = tapped(*(STREAM[start:stop] for start, stop in pairwise(edges)))
    found = tap.findings()
    assert tap.done
    assert (found.text, found.token_ids) == ("grüß dich", [1, 2, 3])
    assert msgspec.json.decode(found.hint) == HINT


def test_an_answer_in_one_piece():
    message = {"index": 0, "message": {"role": "assistant", "content": "hello", "tool_calls": []}, "token_ids": [5]}
    body = json.dumps({"choices": [message], "kv_transfer_params": {"cairn_decode_hint": HINT, "more": 1}}).encode()
    tap = tapped(body[:9], stream=False, length=len(body))
    assert not tap.done
    tap.feed(body[9:])
    found = tap.findings()
    assert tap.done and (found.text, found.token_ids, found.hint is not None) == ("hello", [5], True)


def test_token_ids_that_are_not_all_there_are_none():
    pieces = [{"choices": [{"text": "a", "token_ids": [1]}]}, {"choices": [{"text": "b"}]}]
    assert tapped(*map(event, pieces)).findings().token_ids is None


@pytest.mark.parametrize(
    "piece",
    [
        b"data: {nonsense\n\n",
        b'data: {"choices": [{"text": 3}]}\n\n',
        b'data: {"choices": "x"}\n\n',
        b'data: {"choices": [{"text": "t", "token_ids": ["x"]}]}\n\n',
        b"data: " + b"[" * 100_000 + b"\n\n",
        event({"choices": [{"delta": {"tool_calls": [{"index": 0, "function": {"name": "f"}}]}}]}),
        b"x" * (5 << 20),
        event({"choices": [{"text": "x" * (5 << 20)}]}),
    ],
)
def test_what_cannot_be_read_is_no_answer_but_the_hint_is(piece):
    hinted = event({"choices": [], "kv_transfer_params": {"cairn_decode_hint": HINT}})
    found = tapped(event({"choices": [{"text": "a"}]}), piece, b"\n", hinted).findings()
    assert found.text is None and found.token_ids is None and found.hint is not None


# -- the memory ------------------------------------------------------------------------------------------------------


def test_hints_age_and_are_forgotten():
    clock = ManualClock()
    hints = Hints(10, 30.0, clock)
    hints.remember(b"a", msgspec.Raw(b"1"))
    hints.remember(b"b", msgspec.Raw(b"2"))
    assert bytes(hints.find([b"a", b"b", b"c"])) == b"2" and bytes(hints.find([b"b", b"a"])) == b"1"
    clock.advance(20)
    hints.remember(b"a", msgspec.Raw(b"3"))
    clock.advance(10)
    assert bytes(hints.find([b"a", b"b"])) == b"3" and hints.find([b"b"]) is None and len(hints) == 1
    clock.advance(20)
    assert hints.find([b"a"]) is None and len(hints) == 0


def test_the_hint_that_was_not_used_longest_goes_first():
    hints = Hints(2, 30.0, ManualClock())
    hints.remember(b"a", msgspec.Raw(b"1"))
    hints.remember(b"b", msgspec.Raw(b"2"))
    hints.find([b"a"])
    hints.remember(b"c", msgspec.Raw(b"3"))
    assert len(hints) == 2 and hints.find([b"b"]) is None and hints.find([b"a"]) and hints.find([b"c"])
