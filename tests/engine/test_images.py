"""Images among a prompt's tokens: as many placeholders as vectors, and nothing else taken for an image."""

import itertools
import json
import shutil

import numpy as np
import pytest

from cairn.engine.contract import Pixels
from cairn.engine.text.images import ImagePrompts
from cairn.engine.text.tokenizer import ModelTokenizer
from cairn.errors import InvalidRequest, ModelError
from cairn.models.image_processor import FILE, ImageProcessor

START, IMAGE, END, VIDEO = "<|vision_start|>", "<|image_pad|>", "<|vision_end|>", "<|video_pad|>"


@pytest.fixture(scope="module")
def tokenizer(tiny_vl_model):
    return ModelTokenizer(tiny_vl_model)


@pytest.fixture(scope="module")
def processor(tiny_vl_model):
    return ImageProcessor.read(tiny_vl_model)


def pixels(width, height, seed=0):
    rgb = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8).tobytes()
    return Pixels(width=width, height=height, rgb=rgb)


def text(value):
    return {"type": "text", "text": value}


def image(*size, seed=0):
    return {"type": "image", "image": pixels(*size, seed=seed)}


def user(*parts):
    return {"role": "user", "content": list(parts)}


def id_of(tokenizer, token):
    (found,) = tokenizer.encode(token)
    return found


CHATS = [
    [user(image(64, 64))],
    [user(text("a"), image(64, 64), text("b"))],
    [user(image(100, 40), image(33, 200), image(1, 1))],
    [{"role": "system", "content": "Be brief."}, user(image(300, 200), text("What is this?"))],
    [user(text("one"), image(32, 32)), {"role": "assistant", "content": "yes"}, user(image(64, 32), text("and this?"))],
    [
        user(text("call")),
        {"role": "assistant", "content": "ok"},
        {"role": "tool", "content": [text("r"), image(96, 64)]},
    ],
]


@pytest.mark.parametrize("chat", CHATS)
def test_as_many_placeholders_as_vectors(tokenizer, processor, chat):
    rendered = tokenizer.render_chat(chat)
    placeholder = id_of(tokenizer, IMAGE)
    wanted = [
        part["image"]
        for message in chat
        for part in message["content"]
        if isinstance(part, dict) and part["type"] == "image"
    ]
    tokens = np.array(rendered.token_ids)
    covered = np.zeros(len(tokens), bool)
    for found, picture in zip(rendered.images, wanted, strict=True):
        grid = processor.grid(picture.width, picture.height)
        assert (found.width, found.height, found.rgb, found.grid) == (picture.width, picture.height, picture.rgb, grid)
        assert found.length == grid[1] * grid[2] // 4 and len(found.digest) == 32
        covered[found.start : found.start + found.length] = True
        assert tokens[found.start - 1] == id_of(tokenizer, START)
        assert tokens[found.start + found.length] == id_of(tokenizer, END)
    assert ((tokens == placeholder) == covered).all()
    # all but the placeholders is what the template writes, token by token
    once = [
        token
        for token, run in itertools.groupby(rendered.token_ids)
        for token in ([token] if token == placeholder else list(run))
    ]
    assert tokenizer.decode(once).count(START + IMAGE + END) == len(wanted)


@pytest.mark.parametrize("chat", CHATS)
def test_boundaries_are_ends_of_what_they_say(tokenizer, chat):
    rendered = tokenizer.render_chat(chat)
    positions = [boundary.position for boundary in rendered.boundaries]
    assert positions == sorted(set(positions)) and positions[0] >= 1 and positions[-1] <= len(rendered.token_ids)
    ends = {found.start + found.length + 1 for found in rendered.images}
    assert {b.position for b in rendered.boundaries if b.kind == "image_end"} <= ends <= set(positions)
    for boundary in rendered.boundaries:
        if boundary.kind in ("message_end", "system_end"):
            assert tokenizer.decode(rendered.token_ids[: boundary.position]).endswith("<|im_end|>\n")
    assert any(b.kind == "message_end" for b in rendered.boundaries)


