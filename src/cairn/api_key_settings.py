"""`--api-key`: several keys as `a b` (vLLM's form), as `a,b`, or with the flag given again."""

from argparse import ArgumentParser, Namespace, _ArgumentGroup
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, StringConstraints
from pydantic_settings import NoDecode

__all__ = ["ApiKeys", "add_argument", "flatten_keys", "last_key_word"]

_DEST = "api_key"
_MAX_KEYS = 64


def _split(value: Any) -> Any:
    return value.split(",") if isinstance(value, str) else value


ApiKey = Annotated[str, StringConstraints(pattern=r"^[\x21-\x7e]+$", max_length=512)]
ApiKeys = Annotated[
    Annotated[list[ApiKey], Field(min_length=1, max_length=_MAX_KEYS)] | None, NoDecode, BeforeValidator(_split)
]


def add_argument(parser: "ArgumentParser | _ArgumentGroup", *names: str, **how: Any) -> None:
    """argparse's method of this name, but for `--api-key`, which takes all words up to the next flag."""
    if how.get("dest") == _DEST:
        how |= {"nargs": "+", "action": "append", "metavar": "KEY"}
    parser.add_argument(*names, **how)


def last_key_word(parsed: Namespace) -> str | None:
    """What stands last among several words of the last `--api-key`; None where it has one word or is not there.

    MODEL may stand there: argparse cannot know where the keys end.
    """
    words = getattr(parsed, _DEST, [[]])[-1]
    return words[-1] if len(words) > 1 else None


def flatten_keys(parsed: Namespace, *, without_last: bool = False) -> Namespace:
    """`parsed` with all words of all `--api-key` in one list, in their order, perhaps without the last word."""
    groups = getattr(parsed, _DEST, None)
    if groups is None:
        return parsed
    words = [word for group in groups for word in group]
    return Namespace(**vars(parsed) | {_DEST: words[:-1] if without_last else words})
