"""What a row has besides text: where its tokens stand among images, and the vectors that stand for the images' own."""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from cairn.layers.communicator import Communicator
from cairn.runner.batch_builder import RowContent
from cairn.runner.positions import positions_of
from cairn.step import Image


class ImageCounts(Protocol):
    """Since the start: images that went through the encoder, those found kept instead, and the bytes kept now."""

    encodes: int
    hits: int
    kept_bytes: int


class Vision(Protocol):
    """Turns images into vectors. `merge`: patches that make one token, in height and in width. `counters`: None on a
    rank that has no encoder."""

    @property
    def merge(self) -> int: ...

    @property
    def counters(self) -> ImageCounts | None: ...

    def features(self, image: Image) -> Tensor:
        """[image.length, hidden]; the same bits whatever was encoded before. Asked of rank 0 alone."""
        ...


def row_content(
    start: int, end: int, images: Sequence[Image], vision: Vision | None, communicator: Communicator, like: Tensor
) -> RowContent | None:
    """Of the tokens [start, end) of a sequence with these images; None for one without. Rank 0 encodes, the other ranks
    take what it has from there. `like`: a tensor of the hidden states' width and dtype."""
    if not images:
        return None
    if vision is None:
        raise ValueError("a row with images, but the model does not read them")
    offsets, vectors = [np.zeros(0, np.int64)], [like.new_zeros(0, like.shape[-1])]
    for image in images:
        low, high = max(start, image.start), min(end, image.end)
        if low < high:
            offsets.append(np.arange(low - start, high - start))
            vectors.append(_vectors(image, vision, communicator, like)[low - image.start : high - image.start])
    positions = positions_of(start, end, images, vision.merge)
    return RowContent(positions, np.concatenate(offsets), torch.cat(vectors))


def _vectors(image: Image, vision: Vision, communicator: Communicator, like: Tensor) -> Tensor:
    if communicator.rank == 0:
        own = vision.features(image).to(like)
    else:
        own = like.new_zeros(image.length, like.shape[-1])
    # zeros added: exact
    return communicator.gather_add(own)
