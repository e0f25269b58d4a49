"""The engine as the server talks to it."""

from collections.abc import AsyncIterator, Callable
from typing import Protocol, TypeAlias

from cairn.cache.view import CacheView
from cairn.engine.contract.info import EngineInfo, EngineStats
from cairn.engine.contract.output import GenerateOutput
from cairn.engine.contract.request import GenerateRequest
from cairn.engine.contract.text import TextTokenizer

TakeOutput: TypeAlias = Callable[[int, GenerateOutput], bool]
"""Called with an output as soon as it is there, and with the number of its request among those that came together.
False: it is to be waited for like any other."""


class EngineClient(Protocol):
    """The engine as the server sees it."""

    @property
    def info(self) -> EngineInfo: ...

    @property
    def tokenizer(self) -> TextTokenizer: ...

    @property
    def dead(self) -> str | None:
        """Why the engine has ended, or None while it lives."""

    async def start(self) -> None:
        """Bring the engine up. Raises ConfigError or ModelError from building it, EngineDead if it fell over."""

    def generate(
        self, *requests: GenerateRequest, seconds: float | None = None, take: TakeOutput | None = None
    ) -> AsyncIterator[GenerateOutput]:
        """The outputs of requests that the core takes all or none of, as they come, until each of a request's answers
        has its finish reason, or one of them has `error`. Closing the iterator early aborts what is open. While an
        `anext` waits, `take` is asked first: it may take any but the last output of an answer.

        Raises RequestError when the core refuses them, EngineDead when the engine ends meanwhile, and TimeoutError when
        they have not ended `seconds` after the first `anext`.
        """

    async def stats(self) -> EngineStats:
        """Raises EngineDead, also when no answer comes within the deadline."""

    async def cache_view(self, max_paths: int) -> CacheView:
        """What the prefix cache holds. Raises EngineDead, also when no answer comes within the deadline."""

    async def reset_cache(self) -> int:
        """Drop all that is cached, unless pages are held: then nothing changes. How many are. Raises EngineDead, also
        when no answer comes within the deadline."""

    def await_tools(self, request_id: str, index: int = 0) -> None:
        """Answer `index` to this request, which has ended, was a call: what its session comes back to once its tools
        are done is kept by the time that tools take. Tried once, in the background; unknown ids are ignored."""

    def release_kv_transfer(self, kv_transfer_params: bytes) -> None:
        """What another server, or this one, has handed over with these parameters is not going to be fetched: let go of
        it. Tried once, in the background; they are in nothing trusted."""

    async def wait_dead(self) -> str:
        """Returns the reason when the engine has ended without being told to."""

    async def stop(self, drain_seconds: float) -> None:
        """Take nothing new, let open requests finish for at most `drain_seconds`, then end the engine."""
