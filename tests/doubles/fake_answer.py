"""One request being echoed by the core in memory."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from cairn.engine.contract import FinishReason, GenerateOutput, GenerateRequest, TextStream, TokenLogprobs
from cairn.engine.logprobs import packed
from cairn.engine.stop_strings import StopStrings
from cairn.step import Logprobs
from cairn.types import Keys
from doubles.byte_tokenizer import END_OF_SEQUENCE
from doubles.fake_transfer import RemoteRole

__all__ = ["FakeAnswer", "told"]


def told(tokens: Sequence[int], top: int) -> TokenLogprobs:
    """Token t has the logarithm -1 - t / 1024, so the best ones are 0, 1, 2, ..., and its rank is t + 1."""
    ids = np.array([[token, *range(top)] for token in tokens], np.int32).reshape(len(tokens), 1 + top)
    values = (-1 - ids / 1024).astype(np.float32)
    return packed([Logprobs(ids, values, ids[:, 0] + 1)], top)


@dataclass(slots=True)
class FakeAnswer:
    """What is kept of the request while it lasts. Times are seconds of the core's clock."""

    request: GenerateRequest
    index: int
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
        asked = self.request
        if self.source[self.num_tokens % len(self.source)] == END_OF_SEQUENCE and self.num_tokens < asked.min_tokens:
            self.source = [token for token in self.source if token != END_OF_SEQUENCE] * 2 + [END_OF_SEQUENCE]
        token = self.source[self.num_tokens % len(self.source)]
        self.num_tokens += 1
        text, stop_string = self.stops.push(self.stream.push(token), heed=self.num_tokens > asked.min_tokens)
        finish, reason = self._finish(token, stop_string)
        if finish is not None and stop_string is None:
            text += self.stops.finish() + self.stream.finish()
        return GenerateOutput(
            request_id=asked.request_id,
            index=self.index,
            token_ids=[token],
            text=text,
            finish_reason=finish,
            stop_reason=reason,
            logprobs=None if asked.logprobs is None else told([token], asked.logprobs),
            prompt_logprobs=self._prompt_logprobs() if self.num_tokens == 1 and self.index == 0 else None,
        )

    def _prompt_logprobs(self) -> TokenLogprobs | None:
        top = self.request.prompt_logprobs
        return None if top is None else told(self.keys[1:].tolist(), top)

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
