"""The cache's only door: look a prompt up, extend it, commit what was computed, release it.

    lookup    prompt -> SequenceBlocks: hit c, match m, the shared pages, the checkpoint to restore, the miss reasons
    branch    another one for the same prompt, once it is computed: for several answers to it
    extend    pages for more tokens, and the page copy that writing into a shared page needs
    reserve_checkpoint   pages for a checkpoint that the plan is going to keep
    receive   tokens and a state that another server has computed: the sequence goes on as after a hit of its own
    commit    computed tokens and kept checkpoints enter the tree, for everybody
    release   the request's own references end
    pin       pages that outlive their sequence, because somebody outside, or a request to come, needs them
    retain_breakpoints   checkpoints that go after all others, because a client asked for it
    await_tools   an answer that has ended was a call: its session comes back

Pages that an unapplied step still names are kept by `pin_until(step)` until `release_step(step)`. Nothing here knows
of tensors: pages are numbers, and what is in them is the runner's affair.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from cairn.cache.allocator import BlockAllocator, PinnedPages, TreeWriter
from cairn.cache.answer_ends import AnswerEnds
from cairn.cache.awaited import AwaitedHits, WaitingPrompt
from cairn.cache.checkpoint import Kind, Lineage
from cairn.cache.checkpoint_store import CheckpointStore
from cairn.cache.eviction import EvictionPolicy
from cairn.cache.journal import Journal
from cairn.cache.layout import CacheLayout
from cairn.cache.lookup import PrefixLookup, miss_reasons
from cairn.cache.pages import PagePool
from cairn.cache.placement import CheckpointPoint, PlacementPolicy, PromptFacts
from cairn.cache.reasons import Reason
from cairn.cache.retained import retain_positions
from cairn.cache.sequence_blocks import Namespace, PagePin, SequenceBlocks
from cairn.cache.tree_store import TreeObserver, TreeStore
from cairn.step import GRID, PageCopy
from cairn.types import Boundary, Clock, Keys, Pages, SystemClock

__all__ = ["CacheCounters", "CachePolicy", "PrefixCache"]

GHOST_FACTOR = 4
"""Key tokens remembered of dropped nodes, as a multiple of the tokens that fit the pool."""


@dataclass(frozen=True, slots=True)
class CachePolicy:
    """How the cache behaves. `placement` None switches it off: every prompt is computed, nothing is kept. An
    `eviction` policy serves one cache."""

    placement: PlacementPolicy | None
    eviction: EvictionPolicy
    exact: bool = False


@dataclass(slots=True)
class CacheCounters:
    """In prompt tokens (`queries`, `hits`, `received` from other servers, `lost`) and in requests (`reasons`) or
    checkpoints (`used`). `second_shared`: tokens that prompts shared with earlier ones which they left where nobody had
    left them before, and `second_hits`: those of them that were hit."""

    queries: int = 0
    hits: int = 0
    received: int = 0
    second_shared: int = 0
    second_hits: int = 0
    reasons: Counter[Reason] = field(default_factory=Counter)
    lost: Counter[Reason] = field(default_factory=Counter)
    used: Counter[Kind] = field(default_factory=Counter)


class PrefixCache:
    """Pages, tree and sequences of one model on one rank. Not thread-safe: it belongs to the scheduler's thread."""

    def __init__(self, layout: CacheLayout, num_pages: int, policy: CachePolicy, clock: Clock | None = None) -> None:
        """`clock` measures how long clients retain checkpoints."""
        self.layout = layout
        self.policy = policy
        self.pool = PagePool(num_pages)
        tokens_per_page = max((group.tokens_per_page for group in layout.groups), default=layout.block_size)
        ghost_tokens = GHOST_FACTOR * num_pages * tokens_per_page
        self.answer_ends = AnswerEnds()
        clock = clock or SystemClock()
        self.tree = TreeStore(layout, self.pool, ghost_tokens, (policy.eviction, self.answer_ends))
        self.checkpoints = CheckpointStore(layout, self.pool, self.tree, policy.eviction, clock)
        self.pinned = PinnedPages(self.pool)
        self.lookups = PrefixLookup(layout, policy.exact, policy.eviction)
        self._awaited = AwaitedHits(self.tree.roots.get, policy.exact, not layout.needs_checkpoints)
        self._allocator = BlockAllocator(layout, self.pool, self.checkpoints, self.enabled)
        self._writer = TreeWriter(self.checkpoints, self.pinned, policy.exact)
        self.counters = CacheCounters()
        self.journal = Journal(clock)

    def observe(self, observer: TreeObserver) -> None:
        """Tell one more observer of what enters and leaves the tree, which has to be empty yet."""
        assert not self.tree.roots, "it would miss what is there"
        self.tree.observers = (*self.tree.observers, observer)

    @property
    def enabled(self) -> bool:
        return self.policy.placement is not None

    # -- lookup --------------------------------------------------------------------------------------------------

    def lookup(
        self,
        namespace: Namespace,
        keys: Keys,
        request_id: str,
        resumed_from: int | None = None,
        bypass: bool = False,
        probe: bool = False,
    ) -> SequenceBlocks:
        """Find the longest usable prefix of `keys` (shape [n], n >= 1), and lock it for a sequence.

        `resumed_from`: the prompt length of a request that was preempted; `keys` then goes on with what it had
        generated. `bypass`: find nothing, because all of the prompt has to be computed. `probe`: the reasons are
        left to `explain`, since it is not certain that anybody goes on from here. Nothing is counted before
        `begin_request`.
        """
        looks = self.enabled and not bypass
        root = self.tree.roots.get(namespace) if looks else None
        sequence = self.lookups.find(self.checkpoints.version, root, namespace, keys, request_id, resumed_from)
        if not looks:
            sequence.match.walk = None
        self._open(sequence)
        if not probe:
            self.explain(sequence)
        return sequence

    def explain(self, sequence: SequenceBlocks) -> None:
        """Say why the prompt's tokens after the hit were not hit, as things stand: before anything else is done with a
        sequence that was only a probe."""
        walk, sequence.match.walk = sequence.match.walk, None
        if self.policy.placement is not None and walk is not None:
            running = self.pinned.sequences.values()
            sequence.explain(miss_reasons(self.policy.placement, sequence, walk, running, self.tree.roots))

    def discard(self, sequence: SequenceBlocks) -> None:
        """End a sequence that nothing has come of: a probe."""
        self.pinned.close(sequence)
        if sequence.node is not None:
            self.tree.unlock(sequence.node)

    def begin_request(self, sequence: SequenceBlocks, resumed: bool = False) -> None:
        """The request goes on from this lookup: count it. `resumed`: its prompt was counted before."""
        end = sequence.num_prompt_tokens
        sequence.match.lineage = Lineage(start=sequence.ever_matched, end=end, message_end=end)
        if not resumed:
            self._learn(sequence)
        if sequence.checkpoint is not None and not sequence.closed:
            self.counters.used[sequence.checkpoint.kind] += 1
            self.checkpoints.use(sequence.checkpoint)
        self.checkpoints.renew(sequence.node, sequence.hit)
        if not resumed:
            self.counters.queries += sequence.num_prompt_tokens
            self.counters.hits += sequence.hit - sequence.received
            self.counters.received += sequence.received
            if sequence.match.left is not None and sequence.ever_matched >= GRID:
                self.counters.second_shared += sequence.ever_matched
                self.counters.second_hits += sequence.hit - sequence.received
            self.counters.reasons[sequence.reason] += 1
            self.journal.record(sequence, lost := sequence.lost)
            self.counters.lost.update(lost)

    def await_hits(self, prompts: Iterable[WaitingPrompt]) -> None:
        """These prompts wait, in the order of their turns, and no others: what they would hit is going to be used for
        certain. To be said anew whenever the queue has changed."""
        if self.enabled:
            self.checkpoints.await_uses(self._awaited.find(prompts))

    def awaited_hits(self) -> Mapping[str, tuple[int, int]]:
        """By request that waits: the tokens that it is going to hit as things are, and the bytes that dropping the
        checkpoint there would free. Without those that hit nothing."""
        return {
            name: (node.end, self.checkpoints.freed_bytes(node.checkpoint))
            for name, node in self._awaited.nodes.items()
            if node.checkpoint is not None
        }

    def endangered_hits(self, prompts: Sequence[tuple[str, int]], num_before: int) -> Mapping[str, int]:
        """Which of these requests that wait, given in the order of their turns with their tokens, would lose what they
        are going to hit to the last `num_before` before them: how many tokens that is, by request. No checkpoint is
        evicted for this question."""
        nodes, layout = self._awaited.nodes, self.layout
        needs, pages, need = list[int](), dict[str, int](), 0
        for name, num_tokens in prompts:
            pages[name] = need
            hit = nodes[name].end if name in nodes else 0
            needs.append(layout.pages_for(num_tokens) - layout.pages_for(hit) + layout.pages_per_checkpoint)
            need += needs[-1]
            if len(needs) > num_before:
                # what those before these leave behind will be evicted first, or is worth more than the hit
                need -= needs[-1 - num_before]
        most = max(pages.values(), default=0)
        if not nodes or most <= self.pool.num_free:
            return {}
        victims = self.checkpoints.next_victims(most)
        return {
            name: nodes[name].end
            for name, before in pages.items()
            if name in nodes and nodes[name] in victims and before > victims[nodes[name]]
        }

    def retain_breakpoints(self, sequence: SequenceBlocks, boundaries: Iterable[Boundary]) -> None:
        """Retain what is there already of the checkpoints that the client of `sequence` asks for: those within its
        hit. Later ones are retained as they are made."""
        wanted = {
            p: seconds for p, seconds in retain_positions(boundaries, self.policy.exact).items() if p <= sequence.hit
        }
        node = sequence.node if wanted else None
        while node is not None:
            seconds, checkpoint = wanted.get(node.end, 0), node.checkpoint
            if seconds and checkpoint is not None and self.checkpoints.retain(checkpoint, seconds):
                sequence.retained_breakpoints.add(node.end)
            node = node.parent

    def branch(self, sequence: SequenceBlocks, state: Pages, request_id: str) -> SequenceBlocks:
        """Another sequence of the prompt of `sequence`, all of which is computed, with the state at its end in the
        pages `state`: it goes on from there as after a hit, whatever the tree has. Full pages are shared."""
        branch = sequence.branch(state, request_id)
        self._open(branch)
        self.pool.acquire(state)
        branch.transient.append(state)
        return branch

    def prompt_facts(
        self, sequence: SequenceBlocks, num_tokens: int, boundaries: tuple[Boundary, ...] = ()
    ) -> PromptFacts:
        """What the placement policy may know of `sequence`, which has its pages and is going to prefill up to
        `num_tokens`, and whose messages and images end at `boundaries`."""
        facts = PromptFacts(num_tokens, sequence.hit, sequence.ever_matched, boundaries, self.policy.exact)
        lineage = sequence.match.lineage
        message_ends = (end.position for end in boundaries if end.kind == "message_end" and end.position < lineage.end)
        lineage.message_end = max(message_ends, default=lineage.end)
        placement = self.policy.placement
        if placement is not None and self.layout.needs_checkpoints:
            self.checkpoints.predict(placement, facts, lineage)
        return facts

    def _learn(self, sequence: SequenceBlocks) -> None:
        """What this prompt teaches of the reuse of those before it."""
        match = sequence.match
        match.lineage.forked = match.left is not None
        self.checkpoints.begin_request(match.last_checkpoint_node, match.checkpoint, match.lineage, match.left)

    def _open(self, sequence: SequenceBlocks) -> None:
        self.pinned.open(sequence)
        if sequence.node is not None:
            self.tree.lock(sequence.node)

    # -- growing -------------------------------------------------------------------------------------------------

    def extend(self, sequence: SequenceBlocks, num_tokens: int, step_end: int | None = None) -> list[PageCopy] | None:
        """Allocate pages up to `num_tokens` tokens, dropping cached ones if need be. `step_end`: of groups of limited
        reach no further than that, for they release pages as they go on; None: as of all.

        Returns the page copies that have to be made first, or None when there is no room; then nothing has changed
        but that cached pages may have gone.
        """
        return self._allocator.allocate(sequence, num_tokens, num_tokens if step_end is None else step_end)

    def release_behind(self, sequence: SequenceBlocks, position: int) -> None:
        """Release the pages of `sequence` that lie behind the reach of their layers now that the token at `position`
        comes next, and all steps that have computed earlier ones have been applied. Those that a checkpoint needs which
        has not been committed stay."""
        if not self.layout.is_limited:
            return
        position = min(position, *sequence.pending_states) if sequence.pending_states else position
        for table in sequence.tables:
            dropped = table.drop_before(table.group.needed_at(position))
            if len(dropped):
                self.pinned.note_release()
                self.pool.release(dropped)

    def expect(self, sequence: SequenceBlocks, position: int) -> None:
        """All tokens before `position` are going to be brought from elsewhere to `sequence`, which has only been looked
        up: of groups of limited reach it needs nothing that lies behind."""
        self.release_behind(sequence, position)

    def could_extend(
        self,
        sequence: SequenceBlocks,
        num_tokens: int,
        num_states: int = 0,
        reserved_pages: int = 0,
        step_end: int | None = None,
    ) -> bool:
        """False if neither `extend` nor dropping all that nobody uses makes room for so many tokens and states, and for
        `reserved_pages` pages that others are going to need. Drops nothing: whoever only waits must not cost others
        what is cached. True is no promise."""
        need = (
            reserved_pages
            + self._allocator.missing_pages(sequence, num_tokens, num_tokens if step_end is None else step_end)
            + num_states * self.layout.pages_per_checkpoint
        )
        return self.could_free(sequence, need)

    def could_free(self, sequence: SequenceBlocks, num_pages: int) -> bool:
        """Whether `num_pages` pages are free, or would be if every unreferenced page were dropped; drops nothing."""
        return self.pinned.could_free(sequence, num_pages)

    def reserve_checkpoint(self, sequence: SequenceBlocks, wanted: CheckpointPoint) -> Pages | None:
        """Allocate the pages of the checkpoint at `wanted.position`, to be named in a plan. Returns them, or None
        if there is no room or the position has them already: see `BlockAllocator.reserve_checkpoint`."""
        return self._allocator.reserve_checkpoint(sequence, wanted)

    def force_checkpoint(self, sequence: SequenceBlocks, position: int) -> Pages | None:
        """Allocate pages for the state at `position`, which another server is going to read, whatever the policy says
        and also with the cache off. Returns them, or None if there is no room."""
        return self._allocator.force_checkpoint(sequence, position)

    def transfer_checkpoint(self, sequence: SequenceBlocks, position: int) -> None:
        """Give up the pages of the state at `position`, which are filled and which somebody else holds, if the cache is
        off: no commit will take it from the sequence then."""
        self._allocator.transfer_checkpoint(sequence, position)

    def receive(self, sequence: SequenceBlocks, num_tokens: int, wanted: int, position: int) -> None:
        """The first `num_tokens` tokens lie in the sequence's pages, and the state at `position` in the pages that were
        wanted for `wanted`, the prompt's end: another server has computed them and confirmed it. They serve everybody
        from now on, and the sequence goes on from there. Where no state is needed before the end, none need have
        come."""
        assert sequence.hit < position <= num_tokens <= sequence.num_tokens, (
            f"{sequence.request_id}: nothing new was received"
        )
        pending = sequence.pending_states.pop(wanted)
        kept = [] if self.layout.resumes_anywhere and position != wanted else [position]
        # what was brought of groups of limited reach begins here
        self.release_behind(sequence, num_tokens)
        if kept:
            sequence.pending_states[position] = pending
            self.pool.acquire(pending.pages)
            sequence.transient.append(pending.pages)
        else:
            self.pinned.note_release()
            self.pool.release(pending.pages)
        self.commit(sequence, num_tokens, kept)
        sequence.receive(num_tokens, position, pending.pages if kept else None)

    # -- commit and release --------------------------------------------------------------------------------------

    def commit(self, sequence: SequenceBlocks, num_tokens: int, kept: Iterable[int] = ()) -> None:
        """The first `num_tokens` tokens have been computed, and the wanted states at positions `kept` are filled:
        from now on every lookup may find them."""
        if self.enabled:
            # states become the tree's, and its path may be another than that of the pages it has had
            if sequence.pending_states or sequence.node is None or sequence.node.end != sequence.committed:
                self.pinned.note_release()
            self._writer.commit(sequence, num_tokens, kept)

    def release(self, sequence: SequenceBlocks, loss: Reason | None = None) -> None:
        """End a sequence. No unapplied step may name its pages. `loss`: why no checkpoint was kept at its end."""
        self.pinned.note_release()
        self.pinned.close(sequence)
        if sequence.node is not None:
            if loss is not None and sequence.node.checkpoint is None and sequence.node.end == sequence.committed:
                sequence.node.loss = loss
            if sequence.node.parent is not None:
                self.answer_ends.add(sequence.request_id, sequence.node, sequence.match.lineage)
            self.tree.unlock(sequence.node)

    def await_tools(self, request_id: str) -> bool:
        """The answer to this request was a call, so its session comes back once its tools are done. False if the
        request is not known any more; then nothing changes."""
        open_ones = (each for each in self.pinned.sequences.values() if each.request_id == request_id)
        sequence = next(open_ones, None)
        end = self.answer_ends.get(request_id) if sequence is None else (sequence.node, sequence.match.lineage)
        if end is None:
            return False
        self.checkpoints.await_tools(*end)
        return True

    def pin(self, pages: Pages, for_requests: bool = False) -> PagePin:
        """Keep `pages`, which are distinct and in use, until `unpin`: for somebody outside, or for requests that are
        going to start from them."""
        return self.pinned.pin(pages, for_requests)

    def unpin(self, pin: PagePin) -> None:
        """Release pinned pages."""
        self.pinned.unpin(pin)

    def pin_until(self, step: int, sequence: SequenceBlocks) -> None:
        """Pages that `sequence` needs only for step `step` (the hit's state, the source of a page copy) are kept until
        that step has been applied, whatever becomes of the sequence."""
        self.pinned.pin_until(step, sequence)

    def clear(self) -> bool:
        """Drop everything that no sequence uses. True if the whole pool is free then."""
        return self.make_room(self.pool.num_pages)

    def make_room(self, num_pages: int) -> bool:
        """Drop cached pages until `num_pages` are free; False if there are not so many that nobody uses."""
        return self.checkpoints.make_room(num_pages)

    def release_step(self, step: int) -> None:
        """Release the pages that step `step` named: it has been applied."""
        self.pinned.release_step(step)
