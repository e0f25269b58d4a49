"""Image files from data URIs, and from http(s) under an allow-list, with a bound on everything."""

import asyncio
import base64
import binascii
import re
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx

from cairn.errors import InvalidRequest
from cairn.server.images.address import Resolver, SystemResolver, resolve_public
from cairn.server.images.memory import ImageAllocation
from cairn.server.options import ImageOptions

_TYPES = frozenset(("image/png", "image/jpeg", "image/jpg", "image/webp", "image/gif"))
_SERVED_TYPES = "image/png, image/jpeg, image/webp, image/gif"
_UNTYPED = frozenset(("application/octet-stream", "binary/octet-stream"))
"""Types that object stores give to files without one."""
_REDIRECTS = frozenset((301, 302, 303, 307, 308))
_URL = re.compile(r"[\x21-\x5b\x5d-\x7e]{1,8192}")
"""ASCII without spaces, controls and backslashes: programs disagree on what those mean in a URL."""
_MAX_SHOWN = 80
_MAX_HEAD = 256


def decode_data_uri(text: str, max_bytes: int) -> bytes:
    """The bytes in `data:image/png;base64,...`. Raises InvalidRequest."""
    head, comma, body = text.partition(",")
    kind, *settings = head[len("data:") : _MAX_HEAD].split(";")
    if not comma or len(head) > _MAX_HEAD or not settings or settings[-1].strip().lower() != "base64":
        raise InvalidRequest("a data URI must have the form data:image/png;base64,...")
    if kind.strip().lower() not in _TYPES:
        raise InvalidRequest(f"the data URI's type {kind[:_MAX_SHOWN]!r} is not served; known: {_SERVED_TYPES}")
    if len(body) > (max_bytes + 2) // 3 * 4:
        raise InvalidRequest(f"the image has more than {max_bytes} bytes")
    try:
        data = base64.b64decode(body, validate=True)
    except (binascii.Error, ValueError) as error:
        raise InvalidRequest(f"the data URI is not base64: {error}") from None
    if len(data) > max_bytes:
        raise InvalidRequest(f"the image has more than {max_bytes} bytes")
    return data


class _FetchSlots:
    """Bounds concurrent fetches, in all and per client. Tracks the clients that have a slot or wait for one."""

    def __init__(self, max_open: int, max_per_client: int) -> None:
        self._all = asyncio.Semaphore(max_open)
        self._max_per_client = max_per_client
        self._clients: dict[str, asyncio.Semaphore] = {}
        self._num_users: Counter[str] = Counter()

    @asynccontextmanager
    async def slot(self, client: str) -> AsyncIterator[None]:
        client_slots = self._clients.setdefault(client, asyncio.Semaphore(self._max_per_client))
        self._num_users[client] += 1
        try:
            # The client's own first: who waits for it takes no slot from others.
            async with client_slots, self._all:
                yield
        finally:
            self._num_users[client] -= 1
            if not self._num_users[client]:
                del self._num_users[client], self._clients[client]


