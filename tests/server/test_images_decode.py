"""Bytes to pixels: as transformers would have them, and nothing decoded that is too large."""

import io
import struct
import zlib

import numpy as np
import pytest
from PIL import Image, ImageFile
from transformers.image_transforms import convert_to_rgb

from cairn.errors import InvalidRequest
from cairn.server.images.decode import decode

MODES = ("1", "L", "LA", "P", "PA", "RGB", "RGBA", "CMYK", "YCbCr", "I;16")
FORMATS = {"PNG": "1 L LA P RGB RGBA I;16", "GIF": "1 L P RGB RGBA", "WEBP": "RGB RGBA", "JPEG": "L RGB CMYK YCbCr"}


def image_of(mode, width=21, height=13):
    rng = np.random.default_rng(0)
    if mode == "I;16":
        return Image.fromarray(rng.integers(0, 1 << 16, (height, width), dtype=np.uint16))
    image = Image.fromarray(rng.integers(0, 256, (height, width, 4), dtype=np.uint8), "RGBA")
    return image.convert(mode)


def packed(image, kind, **options):
    out = io.BytesIO()
    image.save(out, kind, **options)
    return out.getvalue()


def array(pixels):
    return np.frombuffer(pixels.rgb, np.uint8).reshape(pixels.height, pixels.width, 3)


@pytest.mark.parametrize(("kind", "mode"), [(kind, mode) for kind, modes in FORMATS.items() for mode in modes.split()])
def test_every_mode_is_converted_as_transformers_does(kind, mode):
    data = packed(image_of(mode), kind)
    expected = convert_to_rgb(Image.open(io.BytesIO(data)), return_numpy=True)
    assert (array(decode(data, 1 << 20)) == expected).all()


def test_transparency_lies_on_white():
    image = Image.new("RGBA", (2, 1), (10, 20, 30, 0))
    image.putpixel((1, 0), (10, 20, 30, 255))
    assert array(decode(packed(image, "PNG"), 100)).tolist() == [[[255] * 3, [10, 20, 30]]]
    palette = Image.new("P", (2, 1), 0)
    palette.putpalette([10, 20, 30, 40, 50, 60])
    palette.putpixel((1, 0), 1)
    data = packed(palette, "PNG", transparency=0)
    assert array(decode(data, 100)).tolist() == [[[255] * 3, [40, 50, 60]]]


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
def test_turned_as_exif_says(kind, orientation):
    exif = Image.Exif()
    exif[0x0112] = orientation
    data = packed(image_of("RGB"), kind, exif=exif)
    turned = decode(data, 1 << 20)
    plain = np.asarray(Image.open(io.BytesIO(data)).convert("RGB"))
    turn = {
        1: lambda a: a,
        2: lambda a: a[:, ::-1],
        3: lambda a: a[::-1, ::-1],
        4: lambda a: a[::-1],
        5: lambda a: a.transpose(1, 0, 2),
        6: lambda a: np.rot90(a, -1),
        7: lambda a: a[::-1, ::-1].transpose(1, 0, 2),
        8: lambda a: np.rot90(a),
    }[orientation]
    assert (array(turned) == turn(plain)).all()


@pytest.mark.parametrize("kind", ["GIF", "WEBP", "PNG"])
def test_the_first_frame_of_an_animation(kind):
    frames = [Image.new("RGB", (8, 8), color) for color in ("red", "green", "blue")]
    data = packed(
        frames[0], kind, save_all=True, append_images=frames[1:], **({"lossless": 1} if kind == "WEBP" else {})
    )
    assert (array(decode(data, 100)) == [255, 0, 0]).all()


def png(width, height):
    def chunk(kind, data):
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + head + chunk(b"IDAT", zlib.compress(b"\0" * 1000)) + chunk(b"IEND", b"")


def webp(kind, body):
    body = kind + struct.pack("<I", len(body)) + body
    return b"RIFF" + struct.pack("<I", len(body) + 4) + b"WEBP" + body


def jpeg(width, height):
    data = packed(image_of("RGB"), "JPEG")
    at = data.index(b"\xff\xc0")
    return data[: at + 5] + struct.pack(">HH", height, width) + data[at + 9 :]


