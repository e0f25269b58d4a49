"""Whether what could be written to a tier is worth the writing, learned from what has come of it.

Each kind of state has an account: what its hits below have saved, in seconds of computing less those of fetching, and
what its writing has taken. Both fade, so that a kind can come back; while a kind does not pay, every eighth of it is
written all the same, or nobody would find out that it does.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from cairn.cache.checkpoint import Kind
from cairn.cache.tree import Checkpoint, Node
from cairn.step import GRID

KEPT_BELOW = frozenset(
    (
        *(Kind.SYSTEM_END, Kind.MESSAGE_END, Kind.IMAGE_END, Kind.BREAKPOINT),
        *(Kind.PROMPT_END, Kind.ANSWER_END, Kind.JUNCTION),
    )
)
"""Checkpoints of other kinds are written once they have been hit, but for some of those on probation."""

PLACES_APART = 4
"""Of the places on a path where nothing says that prompts diverge, the deepest one is written, and then one each time
that it is so many times as far from the end: prompts do diverge there, mostly soon before the end."""

PRIOR_SECONDS = 10.0
"""What each kind is believed to have earned and cost before anything was seen."""

FADING = 0.999
"""What is left of an account after each write."""

EXPLORED = 8


@dataclass(slots=True)
class _Account:
    earned: float = PRIOR_SECONDS
    spent: float = 0.0
    refused: int = 0


class WriteWorth:
    """Accounts by kind of state: the number of a `Kind`."""

    def __init__(self) -> None:
        self._accounts: dict[int, _Account] = {}

    def allows(self, kind: int) -> bool:
        """Whether a state of this kind, with what belongs to it, is to be written."""
        account = self._account(kind)
        if account.earned >= account.spent:
            return True
        account.refused += 1
        return account.refused % EXPLORED == 0

    def pays(self, compute_seconds: float, write_seconds: float, fetch_seconds: float) -> bool:
        """Whether one hit would save anything, and more than the writing takes."""
        return compute_seconds > fetch_seconds and compute_seconds > write_seconds

    def spend(self, kind: int, seconds: float) -> None:
        """Something of this kind has been written."""
        account = self._account(kind)
        account.earned *= FADING
        account.spent = account.spent * FADING + seconds

    def earn(self, kind: int, seconds: float) -> None:
        """A hit on something of this kind has saved so many seconds."""
        self._account(kind).earned += max(0.0, seconds)

    def _account(self, kind: int) -> _Account:
        return self._accounts.setdefault(kind, _Account())


def is_kept_below(checkpoint: Checkpoint) -> bool:
    """Whether something says that prompts go on from here."""
    return checkpoint.kind in KEPT_BELOW or checkpoint.hits > 0


def choose_states(nodes: Sequence[Node], end: int) -> list[Node]:
    """Which of these nodes on a path of `end` tokens, which have a state each, are written with theirs."""
    chosen, least = list[Node](), 0
    for node in reversed(nodes):
        checkpoint, distance = node.checkpoint, end - node.end
        assert checkpoint is not None
        if not is_kept_below(checkpoint):
            if not checkpoint.kind.on_probation or distance < least:
                continue
            least = max(GRID, PLACES_APART * distance)
        chosen.append(node)
    return chosen[::-1]
