"""Images of prompts: their vectors, encoded once and cached by content, and the positions of tokens among them.

Positions are M-RoPE (Qwen2-VL, arXiv 2409.12191, section 2.1): text counts up in time, height and width alike; an
image's tokens share one time and count rows and columns from there; the text after it goes on after the largest of the
three. Only a request's own images matter, so two requests never disturb each other.
"""

import hashlib
import json
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cairn.kernels.staging import Staging
from cairn.layers.communicator import Communicator
from cairn.models.qwen3_5_vision import load_tower, read_vision, tensors
from cairn.models.weights.identity import weights_identity
from cairn.runner.contract import EncoderCounters
from cairn.step import Image


class VisionModel(Protocol):
    """A model's vision tower. `merge`: patches that make one vector, in height and in width; `hidden_size`: the width
    of the vectors."""

    @property
    def merge(self) -> int: ...

    @property
    def hidden_size(self) -> int: ...

    def encode(
        self, width: int, height: int, rgb: bytes, bounds: tuple[int, int] | None = None
    ) -> tuple[tuple[int, int, int], Tensor]:
        """An image, uint8 [height, width, 3] -> its patches in time, height and width, and its vectors
        [patches / merge^2, hidden]. `bounds`: least and most pixels after resizing, instead of the checkpoint's. The
        same bits every time."""

    def encode_largest(self, max_area: int, max_tokens: int | None) -> None:
        """Encode as many black pixels as an image may have, to see what memory that takes. `max_area`: pixels that a
        request may have an image resized to, where the checkpoint does not allow more; `max_tokens`: of a prompt."""


class VisionEncoder(Protocol):
    """Image vectors for a runner. `merge`: patches that make one token, in height and in width. `counters`: None on a
    rank that encodes nothing. `cache_bytes`: most bytes of vectors that are kept."""

    @property
    def merge(self) -> int: ...

    @property
    def cache_bytes(self) -> int: ...

    @property
    def counters(self) -> EncoderCounters | None: ...

    def encode(self, image: Image) -> Tensor:
        """[image.length, hidden]; the same bits whatever was encoded before. Called on rank 0 alone."""

    def encode_largest(self, max_area: int, max_tokens: int | None) -> None:
        """See `VisionModel.encode_largest`."""


class CachedEncoder:
    """A vision tower with a cache of its vectors by content, the least recently used evicted first. A `VisionEncoder`;
    one thread. The vectors stay where the tower has made them, on its device.

    Each step that computes part of a prompt needs the images in that part, so an image that fits the cache is encoded
    once however its prompt is cut into chunks. An image within a prefix hit is never encoded.
    """

    def __init__(self, tower: VisionModel, cache_bytes: int) -> None:
        """`cache_bytes`: size of the cache; 0 caches nothing. Raises ValueError for less."""
        if cache_bytes < 0:
            raise ValueError(f"cache_bytes must not be negative: {cache_bytes}")
        self.merge = tower.merge
        self.counters = EncoderCounters()
        self.cache_bytes = cache_bytes
        self._tower = tower
        self._cache: OrderedDict[bytes, Tensor] = OrderedDict()

    def encode(self, image: Image) -> Tensor:
        """The image's vectors, [image.length, hidden]; the same bits whatever was encoded before. Not to be changed.

        Raises ValueError where the tower cuts the image into other patches than `image.grid` says.
        """
        cached = self._cache.get(image.digest)
        if cached is not None:
            self._cache.move_to_end(image.digest)
            self.counters.hits += 1
            return cached
        grid, vectors = self._tower.encode(image.width, image.height, image.rgb, image.bounds)
        if grid != image.grid or vectors.shape != (image.length, self._tower.hidden_size):
            raise ValueError(
                f"an image of {image.width} x {image.height} pixels has patches {grid} and {vectors.shape[0]} tokens, "
                f"but its prompt says {image.grid} and {image.length}"
            )
        self.counters.encodes += 1
        if vectors.nbytes > self.cache_bytes:
            self.counters.dropped += 1
            return vectors
        while self.counters.cached_bytes + vectors.nbytes > self.cache_bytes:
            _, oldest = self._cache.popitem(last=False)
            self.counters.cached_bytes -= oldest.nbytes
            self.counters.dropped += 1
        self._cache[image.digest] = vectors
        self.counters.cached_bytes += vectors.nbytes
        return vectors

    def encode_largest(self, max_area: int, max_tokens: int | None) -> None:
        """See `VisionModel.encode_largest`; nothing is kept."""
        self._tower.encode_largest(max_area, max_tokens)


class RemoteEncoder:
    """The `VisionEncoder` of a rank that receives image vectors from rank 0."""

    def __init__(self, merge: int) -> None:
        self.merge = merge
        self.counters = None
        self.cache_bytes = 0

    def encode(self, image: Image) -> Tensor:
        """Raises ValueError: this rank has no vision tower."""
        raise ValueError("images are encoded on rank 0 alone")

    def encode_largest(self, max_area: int, max_tokens: int | None) -> None:
        """Nothing is encoded here."""


