"""Checkpoints that clients hold: they go after all others until their time is over, and together never keep more than
a stated share of the pool."""

from collections.abc import Iterator
from math import inf

from cairn.cache.layout import CacheLayout
from cairn.cache.tree import Checkpoint, Node
from cairn.types import Clock

HELD_SHARE = 0.25
"""Most of the pool that held checkpoints may keep, with the keys and values below them: what is held is of no use to
other clients, and a pool full of it would leave the eviction policy nothing to choose from."""


class HeldCheckpoints:
    """Which checkpoints are held, and until when. What a hold keeps are the checkpoint's file and the tokens of its
    path; tokens on the paths of several are counted once."""

    def __init__(self, layout: CacheLayout, num_pages: int, clock: Clock) -> None:
        """`num_pages`: those of the whole pool."""
        self.quota = int(num_pages * HELD_SHARE)
        self._layout = layout
        self._clock = clock
        self._held: dict[Checkpoint, None] = {}
        self._next_end = inf

    def __len__(self) -> int:
        return len(self._held)

    def __iter__(self) -> Iterator[Checkpoint]:
        return iter(self._held)

    def take(self, checkpoint: Checkpoint, seconds: int) -> bool:
        """Hold `checkpoint` for `seconds` from now, longer if it is held for longer. False if that is beyond the quota;
        then nothing has changed."""
        if checkpoint not in self._held and self.num_pages(checkpoint) > self.quota:
            return False
        self._held[checkpoint] = None
        checkpoint.hold_seconds = max(checkpoint.hold_seconds, seconds)
        self.renew(checkpoint)
        return True

    def renew(self, checkpoint: Checkpoint) -> None:
        """Its time begins anew; no matter if it is not held."""
        if checkpoint in self._held:
            checkpoint.held_until = self._clock.now() + checkpoint.hold_seconds
            self._next_end = min(self._next_end, checkpoint.held_until)

    def replace(self, old: Checkpoint, new: Checkpoint) -> None:
        """`new` takes the place of `old`, which is at the same node, with what is left of its time."""
        if old in self._held:
            new.hold_seconds, new.held_until = old.hold_seconds, old.held_until
            self.forget(old)
            self._held[new] = None

    def forget(self, checkpoint: Checkpoint) -> None:
        """The end of a hold; no matter if there is none."""
        self._held.pop(checkpoint, None)
        checkpoint.held_until, checkpoint.hold_seconds = None, 0

    def expired(self) -> list[Checkpoint]:
        """Forget those whose time is over, and say which they were."""
        now = self._clock.now()
        if now < self._next_end:
            return []
        over = [checkpoint for checkpoint in self._held if (checkpoint.held_until or 0.0) <= now]
        for checkpoint in over:
            self.forget(checkpoint)
        self._next_end = min((checkpoint.held_until or 0.0 for checkpoint in self._held), default=inf)
        return over

    def num_pages(self, *more: Checkpoint) -> int:
        """Pages that those held, and `more`, keep together; a partly filled page counts by its tokens."""
        counted: set[Node] = set()
        tokens = 0
        checkpoints = {*self._held, *more}
        for checkpoint in checkpoints:
            node = checkpoint.node
            while node.parent is not None and node not in counted:
                counted.add(node)
                tokens += node.num_tokens
                node = node.parent
        return len(checkpoints) * self._layout.pages_per_checkpoint + self._layout.pages_for(tokens)
