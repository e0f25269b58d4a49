"""Text to tokens and back: streams that never split a character, chats with the ends of their messages."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from cairn.engine.contract import RenderedPrompt, TextTokenizer
from cairn.engine.text.tokenizer import IncrementalText, ModelTokenizer, TokenTexts
from cairn.errors import InvalidRequest, ModelError
from cairn.models.random_weights.make_tokenizer import make_tokenizer

SYSTEM = {"role": "system", "content": "You answer briefly."}
USER = {"role": "user", "content": "What is a cairn?"}
ASSISTANT = {"role": "assistant", "content": "A heap of stones."}
TOOLS = [{"type": "function", "function": {"name": "look_up", "parameters": {"type": "object", "properties": {}}}}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("tokenizer")
    make_tokenizer(found, vocab_size=4096, max_length=32768)
    return found


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> ModelTokenizer:
    return ModelTokenizer(folder)


def ends_of(rendered: RenderedPrompt) -> list[int]:
    return [boundary.position for boundary in rendered.boundaries]


def with_template(folder: Path, target: Path, template: str | None) -> ModelTokenizer:
    """The same tokenizer with another chat template."""
    copy = Path(shutil.copytree(folder, target))
    raw = json.loads((copy / "tokenizer_config.json").read_text())
    raw["chat_template"] = template
    (copy / "tokenizer_config.json").write_text(json.dumps(raw))
    return ModelTokenizer(copy)


def test_is_a_text_tokenizer(tokenizer: ModelTokenizer) -> None:
    checked: TextTokenizer = tokenizer
    assert checked.decode(checked.encode("a b")) == "a b"
    assert tokenizer.vocab_size == 4096
    assert tokenizer.convert_ids_to_tokens([*tokenizer.encode("a b"), 4096, 2])[-3:] == [
        "Ġb",
        "",
        tokenizer.decode([2]),
    ]
    assert tokenizer.eos_token_id == 2


@settings(max_examples=50, deadline=None)
@given(text=st.text())
def test_round_trip(tokenizer: ModelTokenizer, text: str) -> None:
    token_ids = tokenizer.encode(text)
    assert tokenizer.decode(token_ids) == text
    stream = tokenizer.stream()
    pieces = [stream.push(token_id) for token_id in token_ids]
    assert "".join(pieces) + stream.finish() == text


def test_marks_of_calls_are_text_though_they_are_special_tokens(folder: Path, tmp_path: Path) -> None:
    """LFM2's are special: without them its calls could not be told from other text."""
    copy = Path(shutil.copytree(folder, tmp_path / "lfm2"))
    source = Tokenizer.from_file(str(copy / "tokenizer.json"))
    source.add_special_tokens(["<|tool_call_start|>", "<|tool_call_end|>", "<|other|>"])
    source.save(str(copy / "tokenizer.json"))
    tokenizer = ModelTokenizer(copy)
    token_ids = tokenizer.encode("<|other|><|tool_call_start|>[f()]<|tool_call_end|><|im_end|>")
    stream = tokenizer.stream()
    assert "".join(map(stream.push, token_ids)) == "<|tool_call_start|>[f()]<|tool_call_end|>"


@pytest.mark.parametrize("is_harmony", [True, False])
def test_marks_of_harmony_are_text_where_answers_have_channels(folder: Path, tmp_path: Path, is_harmony: bool) -> None:
    """What ends an answer is not. Others end messages by `<|end|>`."""
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    source = Tokenizer.from_file(str(folder / "tokenizer.json"))
    names = ["<|start|>", "<|message|>", "<|constrain|>", "<|end|>", "<|call|>", "<|return|>"]
    source.add_special_tokens([*names, *(["<|channel|>"] if is_harmony else [])])
    source.save(str(tmp_path / "tokenizer.json"))
    tokenizer = ModelTokenizer(tmp_path)
    answer = "<|start|>a<|message|>b<|constrain|>c<|end|>d<|call|>e<|return|>f"
    stream = tokenizer.stream()
    text = "".join(map(stream.push, tokenizer.encode(answer, add_special_tokens=False))) + stream.finish()
    assert text == ("<|start|>a<|message|>b<|constrain|>c<|end|>def" if is_harmony else "abcdef")
    ends = tuple(source.token_to_id(name) for name in ("<|return|>", "<|call|>"))
    assert tokenizer.harmony_ends == (ends if is_harmony else ())


def test_special_tokens(tokenizer: ModelTokenizer) -> None:
    token_ids = tokenizer.encode("a<|im_end|><think>b</think>")
    assert len(token_ids) == 5
    assert tokenizer.decode(token_ids) == "a<|im_end|><think>b</think>"
    stream = tokenizer.stream()
    assert "".join(map(stream.push, token_ids)) == "a<think>b</think>"  # an answer does not show control tokens
    assert tokenizer.decode([4096, 99999]) == ""


