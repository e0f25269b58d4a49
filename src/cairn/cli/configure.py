"""From the settings to what each room takes. Heavy imports wait until something is asked for."""

import importlib.util
from typing import TYPE_CHECKING

from cairn import __version__
from cairn.errors import ConfigError

if TYPE_CHECKING:
    from cairn.engine.contract import EngineConfig, KvEventsConfig, KvTransferConfig, RequestLogConfig
    from cairn.proxy.options import ProxyOptions
    from cairn.proxy_settings import ProxySettings
    from cairn.server.options import ImageOptions, ServerOptions
    from cairn.settings import ServeSettings


def engine_config(settings: "ServeSettings") -> "EngineConfig":
    from cairn.engine.contract import EngineConfig

    pool = settings.kv_cache_memory_bytes
    return EngineConfig(
        model=settings.model,
        dtype=settings.dtype,
        block_size=settings.block_size,
        kv_cache_memory_bytes=None if pool is None else int(pool),
        max_model_len=settings.max_model_len,
        max_num_seqs=settings.max_num_seqs,
        max_num_batched_tokens=settings.max_num_batched_tokens,
        max_waiting=settings.max_waiting,
        enable_prefix_caching=settings.enable_prefix_caching,
        in_flight_sharing=settings.in_flight_sharing,
        mamba_cache_mode=settings.mamba_cache_mode,
        eviction=settings.eviction,
        exact=settings.exact,
        seed=settings.seed,
        kv_events=_kv_events(settings),
        kv_transfer=_kv_transfer(settings),
        request_log=_request_log(settings),
        tensor_parallel_size=settings.tensor_parallel_size,
        language_model_only=_image_options(settings).limit == 0,
        mm_encoder_cache_bytes=int(settings.mm_encoder_cache_bytes),
        check_plans=settings.check_plans,
        quantization=settings.quantization,
    )


def _kv_events(settings: "ServeSettings") -> "KvEventsConfig | None":
    from cairn.engine.contract import KvEventsConfig
    from cairn.kv_settings import kv_events_settings

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
    from cairn.kv_settings import check_secret_file, kv_transfer_settings, peer_names, side_channel
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
        lease_seconds=asked.kv_connector_extra_config.lease_seconds,
        lease_share=asked.kv_connector_extra_config.lease_share,
        max_leases=asked.kv_connector_extra_config.max_leases,
        max_leases_per_client=asked.kv_connector_extra_config.max_leases_per_client,
    )


def _image_options(settings: "ServeSettings") -> "ImageOptions":
    from cairn.image_settings import image_limit, media_domains
    from cairn.server.options import ImageOptions

    limit = image_limit(settings.limit_mm_per_prompt)
    return ImageOptions(
        limit=0 if settings.language_model_only else limit,
        domains=media_domains(settings.allowed_media_domains),
        max_bytes=int(settings.max_image_bytes),
        max_pixels=settings.max_image_pixels,
        fetch_seconds=settings.image_fetch_timeout,
    )


def server_options(settings: "ServeSettings") -> "ServerOptions":
    from cairn.forwarded_settings import trusted_proxies
    from cairn.server.options import ServerOptions

    return ServerOptions(
        model_name=settings.served_model_name or settings.model,
        version=__version__,
        host=settings.host,
        port=settings.port,
        api_keys=tuple(settings.api_key or ()),
        forwarded_allow_ips=trusted_proxies(settings.forwarded_allow_ips),
        max_body_bytes=int(settings.max_body_bytes),
        request_seconds=settings.request_timeout,
        shutdown_seconds=settings.shutdown_timeout,
        images=_image_options(settings),
        enable_auto_tool_choice=settings.enable_auto_tool_choice,
        tool_call_parser=settings.tool_call_parser,
        reasoning_parser=settings.reasoning_parser,
    )


def proxy_options(settings: "ProxySettings") -> "ProxyOptions":
    from cairn.forwarded_settings import trusted_proxies
    from cairn.proxy.options import ProxyOptions

    return ProxyOptions(
        prefill=tuple(settings.prefill),
        decode=tuple(settings.decode),
        version=__version__,
        host=settings.host,
        port=settings.port,
        api_keys=tuple(settings.api_key or ()),
        forwarded_allow_ips=trusted_proxies(settings.forwarded_allow_ips),
        max_open=settings.max_open,
        max_body_bytes=int(settings.max_body_bytes),
        max_attempts=settings.max_attempts,
        connect_seconds=settings.connect_timeout,
        prefill_seconds=settings.prefill_timeout,
        stall_seconds=settings.stall_timeout,
        request_seconds=settings.request_timeout,
        shutdown_seconds=settings.shutdown_timeout,
        health_seconds=settings.health_interval,
        health_timeout_seconds=settings.health_timeout,
        affinity_bytes=settings.affinity_bytes,
        load_factor=settings.load_factor,
        load_slack=settings.load_slack,
        max_hints=settings.max_hints,
        hint_seconds=settings.hint_timeout,
    )
