"""How many prompts may be leased to other servers, in all and for each client: KV exports beyond that are refused. And
those that wait, beside the queue, until the leases leave room for their prompts: in order of turns, and not for ever.

A KV export counts from the moment when it is taken until its lease has ended, so the bounds are never exceeded. A
prompt that was fetched waits for lease room among `Transfers.ready`, in the same order.
"""

from collections import Counter
from collections.abc import Sequence
from itertools import chain

from cairn.errors import InvalidRequest, LeasesFull
from cairn.scheduler.finish import finish
from cairn.scheduler.kv_export import fits_leases, num_pages
from cairn.scheduler.request import Phase, Request, Spec
from cairn.scheduler.state import SchedulerState


def check_quota(state: SchedulerState, specs: Sequence[Spec]) -> None:
    """Whether these requests may come in together. Raises InvalidRequest if they never may, LeasesFull if not now."""
    new = Counter(spec.client for spec in specs if spec.role.kv_export)
    if not new:
        return
    quota = state.transfers.quota
    open_now = _num_by_client(state)
    for client, count in new.items():
        if count > quota.max_leases_per_client:
            raise InvalidRequest(
                f"{count} prompts for other servers are more than one client may have held for it "
                f"(max_leases_per_client {quota.max_leases_per_client}): send fewer prompts at a time",
                "prompt",
            )
        if open_now[client] + count > quota.max_leases_per_client:
            state.counters.refused_kv_exports["client"] += 1
            raise LeasesFull(
                f"{open_now[client]} prompts of this client are held for other servers, or are going to be "
                f"(max_leases_per_client {quota.max_leases_per_client}): fetch them, or try again later"
            )
    total, most = new.total(), quota.max_leases
    if total > most:
        raise InvalidRequest(
            f"{total} prompts for other servers are more than may be held for them (max_leases {most}): send fewer "
            "prompts at a time",
            "prompt",
        )
    if (held := state.num_leases) + total > most:
        state.counters.refused_kv_exports["total"] += 1
        raise LeasesFull(
            f"{held} prompts are held for other servers, or are going to be (max_leases {most}): try again later"
        )


def _num_by_client(state: SchedulerState) -> Counter[str]:
    counts = Counter(request.spec.client for request in state.requests.values() if request.is_to_be_leased)
    counts.update(leased.client for leased in state.transfers.offers.values() if leased.client is not None)
    return counts


def wait_for_lease_room(state: SchedulerState, request: Request) -> None:
    """The leases leave no room for `request`, or are first to have room for one before it."""
    if request.transfer.no_lease_room_since is None:
        _set_since(state, request, state.clock.now())


def reject_overdue(state: SchedulerState) -> list[Request]:
    """End the KV exports that have waited for lease room for too long. Returns them."""
    ready = (request for request in state.transfers.ready if request.transfer.no_lease_room_since is not None)
    waiting = list(chain(state.waiting.kv_exports, ready))
    limit = state.transfers.quota.wait_seconds
    overdue = [
        request for request in waiting if state.clock.now() - (request.transfer.no_lease_room_since or 0.0) >= limit
    ]
    if not overdue:
        return []
    reserved_pages = 0
    for request in sorted(waiting, key=lambda request: request.sort_key):
        if not fits_leases(state, request, reserved_pages):
            break
        # slots or pages are what it waits for by now, as all others do
        _set_since(state, request, None)
        reserved_pages += num_pages(state, request)
    overdue = [request for request in overdue if request.transfer.no_lease_room_since is not None]
    for request in overdue:
        request.outcome.failure = (
            f"what is held for other servers has left no room for this prompt for {limit:g} s: try again later"
        )
        request.outcome.refused = True
        state.counters.refused_kv_exports["timeout"] += 1
        finish(state, request, "error")
    return overdue


def _set_since(state: SchedulerState, request: Request, since: float | None) -> None:
    if request.phase is Phase.WAITING:
        state.waiting.set_no_lease_room(request, since)
    else:
        request.transfer.no_lease_room_since = since
