"""What stands for images: encoded once, kept by content while there is room for it."""

import hashlib
import json
from collections import OrderedDict
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from cairn.models.qwen3_5_vision import load_tower, read_vision, tensors
from cairn.models.weights.identity import weights_identity
from cairn.step import Image


class ImageEncoder(Protocol):
    """Pixels to vectors, whatever the family. `merge`: patches that make one vector, in height and in width;
    `hidden_size`: their width."""

    @property
    def merge(self) -> int: ...

    @property
    def hidden_size(self) -> int: ...

    def encode(self, width: int, height: int, rgb: bytes) -> tuple[tuple[int, int, int], Tensor]:
        """An image, uint8 [height, width, 3] -> its patches in time, height and width, and its vectors
        [patches / merge^2, hidden]. The same bits every time."""
        ...


@dataclass(slots=True)
class EncoderCounters:
    """`encodes`: images that went through the encoder. `hits`: those found kept instead. `kept_bytes`: vectors kept at
    the moment. `dropped`: images whose vectors went to make room, or never found any."""

    encodes: int = 0
    hits: int = 0
    kept_bytes: int = 0
    dropped: int = 0


class CachedVision:
    """One encoder and a cache of what it gave, by content: the least recently used goes first. A `Vision`; one thread.

    A prompt's image is asked for in every step that computes a part of it, so an image that fits is encoded once
    however its prompt is cut, and an image that lies within a prefix hit is never asked for.
    """

    def __init__(self, encoder: ImageEncoder, cache_bytes: int) -> None:
        """`cache_bytes`: most bytes of vectors that are kept; 0 keeps none. Raises ValueError for less."""
        if cache_bytes < 0:
            raise ValueError(f"cache_bytes must not be negative: {cache_bytes}")
        self._encoder = encoder
        self._cache_bytes = cache_bytes
        self._kept: OrderedDict[bytes, Tensor] = OrderedDict()
        self.counters = EncoderCounters()

    @property
    def merge(self) -> int:
        """Patches that make one token, in height and in width."""
        return self._encoder.merge

    def features(self, image: Image) -> Tensor:
        """The image's vectors, [image.length, hidden]; the same bits whatever was encoded before. Not to be changed.

        Raises ValueError where the encoder cuts the image into other patches than `image.grid` says.
        """
        found = self._kept.get(image.digest)
        if found is not None:
            self._kept.move_to_end(image.digest)
            self.counters.hits += 1
            return found
        grid, vectors = self._encoder.encode(image.width, image.height, image.rgb)
        if grid != image.grid or vectors.shape != (image.length, self._encoder.hidden_size):
            raise ValueError(
                f"an image of {image.width} x {image.height} pixels has patches {grid} and {vectors.shape[0]} tokens, "
                f"but its prompt says {image.grid} and {image.length}"
            )
        self.counters.encodes += 1
        self._keep(image.digest, vectors)
        return vectors

    def _keep(self, digest: bytes, vectors: Tensor) -> None:
        if vectors.nbytes > self._cache_bytes:
            self.counters.dropped += 1
            return
        while self.counters.kept_bytes + vectors.nbytes > self._cache_bytes:
            _, oldest = self._kept.popitem(last=False)
            self.counters.kept_bytes -= oldest.nbytes
            self.counters.dropped += 1
        self._kept[digest] = vectors
        self.counters.kept_bytes += vectors.nbytes


class VisionElsewhere:
    """What a rank knows that takes an image's vectors from rank 0. A `Vision`."""

    def __init__(self, merge: int) -> None:
        self._merge = merge

    @property
    def merge(self) -> int:
        """See `CachedVision.merge`."""
        return self._merge

    @property
    def counters(self) -> None:
        """There is no encoder here."""
        return None

    def features(self, image: Image) -> Tensor:
        """Raises ValueError: nobody asks this rank."""
        raise ValueError("images are encoded on rank 0 alone")


def open_vision(
    folder: Path, dtype: torch.dtype, cache_bytes: int, rank: int = 0
) -> CachedVision | VisionElsewhere | None:
    """What a rank has of a checkpoint folder's vision model: rank 0 all of it. None for a model without.

    Raises ModelError that names the file, the field or the tensor.
    """
    if rank > 0:
        config = read_vision(folder)
        return None if config is None else VisionElsewhere(config.merge)
    tower = load_tower(folder, dtype)
    return None if tower is None else CachedVision(tower, cache_bytes)


def tower_identity(folder: Path) -> str:
    """Which vision model a checkpoint folder has: sha256, in hex, over its config and its weights (see
    `weights_identity`); empty without one. The shapes of weights do not say how many heads they are cut into, nor at
    which base positions turn. Raises ModelError."""
    config = read_vision(folder)
    if config is None:
        return ""
    facts = json.dumps(asdict(config), sort_keys=True)
    return hashlib.sha256(f"{weights_identity(folder, tensors(config))} {facts}".encode()).hexdigest()
