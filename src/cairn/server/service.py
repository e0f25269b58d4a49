"""The parts of one server, each for those who need it."""

from collections.abc import Mapping
from types import MappingProxyType

from cairn.engine.contract import EngineClient, TemplateValue
from cairn.http.middleware import Gate
from cairn.server.chat_translation import TranslationRules
from cairn.server.images import MediaConnector
from cairn.server.metrics import Metrics
from cairn.server.notices import Notices
from cairn.server.openai.answers import Answers
from cairn.server.openai.prompts import PromptOptions, PromptRenderer
from cairn.server.openai_responses.background import BackgroundTasks
from cairn.server.openai_responses.store import ResponseStore
from cairn.server.operator_queries import OperatorQueries
from cairn.server.options import ServerLimits, ServerOptions
from cairn.server.sealed_reasoning import ReasoningSeal
from cairn.server.served_model import ServedModel
from cairn.server.stamps import Stamps


class Service:
    """One server's parts, put together; a route gets those that it asks for (`dependencies`).
    `default_sampling`: values of fields that a body does not have; `max_tokens` bounds it where a body has it, too.
    `default_template_kwargs`: variables of the chat template for requests that do not send them. `secret`: what servers
    share that are to read reasoning which the others have encrypted."""

    def __init__(
        self,
        engine: EngineClient,
        options: ServerOptions,
        limits: ServerLimits,
        stamps: Stamps | None = None,
        images: MediaConnector | None = None,
        default_sampling: Mapping[str, float] = MappingProxyType({}),
        default_template_kwargs: Mapping[str, TemplateValue] = MappingProxyType({}),
        secret: bytes | None = None,
    ) -> None:
        info = engine.info
        self.engine = engine
        self.options = options
        self.limits = limits
        self.stamps = stamps = stamps or Stamps()
        self.model = ServedModel(options.model_names, info, created=int(stamps.wall()))
        self.metrics = Metrics(info, options.model_name)
        max_open = limits.max_open if limits.max_open is not None else info.max_num_seqs + info.max_waiting
        self.gate = Gate(max_open, on_full=self.metrics.queue_full.inc)
        self.queries = OperatorQueries(engine, limits)
        notices = Notices()
        self.renderer = PromptRenderer(
            engine.tokenizer,
            PromptOptions(info.vocab_size, info.max_model_len, options.trust_request_chat_template),
            images or MediaConnector(limits.images),
            default_template_kwargs,
            notices,
        )
        self.answers = Answers(
            engine, options, self.model, self.renderer, self.metrics, notices, stamps, default_sampling
        )
        self.translation = TranslationRules(ReasoningSeal(secret), options.strict_tools, notices)
        self.responses = ResponseStore(options.max_stored_responses, options.stored_response_bytes)
        self.background = BackgroundTasks(limits.max_background)

    async def aclose(self) -> None:
        await self.background.aclose()
        await self.renderer.aclose()
