"""Output processing: sampled tokens become outputs for the client; where stop strings may end an answer, with text."""

from collections.abc import Sequence

import msgspec

from cairn.engine.contract import (
    FinishReason,
    GenerateOutput,
    GenerateRequest,
    StopConditions,
    TextStream,
    TextTokenizer,
)
from cairn.engine.contract.output import pack_logprobs
from cairn.engine.core_report import cache_report, draft_report, timings
from cairn.engine.grammars.constraint import GrammarConstraint
from cairn.engine.repetition import RepetitionDetector
from cairn.engine.thinking import ThinkingConstraint
from cairn.engine.transfers.kv_transfer import KvTransfer, report
from cairn.errors import InvalidRequest, QueueFull
from cairn.scheduler.request import Request, Spec
from cairn.scheduler.scheduler import Progress, Scheduler
from cairn.types import RequestId

_BAD_GATEWAY = 502
"""The status of an answer that failed because another server did."""


class StopStringChecker:
    """Releases an answer's text up to where a stop string may have begun. `include`: the stop string that ends the
    answer is part of its text."""

    def __init__(self, stops: Sequence[str], include: bool = False) -> None:
        self._stops = [stop for stop in stops if stop]
        self._include = include
        self._longest = max(map(len, self._stops), default=1) - 1
        self._pending = ""

    def push(self, text: str, check: bool = True) -> tuple[str, str | None]:
        """The text that can be released, and the stop string that was found, if any. Nothing follows after one.
        `check` False: a stop string that ends in this text does not count."""
        old, text = len(self._pending), self._pending + text
        if check:
            # one that ends within the pending text was not to be checked
            places = ((text.find(stop, max(0, old - len(stop) + 1)), stop) for stop in self._stops)
            matches = [(at, stop) for at, stop in places if at >= 0]
            if matches:
                at, stop = min(matches)
                self._pending = ""
                return text[: at + len(stop) if self._include else at], stop
        keep = min(len(text), self._longest)
        while keep and not any(stop.startswith(text[-keep:]) for stop in self._stops):
            keep -= 1
        self._pending = text[len(text) - keep :]
        return text[: len(text) - keep], None

    def flush(self) -> str:
        """The text that is still pending, when the answer ends without a stop string."""
        rest, self._pending = self._pending, ""
        return rest


class CheckedText:
    """The text of an answer that stop strings may end, as its tokens come."""

    def __init__(self, until: StopConditions, stream: TextStream) -> None:
        self._stream = stream
        self._stops = StopStringChecker(until.stop, until.include_stop_str_in_output)
        self._min_tokens, self._num_tokens = until.min_tokens, 0

    def push(self, token: int) -> tuple[str, str | None]:
        """The text that can be released, and the stop string that was found. What the first `min_tokens` tokens
        complete does not count."""
        self._num_tokens += 1
        return self._stops.push(self._stream.push(token), check=self._num_tokens > self._min_tokens)

    def flush(self) -> str:
        """The rest of the text when the answer ends otherwise than at a stop string."""
        text, stop = self._stops.push(self._stream.finish(), check=self._num_tokens > self._min_tokens)
        return text if stop is not None else text + self._stops.flush()


class AnswerState:
    """What is to be known of answer `index` of a request until it ends. `text`: None where the client makes it.
    `failure_status`: the HTTP status if it fails. `repeats`: whether it ends with a repetition that counts.
    `is_checked`: whether something else than the scheduler may end it."""

    def __init__(self, request: GenerateRequest, index: int, text: CheckedText | None, constraint: object) -> None:
        until = request.stop_conditions
        self.request_id = request.request_id
        self.index = index
        self.text = text
        self.failure_status = _BAD_GATEWAY
        self.stop_token_ids = frozenset(until.stop_token_ids)
        self.repeats = False
        self._min_tokens, self._num_tokens = until.min_tokens, 0
        repetition = until.repetition_detection
        self._repetition = RepetitionDetector(repetition) if repetition and repetition.max_pattern_size else None
        self.is_checked = any(check is not None for check in (text, self._repetition, constraint))

    def push(self, tokens: Sequence[int]) -> tuple[int, str, str | None]:
        """How many of the tokens are part of the answer: all of them, if it does not end at one; the text that can be
        released, empty where the client makes it; and the stop string that was found."""
        released = ""
        for count, token in enumerate(tokens, start=1):
            if self._repetition is not None:
                self._num_tokens += 1
                self.repeats = self._repetition.push(token) and self._num_tokens >= self._min_tokens
            text, stop = ("", None) if self.text is None else self.text.push(token)
            released += text
            if stop is not None or self.repeats:
                return count, released, stop
        return len(tokens), released, None

    def flush(self) -> str:
        """The rest of the text, as `push`, when the answer ends otherwise than at a stop string."""
        return "" if self.text is None else self.text.flush()


