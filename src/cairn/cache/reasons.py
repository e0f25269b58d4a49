"""Why a prompt's cached part is not longer: a closed list. Each token that was not hit has exactly one reason, and a
request the first of its tokens' reasons."""

from collections.abc import Container
from enum import StrEnum

__all__ = ["Reason", "first_reason"]


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
    NEVER_SEEN = "never_seen"
    """All that was seen before was cached; the rest is new."""


def first_reason(reasons: Container[Reason]) -> Reason:
    """The one that speaks for them all; NONE for none."""
    return next((reason for reason in Reason if reason in reasons), Reason.NONE)
