"""Images in messages: content parts are found, fetched and decoded before a prompt is made of them.

Whatever is wrong with one is a 400 that names the part, as `messages[i].content[j]`.
"""

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from cairn.engine.contract import Pixels
from cairn.errors import InvalidRequest
from cairn.server.images.decode import decode
from cairn.server.images.fetch import ImageFetcher, data_uri
from cairn.server.images.memory import ImageAllocation, ImageMemory
from cairn.server.options import ImageOptions
from cairn.server.requests import Message

_ROLES = ("user", "tool")


@dataclass(frozen=True, slots=True)
class _Part:
    """One image: its place, and where its bytes are."""

    message: int
    part: int
    url: str

    @property
    def where(self) -> str:
        return f"messages[{self.message}].content[{self.part}]"


class MediaConnector:
    """Fetches and decodes the images of messages. One event loop only.

    At most `decoders` images are decoded at once, each by a thread that is given up, not ended, when it takes too long:
    until it is done no other takes its place.
    """

    def __init__(self, options: ImageOptions, fetcher: ImageFetcher | None = None) -> None:
        self._options = options
        self.memory = ImageMemory(options.max_open_bytes)
        self._fetcher = fetcher or ImageFetcher(options)
        self._threads = ThreadPoolExecutor(max_workers=options.decoders, thread_name_prefix="cairn-images")
        self._free = asyncio.Semaphore(options.decoders)

    async def load_images(
        self, messages: list[Message], markers: tuple[str, ...], share: ImageAllocation
    ) -> dict[tuple[int, int], Pixels]:
        """Every image by the numbers of its message and of its part there. `markers`: the texts that stand for images
        in a prompt, none where the model reads text alone. `share`: where the images' bytes are counted; those of the
        pixels stay counted when this is done.

        Raises InvalidRequest that names the part, Overloaded when other requests' images leave no room.
        """
        _refuse_markers(messages, markers)
        parts = self._find(messages, bool(markers))
        if not parts:
            return {}
        pictures = await self._decode_all(parts, await self._fetch_all(parts, share), share)
        share.keep(sum(len(picture.rgb) for picture in pictures))
        return {(part.message, part.part): picture for part, picture in zip(parts, pictures, strict=True)}

    async def aclose(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
        await self._fetcher.aclose()

    def _find(self, messages: list[Message], reads_images: bool) -> list[_Part]:
        found: list[_Part] = []
        for i, message in enumerate(messages):
            for j, part in enumerate(message.parts):
                if part["type"] == "text":
                    continue
                where, given = f"messages[{i}].content[{j}]", part["image_url"]
                if not reads_images:
                    raise InvalidRequest(f"{where} is an image, but this model reads text alone", "messages")
                if message.role not in _ROLES:
                    raise InvalidRequest(f"{where} is an image: only user and tool messages have them", "messages")
                if len(found) == self._options.limit:
                    raise InvalidRequest(
                        f"{where} is one image too many: at most {self._options.limit} in one prompt are served here, "
                        "see --limit-mm-per-prompt",
                        "messages",
                    )
                found.append(_Part(i, j, given if isinstance(given, str) else given["url"]))
        return found

    async def _fetch_all(self, parts: Sequence[_Part], share: ImageAllocation) -> list[bytes]:
        tasks = [asyncio.create_task(self._fetch(part, share)) for part in parts]
        try:
            return await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _fetch(self, part: _Part, share: ImageAllocation) -> bytes:
        try:
            if part.url[:5].lower() != "data:":
                return await self._fetcher.fetch(part.url, share)
            data = data_uri(part.url, self._options.max_bytes)
            share.take_fetched(len(data), self._options.max_request_bytes)
            return data
        except InvalidRequest as error:
            raise InvalidRequest(f"{part.where}: {error.message}", "messages") from error

    async def _decode_all(self, parts: Sequence[_Part], found: Sequence[bytes], share: ImageAllocation) -> list[Pixels]:
        """One after the other, so that what they may have together is known before each."""
        left, pictures = self._options.max_request_pixels, []
        for part, data in zip(parts, found, strict=True):
            try:
                picture = await self._decode(data, min(self._options.max_pixels, left))
                left -= picture.width * picture.height
                share.take(len(picture.rgb))
            except InvalidRequest as error:
                raise InvalidRequest(f"{part.where}: {error.message}", "messages") from error
            pictures.append(picture)
        return pictures

    async def _decode(self, data: bytes, max_pixels: int) -> Pixels:
        await self._free.acquire()
        try:
            decoding = asyncio.get_running_loop().run_in_executor(self._threads, decode, data, max_pixels)
        except BaseException:
            self._free.release()
            raise
        decoding.add_done_callback(self._done)
        try:
            async with asyncio.timeout(self._options.decode_seconds):
                return await asyncio.shield(decoding)
        except TimeoutError:
            raise InvalidRequest(f"the image was not decoded within {self._options.decode_seconds:g} s") from None

    def _done(self, decoding: "asyncio.Future[Pixels]") -> None:
        self._free.release()
        if not decoding.cancelled():
            # Looked at, as nobody else may any more.
            decoding.exception()


def _refuse_markers(messages: list[Message], markers: tuple[str, ...]) -> None:
    """Raises InvalidRequest where a text has, or texts side by side have, what stands for an image."""
    for i, message in enumerate(messages) if markers else ():
        if isinstance(message.content, str):
            _refuse_marker(message.content, markers, f"messages[{i}].content")
        before = ""
        for j, part in enumerate(message.parts):
            before = before + part["text"] if part["type"] == "text" else ""
            _refuse_marker(before, markers, f"messages[{i}].content[{j}]")
            # Enough to complete a marker, so that many parts cost no more than their text.
            before = before[-max(map(len, markers)) :]


def _refuse_marker(text: str, markers: tuple[str, ...], where: str) -> None:
    for marker in markers:
        if marker in text:
            raise InvalidRequest(f"{where} has {marker!r} in it, which stands for an image: send the image", "messages")
