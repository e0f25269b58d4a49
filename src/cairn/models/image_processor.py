"""The image processor of Qwen2-VL and the families after it: its settings, and its arithmetic without its pixels.

An image is resized so that both sides are multiples of patch x merge and its area lies between two bounds, then cut
into patches; merge x merge patches make one token. The front end only needs to know how many tokens that gives; the
pixels themselves go through transformers' processor, which is built from the same settings.
"""

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from cairn.errors import InvalidRequest
from cairn.models.config_schema import Fields
from cairn.models.weights.tensor_headers import read_json

Grid = tuple[int, int, int]
"""Patches in time, height and width."""

FILE = "preprocessor_config.json"

_MAX_EDGE_PIXELS = 1 << 30
_MAX_ASPECT = 200
_POSITIVE = (1e-12, 1e6)
_KINDS = frozenset(f"Qwen{version}VLImageProcessor{backend}" for version in (2, 3) for backend in ("", "Fast", "Pil"))
_VERSION = 1
"""Part of every digest: counts up when the way from pixels to features changes."""


@dataclass(frozen=True, slots=True)
class ImageProcessor:
    """What of preprocessor_config.json decides how pixels become patches.

    `min_pixels`, `max_pixels`: bounds of the area after resizing. `patch`, `merge`, `temporal`: pixels a side of a
    patch, patches a side of a token, frames of a patch. `resample`: Pillow's number of the filter. `mean` and `std`
    are of pixels times `scale`.
    """

    min_pixels: int
    max_pixels: int
    patch: int
    merge: int
    temporal: int
    resample: int
    scale: float
    mean: tuple[float, float, float]
    std: tuple[float, float, float]

    @classmethod
    def read(cls, folder: Path) -> "ImageProcessor":
        """The settings in a checkpoint folder. Raises ModelError that names the file and the field."""
        return cls.parse(read_json(folder / FILE))

    @classmethod
    def parse(cls, raw: Mapping[str, object]) -> "ImageProcessor":
        """Raises ModelError that names the field."""
        fields = Fields(raw, FILE)
        kind = raw.get("image_processor_type")
        if kind not in _KINDS:
            raise fields.error(f"image_processor_type {kind!r} is not served; known: {', '.join(sorted(_KINDS))}")
        for name in ("do_resize", "do_rescale", "do_normalize", "do_convert_rgb"):
            if raw.get(name, True) is not True:
                raise fields.error(f"{name} is {raw[name]!r}, but only true is implemented")
        least, most = _area_bounds(fields)
        mean = fields.numbers("image_mean", *_POSITIVE, (0.48145466, 0.4578275, 0.40821073))
        std = fields.numbers("image_std", *_POSITIVE, (0.26862954, 0.26130258, 0.27577711))
        return cls(
            min_pixels=least,
            max_pixels=most,
            patch=fields.integer("patch_size", 1, 256, default=14),
            merge=fields.integer("merge_size", 1, 16, default=2),
            temporal=fields.integer("temporal_patch_size", 1, 16, default=2),
            resample=fields.integer("resample", 0, 5, default=3),
            scale=fields.number("rescale_factor", *_POSITIVE, 1 / 255),
            mean=(mean[0], mean[1], mean[2]),
            std=(std[0], std[1], std[2]),
        )

    def with_bounds(self, least: int | None, most: int | None) -> "ImageProcessor":
        """With other bounds of the area, where they are not None. Raises InvalidRequest if they contradict each
        other."""
        changed = replace(
            self,
            min_pixels=self.min_pixels if least is None else least,
            max_pixels=self.max_pixels if most is None else most,
        )
        if changed.min_pixels > changed.max_pixels:
            text = f"min_pixels {changed.min_pixels} are more than max_pixels {changed.max_pixels}"
            raise InvalidRequest(f"mm_processor_kwargs: {text}, of which one may be the model's", "mm_processor_kwargs")
        return changed

    def grid(self, width: int, height: int) -> Grid:
        """The patches of an image of this many pixels: `smart_resize` of transformers' qwen2_vl, in patches.

        Raises InvalidRequest for an image that is more than 200 times as long as it is wide.
        """
        if max(width, height) > _MAX_ASPECT * min(width, height):
            raise InvalidRequest(f"one side is more than {_MAX_ASPECT} times the other: {width} x {height}", "messages")
        side = self.patch * self.merge
        tall, wide = round(height / side) * side, round(width / side) * side
        if tall * wide > self.max_pixels:
            ratio = math.sqrt(height * width / self.max_pixels)
            tall = max(side, math.floor(height / ratio / side) * side)
            wide = max(side, math.floor(width / ratio / side) * side)
        elif tall * wide < self.min_pixels:
            ratio = math.sqrt(self.min_pixels / (height * width))
            tall = math.ceil(height * ratio / side) * side
            wide = math.ceil(width * ratio / side) * side
        return 1, tall // self.patch, wide // self.patch

    def num_tokens(self, grid: Grid) -> int:
        """Tokens that the patches of an image make."""
        return math.prod(grid) // self.merge**2

    def digest(self, width: int, height: int, rgb: bytes) -> bytes:
        """An image's identity, 32 bytes: sha256 over these settings, its size and its pixels, uint8 [height, width, 3].

        What comes first has a length of its own, so no pixels can pass for settings.
        """
        facts = json.dumps(
            {"version": _VERSION, "width": width, "height": height, **asdict(self)},
            sort_keys=True,
            separators=(",", ":"),
        ).encode()
        digest = hashlib.sha256(len(facts).to_bytes(8, "little"))
        digest.update(facts)
        digest.update(rgb)
        return digest.digest()


def _area_bounds(fields: Fields) -> tuple[int, int]:
    """Least and most pixels; older files have them by their own names. A `size` of other words has no default: that
    would be another resizing than the file's."""
    size = fields.read("size", dict[str, Any], "an object with shortest_edge and longest_edge", {})
    edges = size or {"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 1280}
    paths = {edge: f"size.{edge}" for edge in ("shortest_edge", "longest_edge")}
    for edge, older in (("shortest_edge", "min_pixels"), ("longest_edge", "max_pixels")):
        if fields.has(older):
            edges, paths[edge] = {**edges, edge: fields.get(older)}, older
    least, most = (Fields(edges, FILE, paths.__getitem__).integer(edge, 1, _MAX_EDGE_PIXELS) for edge in paths)
    if least > most:
        lower, upper = paths.values()
        raise fields.error(f"{lower} {least} is more than {upper} {most} (both are areas)")
    return least, most
