"""The engine's settings, declared once: `cairn serve` takes flags, variables and YAML keys from the fields here."""

from pathlib import Path
from typing import Literal, Self

from pydantic import BaseModel, ByteSize, ConfigDict, Field, model_validator

from cairn.errors import ConfigError
from cairn.scheduler.speculation import SpeculativeConfig
from cairn.setting_types import AttentionBackend, Bytes, BytesOrZero, Count, CountOrAuto, GdnPrefillBackend, GraphSizes
from cairn.transfer.peers import is_loopback

_MAX_COUNT = 1 << 24


class KvEventsConfig(BaseModel):
    """Where KV events are published, in vLLM's words. `replay_endpoint` None: no replays.

    `buffer_steps`: steps kept for replays; `max_queue_size`: steps that may wait to be sent; `hwm`: messages that may
    wait for one subscriber.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    endpoint: str = Field("tcp://127.0.0.1:5557", max_length=256)
    replay_endpoint: str | None = Field(None, max_length=256)
    topic: str = Field("", max_length=256)
    buffer_steps: int = Field(10_000, ge=1, le=1_000_000)
    hwm: int = Field(100_000, ge=1, le=1_000_000)
    max_queue_size: int = Field(100_000, ge=1, le=1_000_000)
    encoding: Literal["map", "array"] = "map"


class LeaseOptions(BaseModel):
    """How much may be held for other servers, and for how long.

    `lease_seconds`: how long a prefilled prompt waits for its reader, and a request for room among the leases.
    `lease_share`: most of the pool that leases may hold together. `max_leases`: how many there may be, future ones of
    accepted requests included; `max_leases_per_client`: of one client.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    lease_seconds: float = Field(30.0, ge=1, le=600)
    lease_share: float = Field(0.5, gt=0, le=1)
    max_leases: int = Field(1024, ge=1, le=65536)
    max_leases_per_client: int = Field(64, ge=1, le=65536)


class KvTransferConfig(LeaseOptions):
    """How pages and checkpoints go to and come from other servers. Roles are a matter of the request: every server
    with this configuration takes both.

    `host`, `port`: where the side channel listens, and what peers are told. `secret_file`: what peers must know, too;
    None keeps everything on loopback: any other host raises ConfigError. `peers`: hosts, addresses and networks that
    may be read from besides loopback. `on_failure`: what becomes of a request whose pages do not arrive.
    """

    host: str = "localhost"
    port: int = 5600
    secret_file: str | None = None
    peers: tuple[str, ...] = ()
    on_failure: Literal["recompute", "fail"] = "recompute"

    @model_validator(mode="after")
    def _check_host(self) -> Self:
        if self.secret_file is None and not is_loopback(self.host):
            raise ConfigError(
                f"VLLM_NIXL_SIDE_CHANNEL_HOST: {self.host} is not loopback, and whoever may connect can read and write "
                "this server's memory: give all servers the same --kv-secret-file"
            )
        return self


