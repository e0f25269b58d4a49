"""Events of a stream, as they are written one by one and in frames that are made once."""

import json

import pytest

from cairn.engine.contract import GenerateOutput, RenderedPrompt, TokenLogprobs
from cairn.server.openai.chat_message import ChatMessage
from cairn.server.openai.generate import PromptEvents
from cairn.server.openai.logprobs import LogprobsFormatter
from cairn.server.openai.requests import ChatRequest, CompletionRequest
from cairn.server.openai.response_writer import ChatWriter, CompletionWriter
from cairn.server.options import AnswerOptions
from cairn.server.parsers.output_parser import OutputParser
from cairn.types import ManualClock

PIECES = ["a", 'b"\\', "\n\0", "", "é🦜\u2028", '","text":', "", "\x7f/"]
NAME = '\0"\0"\\u0000'
KINDS = {
    "completion": (CompletionWriter, CompletionRequest, {"prompt": "x"}),
    "chat": (ChatWriter, ChatRequest, {"messages": [{"role": "user", "content": "x"}]}),
}


def make_writer(kind, **fields):
    writer, request, body = KINDS[kind]
    body = request(**json.loads(json.dumps({**body, "stream": True, **fields})))
    prompt = RenderedPrompt(token_ids=[1, 2], boundaries=[], text="x")
    formatter = LogprobsFormatter(lambda token: b"x")
    new_message = lambda: ChatMessage(OutputParser(), lambda: "id")  # noqa: E731
    return writer(NAME, 1, NAME, "print", body, [prompt], 2, formatter, new_message, AnswerOptions())


def events(writer, keeps_frames):
    written = []
    for place, text in enumerate(PIECES * 2):
        last = {"finish_reason": "stop"} if place >= 2 * len(PIECES) - 2 else {}
        output = GenerateOutput(request_id="r", index=place % 2, token_ids=[place], text=text, **last)
        if not keeps_frames:
            writer.choices[place % 2].frame = None
        written += writer.output_events(0, output)
    return written


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "fields",
    [{}, {"return_token_ids": True}, {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}],
)
def test_a_frame_changes_no_byte(kind, fields):
    framed, plain = make_writer(kind, **fields), make_writer(kind, **fields)
    assert events(framed, True) == events(plain, False)
    assert all((choice.frame is None) == bool(fields) for choice in framed.choices)
    assert framed.usage() == plain.usage()


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_without_a_text_are_told_where_ids_are_asked_for(kind):
    written = events(make_writer(kind, return_token_ids=True), True)
    choices = [json.loads(event.removeprefix(b"data: "))["choices"][0] for event in written]
    told = [(choice["index"], token) for choice in choices for token in choice.get("token_ids") or ()]
    assert told == [(place % 2, place) for place in range(2 * len(PIECES))]


class Reader:
    """A connection. `can_write`: whether its client keeps up."""

    def __init__(self):
        self.can_write, self.written = True, b""

    def write(self, data):
        self.written += data


class Meter:
    """When outputs were recorded."""

    def __init__(self):
        self.times = []

    def record(self, output, now):
        self.times.append(now)


def test_outputs_are_written_at_once_to_clients_that_keep_up_and_to_no_other():
    def output(text, **fields):
        return GenerateOutput(request_id="r", index=1, token_ids=[1], text=text, **fields)

    writer, reader = make_writer("completion", stream_interval=2), Reader()
    clock, meters = ManualClock(), [Meter(), Meter()]
    stream = PromptEvents(writer, meters, clock)
    assert not stream.take(0, output("a")) and not writer.choices[1].token_ids, "the stream has not begun"
    stream.connection = reader
    for text in "abc":
        clock.advance(1)
        assert stream.take(0, output(text))
    told = TokenLogprobs(width=1, token_ids=bytes(4), values=bytes(4), ranks=bytes(4))
    for more in ({"finish_reason": "stop"}, {"logprobs": told}, {"prompt_logprobs": told}):
        assert not stream.take(0, output("d", **more)), "it says more than tokens"
    texts = [json.loads(line)["choices"][0]["text"] for line in reader.written.decode().split("data: ")[1:]]
    assert texts == ["a", "bc"]
    reader.can_write = False
    assert not stream.take(0, output("d")) and writer.choices[1].token_ids == [1, 1, 1]
    assert [meter.times for meter in meters] == [[], [1, 2, 3]], "what is taken is measured"
