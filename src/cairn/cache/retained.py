"""What clients ask to have retained (`cache_control`): the positions, and the checkpoints there."""

from collections.abc import Iterable, Iterator
from math import inf

from cairn.cache.layout import CacheLayout
from cairn.cache.tree import Checkpoint, Node
from cairn.step import GRID
from cairn.types import Boundary, Clock

RETAINED_SHARE = 0.25
"""Most of the pool that retained checkpoints may keep, with the keys and values below them: they are of no use to
other clients, and a pool full of it would leave the eviction policy nothing to choose from."""


def retain_positions(boundaries: Iterable[Boundary], exact: bool) -> dict[int, int]:
    """Position to seconds of the checkpoints that a client wants retained. In exact mode no prompt goes on from a state
    off the grid, so the one at the grid point below is retained for it."""
    retentions: dict[int, int] = {}
    for boundary in boundaries:
        position = boundary.position // GRID * GRID if exact else boundary.position
        if boundary.retain_seconds and position:
            retentions[position] = max(retentions.get(position, 0), boundary.retain_seconds)
    return retentions


class RetainedCheckpoints:
    """Checkpoints that clients retain: evicted after all others until the time is over. Each keeps its
    state and the tokens of its path; tokens on the paths of several are counted once."""

    def __init__(self, layout: CacheLayout, num_pages: int, clock: Clock) -> None:
        """`num_pages`: those of the whole pool."""
        self.quota = int(num_pages * RETAINED_SHARE)
        self._layout = layout
        self._clock = clock
        self._checkpoints: dict[Checkpoint, None] = {}
        self._next_end = inf

    def __len__(self) -> int:
        return len(self._checkpoints)

    def __iter__(self) -> Iterator[Checkpoint]:
        return iter(self._checkpoints)

    def add(self, checkpoint: Checkpoint, seconds: int) -> bool:
        """Retain `checkpoint` for `seconds` from now, longer if it is retained for longer. False if that is beyond the
        quota; then nothing has changed."""
        if checkpoint not in self._checkpoints and self.num_pages(checkpoint) > self.quota:
            return False
        self._checkpoints[checkpoint] = None
        checkpoint.retain_seconds = max(checkpoint.retain_seconds, seconds)
        self.renew(checkpoint)
        return True

    def renew(self, checkpoint: Checkpoint) -> None:
        """Restart the time of a retained checkpoint."""
        if checkpoint in self._checkpoints:
            checkpoint.retained_until = self._clock.now() + checkpoint.retain_seconds
            self._next_end = min(self._next_end, checkpoint.retained_until)

    def renew_path(self, node: Node | None, upto: int) -> None:
        """Restart the time of those on the path to `node` up to token `upto`."""
        while node is not None and self:
            if node.checkpoint is not None and node.end <= upto:
                self.renew(node.checkpoint)
            node = node.parent

    def replace(self, old: Checkpoint, new: Checkpoint) -> None:
        """`new` takes the place of `old`, which is at the same node, with what is left of its time."""
        if old in self._checkpoints:
            new.retain_seconds, new.retained_until = old.retain_seconds, old.retained_until
            self.remove(old)
            self._checkpoints[new] = None

    def remove(self, checkpoint: Checkpoint) -> None:
        """Retain a checkpoint no longer, if it is retained."""
        self._checkpoints.pop(checkpoint, None)
        checkpoint.retained_until, checkpoint.retain_seconds = None, 0

    def pop_expired(self) -> list[Checkpoint]:
        """Retain those no longer whose time is over. Returns them."""
        now = self._clock.now()
        if now < self._next_end:
            return []
        over = [checkpoint for checkpoint in self._checkpoints if (checkpoint.retained_until or 0.0) <= now]
        for checkpoint in over:
            self.remove(checkpoint)
        self._next_end = min((checkpoint.retained_until or 0.0 for checkpoint in self._checkpoints), default=inf)
        return over

    def num_pages(self, *more: Checkpoint) -> int:
        """Pages that those retained, and `more`, keep together; a partly filled page counts by its tokens."""
        counted: set[Node] = set()
        tokens = 0
        checkpoints = {*self._checkpoints, *more}
        for checkpoint in checkpoints:
            node = checkpoint.node
            while node.parent is not None and node not in counted:
                counted.add(node)
                tokens += node.num_tokens
                node = node.parent
        return len(checkpoints) * self._layout.pages_per_checkpoint + self._layout.pages_for(tokens)
