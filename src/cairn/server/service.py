"""State that the routes share: the engine and its queries, the gate, metrics, and the renderer of prompts."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from types import MappingProxyType
from typing import TypeVar

from cairn.engine.contract import EngineClient, EngineStats, TemplateValue
from cairn.errors import EngineDead, Overloaded
from cairn.http.middleware import Gate
from cairn.server.chat_translation import TranslationRules
from cairn.server.images import MediaConnector
from cairn.server.metrics import Metrics
from cairn.server.notices import Notices
from cairn.server.openai.answers import Answers
from cairn.server.openai.prompts import PromptOptions, PromptRenderer
from cairn.server.openai_responses.background import BackgroundTasks
from cairn.server.openai_responses.store import ResponseStore
from cairn.server.options import ServerLimits, ServerOptions
from cairn.server.sealed_reasoning import ReasoningSeal
from cairn.server.served_model import ServedModel
from cairn.server.stamps import Stamps

# Both together are fewer than the queries that an engine has open at once, so that no kind shuts out another.
_MAX_STATS_QUERIES = 24
_MAX_RESET_QUERIES = 24
_MAX_VIEW_QUERIES = 256  # these share one query to the engine

Result = TypeVar("Result")


class BoundedQueries:
    """One kind of query to the engine: each caller has a deadline of its own, and only so many may wait at once.

    `what`: the engine's task, in words; `seconds`: a caller's whole wait, behind others included; `max_waiting`:
    callers that may wait at once; `get_death`: why the engine has ended, None while it lives.
    """

    def __init__(self, what: str, *, seconds: float, max_waiting: int, get_death: Callable[[], str | None]) -> None:
        self._what = what
        self._seconds = seconds
        self._max_waiting = max_waiting
        self._get_death = get_death
        self._num_waiting = 0

    async def run(self, query: Callable[[], Awaitable[Result]]) -> Result:
        """The query's result. Raises Overloaded (503) if there is no room or no result in time, EngineDead."""
        if self._num_waiting >= self._max_waiting:
            text = f"{self._num_waiting} callers wait for the engine to {self._what} already: try again later"
            raise Overloaded(text)
        self._num_waiting += 1
        try:
            async with asyncio.timeout(self._seconds):
                return await query()
        except TimeoutError:
            raise Overloaded(f"the engine did not {self._what} within {self._seconds:g} s: try again later") from None
        except EngineDead as error:
            if self._get_death() is not None:
                raise
            # The engine lives: it has not answered in its own time, or has too many queries to answer.
            raise Overloaded(f"{error}: try again later") from error
        finally:
            self._num_waiting -= 1


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

        def queries(what: str, seconds: float, max_waiting: int) -> BoundedQueries:
            return BoundedQueries(what, seconds=seconds, max_waiting=max_waiting, get_death=lambda: engine.dead)

        self.stats_queries = queries("tell its counters", limits.stats_seconds, _MAX_STATS_QUERIES)
        self.view_queries = queries("show its cache", limits.view_seconds, _MAX_VIEW_QUERIES)
        self.reset_queries = queries("empty its cache", limits.view_seconds, _MAX_RESET_QUERIES)
        self._stats = EngineStats()

    @property
    def healthy(self) -> bool:
        return self.engine.dead is None and not self.gate.closed

    async def get_stats(self) -> EngineStats:
        """The engine's counters; the last known ones if it does not answer in time."""
        with suppress(EngineDead, Overloaded):
            self._stats = await self.stats_queries.run(self.engine.stats)
        return self._stats

    async def aclose(self) -> None:
        await self.background.aclose()
        await self.renderer.aclose()
