"""Clients that ask one thing after another, and take down how each of them ended."""

import asyncio
import itertools
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import httpx
from fleet import events

__all__ = ["Asked", "Load"]

SECONDS = 60.0
TOKENS = 24


@dataclass(frozen=True)
class Asked:
    """`status`: 0 when no answer came. `error`: what the stream's last event, or the connection, said was wrong."""

    number: int
    stream: bool
    status: int
    tokens: int
    error: str | None = None

    @property
    def good(self) -> bool:
        return self.status == 200 and self.error is None and self.tokens == TOKENS


class Load:
    """`num_clients` clients of the server at `url`; every other answer is a stream. `asked`: what has ended so far."""

    def __init__(self, url: str, key: str, num_clients: int = 4) -> None:
        self._url, self._headers = f"{url}/v1/completions", {"Authorization": f"Bearer {key}"}
        self.num_clients = num_clients
        self._numbers = itertools.count()
        self._stopping = threading.Event()
        self.asked: list[Asked] = []

    @contextmanager
    def running(self) -> Iterator["Load"]:
        """From the begin to the end of the block there is load; afterwards every request has ended."""
        thread = threading.Thread(target=lambda: asyncio.run(self._run()))
        thread.start()
        try:
            yield self
        finally:
            self._stopping.set()
            thread.join(2 * SECONDS)
            assert not thread.is_alive(), "a request has not ended"

    @property
    def failed(self) -> list[Asked]:
        return [asked for asked in self.asked if not asked.good]

    async def _run(self) -> None:
        async with httpx.AsyncClient(timeout=SECONDS, headers=self._headers, trust_env=False) as http:
            await asyncio.gather(*(self._ask_on(http) for _ in range(self.num_clients)))

    async def _ask_on(self, http: httpx.AsyncClient) -> None:
        while not self._stopping.is_set():
            number = next(self._numbers)
            self.asked.append(await self._ask(http, number, stream=number % 2 == 1))

    async def _ask(self, http: httpx.AsyncClient, number: int, stream: bool) -> Asked:
        body = {"prompt": f"{number}: and then", "max_tokens": TOKENS, "ignore_eos": True, "temperature": 0}
        body |= {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
        status, last = 0, {}
        try:
            async with http.stream("POST", self._url, json=body) as response:
                status = response.status_code
                text = (await response.aread()).decode()
            last = events(text)[-1] if stream and status == 200 else json.loads(text)
        except (httpx.HTTPError, ValueError, IndexError) as failure:
            return Asked(number, stream, status, 0, repr(failure))
        error = last.get("error")
        tokens = (last.get("usage") or {}).get("completion_tokens", 0)
        return Asked(number, stream, status, tokens, error and error["message"])
