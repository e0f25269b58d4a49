"""The client of a request, for limits per client; and work that is cancelled when its client disconnects."""

import asyncio
import contextlib
import hashlib
import ipaddress
from collections.abc import Coroutine
from functools import lru_cache
from typing import Any, TypeVar

from starlette.types import Receive, Scope

from cairn.http.error_responses import ClientDisconnected

_SCOPE_KEY = "cairn.client"

Result = TypeVar("Result")


def record_api_key(scope: Scope, key: bytes) -> None:
    """Count the request for this key's client, whatever its address."""
    scope[_SCOPE_KEY] = f"key:{hashlib.blake2b(key, digest_size=12, person=b'cairn.client').hexdigest()}"


def get_key_digest(scope: Scope) -> str:
    """Of the request's API key; empty where none is asked for."""
    return scope.get(_SCOPE_KEY) or ""


def get_client_id(scope: Scope) -> str:
    """At most 64 characters: a digest of the request's API key, else the address that it came from, else nothing."""
    key: str | None = scope.get(_SCOPE_KEY)
    if key is not None:
        return key
    address = get_client_address(scope)
    return f"address:{address}" if address else ""


def get_client_address(scope: Scope) -> str:
    """The IP address that a request came from, behind trusted proxies; empty if it is none: on a Unix socket, or if a
    trusted proxy said something else."""
    client = scope.get("client")
    return _plain_address(str(client[0])) if client else ""


@lru_cache(maxsize=1024)
def _plain_address(text: str) -> str:
    try:
        # An IPv6 address may have its interface after it, of any length.
        address = ipaddress.ip_address(text.partition("%")[0])
    except ValueError:
        return ""
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return str(mapped or address)


async def cancel_on_disconnect(receive: Receive, work: Coroutine[Any, Any, Result]) -> Result:
    """The work's result. Raises ClientDisconnected, after cancelling the work, if the client disconnects first.

    The request's body must have been read. The work is this task's; what never waits is not watched.
    """
    working, loop = asyncio.current_task(), asyncio.get_running_loop()
    assert working is not None
    num_cancels, has_left, watching = working.cancelling(), False, list[asyncio.Task[None]]()

    async def watch() -> None:
        nonlocal has_left
        with contextlib.suppress(Exception):
            while (await receive())["type"] != "http.disconnect":
                pass
        has_left = True
        working.cancel()

    starting = loop.call_soon(lambda: watching.append(loop.create_task(watch())))
    try:
        return await work
    except asyncio.CancelledError:
        if has_left and working.cancelling() == num_cancels + 1:
            raise ClientDisconnected from None
        raise
    finally:
        starting.cancel()
        for task in watching:
            task.cancel()
        if has_left:
            working.uncancel()
