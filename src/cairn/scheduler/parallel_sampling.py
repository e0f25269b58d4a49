"""Several answers to one prompt: it is computed once, and every answer starts from the state at its end.

The first request of a group, its leader, is queued like any request; the others are deferred. When the leader's prompt
is computed, its pages and the checkpoint at its end are pinned and the others are queued: each starts from there,
shares the full pages, and has a copy of its own of the last one. The pins go when the last one has started.

    submit -> deferred --(the prompt is computed)--> waiting -> started
              |  the leader has ended before: the next one leads

Nothing of this is promised: without room for the checkpoint, or when the pinned pages have to give way to running
requests, the others are requests like any others.
"""

from dataclasses import dataclass

from cairn.cache.prefix_cache import PrefixCache
from cairn.cache.sequence_blocks import PagePin, SequenceBlocks
from cairn.scheduler.queue import WaitingQueue
from cairn.scheduler.request import Request


@dataclass(slots=True, eq=False)
class SequenceGroup:
    """The requests that answer one prompt. `not_started`: all but the leader, until they start. `leader`: while the
    others are deferred. `counted`: whether the prompt has come into the counters. `checkpoint`: the state at the
    prompt's end, and `sequence` the pages up to there, pinned for those that have not started."""

    not_started: list[Request]
    leader: Request | None
    counted: bool = False
    checkpoint: PagePin | None = None
    sequence: SequenceBlocks | None = None


class ParallelSampling:
    """The groups of all prompts with several answers."""

    def __init__(self, cache: PrefixCache, waiting: WaitingQueue) -> None:
        self._cache = cache
        self._waiting = waiting
        self._groups: dict[Request, SequenceGroup] = {}  # by each of its requests that has not ended
        self._pinned: dict[SequenceGroup, None] = {}  # those whose `sequence` is pinned, oldest first

    @property
    def num_deferred(self) -> int:
        """Requests that wait for their leader, and are not in the queue."""
        return sum(len(group.not_started) for request, group in self._groups.items() if group.leader is request)

    def defer(self, leader: Request, others: list[Request]) -> None:
        """Make a group: `others` are queued when the prompt of `leader` is computed."""
        group = SequenceGroup(others, leader)
        for request in (leader, *others):
            request.stats.is_parallel_sample = True
            self._groups[request] = group

    def group_of(self, request: Request) -> SequenceGroup | None:
        """None for the only answer to its prompt."""
        return self._groups.get(request)

    def is_leader(self, request: Request) -> bool:
        """Whether others wait for the prompt of this one."""
        group = self._groups.get(request)
        return group is not None and group.leader is request

    def is_deferred(self, request: Request) -> bool:
        """Whether it waits for its leader, and so is not in the queue."""
        group = self._groups.get(request)
        return group is not None and group.leader is not None and request in group.not_started

    def needs_checkpoint(self, request: Request) -> bool:
        """Whether the state at the end of its prompt has to be saved for others."""
        group = self._groups.get(request)
        return group is not None and group.leader is request and group.checkpoint is None

    def pin_checkpoint(self, request: Request) -> None:
        """The state at the prompt's end is there, restored or in pages that a step has written: pin it if needed."""
        sequence, position = request.sequence, request.num_prompt_tokens
        if not self.needs_checkpoint(request) or sequence is None:
            return
        pages = sequence.state_pages(position)
        if pages is not None:
            pin = self._cache.pin(pages, for_requests=True)
            self._groups[request].checkpoint = pin
            self._cache.transfer_checkpoint(sequence, position)

    def queue_others(self, leader: Request) -> None:
        """The prompt of `leader` is computed and committed: pin its pages, and queue the others."""
        group, sequence = self._groups[leader], leader.sequence
        assert group.leader is leader and sequence is not None
        group.leader = None
        if group.checkpoint is not None:
            group.sequence = self._cache.branch(sequence, group.checkpoint.pages, f"{leader.id} and others")
            self._pinned[group] = None
        for request in group.not_started:
            self._waiting.put(request)

    def has_pinned_prompt(self, request: Request) -> bool:
        """Whether the pages and the state of its prompt are pinned for it to start from."""
        group = self._groups.get(request)
        return group is not None and group.sequence is not None and request in group.not_started

    def branch(self, request: Request) -> SequenceBlocks | None:
        """Pages of its own that start from the pinned ones; None where its prompt has to be looked up."""
        group = self._groups.get(request)
        if group is None or group.sequence is None or group.checkpoint is None or request not in group.not_started:
            return None
        return self._cache.branch(group.sequence, group.checkpoint.pages, request.id)

    def start(self, request: Request) -> None:
        """It has pages of its own, or needs none any more. The last one of a group releases the pins."""
        group = self._groups.get(request)
        if group is None or request not in group.not_started:
            return
        group.not_started.remove(request)
        if not group.not_started:
            group.leader = None
            self._release(group)

    def remove(self, request: Request) -> None:
        """A request has ended, for whatever reason: the next one leads if others were waiting for its prompt."""
        group = self._groups.get(request)
        if group is None:
            return
        if group.leader is not request:
            self.start(request)
        else:
            self._release(group)
            group.leader = None
            if group.not_started:
                leader = group.not_started.pop(0)
                group.leader = leader if group.not_started else None
                self._waiting.put(leader)
        del self._groups[request]

    def release_last(self) -> bool:
        """Release the pins of the last group that has some: its requests look their prompt up. False if none has."""
        if not self._pinned:
            return False
        self._release(next(reversed(self._pinned)))
        return True

    def _release(self, group: SequenceGroup) -> None:
        if group.sequence is not None:
            self._cache.release(group.sequence)
            del self._pinned[group]
        if group.checkpoint is not None:
            self._cache.unpin(group.checkpoint)
        group.sequence = group.checkpoint = None