class RequestLogConfig(BaseModel):
    """Where a line is written for each request that has ended. `max_bytes`: of one file; the file before it is kept."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    path: str
    max_bytes: int = 256 << 20


class _Options(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())


class WeightOptions(_Options):
    """What of the checkpoint is loaded, and in which form."""

    dtype: Literal["auto", "float32", "bfloat16"] = Field("auto", description="type of the weights and of the cache")
    quantization: (
        Literal["int4", "int8", "fp8", "modelopt", "compressed-tensors", "awq", "gptq", "auto-round", "mxfp4", "gguf"]
        | None
    ) = Field(
        None,
        description="weights of matrix products in int8, or in int4 by groups of inputs, activations in int8: faster, "
        "less memory, less precise; the others say what the checkpoint is stored in, and change nothing",
    )
    tokenizer: str | None = Field(
        None, description="folder or hub name of another tokenizer than the checkpoint's", min_length=1
    )
    language_model_only: bool = Field(
        False, description="leave the checkpoint's vision model unloaded: images are refused"
    )


class DeviceOptions(_Options):
    """What computes, and how it is used."""

    device: Literal["auto", "cpu", "cuda"] = Field(
        "auto",
        description="what computes: cuda is an NVIDIA GPU, auto is that where one can be used, and the CPU elsewhere",
    )
    gpu_memory_utilization: float = Field(
        0.9,
        description="on a GPU: share of its memory that this server takes; of no meaning with --kv-cache-memory-bytes",
        gt=0,
        le=1,
    )
    attention_backend: AttentionBackend = Field(
        "auto", description="on a GPU: whose attention; auto is triton, cairn's own; flashinfer if installed"
    )
    gdn_prefill_backend: GdnPrefillBackend = Field(
        "auto",
        description="on a GPU: whose gated delta rule computes prompts; auto is triton, cairn's own; fla, if "
        "installed, where it can",
    )
    enforce_eager: bool = Field(
        False, description="launch decode steps kernel by kernel: on a GPU without CUDA graphs, on the CPU unrecorded"
    )
    cudagraph_capture_sizes: GraphSizes = Field(
        None,
        description="on a GPU: rows of decode steps that become CUDA graphs: 1 2 4 8; vLLM's unless given",
    )
    max_cudagraph_capture_size: int = Field(
        512,
        description="rows of the largest CUDA graph, and of the largest decode step that is recorded on the CPU, never "
        "more than --max-num-seqs; 0 for none",
        ge=0,
        le=65536,
    )
    tensor_parallel_size: int = Field(
        1,
        description="processes that the model's heads are divided among; must divide them; on GPUs one process each",
        ge=1,
        le=1024,
    )
    exact: bool = Field(
        False, description="answers are bit for bit the same with and without the cache, alone and batched; slower"
    )


class SchedulingOptions(_Options):
    """How much is computed at once, and for how many."""

    max_model_len: CountOrAuto = Field(
        None,
        description="longest prompt and answer together: 8192, 8k, 8K; the model's own limit unless given, or auto",
        ge=1,
        le=_MAX_COUNT,
    )
    max_num_batched_tokens: Count = Field(2048, description="most tokens computed in one step", ge=1, le=_MAX_COUNT)
    max_num_seqs: int | None = Field(
        None, description="most requests computed at once; 64 unless given, fewer where memory is short", ge=1, le=65535
    )
    scheduling_policy: Literal["fcfs", "priority", "session"] = Field(
        "fcfs",
        description="who of those that wait goes first, smaller `priority` always before larger: fcfs, which is also "
        "priority, goes by arrival, and before that who would lose what it is going to hit, past 16 others at most; "
        "session goes by the least service of the session lately, so that short sessions do not wait behind long ones, "
        "and nobody is bypassed by more than 32 others",
    )
    max_waiting: int = Field(1024, description="most requests waiting; more are answered with 429", ge=1, le=_MAX_COUNT)
    seed: int = Field(0, description="source that requests without a seed have theirs drawn from", ge=0, lt=1 << 63)
    check_plans: bool = Field(
        False, description="for finding bugs: look at every step's plan before it is carried out; slower"
    )


class CacheOptions(_Options):
    """What is kept for later requests, and where."""

    block_size: int = Field(16, description="tokens per page of keys and values", ge=1, le=4096)
    kv_cache_memory_bytes: Bytes | None = Field(
        None,
        description="size of the cache's pool, on each rank: 1GiB, 512MiB, 1e9; unless given 40 percent of the memory "
        "that is available besides the weights, at most 8GiB, divided among the ranks; on a GPU what is left of it",
    )
    enable_prefix_caching: bool = Field(True, description="reuse what earlier requests have computed")
    in_flight_sharing: bool = Field(True, description="a request waits for one in prefill that computes its beginning")
    mamba_cache_mode: Literal["none", "align", "all", "granular", "junction", "auto"] = Field(
        "auto", description="where state checkpoints are kept"
    )
    mamba_ssm_cache_dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto",
        description="what the recurrent states of running requests are in; auto is what the checkpoint's config.json "
        "names, else float32",
    )
    checkpoint_dtype: Literal["auto", "float32", "float16", "int8"] = Field(
        "auto",
        description="form in which checkpoints have the recurrent state: float16 is half of float32, int8 a quarter; "
        "auto is float16 for bfloat16 models of families whose answers it changes less than bfloat16 does; "
        "running states that are no float32 are kept as they are",
    )
    eviction: Literal["lru", "value"] = Field("value", description="what is dropped when the pool is full")
    mm_encoder_cache_bytes: BytesOrZero = Field(
        ByteSize(256 << 20), description="most bytes of encoded images that are kept", validate_default=False
    )


class TierOptions(_Options):
    """What is kept where the pool has no room for it, and where a restart finds it."""

    host_cache_bytes: BytesOrZero | None = Field(
        None, description="memory of this machine for what the cache's pool has no room for: 8GiB; none unless given"
    )
    disk_cache: Path | None = Field(
        None, description="folder for what is cached to be found again after a restart; a new one, or one of cairn's"
    )
    disk_cache_bytes: Bytes | None = Field(
        None, description="most bytes in it; unless given half of what its disk has left, at most 64GiB"
    )
    disk_cache_read_only: bool = Field(
        False, description="leave the folder to another server to write: any number may read what that one writes"
    )


class EngineOptions(TierOptions, CacheOptions, SchedulingOptions, DeviceOptions, WeightOptions):
    """The settings of `cairn serve` that the engine is built with; `--help` has those of the last parent first. Sizes
    in bytes and tokens."""


class EngineConfig(EngineOptions):
    """All that building an engine takes: its settings, and those that flags give as JSON or in parts. With the defaults
    here, pool and running requests are of a size that does not depend on the machine."""

    model: str
    kv_cache_memory_bytes: Bytes | None = ByteSize(1 << 30)
    max_num_seqs: int | None = 8
    kv_events: KvEventsConfig | None = None
    kv_transfer: KvTransferConfig | None = None
    request_log: RequestLogConfig | None = None
    speculative: SpeculativeConfig = SpeculativeConfig()