class OutputProcessor:
    """Makes outputs of what steps sampled for the unfinished answers of one scheduler, which it ends at stop strings
    and at the end of their grammars. `transfer`: the way to other servers."""

    def __init__(self, scheduler: Scheduler, tokenizer: TextTokenizer, transfer: KvTransfer | None = None) -> None:
        self._scheduler = scheduler
        self._tokenizer = tokenizer
        self._transfer = transfer
        self._answers: dict[RequestId, AnswerState] = {}
        self._ids: dict[str, list[RequestId]] = {}  # of a request's unfinished answers

    def add_request(self, request: GenerateRequest, specs: Sequence[Spec]) -> None:
        """`specs`: what the scheduler has been given for `request`, one for each answer."""
        self._ids[request.request_id] = [spec.request_id for spec in specs]
        for index, spec in enumerate(specs):
            text = None
            if request.has_stop_strings:
                text = CheckedText(request.stop_conditions, self._tokenizer.stream(request.skip_special_tokens))
            self._answers[spec.request_id] = AnswerState(request, index, text, spec.constraint)

    def abort(self, request_id: str) -> None:
        """End a request's answers without further output. Unknown ids are ignored."""
        # the last ones first: otherwise each would be the next to compute the prompt
        for answer_id in reversed(self._ids.pop(request_id, [])):
            del self._answers[answer_id]
            self._scheduler.abort(answer_id)

    def process_outputs(self, steps: Sequence[Progress]) -> list[GenerateOutput]:
        """The client's outputs for the progress of the scheduler's requests."""
        outputs, answers = [], self._answers
        for progress in steps:
            request = progress.request
            answer = answers.get(request.spec.request_id)
            if answer is None:
                continue
            may_end = progress.finish is not None or answer.is_checked
            if not may_end and progress.logprobs is None and len(request.output) > len(progress.tokens):
                # tokens and nothing else, as of nearly all answers in nearly every step
                tokens = list(progress.tokens)
                output = GenerateOutput(request_id=answer.request_id, index=answer.index, token_ids=tokens)
            else:
                output = self._output(progress, answer)
            outputs.append(output)
        return outputs

    def _output(self, progress: Progress, answer: AnswerState) -> GenerateOutput:
        request = progress.request
        is_first = len(request.output) == len(progress.tokens) > 0
        num_tokens, text, stop = answer.push(progress.tokens)
        num_output_tokens = len(request.output) - len(progress.tokens) + num_tokens
        finish: FinishReason | None = progress.finish if num_tokens == len(progress.tokens) else None
        stop_reason: str | int | None = None
        if stop is not None:
            finish, stop_reason = "stop", stop
            self._scheduler.finish(request, "stop", num_output_tokens)
        elif finish is not None:
            text += answer.flush()
            if finish == "stop" and request.outcome.stop_token in answer.stop_token_ids:
                stop_reason = request.outcome.stop_token
        elif (finish := self._check_grammar(request, answer)) is not None:
            text += answer.flush()
        elif answer.repeats:
            finish, stop_reason = "repetition", "repetition_detected"
            text += answer.flush()
            self._scheduler.finish(request, "stop", num_output_tokens)
        if finish is not None:
            self._remove(request.id, answer.request_id, finish)
        top = request.spec.prompt_logprobs
        logprobs = None if progress.logprobs is None else progress.logprobs.first(num_tokens)
        output = GenerateOutput(
            request_id=answer.request_id,
            index=answer.index,
            token_ids=list(progress.tokens[:num_tokens]),
            text=text,
            finish_reason=finish,
            stop_reason=stop_reason,
            cache=cache_report(request) if is_first and answer.index == 0 and finish is None else None,
            logprobs=None if logprobs is None else pack_logprobs([logprobs], 0),
            prompt_logprobs=None
            if top is None or not is_first
            else pack_logprobs(request.outcome.prompt_logprobs, top),
        )
        return output if finish is None else self._add_report(output, request, answer)

    def _remove(self, answer_id: RequestId, request_id: str, finish: FinishReason) -> None:
        """An answer has ended; with an error all others to its prompt end, too."""
        del self._answers[answer_id]
        self._ids[request_id].remove(answer_id)
        if finish == "error":
            self.abort(request_id)
        elif not self._ids[request_id]:
            del self._ids[request_id]

    def _check_grammar(self, request: Request, answer: AnswerState) -> FinishReason | None:
        """Ends an answer whose grammar is complete, or allows no token."""
        constraint = request.spec.constraint
        if isinstance(constraint, ThinkingConstraint):
            constraint = constraint.grammar
        if not isinstance(constraint, GrammarConstraint):
            return None
        constraint.follow(request.output)
        if constraint.failure is not None:
            answer.failure_status = InvalidRequest.status
            request.outcome.failure = f"the answer cannot be held to the form that was asked for: {constraint.failure}"
            self._scheduler.finish(request, "error")
            return "error"
        if constraint.complete:
            self._scheduler.finish(request, "stop")
            return "stop"
        return None

    def _add_report(self, output: GenerateOutput, request: Request, answer: AnswerState) -> GenerateOutput:
        """The answer's last output, with what is reported then."""
        transfer = self._transfer if output.finish_reason in ("stop", "length", "repetition") else None
        return msgspec.structs.replace(
            output,
            cache=cache_report(request) if answer.index == 0 else None,
            timings=timings(request),
            error=request.outcome.failure,
            status=QueueFull.status if request.outcome.refused else answer.failure_status,
            kv_transfer_params=None if transfer is None else transfer.response_params(request),
            transfer=report(request),
            drafts=draft_report(request),
        )
