"""What would have saved tokens that were not hit: one line for each reason."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from cairn.cache.placement import Auto
from cairn.cache.reasons import Reason
from cairn.step import GRID

if TYPE_CHECKING:
    from cairn.cache.prefix_cache import PrefixCache

_GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class Situation:
    """What a cure depends on. `all_bytes`: a pool that would have kept everything that is still remembered."""

    all_bytes: int
    auto: bool
    exact: bool
    min_shared: int

    @classmethod
    def of(cls, cache: "PrefixCache", dropped_tokens: int, dropped_checkpoints: int) -> "Situation":
        layout, placement = cache.layout, cache.policy.placement
        dropped = layout.pages_for(dropped_tokens) + dropped_checkpoints * layout.pages_per_checkpoint
        return cls(
            all_bytes=(cache.pool.num_pages + dropped) * layout.page_bytes,
            auto=isinstance(placement, Auto),
            exact=cache.policy.exact,
            min_shared=placement.min_shared if placement is not None else GRID,
        )


def cure(reason: Reason, depth: int, situation: Situation) -> str:
    """Advice for tokens lost below token `depth` of a prefix, in a line."""
    match reason:
        case Reason.NO_CHECKPOINT:
            if not situation.auto:
                return "--mamba-cache-mode auto keeps states where prompts part"
            at = depth // GRID * GRID if situation.exact else depth
            return f"a breakpoint (cache_control) at token {at:,}"
        case Reason.EVICTED:
            return f"a pool of about {_gib(situation.all_bytes)} would hold all that is remembered as dropped"
        case Reason.PREEMPTED:
            return "a larger pool (--kv-cache-memory-bytes) or fewer requests at a time (--max-num-seqs)"
        case Reason.IN_PROGRESS:
            return "sending it once the first request with this prefix has been answered"
        case Reason.NAMESPACE:
            return "the same cache_salt, or none: the plain namespace has it"
        case Reason.TOO_SHORT:
            return f"a shared prefix of at least {situation.min_shared:,} tokens"
        case Reason.REMOTE_FAILED:
            return "a transfer that arrives: the log says what failed"
        case Reason.DISABLED:
            return "a prefix cache that is switched on"
        case Reason.NEVER_SEEN | Reason.NONE:
            return "nothing: it is new"


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / _GIB:.1f} GiB" if num_bytes >= _GIB // 10 else f"{num_bytes / (1 << 20):.1f} MiB"
