"""What a replica tells routers of itself, about once a second: plain values, as Ray passes them on."""

from typing import Annotated, Any

import msgspec

from cairn.engine.contract import EngineStats, KvEventsConfig
from cairn.routing.rule import ReplicaLoad

_Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 40)]
_Endpoint = Annotated[str, msgspec.Meta(max_length=256)]


class ReplicaReport(msgspec.Struct, frozen=True, kw_only=True):
    """`events_endpoint`, `replay_endpoint`: of its KV events, None where it publishes none."""

    num_running: _Count = 0
    num_waiting: _Count = 0
    pending_tokens: _Count = 0
    free_share: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.0
    events_endpoint: _Endpoint | None = None
    replay_endpoint: _Endpoint | None = None
    topic: _Endpoint = ""

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
    encoded: dict[str, Any] = msgspec.to_builtins(report)
    return encoded


def parse_report(stats: dict[str, Any]) -> ReplicaReport:
    """An empty one for what is no report: a replica tells its first one only some time after its start."""
    try:
        return msgspec.convert(stats, ReplicaReport)
    except msgspec.ValidationError:
        return ReplicaReport()
