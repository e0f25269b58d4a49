"""How many prompts may be leased to other servers, in all and for each client: hand-overs beyond that are refused.

A hand-over counts from the moment when it is taken until its lease has ended, so the bounds are never exceeded.
"""

from collections import Counter
from collections.abc import Sequence

from cairn.errors import InvalidRequest, QueueFull
from cairn.scheduler.books import Books
from cairn.scheduler.request import Request, Spec


def num_leases(books: Books) -> int:
    """Prompts that are leased, or are going to be."""
    return len(books.transfers.offers) + sum(_counts(request) for request in books.requests.values())


def check_quota(books: Books, specs: Sequence[Spec]) -> None:
    """Whether these requests may come in together. Raises InvalidRequest if they never may, QueueFull if not now."""
    new = Counter(spec.client for spec in specs if spec.hand_over)
    if not new:
        return
    quota = books.transfers.quota
    open_now = _num_by_client(books)
    for client, count in new.items():
        if count > quota.max_leases_per_client:
            raise InvalidRequest(
                f"{count} prompts for other servers are more than one client may have held for it "
                f"(max_leases_per_client {quota.max_leases_per_client}): send fewer prompts at a time",
                "prompt",
            )
        if open_now[client] + count > quota.max_leases_per_client:
            books.counters.refused_hand_overs["client"] += 1
            raise QueueFull(
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
    if (held := num_leases(books)) + total > most:
        books.counters.refused_hand_overs["total"] += 1
        raise QueueFull(
            f"{held} prompts are held for other servers, or are going to be (max_leases {most}): try again later"
        )


def _num_by_client(books: Books) -> Counter[str]:
    counts = Counter(request.spec.client for request in books.requests.values() if _counts(request))
    counts.update(leased.client for leased in books.transfers.offers.values() if leased.client is not None)
    return counts


def _counts(request: Request) -> bool:
    """Whether it is going to be leased: once it is, the lease counts."""
    return request.spec.hand_over and request.transfer.offered is None