def test_character_of_several_tokens_comes_whole(tokenizer: ModelTokenizer) -> None:
    token_ids = tokenizer.encode("x🪨")
    assert len(token_ids) == 5
    stream = tokenizer.stream()
    assert [stream.push(token_id) for token_id in token_ids] == ["x", "", "", "", "🪨"]
    assert stream.finish() == ""


def test_cut_character_is_given_at_the_end(tokenizer: ModelTokenizer) -> None:
    token_ids = tokenizer.encode("x🪨")
    stream = tokenizer.stream()
    assert [stream.push(token_id) for token_id in token_ids[:3]] == ["x", "", ""]
    assert stream.finish() == "\ufffd"
    assert stream.finish() == ""


def test_bytes_that_are_no_text_are_not_held_back_for_ever(tokenizer: ModelTokenizer) -> None:
    """A lone continuation byte, again and again, as random models write it."""
    lone = tokenizer.encode("🪨")[-1]
    assert tokenizer.decode([lone]) == "\ufffd"
    stream = tokenizer.stream()
    pieces = [stream.push(lone) for _ in range(500)]
    assert max(len(piece) for piece in pieces) <= 8
    assert "".join(pieces) + stream.finish() == "\ufffd" * 500


def test_open_character_after_bytes_that_are_no_text(tokenizer: ModelTokenizer) -> None:
    stone = tokenizer.encode("🪨")
    for count in range(12):
        stream = tokenizer.stream()
        assert "".join(map(stream.push, stone[-1:] * count + stone)) + stream.finish() == "\ufffd" * count + "🪨"


def test_tokenizer_that_falls_back_to_bytes() -> None:
    """As sentencepiece does: an open character is one U+FFFD per byte, and takes the one before it along."""
    vocab = {f"<0x{byte:02X}>": byte for byte in range(256)}
    text = Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True))
    text.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    stream = IncrementalText(text, frozenset())
    assert [stream.push(byte) for byte in "€€🪨".encode()] == ["", "", "€", "", "", "€", "", "", "", "🪨"]
    long = "€é🪨" * 20  # of which only the last tokens are decoded again: never from the middle of a character on
    assert [piece for piece in map(stream.push, long.encode()) if piece] == list(long)


def test_each_step_decodes_only_the_last_few_tokens(tokenizer: ModelTokenizer) -> None:
    class Recorder:
        longest = 0

        def decode(self, token_ids: list[int], skip_special_tokens: bool) -> str:
            self.longest = max(self.longest, len(token_ids))
            return tokenizer.decode(token_ids)

    recorder = Recorder()
    stream = IncrementalText(recorder, frozenset())
    token_ids = tokenizer.encode("A heap of 🪨🪨🪨 along a trail.\n") * 20
    assert "".join(map(stream.push, token_ids)) + stream.finish() == tokenizer.decode(token_ids)
    assert recorder.longest <= 33


@settings(max_examples=100, deadline=None)
@given(token_ids=st.lists(st.integers(3, 300) | st.integers(3, 4095), max_size=120))
def test_stream_says_what_decode_says(tokenizer: ModelTokenizer, token_ids: list[int]) -> None:
    """Also for bytes in any order; ids below 265 are single bytes, and half of those are no text alone."""
    stream = tokenizer.stream()
    streamed = ""
    whole = tokenizer.decode(token_ids)
    for token_id in token_ids:
        streamed += stream.push(token_id)
        assert whole.startswith(streamed)
    assert streamed + stream.finish() == whole


@settings(max_examples=200, deadline=None)
@given(token_ids=st.lists(st.integers(0, 300) | st.integers(0, 4200), max_size=80))
def test_known_texts_of_tokens_change_no_piece(folder: Path, token_ids: list[int]) -> None:
    text = Tokenizer.from_file(str(folder / "tokenizer.json"))
    plain, quick = IncrementalText(text, frozenset({2})), IncrementalText(text, frozenset({2}), TokenTexts(text))
    assert [quick.push(token_id) for token_id in token_ids] == [plain.push(token_id) for token_id in token_ids]
    assert quick.finish() == plain.finish()


def test_texts_of_tokens_are_known_of_decoders_that_look_at_bytes_alone(folder: Path, tmp_path: Path) -> None:
    source = Tokenizer.from_file(str(folder / "tokenizer.json"))
    source.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Strip(" ", 1, 0)])
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    source.save(str(tmp_path / "tokenizer.json"))
    tokenizer = ModelTokenizer(tmp_path)
    token_ids = tokenizer.encode("a a a")
    stream = tokenizer.stream()
    assert "".join(map(stream.push, token_ids)) + stream.finish() == tokenizer.decode(token_ids)


