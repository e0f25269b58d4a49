"""How much of a prompt was computed before: counted by the client, from token ids alone."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["SeenPaths", "Shared", "branch", "common_length"]


def common_length(left: Sequence[int], right: Sequence[int]) -> int:
    """How many leading tokens are the same."""
    for position, (ours, theirs) in enumerate(zip(left, right, strict=False)):
        if ours != theirs:
            return position
    return min(len(left), len(right))


def branch(tokens: Sequence[int], at: int, tail: Sequence[int], length: int) -> list[int]:
    """`length` tokens that share exactly the first `at` with `tokens`, then go on with what `tail` has to offer."""
    assert at < len(tokens) and at < length
    start = next(index for index, token in enumerate(tail) if token != tokens[at])
    branched = [*tokens[:at], *tail[start : start + length - at]]
    assert len(branched) == length and common_length(branched, tokens) == at
    return branched


@dataclass(frozen=True, slots=True)
class Shared:
    """Tokens that a prompt shares with an earlier path of its salt. `prompts`: with an earlier prompt; `paths`: with
    an earlier prompt and the computed part of its answer, so `paths` >= `prompts`."""

    prompts: int
    paths: int


class SeenPaths:
    """The token paths that a server has computed, by cache salt.

    An answer's last token is sampled but never computed: no key, value or state of it exists.
    """

    def __init__(self) -> None:
        self._seen: defaultdict[str | None, list[tuple[int, list[int]]]] = defaultdict(list)

    def shared(self, salt: str | None, prompt: Sequence[int]) -> Shared:
        """What `prompt` shares with what was noted before."""
        lengths = [(common_length(path, prompt), end) for end, path in self._seen[salt]]
        return Shared(
            prompts=max((min(length, end) for length, end in lengths), default=0),
            paths=max((length for length, _ in lengths), default=0),
        )

    def note(self, salt: str | None, prompt: Sequence[int], answer: Sequence[int]) -> None:
        """`prompt` has been answered with `answer`."""
        self._seen[salt].append((len(prompt), [*prompt, *answer[:-1]]))
