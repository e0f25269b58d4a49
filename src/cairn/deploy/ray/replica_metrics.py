"""The metrics of all replicas, asked for through a Ray Serve handle."""

import asyncio
import logging

from ray.serve.exceptions import DeploymentUnavailableError
from ray.serve.handle import DeploymentHandle

from cairn.errors import Overloaded

_SECONDS = 8.0
"""Less than Prometheus waits, and more than a server gives its engine."""

logger = logging.getLogger(__name__)


class ReplicaMetrics:
    """Asks the replicas behind `handles`. It wakes none: where there is no replica, there are no metrics."""

    def __init__(self, *handles: DeploymentHandle) -> None:
        self._handles = handles

    async def __call__(self) -> dict[str, str]:
        """By its name, what each replica tells. Those that fail are left out. Raises Overloaded when one does not
        answer in time."""
        told = await asyncio.gather(*map(_ask_all, self._handles))
        return {name: text for one in told for name, text in one.items()}


async def _ask_all(handle: DeploymentHandle) -> dict[str, str]:
    try:
        told = await handle.broadcast("get_metrics").results_async(timeout_s=_SECONDS, return_exceptions=True)
    except DeploymentUnavailableError:
        return {}
    except TimeoutError:
        text = f"a replica has not told its metrics within {_SECONDS:g} s: try again later"
        raise Overloaded(text) from None
    for error in told:
        if isinstance(error, BaseException):
            logger.warning("a replica has not told its metrics: %s", str(error).strip().partition("\n")[0])
    return dict(one for one in told if not isinstance(one, BaseException))