LARGE = {
    "png": png(20_000, 20_000),
    "png between Pillow's bounds": png(10_000, 10_000),
    "png just above": png(1001, 1000),
    "jpeg": jpeg(20_000, 20_000),
    "gif": b"GIF89a"
    + struct.pack("<HH", 20_000, 20_000)
    + b"\0\0\0"
    + b","
    + struct.pack("<HHHH", 0, 0, 9, 9)
    + b"\0\2\0;",
    "webp": webp(b"VP8X", b"\0" * 4 + (15_999).to_bytes(3, "little") * 2),
    "lossy webp": webp(b"VP8 ", b"\0" * 3 + b"\x9d\x01\x2a" + struct.pack("<HH", 16_000, 16_000)),
    "lossless webp": webp(b"VP8L", b"\x2f" + (15_999 | 15_999 << 14).to_bytes(4, "little")),
}


@pytest.mark.parametrize("name", LARGE)
def test_a_large_image_is_refused_by_its_head(name, monkeypatch):
    def load(self):
        raise AssertionError("it was decoded")

    monkeypatch.setattr(ImageFile.ImageFile, "load", load)
    with pytest.raises(InvalidRequest, match="pixels"):
        decode(LARGE[name], 1_000_000)


@pytest.mark.parametrize("name", [name for name in LARGE if "webp" in name])
def test_pillow_never_opens_a_large_webp(name, monkeypatch):
    """Its decoder makes room for the canvas before anybody can ask for the size."""
    monkeypatch.setattr(Image, "open", lambda *_, **__: pytest.fail("it was opened"))
    with pytest.raises(InvalidRequest, match="16000 x 16000"):
        decode(LARGE[name], 1_000_000)


@pytest.mark.parametrize("options", [{"lossless": True}, {}, {"exif": b"Exif\0\0"}])
def test_the_size_of_a_webp_is_read_as_pillow_reads_it(options):
    for size in ((1, 1), (257, 3), (16, 4000)):
        data = packed(Image.new("RGB", size), "WEBP", **options)
        found = decode(data, size[0] * size[1])
        assert (found.width, found.height) == size
        if size != (1, 1):
            with pytest.raises(InvalidRequest, match="pixels"):
                decode(data, size[0] * size[1] - 1)


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "GIF", "WEBP"])
def test_damage_never_ends_in_anything_but_a_refusal_or_an_image(kind):
    data = packed(image_of("RGB", 40, 40), kind)
    rng = np.random.default_rng(1)
    refused = 0
    for _ in range(300):
        broken = bytearray(data)
        for place in rng.integers(0, len(data), rng.integers(1, 8)):
            broken[place] = rng.integers(0, 256)
        try:
            found = decode(bytes(broken[: rng.integers(1, len(data) + 1)]), 1 << 16)
            assert len(found.rgb) == 3 * found.width * found.height <= 3 << 16
        except InvalidRequest:
            refused += 1
    assert refused > 100


def scans(num_scans):
    """A progressive JPEG with its last scan over and over again."""
    data = packed(image_of("L", 64, 64), "JPEG", progressive=True)
    last = data.rindex(b"\xff\xda")
    return data[:-2] + data[last:-2] * (num_scans - data.count(b"\xff\xda")) + data[-2:]


def test_a_jpeg_of_very_many_scans_is_refused_unopened(monkeypatch):
    """Each goes through all pixels: a small file of them keeps a decoder busy for hours."""
    assert decode(scans(100), 1 << 20).width == 64
    monkeypatch.setattr(Image, "open", lambda *_, **__: pytest.fail("it was opened"))
    for num_scans in (101, 10_000):
        with pytest.raises(InvalidRequest, match="more than 100 scans"):
            decode(scans(num_scans), 1 << 20)


def test_only_a_jpegs_own_scans_are_counted():
    """What looks like one may stand in an application's segment, and behind the image's end."""
    data = packed(image_of("RGB"), "JPEG")
    segment = b"\xff\xe5" + struct.pack(">H", 2 + 400) + b"\xff\xda" * 200
    assert decode(data[:2] + segment + data[2:] + b"\0\2" + b"\xff\xda\0\2" * 200, 1 << 20) == decode(data, 1 << 20)
