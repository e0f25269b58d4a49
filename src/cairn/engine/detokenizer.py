"""The text of answers, made in the client's process so that the core's thread does not wait for it.

Answers with stop strings are not among them: the core has to see their text to end them in time.
"""

from cairn.engine.contract import GenerateOutput, GenerateRequest, TextStream, TextTokenizer


class Detokenizer:
    """Adds the text to the outputs of one request, if the core sends its answers as tokens alone."""

    __slots__ = ("_request", "_streams", "_tokenizer")

    def __init__(self, tokenizer: TextTokenizer, request: GenerateRequest) -> None:
        self._tokenizer = tokenizer
        self._request = request
        self._streams: list[TextStream | None] = [None] * request.num_answers

    def add_text(self, output: GenerateOutput) -> None:
        """Gives `output`, the next one of its answer, the text that its tokens complete."""
        stream = self._streams[output.index]
        if stream is None:
            if self._request.has_stop_strings:
                return
            stream = self._streams[output.index] = self._tokenizer.stream(self._request.skip_special_tokens)
        tokens = output.token_ids
        output.text = stream.push(tokens[0]) if len(tokens) == 1 else "".join(map(stream.push, tokens))
        if output.finish_reason is not None:
            output.text += stream.finish()
            self._streams[output.index] = None
