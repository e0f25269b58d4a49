"""Images in a chat: where their placeholders stand among the tokens, and how many each of them takes. No torch.

A chat template writes one placeholder token for each image. Here it becomes as many as the image will have vectors,
worked out from the image's size alone; the pixels go along to the engine.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
import numpy as np

from cairn.engine.contract import ImageInput, Pixels, RenderedPrompt
from cairn.errors import InvalidRequest, ModelError
from cairn.models.families import family_of
from cairn.models.image_processor import FILE, Grid, ImageProcessor
from cairn.models.weights.tensor_headers import read_json
from cairn.types import Boundary

TokenText = Callable[[int], str | None]
"""The text of a token id, None for an id that the tokenizer does not know."""


@dataclass(frozen=True, slots=True)
class ImagePrompts:
    """What one model's prompts look like where there are images. Safe to use from several threads.

    `token`: what the template writes for an image. `other_tokens`: placeholders of what is not served (videos).
    `end_token`: what it writes after an image. `markers`: the texts of all placeholders."""

    processor: ImageProcessor
    token: int
    other_tokens: frozenset[int]
    end_token: int
    markers: tuple[str, ...]

    @classmethod
    def read(cls, folder: Path, token_text: TokenText) -> "ImagePrompts | None":
        """What a checkpoint folder says of images; None for one that has no vision model, none that is served, or no
        image processor.

        Raises ModelError that names the file and the field.
        """
        if not (folder / FILE).is_file() or not (folder / "config.json").is_file():
            return None
        config = read_json(folder / "config.json")
        if config.get("vision_config") is None or not family_of(config).reads_images:
            return None
        image, video, end = (
            _token(config, name) for name in ("image_token_id", "video_token_id", "vision_end_token_id")
        )
        if image is None:
            raise ModelError("config.json: image_token_id is missing; a model with a vision_config needs it")
        markers = tuple(text for token in (image, video) if token is not None and (text := token_text(token)))
        if not markers or token_text(image) is None:
            raise ModelError(f"config.json: image_token_id {image} is none of the tokenizer's tokens")
        others = frozenset(token for token in (video,) if token is not None)
        return cls(ImageProcessor.read(folder), image, others, -1 if end is None else end, markers)

    def expand(self, rendered: RenderedPrompt, pictures: Sequence[tuple[str, Pixels]]) -> RenderedPrompt:
        """The prompt with as many placeholders for each image as it has vectors, its boundaries where they are then,
        and one more at each image's end. `pictures`: in the order of their placeholders, each after its place in
        the request.

        Raises InvalidRequest unless there are as many placeholders as images: then one was typed as text, or the
        template left an image out.
        """
        tokens = np.array(rendered.token_ids, dtype=np.int64)
        places = np.flatnonzero(tokens == self.token)
        if len(places) != len(pictures) or np.isin(tokens, list(self.other_tokens)).any():
            raise InvalidRequest(
                f"the prompt has {len(places)} placeholders for {len(pictures)} images: placeholders must not be "
                "written as text, and the chat template must take every image",
                "messages",
            )
        if not pictures:
            return rendered
        processors = [self.processor.with_bounds(*picture.bounds) for _, picture in pictures]
        grids = [_grid(processor, *placed) for processor, placed in zip(processors, pictures, strict=True)]
        lengths = [self.processor.num_tokens(grid) for grid in grids]
        counts = np.ones(len(tokens), dtype=np.int64)
        counts[places] = lengths
        before = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(counts)])
        images = [
            ImageInput(
                start=int(before[place]),
                length=length,
                digest=processor.digest(picture.width, picture.height, picture.rgb),
                grid=grid,
                width=picture.width,
                height=picture.height,
                rgb=picture.rgb,
                bounds=None if processor == self.processor else (processor.min_pixels, processor.max_pixels),
            )
            for place, length, grid, processor, (_, picture) in zip(
                places, lengths, grids, processors, pictures, strict=True
            )
        ]
        expanded: list[int] = np.repeat(tokens, counts).tolist()
        # Messages that end where an image does are worth more than the image, so they come last.
        ends = {end: Boundary(end, "image_end") for end in self._ends(expanded, images)}
        ends |= {
            int(before[old.position]): replace(old, position=int(before[old.position])) for old in rendered.boundaries
        }
        boundaries = [ends[position] for position in sorted(ends)]
        return msgspec.structs.replace(rendered, token_ids=expanded, boundaries=boundaries, images=images)

    def _ends(self, tokens: list[int], images: list[ImageInput]) -> list[int]:
        """Where each image ends, the token that closes it included; ascending."""
        ends = [image.start + image.length for image in images]
        return [end + 1 if end < len(tokens) and tokens[end] == self.end_token else end for end in ends]


def _grid(processor: ImageProcessor, where: str, picture: Pixels) -> Grid:
    try:
        return processor.grid(picture.width, picture.height)
    except InvalidRequest as error:
        raise InvalidRequest(f"{where}: {error.message}", "messages") from error


def _token(config: dict[str, object], name: str) -> int | None:
    value = config.get(name)
    if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 0):
        raise ModelError(f"config.json: {name} must be a token id, not {value!r}")
    return value
