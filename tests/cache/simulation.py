"""A pool whose pages remember what was written to them, and requests that write as a runner would.

Every token slot holds a tag that names the whole prefix up to that token and how it was computed, every file the
prefix whose state it is. A wrong page, a stale file, a write into a shared slot: each shows as a wrong tag.
"""

from dataclasses import dataclass, field

import numpy as np

from cairn.cache.audit import audit
from cairn.cache.checkpoint import Kind
from cairn.cache.eviction import EvictionPolicy
from cairn.cache.group_pages import page_numbers
from cairn.cache.layout import AttentionGroup, CacheLayout
from cairn.cache.placement import CheckpointPoint, PlacementPolicy, PromptFacts
from cairn.cache.prefix_cache import CachePolicy, PrefixCache
from cairn.cache.reasons import Reason
from cairn.cache.sequence_blocks import Namespace, PagePin, SequenceBlocks
from cairn.cache.tree import Checkpoint
from cairn.step import PageCopy
from cairn.types import Boundary, ManualClock

PLAIN = Namespace()
Prefix = tuple[int, ...]
Tag = tuple[str, Prefix]


def small_layout(
    block_size: int = 4, state_bytes: int = 100, limited: tuple[AttentionGroup, ...] = (), unlimited: bool = True
) -> CacheLayout:
    """Pages of 64 bytes; with the default state a checkpoint is two pages. `limited`: groups besides the one that has
    no limit, or instead of it."""
    full = (AttentionGroup("full", block_size),) if unlimited else ()
    return CacheLayout(
        block_size=block_size,
        page_bytes=64,
        page_units=1,
        groups=full + limited,
        header_bytes=8,
        state_bytes=state_bytes,
        state_units=1,
    )


