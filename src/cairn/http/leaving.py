"""Work that ends when its client goes away."""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from starlette.types import Receive

from cairn.http.failures import ClientGone

Result = TypeVar("Result")


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, Result]) -> Result:
    """The work's result. Raises ClientGone, with the work cancelled and over, when the client disconnects first.

    The request's body must have been read.
    """
    working = asyncio.create_task(work)
    leaving = asyncio.create_task(_disconnected(receive))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ClientGone
    finally:
        working.cancel()
        leaving.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
