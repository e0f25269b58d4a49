"""Reads an answer while it passes through: its text and token ids, and the hint where its pages can be claimed."""

from dataclasses import dataclass

import msgspec

from cairn.proxy.protocol import Body, valid_hint

_MAX_PENDING_BYTES = 4 << 20
_MAX_ANSWER_CHARS = 4 << 20
_MAX_INT64 = (1 << 63) - 1


@dataclass(frozen=True, slots=True)
class AnswerSummary:
    """`text` and `token_ids` of an answer's first choice, None where they could not be read completely; the `hint` for
    the next turn, None if the server sent none."""

    text: str | None
    token_ids: list[int] | None
    hint: msgspec.Raw | None


class _Message(msgspec.Struct):
    content: str | None = None
    tool_calls: msgspec.Raw = msgspec.Raw(b"null")


class _Choice(msgspec.Struct):
    index: int = 0
    text: str | None = None
    delta: _Message | None = None
    message: _Message | None = None
    token_ids: list[int] | None = None


class _Chunk(msgspec.Struct):
    choices: tuple[_Choice, ...] = ()
    kv_transfer_params: Body | None = None


class StreamInspector:
    """Fed with an answer's bytes in pieces of any size. `done`: nothing more is expected.

    It never fails: the summary of an answer that it cannot read has less in it.
    """

    def __init__(self, stream: bool, content_length: int | None = None) -> None:
        self.done = False
        self._stream = stream
        self._missing = content_length
        self._pending = b""
        self._readable = True
        self._texts: list[str] = []
        self._num_chars = 0
        self._token_ids: list[int] | None = []
        self._hint: msgspec.Raw | None = None

    def feed(self, data: bytes) -> None:
        """Buffers at most one line of a stream, or the whole of an unstreamed answer, within bounds."""
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

    def summarize(self) -> AnswerSummary:
        """The summary of the bytes so far; call it once, at the end."""
        if not self._stream and self._pending:
            self._read_chunk(self._pending)
        text = "".join(self._texts) if self._readable else None
        token_ids = self._token_ids if self._readable and self._token_ids else None
        return AnswerSummary(text, token_ids, self._hint)

    def _read_chunk(self, data: bytes) -> None:
        try:
            chunk = msgspec.json.decode(data, type=_Chunk)
        except (msgspec.DecodeError, RecursionError):
            self._readable = False
            return
        if chunk.kv_transfer_params is not None:
            self._hint = valid_hint(chunk.kv_transfer_params) or self._hint
        for choice in chunk.choices:
            if choice.index == 0:
                self._read_choice(choice)

    def _read_choice(self, choice: _Choice) -> None:
        message = choice.delta or choice.message or _Message()
        text = choice.text or message.content or ""
        self._num_chars += len(text)
        if self._num_chars > _MAX_ANSWER_CHARS or bytes(message.tool_calls) not in (b"null", b"[]"):
            self._readable = False
        if self._readable:
            self._texts.append(text)
        if choice.token_ids is None:
            # Ids come with every chunk or with none; a chunk of text without them makes them incomplete.
            self._token_ids = None if text else self._token_ids
        elif self._token_ids is not None and all(abs(token) <= _MAX_INT64 for token in choice.token_ids):
            self._token_ids += choice.token_ids
