"""Command lines as users of vLLM write them, in the one form that argparse knows.

`--max_model_len 8k` is `--max-model-len 8k`, and `--limit-mm-per-prompt.image 2` is `--limit-mm-per-prompt
'{"image": 2}'`: all such words of one flag make one object.
"""

import json
import re
from collections.abc import Sequence
from typing import Any

from cairn.errors import ConfigError
from cairn.setting_types import parse_count

_FLAG = re.compile(r"(--?[A-Za-z][\w-]*)((?:\.[\w-]+)*)(=.*)?", re.DOTALL)


def rewrite_words(words: Sequence[str]) -> list[str]:
    """What `argparse` is to read. Raises ConfigError for `--flag.key` without a value, and for a key that is both a
    value and an object."""
    end = words.index("--") if "--" in words else len(words)
    plain: list[str] = []
    objects: dict[str, dict[str, Any]] = {}
    before_end = iter(words[:end])
    for word in before_end:
        match = _FLAG.fullmatch(word)
        if match is None:
            plain.append(word)
            continue
        flag, keys, given = match[1], match[2], match[3]
        if flag.startswith("--"):
            flag = flag.replace("_", "-")
        if not keys:
            plain.append(flag + (given or ""))
            continue
        text = next(before_end, None) if given is None else given[1:]
        if text is None:
            raise ConfigError(f"{flag}{keys}: expected one argument")
        _insert(objects.setdefault(flag, {}), flag, keys[1:].split("."), _value(text))
    return [*plain, *(f"{flag}={json.dumps(value)}" for flag, value in objects.items()), *words[end:]]


def _insert(target: dict[str, Any], flag: str, keys: Sequence[str], value: Any) -> None:
    *outer, last = keys
    for key in outer:
        target = target.setdefault(key, {})
        if not isinstance(target, dict):
            raise ConfigError(f"{flag}.{'.'.join(keys)}: {key} has a value already: give it once")
    target[last] = value


def _value(text: str) -> Any:
    """JSON, a number as 8k, or the text itself."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        number = parse_count(text)
        return text if number is None else number
