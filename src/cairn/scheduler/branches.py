"""Several answers to one prompt: it is computed once, and every answer starts from the state at its end.

The first request of a trunk, its leader, goes the way of all requests; the others are parked. When the leader's prompt
is computed, the state at its end and its pages are held, and the others come into the queue: each starts from there,
shares the full pages, and has a copy of its own of the last one. What is held is let go when the last has started.

    submit -> parked --(the prompt is computed)--> in the queue -> started
              |  the leader has ended before: the next one leads

Nothing of this is promised: without room for the file, or when what is held has to give way to requests that run, the
branches are requests like any others.
"""

from dataclasses import dataclass

from cairn.cache.prefix_cache import PrefixCache
from cairn.cache.sequence_blocks import PagePin, SequenceBlocks
from cairn.scheduler.queue import WaitingQueue
from cairn.scheduler.request import Request, Trunk


@dataclass(slots=True, eq=False)
class _Held:
    """What a trunk's branches start from."""

    sequence: SequenceBlocks
    state: PagePin


class Branches:
    """The trunks of all prompts that are to have several answers."""

    def __init__(self, cache: PrefixCache, waiting: WaitingQueue) -> None:
        self._cache = cache
        self._waiting = waiting
        self._parked: dict[Trunk, Request] = {}  # by trunk, its leader
        self._states: dict[Trunk, PagePin] = {}
        self._held: dict[Trunk, _Held] = {}

    @property
    def num_parked(self) -> int:
        """Requests that wait for their leader, and are not in the queue."""
        return sum(len(trunk.branches) for trunk in self._parked)

    def park(self, leader: Request, others: list[Request]) -> None:
        """`others` start when the prompt of `leader` is computed."""
        trunk = Trunk(others)
        for request in (leader, *others):
            request.trunk = trunk
        self._parked[trunk] = leader

    def leads(self, request: Request) -> bool:
        """Whether others wait for the prompt of this one."""
        return request.trunk is not None and self._parked.get(request.trunk) is request

    def wants_state(self, request: Request) -> bool:
        """Whether the state at the end of its prompt has to be kept for others."""
        return self.leads(request) and request.trunk not in self._states

    def keep_state(self, request: Request) -> None:
        """The state at the prompt's end is there: restored, or in a file that a step has kept."""
        sequence, position = request.sequence, request.num_prompt_tokens
        if not self.wants_state(request) or sequence is None or request.trunk is None:
            return
        pages = sequence.restore if sequence.hit == position else None
        if pages is None and position in sequence.files:
            pages = sequence.files[position].pages
        if pages is not None:
            self._states[request.trunk] = self._cache.pin(f"prompt end of {request.id}", pages, for_requests=True)
            self._cache.transfer_checkpoint(sequence, position)

    def let_start(self, leader: Request) -> None:
        """The prompt of `leader` is computed and committed: the others come into the queue."""
        trunk, sequence = leader.trunk, leader.sequence
        assert trunk is not None and sequence is not None
        del self._parked[trunk]
        state = self._states.pop(trunk, None)
        if state is not None:
            self._held[trunk] = _Held(self._cache.branch(sequence, state.pages, f"{leader.id} and others"), state)
        for request in trunk.branches:
            self._waiting.put(request)

    def holds_for(self, request: Request) -> bool:
        """Whether pages and state are held for it to start from."""
        trunk = request.trunk
        return trunk is not None and trunk in self._held and request in trunk.branches

    def sequence(self, request: Request) -> SequenceBlocks | None:
        """Pages of its own, shared with what is held for it; None where it has to look its prompt up."""
        held = self._held.get(request.trunk) if request.trunk is not None and self.holds_for(request) else None
        return None if held is None else self._cache.branch(held.sequence, held.state.pages, request.id)

    def started(self, request: Request) -> None:
        """It has pages of its own, or needs none any more. The last one of a trunk lets go of what is held."""
        trunk = request.trunk
        if trunk is None or request not in trunk.branches:
            return
        trunk.branches.remove(request)
        if not trunk.branches:
            self._parked.pop(trunk, None)
            self._let_go(trunk)

    def ended(self, request: Request) -> None:
        """A request has ended, for whatever reason: the next one leads if others were waiting for its prompt."""
        trunk = request.trunk
        if trunk is None:
            return
        if not self.leads(request):
            self.started(request)
            return
        del self._parked[trunk]
        self._let_go(trunk)
        if trunk.branches:
            leader = trunk.branches.pop(0)
            if trunk.branches:
                self._parked[trunk] = leader
            self._waiting.put(leader)

    def is_parked(self, request: Request) -> bool:
        """Whether it waits for its leader, and so is not in the queue."""
        trunk = request.trunk
        return trunk is not None and trunk in self._parked and request in trunk.branches

    def give_way(self) -> bool:
        """Let go of what is held for the last trunk: its branches look their prompt up. False if there is none."""
        if not self._held:
            return False
        self._let_go(next(reversed(self._held)))
        return True

    def _let_go(self, trunk: Trunk) -> None:
        state, held = self._states.pop(trunk, None), self._held.pop(trunk, None)
        if held is not None:
            self._cache.release(held.sequence)
            state = held.state
        if state is not None:
            self._cache.unpin(state)