def shared_tokens(a: Prefix, b: Prefix) -> int:
    """How many tokens both begin with."""
    return next((at for at, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


@dataclass(eq=False)
class Request:
    """One simulated request. `computed` tokens of its lease have been computed."""

    name: str
    namespace: Namespace
    prompt: Prefix
    answer: list[int]
    lease: SequenceBlocks
    facts: PromptFacts
    computed: int

    @property
    def keys(self) -> Prefix:
        return self.prompt + tuple(self.answer)


@dataclass(eq=False)
class Simulation:
    """The cache under test beside the naive model: every prefix ever committed, and every state ever kept."""

    cache: PrefixCache
    clock: ManualClock
    slots: dict[tuple[int, int], Tag] = field(default_factory=dict)
    files: dict[int, Tag] = field(default_factory=dict)
    committed: set[tuple[Namespace, Prefix]] = field(default_factory=set)
    kept: set[tuple[Namespace, Prefix]] = field(default_factory=set)
    requests: list[Request] = field(default_factory=list)
    offered: list[tuple[PagePin, dict]] = field(default_factory=list)
    quarantine: list[PagePin] = field(default_factory=list)
    step: int = 0
    received: int = 0

    @classmethod
    def build(
        cls,
        num_pages: int,
        placement: PlacementPolicy | None,
        eviction: EvictionPolicy,
        exact: bool = False,
        **layout: object,
    ):
        clock = ManualClock()
        policy = CachePolicy(placement, eviction, exact)
        return cls(PrefixCache(small_layout(**layout), num_pages, policy, clock=clock), clock)

    # -- what a request does -------------------------------------------------------------------------------------

    def start(self, name: str, prompt: Prefix, namespace: Namespace = PLAIN, boundaries=()) -> Request:
        boundaries = tuple(end if isinstance(end, Boundary) else Boundary(end) for end in boundaries)
        lease = self.cache.lookup(namespace, np.array(prompt, np.int64), name)
        facts = PromptFacts(len(prompt), lease.hit, lease.ever_matched)
        request = Request(name, namespace, prompt, [], lease, facts, lease.hit)
        self.requests.append(request)
        self.check_hit(request)
        self.cache.begin_request(lease)
        request.facts = self.cache.prompt_facts(lease, len(prompt), boundaries)
        self.cache.retain_breakpoints(lease, boundaries)
        self._hold(request)
        return request

    def fetch(self, name: str, prompt: Prefix, namespace: Namespace, position: int, state_at: int) -> Request | None:
        """Another server gives the first `position` tokens and the state at `state_at` (of a model that has one, or at
        the prompt's end), or fails when that is more than what is asked for. None when nothing came of it."""
        lease = self.cache.lookup(namespace, np.array(prompt, np.int64), name)
        facts = PromptFacts(len(prompt), lease.hit, lease.ever_matched, (), self.cache.policy.exact)
        request = Request(name, namespace, prompt, [], lease, facts, lease.hit)
        self.check_reasons(request)
        known = lease.matched
        copies = self.cache.extend(lease, len(prompt))
        file = self.cache.force_checkpoint(lease, len(prompt)) if copies is not None else None
        if copies is None or file is None:
            self.cache.release(lease)
            return None
        if position > len(prompt) or not lease.hit < state_at <= position:
            own = (part.pages for part in lease.blocks.span(known, len(prompt)))
            self.quarantine.append(self.cache.pin(np.concatenate([*own, file])))
            self.cache.release(lease)
            return None
        self.requests.append(request)
        if position <= known:
            self._copy(copies)
        elif known < len(prompt):
            for index, group in enumerate(self.cache.layout.groups):
                for token in range(known // group.tokens_per_page * group.tokens_per_page, position):
                    self._write(request, token, index)
        came = [state_at] if self.cache.layout.state_bytes or state_at == len(prompt) else []
        for page in file.tolist() if came else ():
            self._to_file(page, self._tag(request, state_at - 1))
        self.cache.receive(lease, position, len(prompt), state_at)
        self._note(request, position, came)
        self.received += lease.received
        assert lease.hit + sum(lease.lost.values()) == len(prompt)
        assert lease.reason is Reason.DISABLED or lease.reason in lease.lost or lease.reason is Reason.NONE
        request.computed = lease.hit
        restored = set() if lease.restore is None else {self.files[page] for page in lease.restore.tolist()}
        assert restored == {self._tag(request, at - 1) for at in came}
        self.cache.begin_request(lease)
        request.facts = self.cache.prompt_facts(lease, len(prompt))
        self._hold(request)
        return request

    def offer(self, request: Request) -> None:
        """Another server is going to read what has been computed of the request."""
        parts = request.lease.blocks.upto(request.computed)
        pages = page_numbers(parts)
        slots = [
            self._slot(request.lease, token, index)
            for index, part in enumerate(parts)
            for token in range(part.first_token, request.computed)
        ]
        self.offered.append((self.cache.pin(pages), {slot: self.slots[slot] for slot in slots}))

    def let_go(self, index: int) -> None:
        """One of those outside is done."""
        if index < len(self.offered):
            self.cache.unpin(self.offered.pop(index)[0])
        else:
            self.cache.unpin(self.quarantine.pop(index - len(self.offered)))

    def resume(self, request: Request) -> None:
        keys = np.array(request.keys, np.int64)
        request.lease = self.cache.lookup(request.namespace, keys, request.name, resumed_from=len(request.prompt))
        request.computed = request.lease.hit
        self.requests.append(request)
        self.check_hit(request)
        self.cache.begin_request(request.lease, resumed=True)
        self._hold(request)

    def prefill(self, request: Request, end: int) -> bool:
        """Compute the prompt up to `end`, in one step, keeping what the placement wants. False: no room."""
        lease, start = request.lease, request.computed
        if not self._extend(request, end):
            return False
        placement = self.cache.policy.placement
        wanted = placement.in_prefill(request.facts, start, end) if placement is not None else []
        kept = [w for w in wanted if self._fill(request, w)]
        self._read(request, start)
        for position in range(max(start, lease.kv_write_from), end):
            self._write(request, position)
        self._commit(request, end, [w.position for w in kept])
        self._release_behind(request)
        return True

    def decode(self, request: Request, token: int) -> bool:
        """Compute the last token and append `token`, which has not been computed. False: no room."""
        lease = request.lease
        if request.computed < lease.num_tokens:
            if not self._extend(request, request.computed + 1):
                return False
            self._read(request, request.computed)
            if request.computed >= lease.kv_write_from:
                self._write(request, request.computed)
            request.computed += 1
            self._release_behind(request)
        request.answer.append(token)
        lease.append(token)
        return True

    def finish(self, request: Request, loss: Reason | None = None, kind: Kind = Kind.ANSWER_END) -> None:
        """Commit what was computed, with a checkpoint at its end if there is room, and release."""
        position = request.computed
        kept = []
        if loss is None and position > request.lease.hit and self._fill(request, CheckpointPoint(position, kind)):
            kept.append(position)
        self._commit(request, position, kept)
        self.end(request, loss)

    def end(self, request: Request, loss: Reason | None = None) -> None:
        self.cache.release(request.lease, loss)
        self.requests.remove(request)

    def apply(self) -> None:
        """All steps so far have been applied."""
        for step in list(self.cache.pinned.steps):
            self.cache.release_step(step)

    def held_now(self) -> set[Checkpoint]:
        """The checkpoints whose time is not over."""
        now = self.clock.now()
        return {
            held
            for held in self.cache.checkpoints.retained
            if held.retained_until is not None and held.retained_until > now
        }

    # -- what is checked -----------------------------------------------------------------------------------------

    def check_reasons(self, request: Request) -> None:
        """Every prompt token that was not hit has exactly one reason, and one that can be true."""
        lease, space, keys = request.lease, request.namespace, request.keys
        length = len(request.prompt)
        assert min(lease.hit, length) + sum(lease.lost.values()) == length and min(lease.lost.values(), default=1) > 0
        if not self.cache.enabled:
            assert set(lease.lost) <= {Reason.DISABLED}
            return
        assert lease.reason is (Reason.NONE if lease.hit >= length else min(lease.lost, key=list(Reason).index))
        ends = [end for end, _ in lease.match.miss_spans]
        assert ends == sorted(set(ends)) and (not ends or ends[-1] == length)
        here = [
            other.keys
            for other in self.requests
            if other is not request and other.namespace == space and other.lease.committed < len(other.prompt)
        ]
        running = max((shared_tokens(keys, other) for other in here), default=0)
        rewritten = next((end for end, reason in lease.match.miss_spans if reason is Reason.REWRITTEN), 0)
        assert not rewritten or any(
            owner == space and len(path) == rewritten and shared_tokens(path, keys) == lease.ever_matched
            for owner, path in self.committed
        )
        for token in range(lease.hit, length):
            reason = next(reason for end, reason in lease.match.miss_spans if token < end)
            if token < lease.ever_matched:
                assert (space, keys[: token + 1]) in self.committed
                assert reason not in (Reason.NEVER_SEEN, Reason.NAMESPACE, Reason.NONE)
                assert reason is not Reason.IN_PROGRESS or running > token
                assert reason is not Reason.NO_CHECKPOINT or running < max(lease.ever_matched, lease.hit + 1)
                known = lease.ever_matched if self.cache.layout.is_limited else lease.matched
                assert reason is not Reason.NO_CHECKPOINT or token < known or self.cache.policy.exact
            elif token < running:
                assert reason is Reason.IN_PROGRESS
            elif reason is Reason.REWRITTEN:
                assert token >= lease.ever_matched
            else:
                assert reason in (Reason.NEVER_SEEN, Reason.NAMESPACE)
                assert reason is Reason.NEVER_SEEN or (PLAIN, keys[: token + 1]) in self.committed

    def check_hit(self, request: Request) -> None:
        self.check_reasons(request)
        lease, keys = request.lease, request.keys
        space = request.namespace
        assert 0 <= lease.hit <= lease.num_tokens and lease.matched <= lease.ever_matched <= lease.num_tokens
        if lease.matched:
            assert (space, keys[: lease.matched]) in self.committed, "matched what was never committed"
        assert lease.matched == lease.hit or not self.cache.layout.is_limited
        self._read(request, lease.matched)
        if lease.checkpoint is not None:
            assert lease.hit == lease.checkpoint.position
            assert (space, keys[: lease.hit]) in self.kept, "hit where no state was ever kept"
            for page in lease.checkpoint.pages.tolist():
                maker, prefix = self.files[page]
                assert prefix == keys[: lease.hit], "the file holds another state"
                if self.cache.policy.exact:
                    assert maker == self._tag(request, lease.hit - 1)[0], f"a state made by {maker}"
                    assert lease.hit % 64 == 0 or lease.hit >= len(request.prompt), "a state off the grid"
        elif self.cache.layout.state_bytes:
            assert lease.hit == 0

    def check(self) -> None:
        audit(self.cache)
        counted = self.cache.counters
        assert counted.queries == counted.hits + self.received + counted.lost.total(), "a prompt token has no reason"
        for _, slots in self.offered:
            assert {slot: self.slots.get(slot) for slot in slots} == slots, "offered pages have changed"

    # -- how it is simulated -------------------------------------------------------------------------------------

    def _tag(self, request: Request, position: int) -> Tag:
        decoded = position >= request.lease.decode_from
        return (request.name if decoded else "prefill", request.keys[: position + 1])

    def _slot(self, lease: SequenceBlocks, position: int, index: int) -> tuple[int, int]:
        """Where the keys and values of a token lie in the pages of group `index`."""
        table = lease.tables[index]
        place = position // table.group.tokens_per_page - table.first_page
        assert place >= 0, f"token {position} of group {table.group.name} has been given up"
        return int(table.pages[place]), position % table.group.tokens_per_page

    def _read(self, request: Request, position: int) -> None:
        """What computing the token at `position` reads of those before it is what was computed for them."""
        for index, group in enumerate(self.cache.layout.groups):
            for token in range(group.needed_at(position), position):
                tag, found = self._tag(request, token), self.slots[self._slot(request.lease, token, index)]
                if self.cache.policy.exact:
                    assert found == tag, f"token {token}: {found[0]}, expected {tag[0]}"
                else:
                    assert found[1] == tag[1], f"token {token} holds another prefix"

    def _release_behind(self, request: Request) -> None:
        """The step has been applied; of a limited reach a sequence holds no more than it is going to read."""
        self.cache.release_behind(request.lease, request.computed)
        for table in request.lease.tables:
            group = table.group
            if group.reach is not None and request.computed == request.lease.num_tokens:
                assert len(table.pages) <= -(-group.reach // group.tokens_per_page) + 2

    def _write(self, request: Request, position: int, *indices: int) -> None:
        for index in indices or range(len(self.cache.layout.groups)):
            self._write_slot(request, position, index)

    def _write_slot(self, request: Request, position: int, index: int) -> None:
        slot = self._slot(request.lease, position, index)
        page = slot[0]
        assert not any(page in hold.pages for hold in self.quarantine), "a page in quarantine has a new owner"
        for other in self.requests:
            if other is not request:
                for at, part in enumerate(other.lease.blocks.upto(other.computed)):
                    taken = {self._slot(other.lease, p, at) for p in range(part.first_token, other.computed)}
                    assert slot not in taken, f"{request.name} writes into a slot of {other.name}"
        assert page not in self.files or self.cache.pool.counts[page] > 0
        self.files.pop(page, None)
        self.slots[slot] = self._tag(request, position)

    def _extend(self, request: Request, num_tokens: int) -> bool:
        copies = self.cache.extend(request.lease, num_tokens)
        if copies is None:
            return False
        self._copy(copies)
        self._hold(request)
        return True

    def _copy(self, copies: list[PageCopy]) -> None:
        for copy in copies:
            for slot in range(self._page_slots):
                if (copy.source, slot) in self.slots:
                    self.slots[(copy.target, slot)] = self.slots[(copy.source, slot)]

    def _fill(self, request: Request, wanted: CheckpointPoint) -> bool:
        pages = self.cache.reserve_checkpoint(request.lease, wanted)
        for page in pages.tolist() if pages is not None else ():
            self._to_file(page, self._tag(request, wanted.position - 1))
        return pages is not None

    @property
    def _page_slots(self) -> int:
        return max((group.tokens_per_page for group in self.cache.layout.groups), default=1)

    def _to_file(self, page: int, tag: Tag) -> None:
        assert not any(page in hold.pages for hold in self.quarantine), "a page in quarantine has a new owner"
        for slot in range(self._page_slots):
            self.slots.pop((page, slot), None)
        self.files[page] = tag

    def _commit(self, request: Request, end: int, kept: list[int]) -> None:
        request.computed = max(request.computed, end)
        self.cache.commit(request.lease, end, kept)
        self._note(request, end, kept)

    def _note(self, request: Request, end: int, kept: list[int]) -> None:
        if self.cache.enabled:
            keys = request.keys
            self.committed.update((request.namespace, keys[:p]) for p in range(1, end + 1))
            self.kept.update((request.namespace, keys[:p]) for p in kept)

    def _hold(self, request: Request) -> None:
        self.step += 1
        self.cache.pin_until(self.step, request.lease)
