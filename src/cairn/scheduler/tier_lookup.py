"""What another server asks for by content and a tier of this one has: read up into the pool, and offered from there.

asked     the tiers look, in another thread, whether they have more of it than the pool
reading   into pages of a sequence that nobody runs; it enters the tree as what requests fetch does
answered  with what the pool has by then, also where reading was given up

A read takes pages that no waiting request lacks, and is over before the other server gives up.
"""

from cairn.cache.sequence_blocks import Namespace
from cairn.scheduler.page_source import FetchRequest, open_target
from cairn.scheduler.state import SchedulerState
from cairn.scheduler.transfers import FetchKey, OpenLookup
from cairn.transfer.contract import ContentName, LookupRequest, PullEnded
from cairn.types import Keys, RequestId

MAX_READS = 4
"""Lookups that tiers are asked for at a time: others are answered from the pool."""

READ_SECONDS = 1.5
"""After which an answer has to go out: `producer.LOOKUP_SECONDS`, less what that takes."""


def ask_tiers(state: SchedulerState, request: LookupRequest, name: ContentName, keys: Keys) -> bool:
    """Whether tiers are asked for what they have of `keys`: then `advance_lookups` says when the request is to be
    answered."""
    transfers = state.transfers
    if len(transfers.lookups) >= MAX_READS:
        return False
    wanted = FetchRequest(RequestId(f"lookup {request.lookup}"), name, keys)
    for source in transfers.sources:
        if source is not transfers.peers and source.may_have(wanted):
            deadline = state.clock.now() + READ_SECONDS
            transfers.lookups.append(OpenLookup(request, wanted, source, deadline))
            return True
    return False


def advance_lookups(state: SchedulerState) -> list[OpenLookup]:
    """Begin what may be read, give up what takes too long. Returns the lookups that are over: to be answered."""
    transfers, now, ended = state.transfers, state.clock.now(), list[OpenLookup]()
    for lookup in transfers.lookups:
        if lookup.target is None and lookup.source.is_ready(lookup.wanted):
            lookup.is_over = not _start_read(state, lookup)
        elif not lookup.is_over and now >= lookup.deadline:
            _give_up(state, lookup)
        if lookup.is_over:
            ended.append(lookup)
    transfers.lookups = [lookup for lookup in transfers.lookups if not lookup.is_over]
    return ended


def finish_read(state: SchedulerState, key: FetchKey, ended: PullEnded) -> None:
    """Take in what a source has brought for a lookup, if that is what it has brought it for."""
    lookup = next((each for each in state.transfers.lookups if each.key == key), None)
    if lookup is None or lookup.is_over:
        return
    assert lookup.sequence is not None and lookup.target is not None
    cache, sequence, length = state.cache, lookup.sequence, len(lookup.wanted.keys)
    lookup.is_over = True
    if ended.failure is not None:
        state.quarantine(key, lookup.target)
    else:
        position = ended.resume_position(length, cache.layout.resumes_anywhere)
        if position > sequence.hit:
            cache.receive(sequence, ended.position, length, position)
    cache.release(sequence)


def _start_read(state: SchedulerState, lookup: OpenLookup) -> bool:
    """False where tiers have no more than the pool, where computing takes less, or where others need the room."""
    cache, wanted, length = state.cache, lookup.wanted, len(lookup.wanted.keys)
    namespace = Namespace(wanted.name.adapter, wanted.name.salt)
    sequence = cache.lookup(namespace, wanted.keys, wanted.request_id, probe=True)
    plan = lookup.source.plan(wanted, sequence)
    seconds_per_token = state.transfers.prefill_speed.seconds_per_token
    pays = plan is not None and plan.seconds < min(READ_SECONDS, (plan.position - sequence.hit) * seconds_per_token)
    if plan is not None and pays and not state.waiting.plain:
        opened = open_target(cache, sequence, plan, length)
        if opened is not None:
            lookup.sequence, lookup.target = sequence, opened[0]
            lookup.key = lookup.source, lookup.source.start(wanted, lookup.target)
            return True
    cache.discard(sequence)
    lookup.source.decline(wanted)
    return False


def _give_up(state: SchedulerState, lookup: OpenLookup) -> None:
    lookup.is_over = True
    if lookup.key is None:
        lookup.source.decline(lookup.wanted)
        return
    assert lookup.sequence is not None and lookup.target is not None
    state.quarantine(lookup.key, lookup.target)
    state.cache.release(lookup.sequence)
    lookup.source.abort(lookup.key[1])
