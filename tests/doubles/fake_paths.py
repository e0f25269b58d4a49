"""The prompts that the core in memory remembers: its prefix cache."""

from collections import OrderedDict
from collections.abc import Iterator

import numpy as np

from cairn.keys import common_tokens
from cairn.types import Keys

__all__ = ["FakePaths"]

_REMEMBERED = 64


class FakePaths:
    """The last prompts, each under its salt. As many tokens of a new one are cached as it shares with one of them."""

    def __init__(self) -> None:
        self._paths: OrderedDict[tuple[str | None, bytes], None] = OrderedDict()

    def __iter__(self) -> Iterator[tuple[str | None, bytes]]:
        """Salt and int64 bytes of each, oldest first."""
        return iter(self._paths)

    def look_up(self, salt: str | None, keys: Keys) -> int:
        paths = [np.frombuffer(path, dtype="<i8") for path_salt, path in self._paths if path_salt == salt]
        return max((common_tokens(path, keys) for path in paths), default=0)

    def remember(self, salt: str | None, prompt: bytes) -> None:
        self._paths[salt, prompt] = None
        while len(self._paths) > _REMEMBERED:
            self._paths.popitem(last=False)

    def clear(self) -> None:
        self._paths.clear()
