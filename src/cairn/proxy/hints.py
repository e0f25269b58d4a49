"""Where the pages of earlier answers can be claimed: bounded, forgetful, and allowed to be wrong."""

from collections import OrderedDict
from collections.abc import Sequence

import msgspec

from cairn.types import Clock


class Hints:
    """Second-turn hints by the trail's mark at which prompt and answer ended. The least recently used goes first."""

    def __init__(self, max_hints: int, seconds: float, clock: Clock) -> None:
        self._max_hints = max_hints
        self._seconds = seconds
        self._clock = clock
        self._hints: OrderedDict[bytes, tuple[float, msgspec.Raw]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._hints)

    def remember(self, mark: bytes, hint: msgspec.Raw) -> None:
        self._hints[mark] = (self._clock.now() + self._seconds, hint)
        self._hints.move_to_end(mark)
        while len(self._hints) > self._max_hints:
            self._hints.popitem(last=False)

    def find(self, marks: Sequence[bytes]) -> msgspec.Raw | None:
        """The hint at the deepest of these marks that has one, and is not too old."""
        for mark in reversed(marks) if self._hints else ():
            found = self._hints.get(mark)
            if found is None:
                continue
            if found[0] > self._clock.now():
                self._hints.move_to_end(mark)
                return found[1]
            del self._hints[mark]
        return None

    def forget(self, hint: msgspec.Raw, marks: Sequence[bytes]) -> None:
        """A server has refused this hint, found at one of these marks."""
        for mark in marks:
            if self._hints.get(mark, (0.0, None))[1] is hint:
                del self._hints[mark]
