"""Whoever can bring pages of a waiting request's prompt from elsewhere: `fetch` decides which source brings what.

plan     what a source would bring of a prompt, beyond what is cached here
start    the source begins to write into the target's pages
events   what has come, what has failed, and which targets nothing is written to any more
"""

from dataclasses import dataclass
from typing import Protocol

from cairn.cache.group_pages import GroupPages
from cairn.cache.prefix_cache import PrefixCache
from cairn.cache.sequence_blocks import SequenceBlocks
from cairn.step import PageCopy
from cairn.transfer.contract import ContentName, KvSource, PagesFree, PullEnded, PullId
from cairn.types import Keys, Pages, RequestId


@dataclass(frozen=True, slots=True, eq=False)
class FetchRequest:
    """A waiting request, as sources see it: the prompt's content is `keys` under `name`. `peer`: the server that its
    client says may have it."""

    request_id: RequestId
    name: ContentName
    keys: Keys
    peer: KvSource | None = None


@dataclass(frozen=True, slots=True)
class FetchPlan:
    """What a source would bring: the first `position` tokens of the prompt, at most, could be used after `num_bytes`
    bytes have been moved, which takes about `seconds`. `promised`: the source has told whoever sent the request that it
    has them, so that not to bring them is a failure. `origin`: where they are, for messages. `is_local`: this server
    has computed them, or another one of this machine that shares its memory or disk."""

    position: int
    num_bytes: int
    seconds: float
    promised: bool = False
    origin: str = ""
    is_local: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class FetchTarget:
    """Where to: `pages`, per attention group, for the tokens that are not here, to the prompt's end; from the first
    token on of the page that holds the first of them, and none where all are here. Of groups of limited reach those
    within reach of where the request is going to go on, where that is certain. `state_pages`: for the state at the end
    of what comes."""

    pages: tuple[GroupPages, ...]
    state_pages: Pages


def open_target(
    cache: PrefixCache, sequence: SequenceBlocks, plan: FetchPlan, length: int, reserved_pages: int = 0
) -> tuple[FetchTarget, list[PageCopy]] | None:
    """Pages for what `sequence`, which has only been looked up, lacks of a prompt of `length` tokens, and for the state
    at its end; and the page copies to be made first, should less come than is here. None if there is no room for them
    and for `reserved_pages` that others are going to need: then the sequence is of no use any more."""
    if plan.promised or plan.is_local:
        cache.expect(sequence, plan.position)
    if not cache.could_extend(sequence, length, num_states=1, reserved_pages=reserved_pages):
        return None
    cache.explain(sequence)
    copies = cache.extend(sequence, length)
    state_pages = cache.force_checkpoint(sequence, length) if copies is not None else None
    if copies is None or state_pages is None:
        return None
    return FetchTarget(sequence.blocks.span_to_fill(sequence.matched, length), state_pages), copies


FetchEvent = PullEnded | PagesFree


class PageSource(Protocol):
    """No method waits. Called by the scheduler's thread alone."""

    @property
    def is_busy(self) -> bool:
        """Whether a request for which it is not ready is going to be ready by itself."""

    def may_have(self, request: FetchRequest) -> bool:
        """Whether it is worth asking for a plan, in O(1): called when the request is submitted."""

    def is_ready(self, request: FetchRequest) -> bool:
        """Whether it knows by now what it would bring: not before that it is asked for a plan. In O(1)."""

    def plan(self, request: FetchRequest, sequence: SequenceBlocks) -> FetchPlan | None:
        """What it would bring of the prompt beyond `sequence`, which has been looked up; None: nothing."""

    def start(self, request: FetchRequest, target: FetchTarget) -> PullId:
        """Begin a fetch, by a number of this source's own. It ends in exactly one `PullEnded` and one `PagesFree`,
        also when it is aborted."""

    def abort(self, pull: PullId) -> None:
        """Nobody waits for it any more. Its `PagesFree` may come much later. Does nothing for ended ones."""

    def decline(self, request: FetchRequest) -> None:
        """Nothing is wanted of it for this request, for which it has started no fetch."""

    def events(self) -> list[FetchEvent]:
        """Events since the last call, in order."""


class PageSink(Protocol):
    """Whoever copies cached pages to somewhere else. No method waits; called by the scheduler's thread alone."""

    @property
    def num_pins(self) -> int:
        """Pins of pages that are being copied, which end by themselves."""

    def poll(self) -> bool:
        """Between steps: unpin what has been copied, and go on. Whether anything was unpinned."""
