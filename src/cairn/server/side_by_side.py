"""Several asynchronous generators as one."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import TypeVar

__all__ = ["side_by_side"]

Item = TypeVar("Item")


async def side_by_side(streams: Sequence[AsyncGenerator[Item, None]]) -> AsyncGenerator[tuple[int, Item], None]:
    """All items as they come, each with its stream's number, until every stream has ended. What one of them raises
    comes out of here, and then, as when this is closed early, all of them are closed. Readers that are slow hold the
    streams back."""
    if len(streams) == 1:
        async with aclosing(streams[0]) as only:
            async for alone in only:
                yield 0, alone
        return
    items: asyncio.Queue[tuple[int, Item] | Exception | None] = asyncio.Queue(maxsize=len(streams))

    async def pump(number: int, stream: AsyncGenerator[Item, None]) -> None:
        try:
            async with aclosing(stream):
                async for item in stream:
                    await items.put((number, item))
            await items.put(None)
        except Exception as error:
            await items.put(error)

    pumps = [asyncio.create_task(pump(number, stream)) for number, stream in enumerate(streams)]
    try:
        left = len(pumps)
        while left:
            item = await items.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                left -= 1
            else:
                yield item
    finally:
        for task in pumps:
            task.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)
