"""A body on its way to its answer: checked, rendered, held to a form, and asked of the engine."""

import hashlib
from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any, TypeAlias

from starlette.requests import Request
from starlette.responses import Response

from cairn import __version__
from cairn.engine.contract import MAX_ANSWERS, EngineClient, EngineInfo
from cairn.http.clients import cancel_on_disconnect, get_client_id
from cairn.http.sessions import get_session
from cairn.server.images.memory import ImageAllocation
from cairn.server.metrics import Metrics
from cairn.server.notices import Notices
from cairn.server.openai.engine_request import build_engine_request, encode_bad_words, resolve_num_logprobs
from cairn.server.openai.generate import Deadline, Generation
from cairn.server.openai.logprobs import LogprobsFormatter
from cairn.server.openai.prompts import PromptRenderer
from cairn.server.openai.requests import SamplingFields, StreamOptions, refuse_unsupported
from cairn.server.openai.response_format import FormatRules, parse_response_format
from cairn.server.openai.response_writer import ChatWriter, ResponseWriter
from cairn.server.openai.thinking_budget import is_reasoning_open, limit_thinking
from cairn.server.options import ServerOptions
from cairn.server.parsers.registry import select_parsers
from cairn.server.served_model import ServedModel
from cairn.server.stamps import Stamps

WriterType: TypeAlias = Callable[..., ResponseWriter]


class Answers:
    """Has bodies answered by one engine. `default_sampling`: values of fields that a body does not have; `max_tokens`
    bounds it where a body has it, too."""

    def __init__(
        self,
        engine: EngineClient,
        options: ServerOptions,
        model: ServedModel,
        renderer: PromptRenderer,
        metrics: Metrics,
        notices: Notices,
        stamps: Stamps,
        default_sampling: Mapping[str, float] = MappingProxyType({}),
    ) -> None:
        """Raises ConfigError for a parser that there is not."""
        self._engine = engine
        self._options = options
        self.model = model
        self.stamps = stamps
        self._renderer = renderer
        self._metrics = metrics
        self._default_sampling = default_sampling
        self._fingerprint = compute_fingerprint(engine.info)
        self.parsers = select_parsers(
            engine.tokenizer.chat_template,
            options.tool_call_parser or (None if options.enable_auto_tool_choice else "none"),
            options.reasoning_parser,
        )
        self._format_rules = FormatRules(self.parsers, options, notices, stamps.new_id)
        self._logprobs_formatter = LogprobsFormatter(
            lambda token: engine.tokenizer.token_bytes(token), as_token_ids=options.return_tokens_as_token_ids
        )

    async def generate(
        self,
        http: Request,
        body: SamplingFields,
        allocation: ImageAllocation,
        *,
        id_prefix: str,
        writer: WriterType = ChatWriter,
    ) -> Response:
        """Have a body answered as `writer` writes it. Raises RequestError for what has no answer."""
        generation = await self.prepare(http, body, allocation, id_prefix=id_prefix, writer=writer)
        return await generation.respond(http)

    async def prepare(
        self, http: Request, body: SamplingFields, allocation: ImageAllocation, *, id_prefix: str, writer: WriterType
    ) -> Generation:
        """All but the answer itself. Raises RequestError for what can be refused without the engine."""
        deadline = Deadline(self._options.request_timeout)
        async with deadline.enforce():
            preparing = self._prepare(http, body, allocation, deadline, id_prefix, writer)
            return await cancel_on_disconnect(http.receive, preparing)

    async def _prepare(
        self,
        http: Request,
        body: SamplingFields,
        allocation: ImageAllocation,
        deadline: Deadline,
        id_prefix: str,
        writer_type: WriterType,
    ) -> Generation:
        options, stamps, info, tokenizer = self._options, self.stamps, self._engine.info, self._renderer.tokenizer
        arrival_time = stamps.clock.now()
        self.model.check_name(body.model)
        refuse_unsupported(body)
        body = resolve_num_logprobs(body, options.max_logprobs, info.vocab_size)
        body = _with_flags(body.with_defaults(self._default_sampling), options)
        prompts = await self._renderer.render(body, allocation)
        http_id: str = http.scope["cairn.request_id"]
        if body.request_id is not None and not http.scope["cairn.has_own_request_id"]:
            http_id = body.request_id
        opened = [await is_reasoning_open(self.parsers, tokenizer, body, prompt) for prompt in prompts]
        answer = parse_response_format(self._format_rules, body, opened=opened[0])
        bad_words: list[list[int]] = []
        if words := body.bad_words:
            bad_words = await tokenizer.apply(lambda tokenizer: encode_bad_words(tokenizer.encode, words))
        answer_id = f"{id_prefix}{http_id}"
        limit = partial(limit_thinking, self.parsers, tokenizer, body, call_heads=answer.call_heads)
        thinking = [await limit(prompt, is_open=is_open) for prompt, is_open in zip(prompts, opened, strict=True)]
        prediction = await self._renderer.encode_prediction(body)
        requests = tuple(
            build_engine_request(
                info,
                body,
                prompt,
                # Two clients may send the same id; inside the engine an id has to be one request's alone.
                request_id=f"{answer_id}-{body.release_key or stamps.new_id()}",
                client=get_client_id(http.scope),
                session=get_session(http.scope),
                structure=answer.structure,
                bad_words=bad_words,
                thinking=budget,
                prediction=prediction,
            )
            for prompt, budget in zip(prompts, thinking, strict=True)
        )
        if body.is_prefill_only:
            body = body.as_prefill()
        prompts = await self._renderer.add_text(body, prompts)
        n = min(requests[0].num_answers, MAX_ANSWERS)  # the core refuses more
        created, model = int(stamps.wall()), options.model_name
        has_listed = bool(body.logprob_token_ids)
        formatter = self._logprobs_formatter.configure(body.return_tokens_as_token_ids, has_listed=has_listed)
        fields = (answer_id, created, model, self._fingerprint, body, prompts, n, formatter, answer.new_message)
        writer = writer_type(*fields, options)
        return Generation(
            self._engine, tokenizer, self._metrics, stamps.clock, requests, writer, arrival_time, deadline
        )


def compute_fingerprint(info: EngineInfo) -> str:
    """OpenAI's `system_fingerprint`: another one says that the same seed may bring another answer."""
    parts = (info.model, info.architecture, info.dtype, info.quantization, info.exact, info.tensor_parallel_size)
    return f"cairn-{__version__}-{hashlib.sha256(repr(parts).encode()).hexdigest()[:8]}"


def _with_flags(body: SamplingFields, options: ServerOptions) -> SamplingFields:
    """The body as the server's flags have it."""
    changes: dict[str, Any] = {}
    if body.stream and options.enable_force_include_usage:
        changes["stream_options"] = StreamOptions(include_usage=True, continuous_usage_stats=True)
    if body.stream_interval is None and options.stream_interval > 1:
        changes["stream_interval"] = options.stream_interval
    return body.model_copy(update=changes) if changes else body