def test_chat(tokenizer: ModelTokenizer) -> None:
    found = tokenizer.render_chat([SYSTEM, USER])
    system = "<|im_start|>system\nYou answer briefly.<|im_end|>\n"
    user = "<|im_start|>user\nWhat is a cairn?<|im_end|>\n"
    assert tokenizer.decode(found.token_ids) == system + user + "<|im_start|>assistant\n"
    assert [tokenizer.decode(found.token_ids[:end]) for end in ends_of(found)] == [system, system + user]


def test_chat_without_generation_prompt(tokenizer: ModelTokenizer) -> None:
    found = tokenizer.render_chat([SYSTEM, USER, ASSISTANT], add_generation_prompt=False)
    assert tokenizer.decode(found.token_ids).endswith("assistant\nA heap of stones.<|im_end|>\n")
    assert ends_of(found)[-1] == len(found.token_ids)
    assert [end.kind for end in found.boundaries] == ["system_end", "message_end", "message_end"]
    alone = tokenizer.render_chat([SYSTEM], add_generation_prompt=False)
    assert ends_of(alone) == [len(alone.token_ids)]


def test_next_turn_continues_at_the_last_boundary(tokenizer: ModelTokenizer) -> None:
    first = tokenizer.render_chat([SYSTEM, USER], tools=TOOLS)
    second = tokenizer.render_chat([SYSTEM, USER, ASSISTANT, USER], tools=TOOLS)
    assert ends_of(second)[0] == ends_of(first)[0]
    assert second.token_ids[: ends_of(first)[-1]] == first.token_ids[: ends_of(first)[-1]]


def test_tools_belong_to_the_leading_segment(tokenizer: ModelTokenizer) -> None:
    for messages in ([SYSTEM, USER], [USER], [{"role": "developer", "content": "Be kind."}, USER]):
        found = tokenizer.render_chat(messages, tools=TOOLS)
        lead = tokenizer.decode(found.token_ids[: ends_of(found)[0]])
        assert lead.startswith("<|im_start|>system\n")
        assert '"name": "look_up"' in lead
        assert lead.endswith("<|im_end|>\n")
        assert len(found.boundaries) == 2


def test_chat_without_system_segment(tokenizer: ModelTokenizer) -> None:
    found = tokenizer.render_chat([USER])
    assert [tokenizer.decode(found.token_ids[:end]) for end in ends_of(found)] == [
        "<|im_start|>user\nWhat is a cairn?<|im_end|>\n"
    ]


def test_parts_and_tool_calls(tokenizer: ModelTokenizer) -> None:
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}],
        },
        {"role": "tool", "tool_call_id": "1", "content": "42"},
    ]
    text = tokenizer.decode(tokenizer.render_chat(messages).token_ids)
    assert "user\nonetwo<|im_end|>" in text
    assert 'assistant\n<tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call><|im_end|>' in text
    assert "user\n<tool_response>\n42\n</tool_response><|im_end|>" in text


BAD: list[tuple[list[dict[str, Any]], str]] = [
    ([], "messages must not be empty"),
    ([{"role": "wizard", "content": "x"}], "the chat template refuses these messages: unexpected role wizard"),
    ([{"role": "user", "content": "\ud800"}], "the text has a lone surrogate"),
]  # fmt: skip


