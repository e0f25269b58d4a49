"""One request being echoed by the core in memory."""

from dataclasses import dataclass

from cairn.engine.contract import FinishReason, GenerateOutput, GenerateRequest, TextStream
from cairn.engine.fake_tokenizer import END_OF_SEQUENCE
from cairn.engine.fake_transfer import RemoteRole
from cairn.engine.stop_strings import StopStrings
from cairn.types import Keys

__all__ = ["FakeAnswer"]


@dataclass(slots=True)
class FakeAnswer:
    """What is kept of the request while it lasts. Times are seconds of the core's clock."""

    request: GenerateRequest
    keys: Keys
    source: list[int]
    cached_tokens: int
    received_tokens: int
    role: RemoteRole
    room: int
    stream: TextStream
    stops: StopStrings
    submitted: float
    started: float = 0.0
    first: float = 0.0
    num_tokens: int = 0

    @property
    def missing_tokens(self) -> int:
        """Prompt tokens that were neither cached nor received: the rest has to be computed."""
        return len(self.keys) - self.cached_tokens - self.received_tokens

    def advance(self) -> GenerateOutput:
        """One more token; timings and cache report are the core's to add."""
        token = self.source[self.num_tokens % len(self.source)]
        self.num_tokens += 1
        text, stop_string = self.stops.push(self.stream.push(token))
        finish, reason = self._finish(token, stop_string)
        if finish is not None and stop_string is None:
            text += self.stops.finish() + self.stream.finish()
        return GenerateOutput(
            request_id=self.request.request_id,
            token_ids=[token],
            text=text,
            finish_reason=finish,
            stop_reason=reason,
        )

    def _finish(self, token: int, stop_string: str | None) -> tuple[FinishReason | None, str | int | None]:
        if stop_string is not None:
            return "stop", stop_string
        if token in self.request.stop_token_ids:
            return "stop", token
        if token == END_OF_SEQUENCE and not self.request.ignore_eos:
            return "stop", None
        if self.num_tokens >= min(self.room, self.request.max_tokens or self.room):
            return "length", None
        return None, None
