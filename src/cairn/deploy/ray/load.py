"""What a replica tells routers of itself, about once a second: plain values, as Ray passes them on."""

from typing import Any

import msgspec

from cairn.engine.contract import EngineStats, KvEventsConfig
from cairn.routing.rule import ReplicaLoad


class ReplicaReport(msgspec.Struct, frozen=True, kw_only=True):
    """`events_endpoint`, `replay_endpoint`: of its KV events, None where it publishes none."""

    num_running: int = 0
    num_waiting: int = 0
    pending_tokens: int = 0
    free_share: float = 0.0
    events_endpoint: str | None = None
    replay_endpoint: str | None = None
    topic: str = ""

    def load(self, own_tokens: int = 0) -> ReplicaLoad:
        """`own_tokens`: pending ones that the rule counts itself, which knows sooner when they are over."""
        return ReplicaLoad(
            num_running=self.num_running,
            num_waiting=self.num_waiting,
            pending_tokens=max(0, self.pending_tokens - own_tokens),
            free_share=self.free_share,
        )


def make_report(stats: EngineStats, events: KvEventsConfig | None) -> dict[str, Any]:
    """For `parse_report`."""
    pool = stats.pool
    report = ReplicaReport(
        num_running=stats.num_running,
        num_waiting=stats.num_waiting,
        pending_tokens=stats.pending_prefill_tokens,
        free_share=round(pool.free_pages / pool.num_pages, 3) if pool.num_pages else 0.0,
        events_endpoint=None if events is None else events.endpoint,
        replay_endpoint=None if events is None else events.replay_endpoint,
        topic="" if events is None else events.topic,
    )
    found: dict[str, Any] = msgspec.to_builtins(report)
    return found


def parse_report(stats: dict[str, Any]) -> ReplicaReport:
    """An empty one for what is no report: a replica tells its first one only some time after its start."""
    try:
        return msgspec.convert(stats, ReplicaReport)
    except msgspec.ValidationError:
        return ReplicaReport()
