"""The engine's two faces: the core that computes, and the client that the server talks to."""

from collections.abc import AsyncIterator, Callable, Iterator
from typing import Protocol

from cairn.cache.view import CacheView
from cairn.engine.contract.info import EngineInfo, EngineStats
from cairn.engine.contract.output import GenerateOutput
from cairn.engine.contract.request import GenerateRequest
from cairn.engine.contract.text import TextTokenizer
from cairn.errors import RequestError


class EngineCore(Protocol):
    """The engine's inside, one thread only: submit and abort requests, and turn the handle."""

    @property
    def info(self) -> EngineInfo: ...

    @property
    def has_work(self) -> bool:
        """False when `step` would have nothing to do."""
        ...

    def submit(self, *requests: GenerateRequest) -> None:
        """Take requests, all of them or none. Raises RequestError (InvalidRequest, Overloaded); then nothing was
        taken. Requests whose answers have a form may be refused later: see `take_formed`."""
        ...

    def abort(self, request_id: str) -> None:
        """Forget a request; unknown ids are ignored, nothing more is put out for it."""
        ...

    def start(self, wake: Callable[[], None]) -> None:
        """Called once before anything else, by the thread that owns the core. `wake` has it come back to `poll`."""
        ...

    def take_formed(self) -> list[tuple[str, RequestError]]:
        """Called often: go on with the requests that have waited for their grammars. Those that are refused after all,
        the first one's id of what came together, and why; then nothing of it was taken."""
        ...

    def poll(self) -> list[GenerateOutput]:
        """Called often: what has happened outside. Outputs of requests that it has ended."""
        ...

    def step(self) -> list[GenerateOutput]:
        """One plan, run, apply. Outputs of requests that moved."""
        ...

    def close(self) -> None:
        """Called once, at the end."""
        ...

    def idle(self) -> None:
        """Called when there is no work: recounts the accounting. Raises AuditError."""
        ...

    def stats(self) -> EngineStats: ...

    def cache_view(self, max_paths: int) -> Iterator[CacheView | None]:
        """Look at the prefix cache, a slice at each turn between steps: None until the last item. At most `max_paths`
        paths of its tree are shown one by one, 1 to `MAX_SHOWN`."""
        ...

    def reset_cache(self) -> int:
        """Drop all that is cached, unless a request or another server holds pages: then nothing changes. How many
        pages are held."""
        ...


class EngineClient(Protocol):
    """The engine as the server sees it."""

    @property
    def info(self) -> EngineInfo: ...

    @property
    def tokenizer(self) -> TextTokenizer: ...

    @property
    def dead(self) -> str | None:
        """Why the engine has ended, or None while it lives."""
        ...

    async def start(self) -> None:
        """Bring the engine up. Raises ConfigError or ModelError from building it, EngineDead if it fell over."""
        ...

    def generate(self, *requests: GenerateRequest) -> AsyncIterator[GenerateOutput]:
        """The outputs of requests that the core takes all or none of, as they come, until each of a request's answers
        has its finish reason, or one of them has `error`. Closing the iterator early aborts what is open.

        Raises RequestError when the core refuses them and EngineDead when the engine ends meanwhile.
        """
        ...

    async def stats(self) -> EngineStats:
        """Raises EngineDead, also when no answer comes within the deadline."""
        ...

    async def cache_view(self, max_paths: int) -> CacheView:
        """What the prefix cache holds. Raises EngineDead, also when no answer comes within the deadline."""
        ...

    async def reset_cache(self) -> int:
        """Drop all that is cached, unless pages are held: then nothing changes. How many are. Raises EngineDead, also
        when no answer comes within the deadline."""
        ...

    async def wait_dead(self) -> str:
        """Returns the reason when the engine has ended without being told to."""
        ...

    async def stop(self, drain_seconds: float) -> None:
        """Take nothing new, let open requests finish for at most `drain_seconds`, then end the engine."""
        ...