class ImageFetcher:
    """Fetches over HTTP. `resolver`, `transport`: instead of the machine's own.

    Every address is checked before it is connected to, also after redirects. No proxy, cookie, netrc file or
    connection to another host is used.
    """

    def __init__(
        self,
        options: ImageOptions,
        resolver: Resolver | None = None,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self._options = options
        self._resolver = resolver or SystemResolver()
        self._transport = transport
        self._slots = _FetchSlots(options.max_fetches, options.max_client_fetches)

    async def fetch(self, url: str, allocation: ImageAllocation) -> bytes:
        """The bytes at an http(s) URL. Raises InvalidRequest."""
        seconds = self._options.fetch_seconds
        async with self._slots.slot(allocation.client):
            try:
                async with asyncio.timeout(seconds):
                    return await self._follow(_parse(url), allocation)
            except TimeoutError:
                raise InvalidRequest(f"the image could not be fetched within {seconds:g} s") from None
            except (httpx.HTTPError, httpx.InvalidURL, httpx.StreamError, OSError) as error:
                raise InvalidRequest(f"the image could not be fetched: {type(error).__name__}") from error

    async def aclose(self) -> None:
        if self._transport is not None:
            await self._transport.aclose()

    async def _follow(self, url: httpx.URL, allocation: ImageAllocation) -> bytes:
        for _ in range(self._options.max_redirects + 1):
            host = _get_host(url)
            if self._options.domains is not None and host not in self._options.domains:
                raise InvalidRequest(f"images are not fetched from {host!r}: see --allowed-media-domains")
            response = await self._send(url)
            try:
                if response.status_code not in _REDIRECTS:
                    return await self._read(response, allocation)
                target = response.headers.get("location")
                if not target:
                    raise InvalidRequest("the image's server redirects to nowhere")
            finally:
                await response.aclose()
            url = url.join(_parse(target, relative=True))
            _parse(str(url))
        raise InvalidRequest(f"the image's server redirects more than {self._options.max_redirects} times")

    async def _send(self, url: httpx.URL) -> httpx.Response:
        """The response's head, from the first of the host's addresses that accepts a connection."""
        host = _get_host(url)
        addresses = await resolve_public(self._resolver, host, url.port or (443 if url.scheme == "https" else 80))
        for address in addresses[:-1]:
            try:
                return await self._request(url, host, address)
            except (httpx.ConnectError, httpx.ConnectTimeout):
                continue
        return await self._request(url, host, addresses[-1])

    async def _request(self, url: httpx.URL, host: str, address: str) -> httpx.Response:
        if self._transport is None:
            self._transport = httpx.AsyncHTTPTransport(
                trust_env=False,
                # Pools tell connections apart by address, and several hosts may share one.
                limits=httpx.Limits(max_connections=self._options.max_fetches, max_keepalive_connections=0),
            )
        seconds = self._options.fetch_seconds
        request = httpx.Request(
            "GET",
            url.copy_with(host=address, fragment=None),
            headers={
                "Host": url.netloc.decode("ascii"),
                "Accept": _SERVED_TYPES,
                # Compressed content may decompress to any size.
                "Accept-Encoding": "identity",
                "User-Agent": "cairn",
                "Connection": "close",
            },
            extensions={
                "sni_hostname": host,
                "timeout": dict.fromkeys(("connect", "read", "write", "pool"), seconds),
            },
        )
        return await self._transport.handle_async_request(request)

    async def _read(self, response: httpx.Response, allocation: ImageAllocation) -> bytes:
        if response.status_code != 200:
            raise InvalidRequest(f"the image's server answers with status {response.status_code}")
        kind = response.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind not in _TYPES | _UNTYPED:
            raise InvalidRequest(f"the image's server sends {kind[:_MAX_SHOWN]!r}; known: {_SERVED_TYPES}")
        if response.headers.get("content-encoding", "identity").strip().lower() != "identity":
            raise InvalidRequest("the image's server sends packed content, which is not unpacked")
        most, length = self._options.max_bytes, response.headers.get("content-length", "")
        if length.isdecimal() and (len(length) > 18 or int(length) > most):
            raise InvalidRequest(f"the image has more than {most} bytes")
        read = bytearray()
        async for piece in response.stream:  # type: ignore[union-attr]
            read += piece
            if len(read) > most:
                raise InvalidRequest(f"the image has more than {most} bytes")
            allocation.allocate_fetched(len(piece), self._options.max_request_bytes)
        return bytes(read)


def _parse(text: str, relative: bool = False) -> httpx.URL:
    if not _URL.fullmatch(text):
        raise InvalidRequest("the URL must be plain ASCII without spaces or backslashes, at most 8192 characters")
    try:
        url = httpx.URL(text)
    except (httpx.InvalidURL, ValueError) as error:
        raise InvalidRequest(f"the URL cannot be read: {error}") from None
    if url.is_relative_url and relative:
        return url
    if url.scheme not in ("http", "https"):
        raise InvalidRequest(f"the URL's scheme {url.scheme[:_MAX_SHOWN]!r} is not served; known: data, http, https")
    if not url.host or url.userinfo or not 0 < (url.port or 80) < 1 << 16:
        raise InvalidRequest("the URL must have a host, no user name or password, and no port above 65535")
    return url


def _get_host(url: httpx.URL) -> str:
    return url.raw_host.decode("ascii").lower().rstrip(".")
