"""Which tokens end an answer, whatever file of the checkpoint names them, and all that goes by them."""

import json
import shutil
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from cairn.engine.text.tokenizer import ModelTokenizer
from cairn.errors import ModelError
from cairn.models.registry import open_model
from engine.test_structured_answers import Turned, form

END_OF_TEXT, END_OF_MESSAGE = 0, 2
FILES = ("config.json", "generation_config.json", "tokenizer_config.json")


def write_copy(tiny_model: Path, folder: Path, **named: object) -> Path:
    """The checkpoint, whose files name nothing but these end tokens, by the file's name without its ending."""
    shutil.copytree(tiny_model, folder)
    for file in FILES:
        field = "eos_token" if file.startswith("tokenizer") else "eos_token_id"
        raw = json.loads((folder / file).read_text())
        raw.pop(field, None)
        value = named.get(file.removesuffix(".json"))
        (folder / file).write_text(json.dumps(raw if value is None else raw | {field: value}))
    return folder


def eos_token_ids(folder: Path) -> tuple[int, ...]:
    return open_model(folder).eos_token_ids(ModelTokenizer(folder).eos_token_id)


@pytest.mark.parametrize(
    ("named", "wanted"),
    [
        ({}, ()),
        ({"tokenizer_config": "<|im_end|>"}, (END_OF_MESSAGE,)),
        ({"config": END_OF_TEXT, "tokenizer_config": "<|im_end|>"}, (END_OF_TEXT, END_OF_MESSAGE)),
        ({"config": [END_OF_TEXT, 7], "generation_config": [END_OF_TEXT, 9]}, (END_OF_TEXT, 7, 9)),
        ({"generation_config": END_OF_TEXT, "tokenizer_config": "<|endoftext|>"}, (END_OF_TEXT,)),
        ({"tokenizer_config": {"content": "<|im_end|>", "__type": "AddedToken"}}, (END_OF_MESSAGE,)),
        # one token more than the model has rows
        ({"config": 7, "tokenizer_config": "<|a token that no file has|>"}, (7,)),
    ],
)
def test_every_file_counts(tiny_model: Path, tmp_path: Path, named: dict[str, object], wanted: tuple[int, ...]) -> None:
    assert eos_token_ids(write_copy(tiny_model, tmp_path / "copy", **named)) == wanted


def test_a_token_added_behind_the_vocabulary_counts(tiny_model: Path, tmp_path: Path) -> None:
    """As fine-tuning adds one, where the model has rows to spare."""
    folder = write_copy(tiny_model, tmp_path / "copy", config=7)
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    dropped = max(tokenizer["model"]["vocab"], key=tokenizer["model"]["vocab"].get)
    number = tokenizer["model"]["vocab"].pop(dropped)
    tokenizer["model"]["merges"] = [pair for pair in tokenizer["model"]["merges"] if "".join(pair) != dropped]
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"eos_token": "<|end of turn|>"}))
    assert eos_token_ids(folder) == (7, number)


def test_another_folders_tokenizer_says_its_own_end(tiny_model: Path, tmp_path: Path) -> None:
    folder = write_copy(tiny_model, tmp_path / "copy", config=7)
    tokenizer = ModelTokenizer(folder, tokenizer=tiny_model)
    assert open_model(folder).eos_token_ids(tokenizer.eos_token_id) == (7, END_OF_MESSAGE)


@pytest.mark.parametrize("file", ["config.json", "generation_config.json"])
@pytest.mark.parametrize("value", [4096, [END_OF_TEXT, 4096], "<|im_end|>", True, -1])
def test_what_is_no_token_is_blamed_on_its_file(tiny_model: Path, tmp_path: Path, file: str, value: Any) -> None:
    folder = write_copy(tiny_model, tmp_path / "copy", **{file.removesuffix(".json"): value})
    with pytest.raises(ModelError) as refused:
        open_model(folder)
    assert str(refused.value).startswith(f"{file}: eos_token_id must be an integer in 0..4095, not ")


def test_a_damaged_generation_config_is_named(tiny_model: Path, tmp_path: Path) -> None:
    folder = write_copy(tiny_model, tmp_path / "copy")
    (folder / "generation_config.json").write_text("nonsense")
    with pytest.raises(ModelError, match=r"generation_config\.json: not valid JSON"):
        open_model(folder)


def test_the_tokenizers_end_ends_an_answer(tiny_model: Path, tmp_path: Path) -> None:
    """As published: config.json and generation_config.json name the end of a document, the tokenizer that of a turn."""
    named = {"config": END_OF_TEXT, "generation_config": END_OF_TEXT, "tokenizer_config": "<|im_end|>"}
    with closing(Turned(write_copy(tiny_model, tmp_path / "copy", **named))) as engine:
        wanted = {"max_tokens": 12, "logit_bias": {END_OF_MESSAGE: 100.0}}
        engine.ask("plain", **wanted)
        engine.ask("at least", **wanted, min_tokens=5)
        engine.ask("no end", **wanted, ignore_eos=True)
        engine.ask("in form", form("regex", "(ab)+"), **wanted)
        engine.run()
        assert engine.tokens["plain", 0] == [END_OF_MESSAGE] and engine.end("plain").finish_reason == "stop"
        *others, last = engine.tokens["at least", 0]
        assert len(others) == 5 and END_OF_MESSAGE not in others and last == END_OF_MESSAGE
        assert engine.tokens["no end", 0] == [END_OF_MESSAGE] * 12 and engine.end("no end").finish_reason == "length"
        assert engine.text("in form") == "ab" and engine.end("in form").finish_reason == "stop"
        assert engine.tokens["in form", 0][-1] == END_OF_MESSAGE
