"""One answer's text as it grows: from tokens to what may go out, and to the stop string that ends it."""

from cairn.engine.constraint import GrammarConstraint
from cairn.engine.contract import GenerateRequest, TextStream
from cairn.engine.kv_transfer import Terms
from cairn.engine.stop_strings import StopStrings

_BAD_GATEWAY = 502
"""The status of an answer that failed because another server did."""


class GrowingAnswer:
    """Answer `index` of a request. `terms`: the request's part in a transfer; `constraint`: what holds it to a form;
    `failure_status`: the HTTP status if it fails."""

    def __init__(
        self,
        request: GenerateRequest,
        index: int,
        stream: TextStream,
        terms: Terms,
        constraint: GrammarConstraint | None,
    ) -> None:
        self.request_id = request.request_id
        self.index = index
        self.terms = terms
        self.constraint = constraint
        self.failure_status = _BAD_GATEWAY
        self.stop_tokens = frozenset(request.stop_token_ids)
        self._stream = stream
        self._stops = StopStrings(request.stop, request.include_stop_str_in_output)
        self._min_tokens, self._num_tokens = request.min_tokens, 0

    def push(self, tokens: tuple[int, ...]) -> tuple[str, str | None]:
        """The text that may go out, and the stop string that was met. What the first `min_tokens` tokens complete
        stops nothing."""
        said = ""
        for token in tokens:
            self._num_tokens += 1
            text, stop = self._stops.push(self._stream.push(token), heed=self._heeds)
            said += text
            if stop is not None:
                return said, stop
        return said, None

    def finish(self) -> str:
        """What is left when the answer ends otherwise than at a stop string."""
        text, stop = self._stops.push(self._stream.finish(), heed=self._heeds)
        return text if stop is not None else text + self._stops.finish()

    @property
    def _heeds(self) -> bool:
        return self._num_tokens > self._min_tokens
