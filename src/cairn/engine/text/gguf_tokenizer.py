"""The tokenizer of a GGUF file, which has its vocabulary, its merges and the name of a way to split text before them.
transformers knows the tokenizers that these stand for. No torch."""

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from tokenizers import pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS, convert_gguf_tokenizer

from cairn.errors import ModelError
from cairn.models.weights.gguf.header import GgufHeader, read_header

_PREFIX = "tokenizer.ggml."
_LISTS = ("tokens", "merges")
_SPECIAL = MappingProxyType({"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"})
_FIX = "--tokenizer names a folder with another one"

# GPT-2's, which transformers takes where it knows none of that name.
_AS_GPT2 = frozenset(("gpt-2",))
# GPT-2's, digit by digit.
_SINGLE_DIGITS = frozenset(("refact", "starcoder"))


def load_gguf_tokenizer(path: Path) -> PreTrainedTokenizerFast:
    """With the chat template that the file has. Raises ModelError that names the field of a tokenizer that is missing,
    damaged or not known."""
    header = read_header(path, lists=[_PREFIX + name for name in _LISTS])
    fields = {name.removeprefix(_PREFIX): value for name, value in header.metadata.items() if name.startswith(_PREFIX)}
    tokens = fields.get("tokens")
    if not isinstance(tokens, list) or not all(isinstance(token, str) for token in tokens):
        raise ModelError(f"{path}: {_PREFIX}tokens is missing: the file has no tokenizer; {_FIX}")
    split = fields.get("pre")
    if fields.get("model") == "gpt2" and split not in {*GGUF_PRE_TOKENIZER_SPLITS, *_AS_GPT2, *_SINGLE_DIGITS}:
        raise ModelError(f"{path}: {_PREFIX}pre {split!r} is no way to split text that is known; {_FIX}")
    try:
        backend, _ = convert_gguf_tokenizer(header.architecture, _vocabulary(fields))
    except Exception as error:  # tokenizers raises bare Exception
        raise ModelError(f"{path}: the tokenizer cannot be made of {_PREFIX}*: {error}; {_FIX}") from error
    if split in _SINGLE_DIGITS:
        digits = pre_tokenizers.Digits(individual_digits=True)
        backend.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    settings = _settings(header, fields, tokens)
    return PreTrainedTokenizerFast(tokenizer_object=backend, **settings)  # type: ignore[no-untyped-call]


def _vocabulary(fields: Mapping[str, Any]) -> dict[str, Any]:
    """In transformers' words."""
    names = {
        "model": "tokenizer_type",
        "pre": "pre_tokenizer_type",
        "token_type": "token_type",
        "tokens": "tokens",
        "merges": "merges",
        "scores": "scores",
    }
    return {name: fields[stored] for stored, name in names.items() if fields.get(stored) is not None}


def _settings(header: GgufHeader, fields: Mapping[str, Any], tokens: list[str]) -> dict[str, Any]:
    """What tokenizer_config.json says otherwise."""
    settings: dict[str, Any] = {name: fields.get(name, False) is True for name in ("add_bos_token", "add_eos_token")}
    for name, stored in _SPECIAL.items():
        number = fields.get(f"{stored}_token_id")
        if number is not None and not (isinstance(number, int) and 0 <= number < len(tokens)):
            raise ModelError(f"{header.path}: {_PREFIX}{stored}_token_id {number!r} is none of {len(tokens)} tokens")
        settings[name] = None if number is None else tokens[number]
    template = header.metadata.get("tokenizer.chat_template")
    return settings | {"chat_template": template if isinstance(template, str) else None}
