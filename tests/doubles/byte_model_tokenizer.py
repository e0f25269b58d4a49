"""A real tokenizer whose tokens are the bytes that `ByteTokenizer` has, around a real chat template: an engine that
echoes can be asked with it."""

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from cairn.engine.text.tokenizer import ModelTokenizer

__all__ = ["make_byte_tokenizer"]

_PRINTABLE = (*range(33, 127), *range(161, 173), *range(174, 256))


def make_byte_tokenizer(folder: Path, template: str) -> ModelTokenizer:
    """Token b is byte b; 256 to 258 are `<end>`, `<|im_start|>` and `<|im_end|>`. `folder`: is made."""
    others = [byte for byte in range(256) if byte not in _PRINTABLE]
    letters = {chr(byte): byte for byte in _PRINTABLE} | {chr(256 + place): byte for place, byte in enumerate(others)}
    tokenizer = Tokenizer(models.BPE(vocab=letters, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in ("<end>", "<|im_start|>", "<|im_end|>")])
    folder.mkdir(parents=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<end>", "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return ModelTokenizer(folder)
