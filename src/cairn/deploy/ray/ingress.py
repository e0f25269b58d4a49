"""The ingress deployment: what Ray's HTTP proxy hands requests to."""

import logging
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from ray.serve.handle import DeploymentHandle
from starlette.types import ASGIApp

from cairn.cli.run import start_log
from cairn.deploy.ray.fleet_metrics import FleetMetrics
from cairn.deploy.ray.handles import HandleReplicas
from cairn.deploy.ray.prompts import PromptReader, create_prompt_reader
from cairn.deploy.ray.relay import RequestRelay
from cairn.deploy.ray.replica_calls import RelayLimits
from cairn.deploy.ray.replica_metrics import ReplicaMetrics
from cairn.deploy.ray.route_prefix import RoutePrefix
from cairn.deploy.ray.settings import RaySettings, load_ray_settings
from cairn.errors import CairnError
from cairn.http.application import ROOT_PATH
from cairn.http.middleware import ApiKey
from cairn.proxy.server_pool import Headers
from cairn.routing.rule import RoutedRequest
from cairn.server.app import find_open_paths

logger = logging.getLogger(__name__)


def find_guard(settings: RaySettings) -> Callable[[ASGIApp], ASGIApp] | None:
    """What refuses strangers, who then neither wake a replica nor have their prompts read. None where all are welcome,
    and where a replica has to do it, since browsers want its CORS headers with every answer."""
    if not settings.api_key or settings.allowed_origins is not None:
        return None
    return partial(ApiKey, api_keys=settings.api_key, open_paths={*find_open_paths(settings), ROOT_PATH})


class Ingress:
    """Ray Serve makes one for each replica of this deployment. It calls no replica before the first request."""

    def __init__(self, args: Mapping[str, Any], replicas: DeploymentHandle, prefill: DeploymentHandle | None) -> None:
        settings = load_ray_settings(args)
        start_log(settings.log_level)
        limits = RelayLimits(
            settings.max_attempts,
            int(settings.max_body_bytes),
            settings.replica_timeout,
            answer_seconds=settings.request_timeout,
        )
        pool = None if prefill is None else HandleReplicas(prefill)
        relay = RequestRelay(HandleReplicas(replicas), limits, self._read_prompt, pool, find_guard(settings))
        metrics = ReplicaMetrics(replicas) if prefill is None else ReplicaMetrics(replicas, prefill)
        self._app = RoutePrefix(FleetMetrics(relay, metrics))
        self._reader: PromptReader | None = None
        try:
            self._reader = create_prompt_reader(settings)
        except CairnError as error:
            logger.warning("requests are routed by load alone: their prompts cannot be read here: %s", error)

    async def _read_prompt(self, path: str, content: bytes, headers: Headers) -> RoutedRequest:
        return RoutedRequest() if self._reader is None else await self._reader.read(path, content, headers)

    async def __serve_build_asgi_app__(self) -> ASGIApp:
        return self._app
