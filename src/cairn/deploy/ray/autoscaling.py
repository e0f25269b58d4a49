"""How many replicas there should be: by the engines' own queues and pools, not by requests at a proxy."""

import math
from typing import Any

from cairn.engine.contract import EngineStats

PRESSURE = "pressure"
"""The metric of a replica that the policy reads."""


def engine_pressure(stats: EngineStats, max_num_seqs: int) -> float:
    """1 where an engine is as full as it can be without a queue: all places taken, or all pages held. More with a
    queue."""
    return max((stats.num_running + stats.num_waiting) / max_num_seqs, stats.pool.usage)


class PressurePolicy:
    """Ray Serve's autoscaling policy: as many replicas as keep the mean pressure at `target_pressure`.

    Bounds, delays and the start from zero, which a request brings about, are Ray's.
    """

    def __init__(self, target_pressure: float) -> None:
        self._target_pressure = target_pressure

    def __call__(self, context: Any) -> tuple[float, dict[str, Any]]:
        """`context`: Ray's AutoscalingContext. No replica is given up while requests are open in the last one."""
        pressures = (context.aggregated_metrics or {}).get(PRESSURE, {})
        wanted = math.ceil(round(sum(pressures.values()) / self._target_pressure, 6))
        if context.total_num_requests > 0:
            wanted = max(1, wanted)
        # one that has not told anything yet has just been started
        num_silent = len([name for name in context.running_replicas if name not in pressures])
        if wanted and num_silent:
            wanted = max(wanted, context.target_num_replicas)
        return wanted, {}
