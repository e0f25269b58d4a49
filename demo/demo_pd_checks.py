"""The promises that the demo holds a pair of servers to."""

from collections.abc import Sequence

from demo.checks import Check
from demo.demo_pd_job import AGAIN, LONELY, Asked, Pages

__all__ = ["check_pair", "check_same_answers"]


def check_same_answers(pair: Sequence[Asked], lone: Sequence[Asked]) -> Check:
    """With --exact: P and D are one server of their size, bit for bit."""
    different = [
        ours.label
        for ours, theirs in zip(pair, lone, strict=True)
        if (ours.prompt_ids, ours.answer_ids) != (theirs.prompt_ids, theirs.answer_ids)
    ]
    return Check(f"all {len(pair)} answers are those of a lone server, token for token", tuple(different))


def check_pair(asked: Sequence[Asked], pages: Pages, *, exact: bool) -> list[Check]:
    """What one run of the conversation must show. With --exact, computed answers are not shared."""
    again, lonely = (_labelled(asked, label) for label in (AGAIN, LONELY))
    served = [one for one in asked if one is not lonely]
    later = [one for one in served if one is not again]
    length = len(again.prompt_ids)
    checks = [
        Check(
            f"the second send of {length:,} tokens finds all of them on D, and nothing is moved",
            () if (again.hit, again.pulled, again.computed) == (length, 0, 0) else (_facts(again),),
        ),
        Check(
            "while P is there, D computes no token of a prompt",
            tuple(_facts(one) for one in served if one.computed or one.hit + one.received < len(one.prompt_ids)),
        ),
        Check(
            "D pulls no more than the pages of what is new to it, and one checkpoint",
            tuple(_facts(one) for one in later if not 0 < one.pulled <= due(one, pages, exact=exact)),
        ),
        Check(
            "with P killed, the request is answered all the same: D computes what it lacks",
            () if lonely.answer_ids and lonely.computed and not lonely.received else (_facts(lonely),),
        ),
    ]
    return checks if exact else [*checks, _check_back(later[1:], pages)]


def due(asked: Asked, pages: Pages, *, exact: bool) -> int:
    """Bytes that D may pull: what was neither in an earlier prompt nor, without --exact, in a computed answer."""
    return pages.num_bytes(asked.shared.prompts if exact else asked.shared.paths, len(asked.prompt_ids))


def due_back(asked: Asked, pages: Pages) -> int:
    """Bytes that P may pull: the answer that D computed."""
    return pages.num_bytes(asked.shared.prompts, asked.shared.paths)


def _check_back(turns: Sequence[Asked], pages: Pages) -> Check:
    return Check(
        "P pulls D's answer before the next turn: no more than its pages, and one checkpoint",
        tuple(_facts(one) for one in turns if not 0 < one.pulled_back <= due_back(one, pages)),
    )


def _facts(asked: Asked) -> str:
    return (
        f"{asked.label}: {len(asked.prompt_ids):,} tokens, {asked.shared.paths:,} shared; D had {asked.hit:,}, "
        f"received {asked.received:,}, computed {asked.computed:,}; {asked.pulled:,} bytes to D, "
        f"{asked.pulled_back:,} to P"
    )


def _labelled(asked: Sequence[Asked], label: str) -> Asked:
    return next(one for one in asked if one.label == label)
