"""Stop strings, found in text that comes in pieces."""

from collections.abc import Sequence


class StopStrings:
    """Gives out an answer's text as far as it is certain that no stop string has begun in it. `include`: the stop
    string that is met goes out, too."""

    def __init__(self, stops: Sequence[str], include: bool = False) -> None:
        self._stops = [stop for stop in stops if stop]
        self._include = include
        self._longest = max(map(len, self._stops), default=1) - 1
        self._held = ""

    def push(self, text: str, heed: bool = True) -> tuple[str, str | None]:
        """The text that may go out, and the stop string that has been met, if any. Nothing follows after one. Without
        `heed` a stop string that ends in this text stops nothing."""
        held, text = len(self._held), self._held + text
        if heed:
            # one that lies in what was held has come too early
            places = ((text.find(stop, max(0, held - len(stop) + 1)), stop) for stop in self._stops)
            met = [(at, stop) for at, stop in places if at >= 0]
            if met:
                at, stop = min(met)
                self._held = ""
                return text[: at + len(stop) if self._include else at], stop
        keep = min(len(text), self._longest)
        while keep and not any(stop.startswith(text[-keep:]) for stop in self._stops):
            keep -= 1
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep], None

    def finish(self) -> str:
        """What was held back, when the answer ends without a stop string."""
        rest, self._held = self._held, ""
        return rest
