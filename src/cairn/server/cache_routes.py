"""`GET /cache`: the content of the prefix cache as JSON. `GET /cache/ui`: the same as a page."""

import asyncio
from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, Query
from fastapi.responses import Response

from cairn import __version__
from cairn.engine.contract import MAX_SHOWN, CacheView, EngineClient, SpecDecodeStats
from cairn.server.cache_page import cache_page
from cairn.server.operator_queries import BoundedQueries
from cairn.types import Clock

_DEFAULT_NODES = 500
_FRESH_SECONDS = 1.0


class CacheViews:
    """Queries the engine once at a time, and answers callers within a second from the same result: however many watch,
    the engine walks its tree at most once a second for each size. `queries`: bounds how many wait and for how long."""

    def __init__(self, engine: EngineClient, queries: BoundedQueries, model_name: str, clock: Clock) -> None:
        self._engine = engine
        self._queries = queries
        self._model_name = model_name
        self._clock = clock
        self._lock = asyncio.Lock()
        self._last: tuple[int, float, bytes] | None = None

    async def get(self, max_paths: int) -> bytes:
        """The JSON text. Raises EngineDead, and Overloaded if it takes too long."""
        return await self._queries.run(lambda: self._get_shared(max_paths))

    async def _get_shared(self, max_paths: int) -> bytes:
        async with self._lock:
            now, last = self._clock.now(), self._last
            if last is not None and last[0] == max_paths and now - last[1] < _FRESH_SECONDS:
                return last[2]
            view = await self._engine.cache_view(max_paths)
            # a server that drafts nothing has nothing to tell of it
            drafts = (await self._engine.stats()).spec_decode if self._engine.info.num_speculative_tokens else None
            text = msgspec.json.encode(self._body(view, drafts))
            self._last = (max_paths, self._clock.now(), text)
            return text

    def _body(self, view: CacheView, drafts: SpecDecodeStats | None) -> dict[str, Any]:
        cache = self._engine.info.cache
        about: dict[str, Any] = {"model": self._model_name, "version": __version__}
        about |= {"mamba_cache_mode": cache.mamba_cache_mode, "exact": self._engine.info.exact}
        # A file takes whole pages, and so does each checkpoint in the list.
        about |= {"block_size": cache.block_size, "checkpoint_bytes": cache.pages_per_checkpoint * cache.page_bytes}
        about |= {"bytes_per_token": cache.bytes_per_token, "checkpoint_dtype": cache.checkpoint_dtype}
        about |= {"state_dtype": cache.state_dtype, "window_bytes": cache.window_bytes}
        return {"object": "cairn.cache", "server": about, "spec_decode": drafts} | {
            name: getattr(view, name)
            for name in (
                "enabled",
                "pool",
                "policy",
                "tree",
                "paths",
                "history",
                "lost",
                "unlisted_tokens",
                "visits",
                "tiers",
                "queue",
            )
        }


def router(views: CacheViews) -> APIRouter:
    routes, page = APIRouter(), cache_page()

    async def show(max_nodes: Annotated[int, Query(ge=1, le=MAX_SHOWN)] = _DEFAULT_NODES) -> Response:
        text = await views.get(max_nodes)
        return Response(text, media_type="application/json", headers={"Cache-Control": "no-store"})

    async def show_page() -> Response:
        return Response(page.body, media_type="text/html; charset=utf-8", headers=page.headers)

    routes.add_api_route("/cache", show, methods=["GET"], response_model=None)
    routes.add_api_route("/cache/ui", show_page, methods=["GET"], response_model=None)
    return routes
