"""What building an engine takes."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class KvEventsConfig:
    """Where KV events are published, in vLLM's words. `replay_endpoint` None: no replays.

    `buffer_steps`: steps kept for replays; `max_queue_size`: steps that may wait to be sent; `hwm`: messages that may
    wait for one subscriber.
    """

    endpoint: str = "tcp://127.0.0.1:5557"
    replay_endpoint: str | None = None
    topic: str = ""
    buffer_steps: int = 10_000
    hwm: int = 100_000
    max_queue_size: int = 100_000
    encoding: Literal["map", "array"] = "map"


@dataclass(frozen=True, slots=True, kw_only=True)
class KvTransferConfig:
    """How pages and checkpoints go to and come from other servers. Roles are a matter of the request: every server
    with this configuration takes both.

    `host`, `port`: where the side channel listens, and what peers are told. `secret_file`: what peers must know, too;
    None keeps everything on loopback. `peers`: hosts, addresses and networks that may be read from besides loopback.
    `on_failure`: what becomes of a request whose pages do not arrive. `lease_seconds`: how long a prefilled prompt
    waits for its reader, and a request for room among them. `lease_share`: most of the pool that such prompts may hold
    together. `max_leases`: how many there may be, those that are going to be included; `max_leases_per_client`: of one
    client.
    """

    host: str = "localhost"
    port: int = 5600
    secret_file: str | None = None
    peers: tuple[str, ...] = ()
    on_failure: Literal["recompute", "fail"] = "recompute"
    lease_seconds: float = 30.0
    lease_share: float = 0.5
    max_leases: int = 1024
    max_leases_per_client: int = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestLogConfig:
    """Where a line is written for each request that has ended. `max_bytes`: of one file; the file before it is kept."""

    path: str
    max_bytes: int = 256 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """All that building an engine takes. Sizes in bytes and tokens; `seed`: where unseeded requests draw theirs from.

    `kv_cache_memory_bytes`, of each rank, and `max_num_seqs`: None for what fits the machine.

    `language_model_only`: leave a vision model that the checkpoint has unloaded. `mm_encoder_cache_bytes`: most bytes
    of encoded images that are kept. `in_flight_sharing`: whether a request waits for one in prefill that computes its
    beginning. `check_plans`: look at every plan before it is carried out, to find bugs. `quantization`: what matrices
    are brought to when they are loaded; None for `dtype`.
    """

    model: str
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    block_size: int = 16
    kv_cache_memory_bytes: int | None = 1 << 30
    max_model_len: int | None = None
    max_num_seqs: int | None = 8
    max_num_batched_tokens: int = 2048
    max_waiting: int = 1024
    enable_prefix_caching: bool = True
    in_flight_sharing: bool = True
    mamba_cache_mode: Literal["none", "align", "all", "granular", "junction", "auto"] = "auto"
    eviction: Literal["lru", "value"] = "value"
    exact: bool = False
    seed: int = 0
    kv_events: KvEventsConfig | None = None
    kv_transfer: KvTransferConfig | None = None
    request_log: RequestLogConfig | None = None
    tensor_parallel_size: int = 1
    language_model_only: bool = False
    mm_encoder_cache_bytes: int = 256 << 20
    check_plans: bool = False
    quantization: Literal["int8"] | None = None
