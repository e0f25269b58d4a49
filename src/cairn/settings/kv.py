"""The settings of `cairn serve` about what leaves the process: KV events and transfers, in vLLM's words and variables.

Everything wrong ends in a ConfigError of one line that names the flag, the JSON's key or the variable.
"""

import os
import re
from collections.abc import Mapping, MutableMapping
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from cairn.engine.contract import KvEventsConfig, LeaseOptions
from cairn.errors import ConfigError
from cairn.setting_types import list_entries
from cairn.settings.json_flags import parse_json_flag
from cairn.settings.sources import is_service_link, warn_of_service_link

_ONE_CONNECTOR = "NixlConnector is the only connector; name it"
_HOST_VARIABLE = "VLLM_NIXL_SIDE_CHANNEL_HOST"
_PORT_VARIABLE = "VLLM_NIXL_SIDE_CHANNEL_PORT"
_HOST = re.compile(r"[0-9A-Za-z._:-]{1,253}")
_PORT = re.compile(r"[0-9]{1,5}")
_SHOWN = 80


class KvEventsSettings(KvEventsConfig):
    """What --kv-events-config may say: where events are published, and vLLM's two switches."""

    enable_kv_cache_events: bool = True
    publisher: Literal["zmq", "null"] = "zmq"


class KvTransferExtra(LeaseOptions):
    """`kv_connector_extra_config`: what is cairn's own, and `backends`, of which there is one."""

    model_config = ConfigDict(strict=True)

    backends: list[Literal["UCX"]] = Field(["UCX"], min_length=1, max_length=1)


class KvTransferSettings(BaseModel):
    """What --kv-transfer-config may say, in vLLM's words.

    The role is a matter of each request, so all roles mean the same. `engine_id` and the keys below it say how other
    connectors buffer and connect: they are checked for their type and have no effect.
    """

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    kv_connector: Literal["NixlConnector"]
    kv_role: Literal["kv_both", "kv_producer", "kv_consumer"] = "kv_both"
    kv_load_failure_policy: Literal["recompute", "fail"] = "recompute"
    kv_connector_extra_config: KvTransferExtra = Field(default_factory=lambda: KvTransferExtra.model_validate({}))
    engine_id: str | None = Field(None, max_length=256)
    kv_buffer_device: str | None = Field(None, max_length=64)
    kv_buffer_size: float | None = Field(None, ge=0)
    kv_rank: int | None = Field(None, ge=0, le=1 << 31)
    kv_parallel_size: int | None = Field(None, ge=1, le=1 << 31)
    kv_ip: str | None = Field(None, max_length=253)
    kv_port: int | None = Field(None, ge=0, le=65535)
    enable_permute_local_kv: bool | None = None


def kv_events_settings(text: str | None) -> KvEventsSettings | None:
    """What --kv-events-config asks for; None if it is not given, or switched off in itself. Raises ConfigError."""
    if text is None:
        return None
    events = parse_json_flag("--kv-events-config", KvEventsSettings, text)
    return events if events.enable_kv_cache_events and events.publisher == "zmq" else None


def kv_transfer_settings(text: str | None) -> KvTransferSettings | None:
    """What --kv-transfer-config asks for; None if it is not given. Raises ConfigError."""
    if text is None:
        return None
    return parse_json_flag("--kv-transfer-config", KvTransferSettings, text, {"kv_connector": _ONE_CONNECTOR})


def side_channel(environ: Mapping[str, str] = os.environ) -> tuple[str, int]:
    """Where other servers ask for pages, host and port (0: any free one), from vLLM's variables; an empty one counts as
    not set, and so does the port that Kubernetes sets for a Service of that name. Raises ConfigError."""
    host = environ.get(_HOST_VARIABLE) or "localhost"
    port = environ.get(_PORT_VARIABLE) or "5600"
    if is_service_link(port):
        warn_of_service_link(_PORT_VARIABLE, port, "Set it in the container's env")
        port = "5600"
    if not _HOST.fullmatch(host):
        raise ConfigError(f"{_HOST_VARIABLE}: must be a host name or an address, not {host[:_SHOWN]!r}")
    if not _PORT.fullmatch(port) or int(port) > 65535:
        raise ConfigError(f"{_PORT_VARIABLE}: must be a port from 0 (any free one) to 65535, not {port[:_SHOWN]!r}")
    return host, int(port)


def free_side_channel_port(environ: MutableMapping[str, str] = os.environ) -> None:
    """Have `side_channel` take any free port unless a variable says which."""
    port = environ.get(_PORT_VARIABLE) or None
    if port is None or is_service_link(port):
        environ[_PORT_VARIABLE] = "0"


def peer_names(text: str | None) -> tuple[str, ...]:
    """The entries of --kv-peer-allowlist, `a,b` or `["a", "b"]`. Raises ConfigError; who they are is not looked at."""
    entries = [] if text is None else list_entries(text)
    if entries is None or not all(entries):
        shown = str(text)[:_SHOWN]
        raise ConfigError(f"--kv-peer-allowlist: must be hosts as a,b or a JSON list of texts, not {shown!r}")
    return tuple(entries)