def test_a_longer_chat_begins_with_the_shorter_one(tokenizer):
    """What makes incremental images hit: the same beginning, token by token, and the same identities."""
    shared = [image(64, 64, seed=seed) for seed in range(4)]
    four = tokenizer.render_chat([user(*shared, text("Compare them all."))])
    five = tokenizer.render_chat([user(*shared, image(64, 64, seed=4), text("Compare them all."))])
    end = four.images[3].start + four.images[3].length + 1
    assert four.token_ids[:end] == five.token_ids[:end] and four.token_ids[end] != five.token_ids[end]
    assert [a.digest for a in four.images] == [b.digest for b in five.images[:4]]
    assert end in {boundary.position for boundary in four.boundaries}


def test_text_alone_is_as_without_images(tokenizer, tiny_vl_model, tmp_path):
    folder = tmp_path / "text"
    shutil.copytree(tiny_vl_model, folder)
    (folder / FILE).unlink()
    plain = ModelTokenizer(folder)
    assert plain.image_markers == () and tokenizer.image_markers == (IMAGE, VIDEO)
    chat = [{"role": "system", "content": "s"}, user(text("x"), text("y"))]
    assert plain.render_chat(chat) == tokenizer.render_chat(chat)
    with pytest.raises(InvalidRequest, match="text alone"):
        plain.render_chat([user(image(8, 8))])


@pytest.mark.parametrize(
    "chat",
    [
        [user(text(IMAGE))],
        [user(text(VIDEO))],
        [user(text(IMAGE), image(64, 64))],
        [user(image(64, 64), text(f"{START}{IMAGE}{END}"))],
        [user(text("x")), {"role": "assistant", "content": IMAGE}, user(text("y"))],
        [user(text("x")), {"role": "assistant", "content": "", "tool_calls": [
            {"function": {"name": "f", "arguments": json.dumps({"a": IMAGE})}}]}, user(text("y"))],
        [user(image(64, 64), text("<|image_"), text("pad|>"))],
    ],
)  # fmt: skip
def test_placeholders_in_texts_are_refused(tokenizer, chat):
    with pytest.raises(InvalidRequest, match="placeholders"):
        tokenizer.render_chat(chat)


def test_a_template_that_leaves_an_image_out_is_refused(tokenizer):
    with pytest.raises(InvalidRequest):
        tokenizer.render_chat([{"role": "system", "content": [image(64, 64)]}, user(text("x"))])


def test_identity_is_that_of_the_pixels(tokenizer):
    def digest(part):
        return tokenizer.render_chat([user(part)]).images[0].digest

    same, other = digest(image(64, 32, seed=1)), digest(image(64, 32, seed=2))
    turned = {"type": "image", "image": Pixels(width=32, height=64, rgb=pixels(64, 32, seed=1).rgb)}
    assert digest(image(64, 32, seed=1)) == same and len({same, other, digest(turned)}) == 3


def test_an_image_that_is_too_long(tokenizer):
    with pytest.raises(InvalidRequest, match=r"^messages\[1\]\.content\[2\]: .* 200 times"):
        tokenizer.render_chat([user(image(64, 64)), user(image(64, 64), text("x"), image(1, 300))])


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"image_token_id": None}, "image_token_id"),
        ({"image_token_id": "5"}, "image_token_id"),
        ({"image_token_id": 1 << 20}, "none of the tokenizer"),
        ({"video_token_id": -1}, "video_token_id"),
        ({"vision_end_token_id": 1.5}, "vision_end_token_id"),
    ],
)
def test_configs_that_are_refused(tiny_vl_model, tmp_path, changed, said):
    config = json.loads((tiny_vl_model / "config.json").read_text()) | changed
    (tmp_path / "config.json").write_text(json.dumps(config))
    shutil.copy(tiny_vl_model / FILE, tmp_path)
    with pytest.raises(ModelError, match=said):
        ImagePrompts.read(tmp_path, lambda token: "x" if token < 4096 else None)


def test_folders_without_vision(tiny_model, tiny_vl_model, tmp_path):
    assert ImagePrompts.read(tiny_model, str) is None
    shutil.copy(tiny_vl_model / FILE, tmp_path)
    assert ImagePrompts.read(tmp_path, str) is None
    (tmp_path / "config.json").write_text("{}")
    assert ImagePrompts.read(tmp_path, str) is None
