"""A replica: an actor with one engine, whose process is its child, and the server's application around it."""

import json
import logging
from collections.abc import AsyncGenerator, Mapping
from contextlib import ExitStack
from typing import Any

import ray
from ray import serve
from starlette.types import ASGIApp
from uvicorn.middleware.proxy_headers import ProxyHeadersMiddleware

from cairn.addresses import join_host_port
from cairn.cli.run import engine_config, find_served_model, load_model_tokenizer, prepare_server, start_log, warn
from cairn.deploy.ray.autoscaling import PRESSURE, engine_pressure
from cairn.deploy.ray.exchange import AnswerHead, AsgiExchange, RelayedRequest
from cairn.deploy.ray.load import make_report
from cairn.deploy.ray.settings import RaySettings, load_ray_settings
from cairn.deploy.ray.start_failures import start_failure
from cairn.engine.contract import EngineClient
from cairn.errors import CairnError, EngineDead
from cairn.http.web_server import create_server_socket, parse_trusted_proxies, raise_descriptor_limit, trusted_hosts
from cairn.server.app import create_app
from cairn.server.images import MediaConnector
from cairn.server.service import Service
from cairn.server.stat_logger import format_startup_lines
from cairn.settings.kv import free_side_channel_port

logger = logging.getLogger(__name__)


class EngineReplica:
    """Ray Serve makes one for each replica of the deployment, and calls its methods."""

    async def __init__(self, args: Mapping[str, Any], core: str) -> None:  # type: ignore[misc]
        """`args`: see `load_ray_settings`; `core`: the engine's builder. Raises what keeps the engine from starting,
        which Ray shows."""
        settings = load_ray_settings(args)
        start_log(settings.log_level)
        try:
            await self._start(settings, core)
        except CairnError as error:
            logger.error("this replica cannot start: %s", error)
            raise start_failure(error) from None

    async def _start(self, settings: RaySettings, core: str) -> None:
        raise_descriptor_limit()
        warn(settings)
        trusted = parse_trusted_proxies(settings.forwarded_allow_ips)
        free_side_channel_port()
        settings = with_kv_events(settings, ray.util.get_node_ip_address())
        self._events = engine_config(settings).kv_events
        setup = prepare_server(settings, core, load_model_tokenizer, find_served_model)
        self._engine: EngineClient = setup.create_engine()
        await self._engine.start()
        for line in format_startup_lines(self._engine.info):
            logger.info(line)
        self._service = Service(
            self._engine,
            settings,
            setup.limits,
            images=MediaConnector(setup.limits.images),
            default_sampling=setup.default_sampling,
            default_template_kwargs=setup.default_template_kwargs,
            secret=setup.secret,
        )
        app = create_app(self._service)
        self._living = app.router.lifespan_context(app)
        await self._living.__aenter__()
        self._app: ASGIApp = ProxyHeadersMiddleware(app, trusted_hosts(trusted))  # type: ignore[arg-type, assignment]

    async def answer(self, request: RelayedRequest, hint: object) -> AsyncGenerator[AnswerHead | bytes, None]:
        """An AnswerHead, then bytes of the body as they come. `hint`: the router's, empty here."""
        async for item in AsgiExchange(self._app, request).run():
            yield item

    async def get_metrics(self) -> tuple[str, str]:
        """This replica's name, and what its server tells at /metrics."""
        exposition = self._service.metrics.exposition(await self._service.queries.get_stats())
        return serve.get_replica_context().replica_id.unique_id, exposition.decode()

    async def record_routing_stats(self) -> dict[str, Any]:
        """For the routers: see `ReplicaReport`."""
        return make_report(await self._service.queries.get_stats(), self._events)

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """For the autoscaler: see `PressurePolicy`."""
        return {PRESSURE: engine_pressure(await self._service.queries.get_stats(), self._engine.info.max_num_seqs)}

    async def check_health(self) -> None:
        """Raises EngineDead when the engine has ended: Ray then replaces this replica."""
        if self._engine.dead is not None:
            raise EngineDead(self._engine.dead)

    async def __del__(self) -> None:
        """Ray calls it, and waits for it, when all requests have been answered or the time for that is over."""
        if not hasattr(self, "_living"):
            return
        self._service.gate.close()
        await self._living.__aexit__(None, None, None)
        await self._engine.stop(0)


def with_kv_events(settings: RaySettings, host: str) -> RaySettings:
    """Publishing KV events on two free ports of this node's address, unless the settings say where, or that none are.

    Another process may take a port before the engine does: then the replica does not start, and is started again.
    """
    if settings.kv_events_config is not None or not settings.enable_prefix_caching:
        return settings
    with ExitStack() as stack:
        sockets = [stack.enter_context(create_server_socket(host, 0)) for _ in range(2)]
        ports = [server_socket.getsockname()[1] for server_socket in sockets]
    addresses = [f"tcp://{join_host_port(host, port)}" for port in ports]
    config = {"endpoint": addresses[0], "replay_endpoint": addresses[1]}
    return settings.model_copy(update={"kv_events_config": json.dumps(config)})
