"""Images among key tokens: each place of each image has a number below 0 of its own, as long as this process lives.

The number says nothing by itself: what is told to other servers and routers is the image's whole digest.
"""

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256

import numpy as np

from cairn.cache.events import KeyName
from cairn.engine.contract import ImageInput
from cairn.errors import InvalidRequest
from cairn.step import Image
from cairn.types import Keys

DIGEST_BYTES = 32
_MAX_IMAGES = 1 << 16


@dataclass(frozen=True, slots=True)
class _Run:
    """Keys base, base - 1, ... stand for an image's places."""

    base: int
    length: int
    digest: bytes


class ImageKeys:
    """Gives numbers to images and remembers the last 65,536 of them. A number is never given again: an image that was
    forgotten gets others, which costs a hit and never gives a wrong one. `token`: the placeholder's vocabulary id.
    `tower`: which weights make vectors of images; the same pixels are another content to another vision model."""

    def __init__(self, token: int, tower: str = "", max_images: int = _MAX_IMAGES) -> None:
        self.token = token
        self._tower = tower.encode()
        self._max_images = max_images
        self._runs: OrderedDict[bytes, _Run] = OrderedDict()
        self._by_base: dict[int, _Run] = {}
        self._bases: list[int] = []
        self._next = -1

    def put_in(self, keys: Keys, images: Sequence[ImageInput]) -> tuple[Keys, tuple[Image, ...]]:
        """The prompt's keys, shape [n], with those of the images in their places, and the images as steps know them.

        Raises InvalidRequest when they do not fit into the prompt, in order, or contradict themselves.
        """
        keys, placed, end = keys.copy(), [], 0
        for number, image in enumerate(images):
            _check(number, image, end, len(keys))
            end = image.start + image.length
            digest = sha256(self._tower + image.digest).digest()
            run = self._run(digest, image.length)
            keys[image.start : end] = run.base - np.arange(image.length)
            place = image.start, image.length, image.grid
            placed.append(Image(*place, digest, image.width, image.height, image.rgb, image.bounds))
        return keys, tuple(placed)

    def name(self, key: int) -> KeyName | None:
        """See `cairn.cache.events.KeyNames`."""
        run = self._run_of(key)
        return None if run is None else KeyName(run.digest, run.base - key, self.token)

    def _run(self, digest: bytes, length: int) -> _Run:
        known = self._runs.get(digest)
        if known is None or known.length != length:
            known = _Run(self._next, length, digest)
            self._next -= length
            if (other := self._runs.pop(digest, None)) is not None:
                del self._by_base[other.base]
            self._runs[digest] = self._by_base[known.base] = known
            # bases go down, so the list of their negatives goes up
            self._bases.append(-known.base)
            self._forget()
        self._runs.move_to_end(digest)
        return known

    def _forget(self) -> None:
        while len(self._runs) > self._max_images:
            _, oldest = self._runs.popitem(last=False)
            del self._by_base[oldest.base]
        if len(self._bases) > 2 * self._max_images:
            self._bases = [base for base in self._bases if -base in self._by_base]

    def _run_of(self, key: int) -> _Run | None:
        at = bisect_right(self._bases, -key) - 1
        run = self._by_base.get(-self._bases[at]) if at >= 0 else None
        return run if run is not None and run.base - key < run.length else None


def _check(number: int, image: ImageInput, previous_end: int, length: int) -> None:
    where = f"images[{number}]"
    if not previous_end <= image.start < image.start + image.length <= length:
        raise InvalidRequest(f"{where}: tokens {image.start} + {image.length} are no place of their own", "images")
    if len(image.digest) != DIGEST_BYTES:
        raise InvalidRequest(f"{where}: a digest has {DIGEST_BYTES} bytes, not {len(image.digest)}", "images")
    if not (1 <= image.width < 1 << 16 and 1 <= image.height < 1 << 16):
        raise InvalidRequest(f"{where}: {image.width} x {image.height} is no size", "images")
    if len(image.rgb) != 3 * image.width * image.height:
        pixels = f"{image.width} x {image.height} pixels"
        raise InvalidRequest(f"{where}: {len(image.rgb)} bytes are not its {pixels}", "images")
    if min(image.grid) < 1:
        raise InvalidRequest(f"{where}: a grid of {image.grid} has no patches", "images")
