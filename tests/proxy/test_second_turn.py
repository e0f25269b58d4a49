"""How a conversation is recognized at its next turn: digests of its prompt, what the stream
inspector reads on the way, the cache of hints."""

import json
from itertools import pairwise

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cairn.proxy.prefixes import HintCache, prefix_digests
from cairn.proxy.protocol import parse_body
from cairn.proxy.stream_inspector import AnswerSummary, StreamInspector
from cairn.types import ManualClock

HINT = {"engine": "e", "host": "h", "port": 1}


def digests_of(**body):
    return prefix_digests(parse_body(json.dumps(body).encode()))


def said(text=None, token_ids=None):
    return AnswerSummary(text, token_ids, None)


def test_text():
    end = digests_of(prompt="p" * 100).add_answer(said("a" * 100))
    assert end in digests_of(prompt="p" * 100 + "a" * 100).digests
    assert end in digests_of(prompt="p" * 100 + "a" * 92 + "x").digests
    assert end not in digests_of(prompt="p" * 100 + "a" * 91 + "xx").digests
    assert end not in digests_of(prompt="p" * 99 + "a" * 101).digests
    assert digests_of(prompt="p").add_answer(said("a")) is None


def test_token_ids():
    end = digests_of(prompt=list(range(100))).add_answer(said("text", list(range(100, 200))))
    assert end in digests_of(prompt=list(range(192))).digests
    assert end not in digests_of(prompt=list(range(191))).digests
    # Without the answer's ids, where the prompt was known to end.
    assert (
        digests_of(prompt=list(range(100))).add_answer(said("text")) == digests_of(prompt=list(range(64))).digests[-1]
    )
    assert digests_of(prompt="a" * 64).digests != digests_of(prompt=[97] * 64).digests


def test_messages():
    user, answer = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}
    end = digests_of(messages=[user]).add_answer(said("hello"))
    assert digests_of(messages=[user, answer]).digests[-1] == end
    parts = answer | {"content": [{"type": "text", "text": "hel"}, {"type": "text", "text": "lo"}], "tool_calls": []}
    assert end in digests_of(messages=[user, parts, user]).digests
    assert end not in digests_of(messages=[user, answer | {"content": "hullo"}, user]).digests
    assert end not in digests_of(messages=[user, answer | {"role": "user"}, user]).digests
    assert end not in digests_of(messages=[user, answer], cache_salt="s").digests
    assert end not in digests_of(messages=[user, answer], model="m").digests
    assert digests_of(messages=[user]).add_answer(said(None)) == digests_of(messages=[user]).digests[-1]


@settings(max_examples=50, deadline=None)
@given(st.text(max_size=300), st.text(max_size=300), st.text(max_size=100))
def test_a_longer_prompt_passes_where_the_shorter_ended(prompt, answer, question):
    end = digests_of(prompt=prompt).add_answer(said(answer))
    assert end is None or end in digests_of(prompt=prompt + answer + question).digests


def test_the_digests_are_bounded():
    long = digests_of(prompt="x" * (1 << 21))
    assert len(long.digests) == 16384
    assert long.add_answer(said("y" * 100)) == long.digests[-1]


@pytest.mark.parametrize("body", [{}, {"prompt": [1, "a"]}, {"messages": 3}, {"messages": [3]}, {"prompt": [1 << 64]}])
def test_no_prompt_no_digests(body):
    assert digests_of(**body) is None


# -- the stream inspector ----------------------------------------------------------------------------------------------


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


def inspector_fed_with(*pieces, stream=True, length=None):
    inspector = StreamInspector(stream, length)
    for piece in pieces:
        inspector.feed(piece)
    return inspector


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, len(STREAM)), max_size=6).map(sorted))
def test_a_stream_may_be_cut_anywhere(cuts):
    edges = [0, *cuts, len(STREAM)]
    inspector = inspector_fed_with(*(STREAM[start:stop] for start, stop in pairwise(edges)))
    found = inspector.summarize()
    assert inspector.done
    assert (found.text, found.token_ids) == ("grüß dich", [1, 2, 3])
    assert msgspec.json.decode(found.hint) == HINT


def test_an_answer_in_one_piece():
    message = {"index": 0, "message": {"role": "assistant", "content": "hello", "tool_calls": []}, "token_ids": [5]}
    body = json.dumps({"choices": [message], "kv_transfer_params": {"cairn_decode_hint": HINT, "more": 1}}).encode()
    inspector = inspector_fed_with(body[:9], stream=False, length=len(body))
    assert not inspector.done
    inspector.feed(body[9:])
    found = inspector.summarize()
    assert inspector.done and (found.text, found.token_ids, found.hint is not None) == ("hello", [5], True)


def test_token_ids_that_are_not_all_there_are_none():
    pieces = [{"choices": [{"text": "a", "token_ids": [1]}]}, {"choices": [{"text": "b"}]}]
    assert inspector_fed_with(*map(event, pieces)).summarize().token_ids is None


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
    found = inspector_fed_with(event({"choices": [{"text": "a"}]}), piece, b"\n", hinted).summarize()
    assert found.text is None and found.token_ids is None and found.hint is not None


# -- the cache of hints ------------------------------------------------------------------------------------------------


def test_hints_age_and_are_forgotten():
    clock = ManualClock()
    hints = HintCache(10, 30.0, clock)
    hints.store(b"a", msgspec.Raw(b"1"))
    hints.store(b"b", msgspec.Raw(b"2"))
    assert bytes(hints.find([b"a", b"b", b"c"])) == b"2" and bytes(hints.find([b"b", b"a"])) == b"1"
    clock.advance(20)
    hints.store(b"a", msgspec.Raw(b"3"))
    clock.advance(10)
    assert bytes(hints.find([b"a", b"b"])) == b"3" and hints.find([b"b"]) is None and len(hints) == 1
    clock.advance(20)
    assert hints.find([b"a"]) is None and len(hints) == 0


def test_the_hint_that_was_not_used_longest_goes_first():
    hints = HintCache(2, 30.0, ManualClock())
    hints.store(b"a", msgspec.Raw(b"1"))
    hints.store(b"b", msgspec.Raw(b"2"))
    hints.find([b"a"])
    hints.store(b"c", msgspec.Raw(b"3"))
    assert len(hints) == 2 and hints.find([b"b"]) is None and hints.find([b"a"]) and hints.find([b"c"])


@pytest.mark.parametrize("odd", [[], ["x"], [5, None], [{"type": "text"}], {"text": 5}, 7])
def test_what_is_new_in_every_request_is_no_part_of_a_prompt(odd):
    """Servers leave it out, too. `odd`: content that a server will say something about."""
    first, second = (f"x-anthropic-billing-header: cc_version=2; cch={number};" for number in ("00001", "0aaa9"))
    rules, asked = {"type": "text", "text": "Rules."}, [{"role": "user", "content": "Hello."}]
    ways = [
        [digests_of(system=[{"type": "text", "text": header}, rules], messages=asked) for header in (first, second)],
        [digests_of(system=f"{header}\nRules.", messages=asked) for header in (first, second)],
        [digests_of(instructions=f"{header}\nRules.", input="Hello.") for header in (first, second)],
    ]
    assert all(one.digests == other.digests for one, other in ways)
    assert ways[0][0].digests[1] != digests_of(system="Others.", messages=asked).digests[1]
    later = [
        digests_of(messages=[*asked, {"role": "system", "content": f"{header}\nRules."}]) for header in (first, second)
    ]
    assert later[0].digests[:1] == later[1].digests[:1] and later[0].digests[-1] != later[1].digests[-1]
    assert digests_of(system=odd, messages=asked) is not None