@dataclass(frozen=True, slots=True)
class MultimodalInputs:
    """The non-text inputs of a plan row: `positions` int64 [3, tokens] of all its tokens, and `vectors` [k, hidden]
    that take the place of the embeddings of its tokens at `offsets` int64 [k]. `head_positions`: of the entries of a
    head that drafts, where they differ: one after the token before each."""

    positions: NDArray[np.int64]
    offsets: NDArray[np.int64]
    vectors: Tensor
    head_positions: NDArray[np.int64] | None = None


def multimodal_inputs(
    start: int,
    end: int,
    images: Sequence[Image],
    vision: VisionEncoder | None,
    communicator: Communicator,
    like: Tensor,
    has_head: bool = False,
) -> MultimodalInputs | None:
    """The inputs of tokens [start, end) of a sequence with these images; None for a sequence without images. Rank 0
    encodes and the other ranks receive its vectors. `like`: a tensor of the hidden states' width and dtype. `has_head`:
    whether there is one that drafts.

    Raises ValueError where there are images and no encoder.
    """
    if not images:
        return None
    if vision is None:
        raise ValueError("a row with images, but the model does not read them")
    offsets, vectors = [np.zeros(0, np.int64)], [like.new_zeros(0, like.shape[-1])]
    for image in images:
        low, high = max(start, image.start), min(end, image.end)
        if low < high:
            image_vectors = (
                vision.encode(image).to(like)
                if communicator.rank == 0
                else like.new_empty(image.length, like.shape[-1])
            )
            offsets.append(np.arange(low - start, high - start))
            vectors.append(communicator.broadcast(image_vectors)[low - image.start : high - image.start])
    positions = mrope_positions(start, end, images, vision.merge)
    head_positions = None
    if has_head:
        # before the first token is a text's position
        shifted = mrope_positions(max(0, start - 1), end, images, vision.merge)[:, : end - start] + 1
        if start == 0:
            shifted = np.concatenate([np.zeros((3, 1), np.int64), shifted[:, :-1]], axis=1)
        head_positions = None if np.array_equal(shifted, positions) else shifted
    return MultimodalInputs(positions, np.concatenate(offsets), torch.cat(vectors), head_positions)


def mrope_positions(start: int, end: int, images: Sequence[Image], merge: int) -> NDArray[np.int64]:
    """Positions of tokens [start, end) in time, height and width, int64 [3, end - start].

    `images`: in order. `merge`: patches that make one token, in height and in width.
    """
    positions = np.tile(np.arange(start, end, dtype=np.int64), (3, 1))
    shift = 0
    for image in images:
        if image.start >= end:
            break
        frames, height, width = image.grid[0], image.grid[1] // merge, image.grid[2] // merge
        low, high = max(start, image.start), min(end, image.end)
        if low < high:
            grid = np.indices((frames, height, width)).reshape(3, -1)[:, low - image.start : high - image.start]
            positions[:, low - start : high - start] = image.start + shift + grid
        shift += max(frames, height, width) - image.length
        if image.end < end:
            text_start = max(start, image.end)
            positions[:, text_start - start :] = np.arange(text_start, end) + shift
    return positions


def open_vision(
    folder: Path, dtype: torch.dtype, cache_bytes: int, rank: int = 0, device: torch.device | None = None
) -> CachedEncoder | RemoteEncoder | None:
    """The vision encoder of a checkpoint folder for one rank; rank 0 loads the tower to `device`, None for the host.
    None for a model without vision.

    Raises ModelError that names the file, the field or the tensor.
    """
    if rank > 0:
        config = read_vision(folder)
        return None if config is None else RemoteEncoder(config.spatial_merge_size)
    tower = load_tower(folder, dtype, device, partial(send_arrays, device or torch.device("cpu")))
    return None if tower is None else CachedEncoder(tower, cache_bytes)


def send_arrays(device: torch.device, arrays: Sequence[NDArray[Any]]) -> list[Tensor]:
    """The arrays on the device, in one copy that the host does not wait for."""
    staging = Staging()
    staged = [staging.add(array) for array in arrays]
    staging.send(device)
    return [array.tensor for array in staged]


def tower_identity(folder: Path) -> str:
    """The identity of a checkpoint folder's vision model: sha256, in hex, over its config and its weights (see
    `weights_identity`); empty without one. The config counts, too: shapes of weights do not say the number of heads or
    the base of the rotary positions. Raises ModelError."""
    config = read_vision(folder)
    if config is None:
        return ""
    facts = json.dumps(asdict(config), sort_keys=True)
    return hashlib.sha256(f"{weights_identity(folder, tensors(config))} {facts}".encode()).hexdigest()