@pytest.mark.parametrize(("messages", "message"), BAD, ids=[message for _, message in BAD])
def test_refused_messages(tokenizer: ModelTokenizer, messages: list[dict[str, Any]], message: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        tokenizer.render_chat(messages)
    assert message in caught.value.message
    assert caught.value.param == "messages"


def test_refused_text(tokenizer: ModelTokenizer) -> None:
    with pytest.raises(InvalidRequest, match="lone surrogate") as caught:
        tokenizer.encode("\udfff")
    assert caught.value.param == "prompt"


def test_boundaries_that_are_no_exact_prefix_are_dropped(folder: Path, tmp_path: Path) -> None:
    """The suffix melts into the last word, so that the text is a prefix and its tokens are not."""
    template = "{% for m in messages %}{{ m.content }}{% endfor %}{{ 'ef' if add_generation_prompt }}"
    melting = with_template(folder, tmp_path / "b", template)
    assert len(melting.encode("def")) == 1
    assert melting.render_chat([{"role": "user", "content": "d"}]).boundaries == []


def test_template_that_wants_a_user_message(folder: Path, tmp_path: Path) -> None:
    """The leading segment cannot be rendered alone; the request is served all the same."""
    template = (
        "{% if messages[-1].role == 'system' %}{{ raise_exception('no user message') }}{% endif %}"
        "{% for m in messages %}{{ m.content + '<|im_end|>' }}{% endfor %}{{ '>' if add_generation_prompt }}"
    )
    found = with_template(folder, tmp_path / "copy", template)
    rendered = found.render_chat([SYSTEM, USER])
    assert [(end.kind, found.decode(rendered.token_ids[: end.position])) for end in rendered.boundaries] == [
        ("system_end", "You answer briefly.<|im_end|>"),
        ("message_end", "You answer briefly.<|im_end|>What is a cairn?<|im_end|>"),
    ]
    with pytest.raises(InvalidRequest, match="no user message"):
        found.render_chat([SYSTEM])


@pytest.mark.parametrize(
    "template",
    ["{{ messages[0].nothing.at.all }}", "{{ messages[0].content + 1 }}", "{{ messages[9]['x'] }}", "{% if %}"],
)
def test_template_errors(folder: Path, tmp_path: Path, template: str) -> None:
    broken = with_template(folder, tmp_path / "copy", template)
    with pytest.raises(InvalidRequest, match="the chat template refuses these messages") as caught:
        broken.render_chat([USER])
    assert caught.value.param == "messages"


def test_another_tokenizer_and_another_template(folder: Path, tmp_path: Path) -> None:
    """What a folder without a tokenizer is served with; the place of images stays the model's."""
    other = ModelTokenizer(tmp_path, folder, "{% for m in messages %}<{{ m.content }}>{% endfor %}")
    rendered = other.render_chat([USER])
    assert other.decode(rendered.token_ids) == f"<{USER['content']}>" and other.chat_template.startswith("{% for m")
    assert other.encode("a b") == ModelTokenizer(folder).encode("a b")


def test_a_tokenizer_tells_its_settings(folder: Path, tokenizer: ModelTokenizer) -> None:
    told, written = tokenizer.describe(), json.loads((folder / "tokenizer_config.json").read_text())
    assert told["chat_template"] == tokenizer.chat_template and told["model_max_length"] == 32768
    assert told["eos_token"] == written["eos_token"] and isinstance(told["tokenizer_class"], str)
    assert json.loads(json.dumps(told)) == told and str(folder) not in json.dumps(told)


def test_no_chat_template(folder: Path, tmp_path: Path) -> None:
    plain = with_template(folder, tmp_path / "copy", None)
    with pytest.raises(InvalidRequest, match="this model has no chat template") as caught:
        plain.render_chat([USER])
    assert caught.value.param == "messages"


def test_broken_folder(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"tokenizer\.json: missing"):
        ModelTokenizer(tmp_path)
    copy = Path(shutil.copytree(folder, tmp_path / "copy"))
    (copy / "tokenizer.json").write_text('{"version": "1.0"}')
    with pytest.raises(ModelError, match="the tokenizer cannot be loaded"):
        ModelTokenizer(copy)
    (copy / "tokenizer.json").write_bytes((folder / "tokenizer.json").read_bytes()[:1000])
    with pytest.raises(ModelError, match="the tokenizer cannot be loaded"):
        ModelTokenizer(copy)


def test_remote_code_is_not_run(folder: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(folder, tmp_path / "copy"))
    raw = json.loads((copy / "tokenizer_config.json").read_text())
    raw |= {"auto_map": {"AutoTokenizer": ["evil.Tokenizer", None]}, "tokenizer_class": "Tokenizer"}
    (copy / "tokenizer_config.json").write_text(json.dumps(raw))
    (copy / "evil.py").write_text("raise SystemExit('ran')")
    assert ModelTokenizer(copy).encode("a b") == ModelTokenizer(folder).encode("a b")


def test_settings_that_would_cut_or_pad_are_taken_off(folder: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(folder, tmp_path / "copy"))
    raw = json.loads((copy / "tokenizer.json").read_text())
    raw["truncation"] = {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}
    (copy / "tokenizer.json").write_text(json.dumps(raw))
    assert len(ModelTokenizer(copy).encode("a b c d e")) == 5


def test_needs_no_torch(folder: Path) -> None:
    """The HTTP process tokenizes; torch would cost it a second and several hundred megabytes."""
    code = (
        "import sys, pathlib; from cairn.engine.text.tokenizer import ModelTokenizer as T;"
        "T(pathlib.Path(sys.argv[1])).render_chat([{'role': 'user', 'content': 'x'}]);"
        "sys.exit('torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code, str(folder)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
