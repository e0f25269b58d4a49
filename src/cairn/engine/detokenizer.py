"""The text of answers, made in the client's process so that the core's thread does not wait for it.

Answers with stop strings are not among them: the core has to see their text to end them in time.
"""

import asyncio
from collections.abc import Sequence

import msgspec

from cairn.engine.contract import GenerateOutput, GenerateRequest, TextStream, TextTokenizer

MAX_TOKENS_AT_ONCE = 256
"""Tokens that are turned into text before others on the event loop have their turn: a slow reader's output may have
all of a long answer."""


class Detokenizer:
    """Adds the text to outputs of requests whose answers the core sends as tokens alone."""

    def __init__(self, tokenizer: TextTokenizer, requests: Sequence[GenerateRequest]) -> None:
        self._tokenizer = tokenizer
        self._requests = {request.request_id: request for request in requests if not request.has_stop_strings}
        self._streams: dict[tuple[str, int], TextStream] = {}

    async def add_text(self, output: GenerateOutput) -> GenerateOutput:
        """`output`, the next one of its answer, with the text that its tokens complete."""
        request, answer = self._requests.get(output.request_id), (output.request_id, output.index)
        if request is None:
            return output
        stream = self._streams.get(answer)
        if stream is None:
            stream = self._streams[answer] = self._tokenizer.stream(request.skip_special_tokens)
        text = ""
        for place, token in enumerate(output.token_ids, 1):
            text += stream.push(token)
            if place % MAX_TOKENS_AT_ONCE == 0:
                await asyncio.sleep(0)
        if output.finish_reason is not None:
            text += stream.finish()
            del self._streams[answer]
        return msgspec.structs.replace(output, text=text) if text else output
