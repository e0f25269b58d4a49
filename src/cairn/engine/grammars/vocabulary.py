"""A tokenizer as llguidance sees it: which bytes each token writes."""

import json
from collections.abc import Sequence

from llguidance import LLTokenizer, TokenizerWrapper
from tokenizers import Tokenizer

from cairn.engine.text.tokenizer import ModelTokenizer, marks_of


def grammar_tokenizer(tokenizer: ModelTokenizer, vocab_size: int, eos_token_ids: Sequence[int]) -> LLTokenizer:
    """llguidance's tokenizer for a model of `vocab_size` logits. Takes a second
    for a large vocabulary.

    Marks such as `<think>` that are part of an answer's text are text to grammars, too; only control tokens are not.
    """
    source = _Source(tokenizer.to_json(), vocab_size, eos_token_ids)
    size = max(vocab_size, len(source.tokens))
    return LLTokenizer(TokenizerWrapper(source), n_vocab=size, eos_token=list(source.eos_token_ids))


class _Source:
    """What `TokenizerWrapper` asks for."""

    bos_token_id = None

    def __init__(self, tokenizer_json: str, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        tokenizer_json = _with_plain_marks(tokenizer_json)
        self._tokenizer = Tokenizer.from_str(tokenizer_json)
        added = self._tokenizer.get_added_tokens_decoder()
        size = max(self._tokenizer.get_vocab_size(with_added_tokens=True), *(token + 1 for token in added), 0)
        plain = LLTokenizer(tokenizer_json)
        self.tokens = [plain.decode_bytes([token]) for token in range(min(size, plain.vocab_size))]
        self.tokens += [b""] * (size - len(self.tokens))
        for token, text in added.items():
            self.tokens[token] = text.content.encode()
        # what no token of the text can be: control tokens
        self.special_token_ids = sorted(token for token, text in added.items() if text.special)
        self._tokenizer.encode_special_tokens = True
        self.eos_token_ids = [token for token in eos_token_ids if 0 <= token < vocab_size] or [size - 1]
        self.eos_token_id = self.eos_token_ids[0]

    def __call__(self, text: bytes | str) -> list[int]:
        """Tokens of a text that has no control tokens in it, whatever it looks like."""
        decoded = text.decode(errors="replace") if isinstance(text, bytes) else text
        ids: list[int] = self._tokenizer.encode(decoded, add_special_tokens=False).ids
        return ids


def _with_plain_marks(tokenizer_json: str) -> str:
    """Marks are found in text, whether or not the checkpoint calls them special."""
    written = json.loads(tokenizer_json)
    added = written.get("added_tokens", [])
    marks = marks_of(any(token.get("content") == "<|channel|>" for token in added))
    for token in added:
        if token.get("content") in marks:
            token["special"] = False
    return json.dumps(written, ensure_ascii=False)
