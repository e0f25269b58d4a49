"""A GGUF file's tokenizer and chat template are those of the checkpoint that it was made of."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from cairn.cli.run import load_model_tokenizer
from cairn.engine.text.tokenizer import ModelTokenizer
from cairn.errors import ModelError
from models.gguf_files import write_gguf

TEXTS = (
    "Hello world, 12345 it's  two   spaces\n\n\ttab é 漢字 🙂 can't",
    "<|im_start|>user\nhi<|im_end|>\n<think>\n\n</think> 3.14 DON'T <tool_call>",
    " lead",
    "",
)
CHAT = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "what is 12 x 12?"}]


@pytest.fixture
def write(made_model, tmp_path) -> Callable[..., Path]:
    """Fields of the tokenizer -> a file that has these."""
    return lambda **fields: write_gguf(made_model("qwen3_5"), tmp_path / "model.gguf", tokenizer=fields)


def test_it_is_the_checkpoints(write, made_model) -> None:
    ours, theirs = ModelTokenizer(write()), ModelTokenizer(made_model("qwen3_5"))
    for text in TEXTS:
        tokens = theirs.encode(text)
        assert ours.encode(text) == tokens and ours.decode(tokens) == theirs.decode(tokens)
        assert [ours.token_bytes(token) for token in tokens] == [theirs.token_bytes(token) for token in tokens]
    assert ours.render_chat(CHAT) == theirs.render_chat(CHAT) and ours.chat_template == theirs.chat_template
    assert ours.vocab_size == theirs.vocab_size and ours.eos_token_id == theirs.eos_token_id
    stream = ours.stream()
    assert "".join(stream.push(token) for token in ours.encode(TEXTS[1])) + stream.finish() == (
        "user\nhi\n<think>\n\n</think> 3.14 DON'T <tool_call>"
    )
    assert ours.describe()["tokenizer_class"] == theirs.describe()["tokenizer_class"]


def test_what_lies_beside_the_file_is_not_taken_for_its_own(write, made_model) -> None:
    path = write()
    beside = json.loads((made_model("qwen3_5") / "tokenizer.json").read_text())
    beside["model"]["merges"] = []
    path.with_name("tokenizer.json").write_text(json.dumps(beside))
    assert ModelTokenizer(path).encode(TEXTS[0]) == ModelTokenizer(made_model("qwen3_5")).encode(TEXTS[0])


def test_a_beginning_is_added_where_the_file_says_so(write) -> None:
    plain, begun = ModelTokenizer(write()), ModelTokenizer(write(bos_token_id=1, add_bos_token=True))
    tokens = plain.encode("one two")
    assert begun.encode("one two") == [1, *tokens] and begun.encode("one two", add_special_tokens=False) == tokens


@pytest.mark.parametrize(
    ("pre", "words"),
    [
        ("qwen35", ["1", "2", "3"]),
        ("refact", ["1", "2", "3"]),
        ("gpt-2", ["123"]),
        ("llama-bpe", ["123"]),
    ],
)
def test_text_is_split_as_the_file_says(pre: str, words: list[str], write) -> None:
    """Before the merges: what is not one word here is never one token."""
    tokenizer = ModelTokenizer(write(pre=pre))
    pieces = Tokenizer.from_str(tokenizer.to_json()).pre_tokenizer.pre_tokenize_str("123")
    assert [piece for piece, _ in pieces] == words


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"tokens": None}, "tokenizer.ggml.tokens is missing: the file has no tokenizer; --tokenizer names"),
        ({"model": "bert"}, "the tokenizer cannot be made of tokenizer.ggml.*"),
        ({"pre": "of-nobody"}, "tokenizer.ggml.pre 'of-nobody' is no way to split text that is known; --tokenizer"),
        ({"pre": None}, "tokenizer.ggml.pre None is no way"),
        ({"merges": None}, "the tokenizer cannot be made of tokenizer.ggml.*"),
        ({"bos_token_id": 1 << 20}, "tokenizer.ggml.bos_token_id 1048576 is none of 4096 tokens"),
    ],
)
def test_what_is_missing_is_named(fields: dict[str, Any], said: str, write) -> None:
    with pytest.raises(ModelError) as raised:
        load_model_tokenizer(str(write(**fields)), None, None)
    assert said in str(raised.value) and "model.gguf" in str(raised.value)


def test_another_tokenizer_may_be_named(write, made_model) -> None:
    other = made_model("qwen3_5")
    tokenizer = load_model_tokenizer(str(write(pre="of-nobody")), str(other), None)
    assert tokenizer.encode(TEXTS[0]) == ModelTokenizer(other).encode(TEXTS[0])
