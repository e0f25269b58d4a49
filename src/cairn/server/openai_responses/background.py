"""Responses that are made while no client waits: `background: true`."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import TypeAlias

from cairn.errors import QueueFull
from cairn.server.openai_responses.store import Owner

_Key: TypeAlias = tuple[Owner, str]
"""A response's owner and id."""


class BackgroundTasks:
    """The tasks that make them. `max_running`: at a time, those that wait for the engine among them."""

    def __init__(self, max_running: int) -> None:
        self._max_running = max_running
        self._tasks: dict[_Key, asyncio.Task[None]] = {}

    def check_room(self) -> None:
        """Raises QueueFull."""
        if len(self._tasks) >= self._max_running:
            raise QueueFull(f"{len(self._tasks)} responses are made in the background already: try again later")

    def start(self, key: _Key, work: Coroutine[None, None, None], at_end: Callable[[], None]) -> None:
        """`at_end` is called whatever happens to the work."""
        task = asyncio.create_task(work)
        self._tasks[key] = task

        def end(_: asyncio.Task[None]) -> None:
            del self._tasks[key]
            at_end()

        task.add_done_callback(end)

    async def cancel(self, key: _Key) -> bool:
        """Cancel the work and wait for its end. False: it has ended already."""
        task = self._tasks.get(key)
        if task is None:
            return False
        task.cancel()
        await asyncio.wait((task,))
        return True

    async def aclose(self) -> None:
        """Cancel all."""
        await asyncio.gather(*map(self.cancel, list(self._tasks)))
