"""Reads an answer while it passes through: its text and token ids, and the hint where its pages can be claimed."""

from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from cairn.proxy.protocol import Body, valid_hint

_MAX_PENDING_BYTES = 4 << 20
_MAX_ANSWER_CHARS = 4 << 20
_MAX_INT64 = (1 << 63) - 1


@dataclass(frozen=True, slots=True)
class AnswerSummary:
    """`text` and `token_ids` of an answer's first choice, None where they could not be read completely; the `hint` for
    the next turn, None if the server sent none. `response_id`: of an answer of /v1/responses."""

    text: str | None
    token_ids: list[int] | None
    hint: msgspec.Raw | None
    response_id: str | None = None


class _Message(msgspec.Struct):
    content: str | None = None
    tool_calls: msgspec.Raw = msgspec.Raw(b"null")


class _Choice(msgspec.Struct):
    index: int = 0
    text: str | None = None
    delta: _Message | None = None
    message: _Message | None = None
    token_ids: list[int] | None = None


class _Block(msgspec.Struct):
    """Of Anthropic's messages, a delta of one, or a part of an item."""

    type: str = ""
    text: str | None = None


class _Item(msgspec.Struct):
    type: str = ""
    content: tuple[_Block, ...] = ()


class _Response(msgspec.Struct):
    id: str | None = None
    output: tuple[_Item, ...] = ()
    kv_transfer_params: Body | None = None


class _Chunk(msgspec.Struct):
    """An answer, or an event, of any of the APIs; those of the newer two say what they are in `type` or `object`."""

    choices: tuple[_Choice, ...] = ()
    kv_transfer_params: Body | None = None
    type: str = ""
    object: str = ""
    content: tuple[_Block, ...] = ()
    content_block: _Block | None = None
    delta: msgspec.Raw = msgspec.Raw(b"null")
    response: _Response | None = None


_LAST_EVENTS = frozenset(("message_stop", "response.completed", "response.incomplete", "response.failed"))


class StreamInspector:
    """Fed with an answer's bytes in pieces of any size. `done`: nothing more is expected.

    `record` is called once with the summary: when the answer is done, or else at its end. It never fails: the summary
    of an answer that it cannot read has less in it.
    """

    def __init__(
        self,
        stream: bool,
        content_length: int | None = None,
        record: Callable[[AnswerSummary], None] | None = None,
    ) -> None:
        self.done = False
        self._record = record
        self._stream = stream
        self._missing = content_length
        self._pending = b""
        self._readable = True
        self._texts: list[str] = []
        self._num_chars = 0
        self._token_ids: list[int] | None = []
        self._hint: msgspec.Raw | None = None
        self._response_id: str | None = None

    def feed(self, data: bytes) -> None:
        """Buffers at most one line of a stream, or the whole of an unstreamed answer, within bounds. To be called
        before the data goes out: the client's next turn may be quicker than the end of this answer."""
        if self._missing is not None:
            self._missing -= len(data)
            self.done = self.done or self._missing <= 0
        self._pending += data
        if self._stream:
            *lines, self._pending = self._pending.split(b"\n")
            for line in lines:
                if line.startswith(b"data:") and line[5:].strip() == b"[DONE]":
                    self.done = True
                elif line.startswith(b"data:"):
                    self._read_chunk(line[5:].strip())
        if len(self._pending) > _MAX_PENDING_BYTES:
            self._pending, self._readable = b"", False
        if self.done:
            self.finish()

    def finish(self) -> None:
        """There is no more data."""
        record, self._record = self._record, None
        if record is not None:
            record(self.summarize())

    def summarize(self) -> AnswerSummary:
        """The summary of the bytes so far; call it once, at the end."""
        if not self._stream and self._pending:
            self._read_chunk(self._pending)
        text = "".join(self._texts) if self._readable else None
        token_ids = self._token_ids if self._readable and self._token_ids else None
        return AnswerSummary(text, token_ids, self._hint, self._response_id)

    def _read_chunk(self, data: bytes) -> None:
        try:
            chunk = msgspec.json.decode(data, type=_Chunk)
            blocks = _blocks_of(chunk)
            response = msgspec.json.decode(data, type=_Response) if chunk.object == "response" else None
        except (msgspec.DecodeError, RecursionError):
            self._readable = False
            return
        if chunk.kv_transfer_params is not None:
            self._hint = valid_hint(chunk.kv_transfer_params) or self._hint
        for choice in chunk.choices:
            if choice.index == 0:
                self._read_choice(choice)
        for block in blocks:
            self._read_block(block)
        if chunk.type in _LAST_EVENTS:
            self.done, response = True, chunk.response
        if response is not None:
            self._read_response(response)

    def _read_block(self, block: _Block) -> None:
        if block.type == "tool_use":
            self._readable = False
        if block.type in ("text", "text_delta"):
            self._add_text(block.text or "")

    def _read_response(self, response: _Response) -> None:
        self._response_id = response.id
        if response.kv_transfer_params is not None:
            self._hint = valid_hint(response.kv_transfer_params) or self._hint
        for item in response.output:
            if item.type.endswith("_call"):
                self._readable = False
            for part in item.content if item.type == "message" else ():
                self._add_text(part.text or "")

    def _add_text(self, text: str) -> None:
        self._num_chars += len(text)
        if self._num_chars > _MAX_ANSWER_CHARS:
            self._readable = False
        if self._readable:
            self._texts.append(text)

    def _read_choice(self, choice: _Choice) -> None:
        message = choice.delta or choice.message or _Message()
        text = choice.text or message.content or ""
        if bytes(message.tool_calls) not in (b"null", b"[]"):
            self._readable = False
        self._add_text(text)
        if choice.token_ids is None:
            # Ids come with every chunk or with none; a chunk of text without them makes them incomplete.
            self._token_ids = None if text else self._token_ids
        elif self._token_ids is not None and all(abs(token) <= _MAX_INT64 for token in choice.token_ids):
            self._token_ids += choice.token_ids


def _blocks_of(chunk: _Chunk) -> tuple[_Block, ...]:
    """Of a message of Anthropic's, or of one of its events. Raises msgspec.DecodeError."""
    match chunk.type:
        case "message":
            return chunk.content
        case "content_block_start":
            return () if chunk.content_block is None else (chunk.content_block,)
        case "content_block_delta":
            return (msgspec.json.decode(chunk.delta, type=_Block),)
    return ()
