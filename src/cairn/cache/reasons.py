"""Why a prompt's cached part is not longer: a closed list, and a hint for each reason. Each token that was not hit has
exactly one reason, and a request the first of its tokens' reasons."""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from cairn.step import GRID

__all__ = ["HintFacts", "Reason", "first_reason", "hint"]

_GIB = 1 << 30


class Reason(StrEnum):
    """A request is given the first of these that has cost it tokens."""

    NONE = "none"
    """The whole prompt was cached."""
    DISABLED = "disabled"
    """Prefix caching is off, for the server or for this request."""
    PREEMPTED = "preempted"
    """A checkpoint is missing because its request was preempted before it could be kept."""
    TOO_SHORT = "too_short"
    """What is shared is shorter than the smallest prefix that the placement policy keeps."""
    EVICTED = "evicted"
    """More had been cached, and was dropped for want of memory."""
    IN_PROGRESS = "in_progress"
    """A request that is still running has more of this prompt, but has not got to a checkpoint yet."""
    NO_CHECKPOINT = "no_checkpoint"
    """Keys and values match further, but no usable state was kept there."""
    NAMESPACE = "namespace"
    """The prompt is known without its `cache_salt`; entries of other salts are never looked at."""
    REMOTE_FAILED = "remote_failed"
    """Another server had more, and the transfer failed."""
    TIER_FAILED = "tier_failed"
    """This server's host memory or disk had more, and it could not be read, or not in time."""
    TIER_SLOW = "tier_slow"
    """This server's host memory or disk had more, and computing it was to take less time than reading it."""
    REWRITTEN = "rewritten"
    """It stands where an earlier request's answer was computed, and is not that answer."""
    NEVER_SEEN = "never_seen"
    """All that was seen before was cached; the rest is new."""


_ORDER = tuple(Reason)


def first_reason(reasons: Iterable[Reason]) -> Reason:
    """The first of `Reason` that is in `reasons`; NONE if none is."""
    return min(reasons, key=_ORDER.index, default=Reason.NONE)


@dataclass(frozen=True, slots=True)
class HintFacts:
    """What a hint depends on. `all_bytes`: bytes of a pool that would have kept all that is still remembered. `auto`:
    the placement mode is `auto`. `min_shared`: the shortest shared prefix that can be hit, in tokens."""

    all_bytes: int
    auto: bool
    exact: bool
    min_shared: int


def hint(reason: Reason, depth: int, facts: HintFacts) -> str:
    """What would have saved the tokens that were lost below token `depth` of a prefix, in one line."""
    match reason:
        case Reason.NO_CHECKPOINT:
            if not facts.auto:
                return "--mamba-cache-mode auto keeps states where prompts part"
            at = depth // GRID * GRID if facts.exact else depth
            return f"a breakpoint (cache_control) at token {at:,}"
        case Reason.EVICTED:
            pool = f"a pool of about {_gib(facts.all_bytes)} would hold all that is remembered as dropped"
            return f"{pool}, or a tier below it (--host-cache-bytes, --disk-cache)"
        case Reason.PREEMPTED:
            return "a larger pool (--kv-cache-memory-bytes) or fewer requests at a time (--max-num-seqs)"
        case Reason.IN_PROGRESS:
            return "sending it once the first request with this prefix has been answered"
        case Reason.NAMESPACE:
            return "the same cache_salt, or none: the plain namespace has it"
        case Reason.TOO_SHORT:
            return f"a shared prefix of at least {facts.min_shared:,} tokens"
        case Reason.REMOTE_FAILED:
            return "a transfer that arrives: the log says what failed"
        case Reason.TIER_FAILED:
            return "a disk that answers in time: cairn:tier_drops_total says what could not be read"
        case Reason.TIER_SLOW:
            return "a faster disk, or more of it in host memory (--host-cache-bytes)"
        case Reason.DISABLED:
            return "a prefix cache that is switched on"
        case Reason.REWRITTEN:
            return (
                "the answer sent back as it came, reasoning_content included, and a template that keeps it"
                " (some need chat_template_kwargs: preserve_thinking)"
            )
        case Reason.NEVER_SEEN | Reason.NONE:
            return "nothing: it is new"


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / _GIB:.1f} GiB" if num_bytes >= _GIB // 10 else f"{num_bytes / (1 << 20):.1f} MiB"
