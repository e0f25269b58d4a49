"""From the settings to what each room takes. Heavy imports wait until something is asked for."""

import importlib.util
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from cairn.errors import ConfigError

if TYPE_CHECKING:
    from cairn.engine.contract import EngineConfig, KvEventsConfig, KvTransferConfig, RequestLogConfig
    from cairn.server.options import ImageOptions
    from cairn.settings.serve import ServeSettings


def engine_config(settings: "ServeSettings") -> "EngineConfig":
    """The settings that the engine is built with, under the same names; those that are JSON are read."""
    from cairn.engine.contract import EngineConfig

    names = {one.name for one in fields(EngineConfig)} & type(settings).model_fields.keys()
    pool = settings.kv_cache_memory_bytes
    more: dict[str, Any] = {
        "kv_cache_memory_bytes": None if pool is None else int(pool),
        "mm_encoder_cache_bytes": int(settings.mm_encoder_cache_bytes),
        "language_model_only": image_options(settings).limit == 0,
        "kv_events": _kv_events(settings),
        "kv_transfer": _kv_transfer(settings),
        "request_log": _request_log(settings),
    }
    return EngineConfig(**{name: getattr(settings, name) for name in names} | more)


def _kv_events(settings: "ServeSettings") -> "KvEventsConfig | None":
    from cairn.engine.contract import KvEventsConfig
    from cairn.settings.kv import kv_events_settings

    asked = kv_events_settings(settings.kv_events_config)
    if asked is None:
        return None
    return KvEventsConfig(**asked.model_dump(exclude={"enable_kv_cache_events", "publisher"}))


def _request_log(settings: "ServeSettings") -> "RequestLogConfig | None":
    from cairn.engine.contract import RequestLogConfig

    if settings.request_log is None:
        return None
    # the core's process may have another working directory
    return RequestLogConfig(path=str(settings.request_log.absolute()), max_bytes=int(settings.request_log_bytes))


def _kv_transfer(settings: "ServeSettings") -> "KvTransferConfig | None":
    from cairn.engine.contract import KvTransferConfig
    from cairn.settings.kv import check_secret_file, kv_transfer_settings, peer_names, side_channel
    from cairn.transfer.peers import PeerPolicy, is_loopback

    asked = kv_transfer_settings(settings.kv_transfer_config)
    secret, peers = settings.kv_secret_file, peer_names(settings.kv_peer_allowlist)
    # looked at without transfers, too: a mistake is found where it is made, not when they are switched on
    PeerPolicy(peers, has_secret=secret is not None)
    if secret is not None:
        check_secret_file(secret)
    if asked is None:
        return None
    channel = side_channel()
    if secret is None and not is_loopback(channel.host):
        raise ConfigError(
            f"VLLM_NIXL_SIDE_CHANNEL_HOST: {channel.host} is not loopback, and whoever may connect can read and write "
            "this server's memory: give all servers the same --kv-secret-file"
        )
    if importlib.util.find_spec("nixl") is None:
        raise ConfigError("--kv-transfer-config: needs NIXL, which is not installed: pip install 'cairn-serve[nixl]'")
    return KvTransferConfig(
        host=channel.host,
        port=channel.port,
        secret_file=None if secret is None else str(secret),
        peers=peers,
        on_failure=asked.kv_load_failure_policy,
        **asked.kv_connector_extra_config.model_dump(exclude={"backends"}),
    )


def image_options(settings: "ServeSettings") -> "ImageOptions":
    from cairn.server.options import ImageOptions
    from cairn.settings.images import image_limit, media_domains

    limit = image_limit(settings.limit_mm_per_prompt)
    return ImageOptions(
        limit=0 if settings.language_model_only else limit,
        domains=media_domains(settings.allowed_media_domains),
        max_bytes=int(settings.max_image_bytes),
        max_pixels=settings.max_image_pixels,
        fetch_seconds=settings.image_fetch_timeout,
    )
