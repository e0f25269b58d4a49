"""The Serve application: its deployments, with what Ray has to know of them."""

from typing import Any

from ray import serve
from ray.serve import Application
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy, RequestRouterConfig
from ray.serve.schema import LoggingConfig

from cairn.cli.run import engine_config, image_options
from cairn.deploy.ray.autoscaling import PressurePolicy
from cairn.deploy.ray.ingress import Ingress
from cairn.deploy.ray.replica import EngineReplica
from cairn.deploy.ray.router import PrefixRouter
from cairn.deploy.ray.settings import RaySettings
from cairn.models.weights.hub import ModelSource, check_source

_CORE = "cairn.engine.build:build_core"
_UNBOUNDED = 1 << 16
"""Requests that Ray lets a replica have: the server's own gate answers those above its bound, with 429."""

_START_ATTEMPTS = 3
_HEALTH_SECONDS = 5.0
_STATS_SECONDS = 1.0


def build_application(settings: RaySettings, core: str = _CORE) -> Application:
    """An ingress in front of replicas. `core`: the builder of the engine's core, as module:function. Raises ConfigError
    for settings that no server would start with, and for a model's folder that is none."""
    settings = settings.with_transfers()
    check_source(ModelSource(settings.model, settings.revision, settings.download_dir))
    engine_config(settings)
    image_options(settings)
    args = settings.as_arguments()
    replicas = _replicas(settings, "replica", **_num_replicas(settings)).bind(args, core)
    prefill = None
    if settings.num_prefill_replicas:
        prefill = _replicas(settings, "prefill", num_replicas=settings.num_prefill_replicas).bind(args, core)
    ingress = serve.deployment(
        serve.ingress()(Ingress),
        name="ingress",
        num_replicas=settings.num_ingresses,
        ray_actor_options={"num_cpus": 0},
        max_ongoing_requests=settings.max_open,
        max_queued_requests=settings.max_open,
        graceful_shutdown_timeout_s=settings.shutdown_timeout,
        logging_config=LoggingConfig(enable_access_log=False),
    )
    return ingress.bind(args, replicas, prefill)


def _replicas(settings: RaySettings, name: str, **number: Any) -> Any:
    """The deployment of this name, as many as `number` says."""
    resources: dict[str, Any] = {"num_cpus": settings.num_cpus, "num_gpus": settings.num_gpus}
    if settings.memory is not None:
        resources["memory"] = int(settings.memory)
    return serve.deployment(
        EngineReplica,
        name=name,
        ray_actor_options=resources,
        max_ongoing_requests=_UNBOUNDED,
        max_constructor_retry_count=_START_ATTEMPTS,
        max_surge_percent=settings.max_surge_percent,
        graceful_shutdown_timeout_s=settings.shutdown_timeout,
        health_check_period_s=_HEALTH_SECONDS,
        # as `cairn serve`: no line a request
        logging_config=LoggingConfig(enable_access_log=False),
        request_router_config=RequestRouterConfig(
            request_router_class=f"{PrefixRouter.__module__}.{PrefixRouter.__qualname__}",
            request_routing_stats_period_s=_STATS_SECONDS,
        ),
        **number,
    )


def _num_replicas(settings: RaySettings) -> dict[str, Any]:
    if settings.max_replicas is None:
        return {"num_replicas": settings.num_replicas}
    policy = AutoscalingPolicy(
        policy_function=f"{PressurePolicy.__module__}:{PressurePolicy.__qualname__}",
        policy_kwargs={"target_pressure": settings.target_pressure},
    )
    return {
        "autoscaling_config": AutoscalingConfig(
            min_replicas=settings.min_replicas,
            max_replicas=settings.max_replicas,
            upscale_delay_s=settings.upscale_delay_s,
            downscale_delay_s=settings.downscale_delay_s,
            # Ray takes no less often than every 10 s for granted, and wants to look back further than that
            metrics_interval_s=min(10.0, settings.look_back_period_s / 2),
            look_back_period_s=settings.look_back_period_s,
            policy=policy,
        )
    }
