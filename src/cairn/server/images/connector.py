"""Images of chat messages, fetched and decoded before a prompt is made of them.

Whatever is wrong with one is a 400 that names the part, as `messages[i].content[j]`.
"""

import asyncio
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from cairn.engine.contract import Pixels
from cairn.errors import InvalidRequest
from cairn.server.images.decode import decode
from cairn.server.images.fetch import ImageFetcher, decode_data_uri
from cairn.server.images.memory import ImageAllocation, ImageMemory
from cairn.server.images.named import NamedImages, Owner
from cairn.server.openai.messages import ImagePart, Message
from cairn.server.options import ImageOptions

_ROLES = ("user", "tool")

Result = TypeVar("Result")


class MediaConnector:
    """Fetches and decodes the images of messages. One event loop only.

    At most `decoders` images are decoded at once, each by a thread that is given up, not ended, when it takes too long:
    until it is done no other takes its place.
    """

    def __init__(self, options: ImageOptions, fetcher: ImageFetcher | None = None) -> None:
        self._options = options
        self.memory = ImageMemory(options.max_open_bytes)
        self._named = NamedImages(options.max_named_bytes)
        self._fetcher = fetcher or ImageFetcher(options)
        self._threads = ThreadPoolExecutor(max_workers=options.decoders, thread_name_prefix="cairn-images")
        self._decoders = asyncio.Semaphore(options.decoders)

    async def load_images(
        self, messages: list[Message], markers: tuple[str, ...], allocation: ImageAllocation, cache_salt: str = ""
    ) -> dict[tuple[int, int], Pixels]:
        """Every image by the numbers of its message and of its part. `markers`: the texts that stand for images in a
        prompt, none if the model reads text alone. `allocation`: counts the images' bytes, at the end those of the
        pixels. `cache_salt`: images that have a name are found again under the same one.

        Raises InvalidRequest naming the part, Overloaded if other requests' images leave no room.
        """
        _refuse_markers(messages, markers)
        parts = self._find_parts(messages, bool(markers))
        if not parts:
            return {}
        owner: Owner = allocation.client, cache_salt
        fetches = [
            asyncio.create_task(_name_part(place, self._read, part, owner, allocation)) for place, part in parts.items()
        ]
        try:
            files = await asyncio.gather(*fetches)
        finally:
            for fetch in fetches:
                fetch.cancel()
            await asyncio.gather(*fetches, return_exceptions=True)
        # One after the other, so that each is known to leave the request's pixels for the next ones.
        left, images = self._options.max_request_pixels, dict[tuple[int, int], Pixels]()
        for (place, part), data in zip(parts.items(), files, strict=True):
            image = await _name_part(place, self._decode, data, min(self._options.max_pixels, left))
            left -= image.width * image.height
            allocation.allocate(len(image.rgb))
            images[place] = image
            if name := part.get("uuid"):
                self._named.put(owner, name, data)
        allocation.shrink(sum(len(image.rgb) for image in images.values()))
        return images

    async def aclose(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
        await self._fetcher.aclose()

    def _find_parts(self, messages: list[Message], reads_images: bool) -> dict[tuple[int, int], ImagePart]:
        image_parts: dict[tuple[int, int], ImagePart] = {}
        for i, message in enumerate(messages):
            for j, part in enumerate(message.parts):
                if part["type"] == "text":
                    continue
                where = f"messages[{i}].content[{j}]"
                if not reads_images:
                    raise InvalidRequest(f"{where} is an image, but this model reads text alone", "messages")
                if message.role not in _ROLES:
                    raise InvalidRequest(f"{where} is an image: only user and tool messages have them", "messages")
                if len(image_parts) == self._options.limit:
                    raise InvalidRequest(
                        f"{where} is one image too many: at most {self._options.limit} in one prompt are served here, "
                        "see --limit-mm-per-prompt",
                        "messages",
                    )
                image_parts[i, j] = part
        return image_parts

    async def _read(self, part: ImagePart, owner: Owner, allocation: ImageAllocation) -> bytes:
        """The file: what its URL says, or what has come under its name before."""
        if url := (part.get("image_url") or {}).get("url"):
            return await self._fetch(url, allocation)
        if not (name := part.get("uuid")):
            raise InvalidRequest("image_url.url is missing: send it, or the uuid of an image that was sent before")
        file = self._named.get(owner, name)
        if file is None:
            raise InvalidRequest("this server knows no image with this uuid, or does no longer: send image_url.url")
        allocation.allocate_fetched(len(file), self._options.max_request_bytes)
        return file

    async def _fetch(self, url: str, allocation: ImageAllocation) -> bytes:
        if url[:5].lower() != "data:":
            return await self._fetcher.fetch(url, allocation)
        data = decode_data_uri(url, self._options.max_bytes)
        allocation.allocate_fetched(len(data), self._options.max_request_bytes)
        return data

    async def _decode(self, data: bytes, max_pixels: int) -> Pixels:
        await self._decoders.acquire()
        try:
            decoding = asyncio.get_running_loop().run_in_executor(self._threads, decode, data, max_pixels)
        except BaseException:
            self._decoders.release()
            raise
        decoding.add_done_callback(self._end_decoding)
        try:
            async with asyncio.timeout(self._options.decode_seconds):
                return await asyncio.shield(decoding)
        except TimeoutError:
            raise InvalidRequest(f"the image was not decoded within {self._options.decode_seconds:g} s") from None

    def _end_decoding(self, decoding: "asyncio.Future[Pixels]") -> None:
        self._decoders.release()
        if not decoding.cancelled():
            decoding.exception()  # asyncio logs one that nobody has looked at


async def _name_part(place: tuple[int, int], function: Callable[..., Awaitable[Result]], *arguments: Any) -> Result:
    """What the function returns. Its InvalidRequest names the message and the part."""
    try:
        return await function(*arguments)
    except InvalidRequest as error:
        text = f"messages[{place[0]}].content[{place[1]}]: {error.message}"
        raise InvalidRequest(text, "messages") from error


def _refuse_markers(messages: list[Message], markers: tuple[str, ...]) -> None:
    """Raises InvalidRequest if a text, or texts side by side, contain what stands for an image."""
    for i, message in enumerate(messages) if markers else ():
        texts = {f"messages[{i}].content": message.content if isinstance(message.content, str) else ""}
        text = ""
        for j, part in enumerate(message.parts):
            # Enough of the texts before to complete a marker, so that many parts cost no more than their text.
            text = text[-max(map(len, markers)) :] + part["text"] if part["type"] == "text" else ""
            texts[f"messages[{i}].content[{j}]"] = text
        for where, text in texts.items():
            for marker in markers:
                if marker in text:
                    stands_for = "which stands for an image: send the image"
                    raise InvalidRequest(f"{where} has {marker!r} in it, {stands_for}", "messages")
