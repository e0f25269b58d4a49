"""The answers that have not ended: what steps bring becomes text, and outputs for the client."""

from collections.abc import Sequence

import msgspec

from cairn.engine.contract import FinishReason, GenerateOutput, GenerateRequest, TextStream, TextTokenizer
from cairn.engine.contract.output import packed
from cairn.engine.core_report import cache_report, timings
from cairn.engine.grammars.constraint import GrammarConstraint
from cairn.engine.transfers.kv_transfer import KvTransfer, report
from cairn.errors import InvalidRequest, QueueFull
from cairn.scheduler.request import Request, Spec
from cairn.scheduler.scheduler import Progress, Scheduler
from cairn.transfer.params import TransferRole
from cairn.types import RequestId

_BAD_GATEWAY = 502
"""The status of an answer that failed because another server did."""


class StopStrings:
    """Gives out an answer's text as far as it is certain that no stop string has begun in it. `include`: the stop
    string that is met goes out, too."""

    def __init__(self, stops: Sequence[str], include: bool = False) -> None:
        self._stops = [stop for stop in stops if stop]
        self._include = include
        self._longest = max(map(len, self._stops), default=1) - 1
        self._held = ""

    def push(self, text: str, heed: bool = True) -> tuple[str, str | None]:
        """The text that may go out, and the stop string that has been met, if any. Nothing follows after one. Without
        `heed` a stop string that ends in this text stops nothing."""
        held, text = len(self._held), self._held + text
        if heed:
            # one that lies in what was held has come too early
            places = ((text.find(stop, max(0, held - len(stop) + 1)), stop) for stop in self._stops)
            met = [(at, stop) for at, stop in places if at >= 0]
            if met:
                at, stop = min(met)
                self._held = ""
                return text[: at + len(stop) if self._include else at], stop
        keep = min(len(text), self._longest)
        while keep and not any(stop.startswith(text[-keep:]) for stop in self._stops):
            keep -= 1
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep], None

    def finish(self) -> str:
        """What was held back, when the answer ends without a stop string."""
        rest, self._held = self._held, ""
        return rest


class GrowingAnswer:
    """Answer `index` of a request. `role`: the request's part in a transfer; `constraint`: what holds it to a form;
    `failure_status`: the HTTP status if it fails."""

    def __init__(
        self,
        request: GenerateRequest,
        index: int,
        stream: TextStream,
        role: TransferRole,
        constraint: GrammarConstraint | None,
    ) -> None:
        until = request.stop_conditions
        self.request_id = request.request_id
        self.index = index
        self.role = role
        self.constraint = constraint
        self.failure_status = _BAD_GATEWAY
        self.stop_tokens = frozenset(until.stop_token_ids)
        self._stream = stream
        self._stops = StopStrings(until.stop, until.include_stop_str_in_output)
        self._min_tokens, self._num_tokens = until.min_tokens, 0

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


class OpenAnswers:
    """Those of one scheduler's requests, which it ends at stop strings, and where their form does. `transfer`: the way
    to other servers."""

    def __init__(self, scheduler: Scheduler, tokenizer: TextTokenizer, transfer: KvTransfer | None = None) -> None:
        self._scheduler = scheduler
        self._tokenizer = tokenizer
        self._transfer = transfer
        self._answers: dict[RequestId, GrowingAnswer] = {}
        self._ids: dict[str, list[RequestId]] = {}  # of a request's answers that have not ended

    def begin(
        self, request: GenerateRequest, role: TransferRole, made: Sequence[tuple[Spec, GrammarConstraint | None]]
    ) -> None:
        """The scheduler has taken these specs, one for each answer to `request`."""
        self._ids[request.request_id] = [spec.request_id for spec, _ in made]
        for index, (spec, form) in enumerate(made):
            stream = self._tokenizer.stream(request.skip_special_tokens)
            self._answers[spec.request_id] = GrowingAnswer(request, index, stream, role, form)

    def abort(self, request_id: str) -> None:
        """End a request's answers; nothing more is put out for them. Unknown ids are ignored."""
        # the last ones first: otherwise each would be the next to compute the prompt
        for own in reversed(self._ids.pop(request_id, [])):
            del self._answers[own]
            self._scheduler.abort(own)

    def outputs(self, news: Sequence[Progress]) -> list[GenerateOutput]:
        """What is to be put out for the news of the scheduler's requests."""
        outputs = [self._output(progress) for progress in news]
        return [output for output in outputs if output is not None]

    def _output(self, progress: Progress) -> GenerateOutput | None:
        request = progress.request
        answer = self._answers.get(request.id)
        if answer is None:
            return None
        text, stop = answer.push(progress.tokens)
        finish: FinishReason | None = progress.finish
        stop_reason: str | int | None = None
        if stop is not None:
            finish, stop_reason = "stop", stop
            self._scheduler.finish(request, "stop")
        elif finish is not None:
            text += answer.finish()
            if finish == "stop" and request.outcome.stop_token in answer.stop_tokens:
                stop_reason = request.outcome.stop_token
        elif (finish := self._judged(request, answer)) is not None:
            text += answer.finish()
        if finish is not None:
            self._ended(request.id, answer.request_id, finish)
        told, shown = progress.logprobs, request.spec.prompt_logprobs
        first = len(request.output) == len(progress.tokens) > 0
        output = GenerateOutput(
            request_id=answer.request_id,
            index=answer.index,
            token_ids=list(progress.tokens),
            text=text,
            finish_reason=finish,
            stop_reason=stop_reason,
            logprobs=None if told is None else packed([told], 0),
            prompt_logprobs=packed(request.outcome.prompt_logprobs, shown) if shown is not None and first else None,
        )
        return output if finish is None else self._last(output, request, answer)

    def _ended(self, own: RequestId, request_id: str, finish: FinishReason) -> None:
        """An answer has ended, and with an error all others to its prompt."""
        del self._answers[own]
        self._ids[request_id].remove(own)
        if finish == "error":
            self.abort(request_id)
        elif not self._ids[request_id]:
            del self._ids[request_id]

    def _judged(self, request: Request, answer: GrowingAnswer) -> FinishReason | None:
        """Ends an answer that has reached the end of its form, or a place from which there is no way on."""
        constraint = answer.constraint
        if constraint is None:
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

    def _last(self, output: GenerateOutput, request: Request, answer: GrowingAnswer) -> GenerateOutput:
        well = output.finish_reason in ("stop", "length")
        return msgspec.structs.replace(
            output,
            cache=cache_report(request, answer.role.prefill_cached_tokens) if answer.index == 0 else None,
            timings=timings(request),
            error=request.outcome.failure,
            status=QueueFull.status if request.outcome.refused else answer.failure_status,
            kv_transfer_params=self._transfer.answer(request) if well and self._transfer is not None else None,
            transfer=report(request),
        )
