"""The metrics of all replicas, asked for through a Ray Serve handle."""

import asyncio

from ray.serve.exceptions import DeploymentUnavailableError
from ray.serve.handle import DeploymentHandle

from cairn.deploy.ray.fleet_metrics import ReplicaNames, gather_expositions

_REACH_SECONDS = 2.0
_ANSWER_SECONDS = 6.0
"""More than a server gives its engine: a long step is no failure. Both together are less than Prometheus waits."""


class ReplicaMetrics:
    """Asks the replicas behind `handles`. It wakes none: where there is no replica, there are no metrics."""

    def __init__(self, *handles: DeploymentHandle) -> None:
        self._pools = [(handle, ReplicaNames()) for handle in handles]

    async def __call__(self) -> dict[str, str | None]:
        """Each replica's exposition by its name; None for one that has failed, or has not answered in time."""
        pools = await asyncio.gather(*(_ask_all(handle, names) for handle, names in self._pools))
        return {name: text for pool in pools for name, text in pool.items()}


async def _ask_all(handle: DeploymentHandle, names: ReplicaNames) -> dict[str, str | None]:
    try:
        # Ray's public way to the results waits for all of them, and has none when one is late
        results = await asyncio.wait_for(handle.broadcast("get_metrics")._fetch_replica_results_async(), _REACH_SECONDS)
    except (DeploymentUnavailableError, TimeoutError):
        return {}
    expositions = await gather_expositions([result.get_async() for result in results], _ANSWER_SECONDS)
    return names.add_missing(expositions, len(results))
