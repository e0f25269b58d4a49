"""Where one transfer is, from the consumer's side, and how long it may stay there.

    RESOLVING -> HANDSHAKING -> CLAIMING -> READING -> CONFIRMING -> DONE
                      |             +---- nothing to read ---^
                      +---- only a release ---------------------------^
    any of them -> FAILED            nothing can arrive any more
    READING     -> ABANDONED         a late write may still come: the pages stay in quarantine
    ABANDONED   -> FAILED            the link says that none will

The outcome is known in DONE, FAILED and ABANDONED. Every state but ABANDONED has a deadline, and ABANDONED makes
nobody wait. What was read may be used in DONE alone: P has then said that its lease never lapsed before the last
byte had arrived.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType


class PullState(Enum):
    """Where a transfer is, and what is true there."""

    RESOLVING = "resolving"
    """Nothing was sent; the host has not been checked."""
    HANDSHAKING = "handshaking"
    """The peer may be spoken to; it has not proved itself."""
    CLAIMING = "claiming"
    """The claim is out; the lease may be ours or not."""
    READING = "reading"
    """The lease is ours; bytes arrive in the wanted pages."""
    CONFIRMING = "confirming"
    """All bytes are there; whether they are the right ones is not known."""
    DONE = "done"
    """They are. The pages are their owner's."""
    FAILED = "failed"
    """Nothing may be used. The pages are their owner's."""
    ABANDONED = "abandoned"
    """Nothing may be used, and bytes may still arrive: the pages are nobody's."""


TRANSITIONS: Mapping[PullState, frozenset[PullState]] = MappingProxyType(
    {
        PullState.RESOLVING: frozenset({PullState.HANDSHAKING, PullState.FAILED}),
        PullState.HANDSHAKING: frozenset({PullState.CLAIMING, PullState.DONE, PullState.FAILED}),
        PullState.CLAIMING: frozenset({PullState.READING, PullState.CONFIRMING, PullState.FAILED}),
        PullState.READING: frozenset({PullState.CONFIRMING, PullState.FAILED, PullState.ABANDONED}),
        PullState.CONFIRMING: frozenset({PullState.DONE, PullState.FAILED}),
        PullState.ABANDONED: frozenset({PullState.FAILED}),
        PullState.DONE: frozenset(),
        PullState.FAILED: frozenset(),
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PullLimits:
    """Times in seconds: how long an answer may take, how long a read, how often something is said again, and how long a
    peer that did not answer is not asked again."""

    answer: float = 5.0
    read: float = 30.0
    repeat: float = 0.5
    heartbeat: float = 5.0
    retry_silent: float = 10.0
