"""Image files to pixels with Pillow. The format is checked first, and the size before any pixel is decoded."""

import re
import struct
from io import BytesIO

from PIL import Image, ImageOps

from cairn.engine.contract import Pixels
from cairn.errors import InvalidRequest

_MAX_SIDE = 65_535
_MAX_SCANS = 100
"""Encoders write about ten. Each scan visits all pixels, and may be a few bytes long."""
_JPEG_MARKER = re.compile(rb"\xff([\x02-\xcf\xd9-\xfe])")
"""Markers but those that stand alone: stuffing, restarts, fill bytes (ITU-T T.81, B.1.1)."""
_END_OF_IMAGE, _START_OF_SCAN = 0xD9, 0xDA


def decode(data: bytes, max_pixels: int) -> Pixels:
    """The image as RGB, as transformers' processors have it: rotated as its Exif says, transparency on white, the
    first frame of an animation.

    Raises InvalidRequest for what is no PNG, JPEG, WebP or GIF, is damaged or truncated, has more than `max_pixels`
    (before pixels take memory), or is a JPEG of more than 100 scans, which would take hours.
    """
    kind = _format(data)
    if kind is None:
        raise InvalidRequest("the image is no PNG, JPEG, WebP or GIF")
    try:
        if kind == "WEBP":
            # Pillow's decoder allocates the canvas when it opens the file.
            _check_size(*_webp_size(data), max_pixels)
        if kind == "JPEG":
            _check_scans(data)
        with Image.open(BytesIO(data), formats=[kind]) as image:
            _check_size(*image.size, max_pixels)
            image.load()
            # A GIF's frame may be larger than its canvas says.
            _check_size(*image.size, max_pixels)
            return _pixels(image)
    except InvalidRequest:
        raise
    except (Image.DecompressionBombError, Image.DecompressionBombWarning):
        raise InvalidRequest(f"the image has more than {max_pixels} pixels") from None
    except Exception as error:  # decoders raise anything for damaged files
        raise InvalidRequest(f"the image is damaged or cut short: {type(error).__name__}") from error


def _format(data: bytes) -> str | None:
    if data.startswith(b"\x89PNG\r\n\x1a\n"):
        return "PNG"
    if data.startswith(b"\xff\xd8\xff"):
        return "JPEG"
    if data.startswith((b"GIF87a", b"GIF89a")):
        return "GIF"
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        return "WEBP"
    return None


def _webp_size(data: bytes) -> tuple[int, int]:
    """Width and height as the file's first chunk has them (WebP container specification, RFC 9649)."""
    match data[12:16]:
        case b"VP8X":
            return int.from_bytes(data[24:27], "little") + 1, int.from_bytes(data[27:30], "little") + 1
        case b"VP8L":
            bits = int.from_bytes(data[21:25], "little")
            return (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1
        case b"VP8 ":
            width, height = struct.unpack_from("<HH", data, 26)
            return width & 0x3FFF, height & 0x3FFF
    raise InvalidRequest("the image is damaged or cut short: its first chunk is unknown")


def _check_scans(data: bytes) -> None:
    at = num_scans = 0
    while (marker := _JPEG_MARKER.search(data, at)) is not None and marker[1][0] != _END_OF_IMAGE:
        num_scans += marker[1][0] == _START_OF_SCAN
        if num_scans > _MAX_SCANS:
            raise InvalidRequest(f"the image is a JPEG of more than {_MAX_SCANS} scans: save it with fewer")
        at = marker.end() + max(2, int.from_bytes(data[marker.end() : marker.end() + 2], "big"))


def _check_size(width: int, height: int, max_pixels: int) -> None:
    if not 1 <= width <= _MAX_SIDE or not 1 <= height <= _MAX_SIDE or width * height > max_pixels:
        raise InvalidRequest(f"the image is {width} x {height}; at most {max_pixels} pixels are decoded")


def _pixels(image: Image.Image) -> Pixels:
    turned = ImageOps.exif_transpose(image)
    if "A" in turned.getbands() or turned.info.get("transparency") is not None:
        seen = turned.convert("RGBA")
        turned = Image.alpha_composite(Image.new("RGBA", seen.size, (255, 255, 255, 255)), seen)
    rgb = turned.convert("RGB")
    return Pixels(width=rgb.width, height=rgb.height, rgb=rgb.tobytes())
