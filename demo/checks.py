"""The promises that the demo holds the server to. Each is a line with a verdict."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from demo.job import AGAIN, BRANCHED, ONE_TOKEN, PAIR, Outcome

__all__ = ["SLACK", "Check", "check_default", "check_exact", "check_full_pool"]

SLACK = 63
"""Sharing that ends anywhere is hit at the last multiple of 64 before its end, while memory is idle."""

LEAST_SHARE = 0.8
"""Of what two prompts share without saying so, so much is hit at the second sighting when memory is full."""


@dataclass(frozen=True, slots=True)
class Check:
    """One promise in words, and what speaks against it: nothing, if it was kept."""

    promise: str
    against: tuple[str, ...] = ()

    @property
    def kept(self) -> bool:
        return not self.against


def check_exact(cached: Sequence[Outcome], others: Mapping[str, Sequence[Outcome]]) -> list[Check]:
    """What holds with --exact. `cached`: with the default cache; `others`: the same job by name of the server."""
    checks = [_same_answers(cached, name, outcomes) for name, outcomes in others.items()]
    again, one_token, branched = (_labelled(cached, label) for label in (AGAIN, ONE_TOKEN, BRANCHED))
    length, passes = len(again.reply.prompt_ids), one_token.reply.forward_passes
    least = branched.shared.prompts - SLACK
    return [
        *checks,
        _check(
            f"the second identical prompt of {length:,} tokens has {length:,} cached",
            *_unless(again.reply.cached_tokens == length, f"{again.reply.cached_tokens:,} are"),
        ),
        _check(
            "asked for one token, it is answered without a forward pass",
            *_unless(one_token.reply.cached_tokens == length and passes == 0, f"{passes} were run"),
        ),
        _check(
            f"of {branched.shared.prompts:,} shared tokens at least {least:,} are cached at the second sighting",
            *_unless(branched.reply.cached_tokens >= least, f"{branched.reply.cached_tokens:,} are"),
        ),
        _check(
            f"every request has cached what it shares with an earlier prompt, less {SLACK} tokens at most",
            *(_too_few(outcome, outcome.shared.prompts) for outcome in cached if _misses(outcome, exact=True)),
        ),
    ]


def check_default(outcomes: Sequence[Outcome]) -> list[Check]:
    """What holds without --exact, where computed answers are shared as well."""
    return [
        _check(
            "without --exact the same holds for earlier prompts with their answers",
            *(_too_few(outcome, outcome.shared.paths) for outcome in outcomes if _misses(outcome, exact=False)),
        )
    ]


def check_full_pool(outcomes: Sequence[Outcome]) -> list[Check]:
    """What holds while the pool is full, once the server has seen that prompts share what nobody announces."""
    seconds = [outcome for outcome in outcomes if outcome.label == PAIR]
    few = [outcome for outcome in seconds[1:] if outcome.reply.cached_tokens < LEAST_SHARE * outcome.shared.prompts]
    return [
        _check(
            f"in a full pool {LEAST_SHARE:.0%} at least of what a pair shares are cached at the second sighting, "
            "from the second pair on",
            *(_too_few(outcome, outcome.shared.prompts) for outcome in few),
        )
    ]


def _check(promise: str, *against: str) -> Check:
    return Check(promise, against)


def _unless(holds: bool, against: str) -> tuple[str, ...]:
    return () if holds else (against,)


def _same_answers(cached: Sequence[Outcome], name: str, others: Sequence[Outcome]) -> Check:
    different = [
        f"{ours.part}, {ours.label}"
        for ours, theirs in zip(cached, others, strict=True)
        if (ours.reply.prompt_ids, ours.reply.answer_ids) != (theirs.reply.prompt_ids, theirs.reply.answer_ids)
    ]
    return _check(f"all {len(cached)} answers are identical with '{name}', token for token", *different)


def _misses(outcome: Outcome, exact: bool) -> bool:
    promised = (outcome.shared.prompts if exact else outcome.shared.paths) - SLACK
    # more than was ever computed would be somebody else's tokens
    return not promised <= outcome.reply.cached_tokens <= outcome.shared.paths


def _too_few(outcome: Outcome, shared: int) -> str:
    return f"{outcome.part}, {outcome.label}: {outcome.reply.cached_tokens:,} cached, {shared:,} shared"


def _labelled(outcomes: Sequence[Outcome], label: str) -> Outcome:
    return next(outcome for outcome in outcomes if outcome.label == label)
