"""Reads along while an answer passes: what was said, and where its pages can be found afterwards."""

from dataclasses import dataclass

import msgspec

from cairn.proxy.protocol import Body, valid_hint

_MAX_PENDING_BYTES = 4 << 20
_MAX_ANSWER_CHARS = 4 << 20
_MAX_INT64 = (1 << 63) - 1


@dataclass(frozen=True, slots=True)
class AnswerSummary:
    """What an answer told. `text` and `token_ids` of its first choice; None where they could not be read whole."""

    text: str | None
    token_ids: list[int] | None
    hint: msgspec.Raw | None


class _Said(msgspec.Struct):
    content: str | None = None
    tool_calls: msgspec.Raw = msgspec.Raw(b"null")


class _Choice(msgspec.Struct):
    index: int = 0
    text: str | None = None
    delta: _Said | None = None
    message: _Said | None = None
    token_ids: list[int] | None = None


class _Piece(msgspec.Struct):
    choices: tuple[_Choice, ...] = ()
    kv_transfer_params: Body | None = None


class StreamInspector:
    """Fed with an answer's bytes as they pass, cut anywhere. `done` once nothing more is to be expected.

    It never fails: an answer that it cannot read only has fewer findings.
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
        """Raises nothing, keeps at most a line of a stream, or the whole of an unstreamed answer, within bounds."""
        if self._missing is not None:
            self._missing -= len(data)
            self.done = self.done or self._missing <= 0
        self._pending += data
        if self._stream:
            *lines, self._pending = self._pending.split(b"\n")
            for line in lines:
                self._line(line.rstrip(b"\r"))
        if len(self._pending) > _MAX_PENDING_BYTES:
            self._pending, self._readable = b"", False

    def findings(self) -> AnswerSummary:
        """What is known by now; to be asked once, at the end."""
        if not self._stream and self._pending:
            self._piece(self._pending)
        text = "".join(self._texts) if self._readable else None
        token_ids = self._token_ids if self._readable and self._token_ids else None
        return AnswerSummary(text, token_ids, self._hint)

    def _line(self, line: bytes) -> None:
        if not line.startswith(b"data:"):
            return
        data = line[5:].strip()
        if data == b"[DONE]":
            self.done = True
        else:
            self._piece(data)

    def _piece(self, data: bytes) -> None:
        try:
            piece = msgspec.json.decode(data, type=_Piece)
        except (msgspec.DecodeError, RecursionError):
            self._readable = False
            return
        if piece.kv_transfer_params is not None:
            self._hint = valid_hint(piece.kv_transfer_params) or self._hint
        for choice in piece.choices:
            if choice.index == 0:
                self._choice(choice)

    def _choice(self, choice: _Choice) -> None:
        said = choice.delta or choice.message or _Said()
        text = choice.text or said.content or ""
        self._num_chars += len(text)
        if self._num_chars > _MAX_ANSWER_CHARS or bytes(said.tool_calls) not in (b"null", b"[]"):
            self._readable = False
        if self._readable:
            self._texts.append(text)
        if choice.token_ids is None:
            # Ids come with every piece or with none; a piece of text without them makes them incomplete.
            self._token_ids = None if text else self._token_ids
        elif self._token_ids is not None and all(abs(token) <= _MAX_INT64 for token in choice.token_ids):
            self._token_ids += choice.token_ids
