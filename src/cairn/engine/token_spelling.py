"""What single tokens spell, as bytes: a token may hold a part of a character, which no text can."""

import json
import re

from tokenizers import Tokenizer

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SPACE = "\u2581"


class TokenSpelling:
    """Reads the vocabulary's own spelling: GPT-2's letters for bytes, or SentencePiece's sign for a space and names for
    single bytes (Radford et al. 2019; Kudo and Richardson 2018)."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._added = {number: token.content for number, token in tokenizer.get_added_tokens_decoder().items()}
        decoder = json.loads(tokenizer.to_str()).get("decoder")
        self._letters = _byte_of_letter() if "ByteLevel" in json.dumps(decoder) else None

    def token_bytes(self, token_id: int) -> bytes:
        """Empty for an id that stands for nothing."""
        if token_id in self._added:
            return self._added[token_id].encode()
        spelled: str | None = self._tokenizer.id_to_token(token_id)
        if spelled is None:
            return b""
        if self._letters is not None:
            return b"".join(self._letters.get(letter) or letter.encode() for letter in spelled)
        byte = _BYTE.fullmatch(spelled)
        return bytes.fromhex(byte[1]) if byte else spelled.replace(_SPACE, " ").encode()


def _byte_of_letter() -> dict[str, bytes]:
    """GPT-2's letters: printable Latin-1 stands for itself, all other bytes for the letters from U+0100 on."""
    plain = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in plain]
    letters = {chr(byte): bytes([byte]) for byte in plain}
    return letters | {chr(256 + place): bytes([byte]) for place, byte in enumerate(others)}
