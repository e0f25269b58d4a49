"""A process that says whether grammars compile: `python -m cairn.engine.grammars.worker ADDRESS LOG_LEVEL`.

Started by `compiler.GrammarChecker`, never by hand. Each frame is a Structure; the answer is the reason why it is
refused, or null. One that hangs or fills the memory costs this process and nothing else.
"""

import resource
import sys

import msgspec
from llguidance import LLTokenizer, TokenizerWrapper

from cairn.engine.child_process import ParentLink, run_child
from cairn.engine.contract import Structure
from cairn.engine.grammars.constraint import GrammarConstraint
from cairn.engine.grammars.structure import grammar_of, refusal
from cairn.errors import InvalidRequest

_MAX_BYTES = 2 << 30


class _Bytes:
    """A tokenizer with a token for every byte: enough to see whether a grammar compiles."""

    tokens = (*(bytes([byte]) for byte in range(256)), b"<end>")
    eos_token_id = 256
    bos_token_id = None
    special_token_ids = (256,)

    def __call__(self, text: bytes | str) -> list[int]:
        return list(text.encode() if isinstance(text, str) else text)


def byte_tokenizer() -> LLTokenizer:
    return LLTokenizer(TokenizerWrapper(_Bytes()))


def find_grammar_error(structure: Structure, tokenizer: LLTokenizer) -> str | None:
    """Why a structure cannot be used; None where it can."""
    try:
        GrammarConstraint.compile(grammar_of(structure), tokenizer, len(_Bytes.tokens))
    except InvalidRequest as error:
        return error.message
    except ValueError as error:
        return refusal(structure, str(error)).message
    return None


def _serve(parent: ParentLink) -> int:
    resource.setrlimit(resource.RLIMIT_AS, (_MAX_BYTES, _MAX_BYTES))
    tokenizer = byte_tokenizer()
    while True:
        frame = parent.receive(None)
        if frame is not None:
            structure = msgspec.msgpack.decode(frame, type=Structure)
            parent.send(msgspec.msgpack.encode(find_grammar_error(structure, tokenizer)))


if __name__ == "__main__":
    sys.exit(run_child(sys.argv[1:], "grammars", _serve))
