"""The HTTP settings of `cairn serve`, and limits that no flag sets."""

from dataclasses import dataclass, field
from typing import Literal

from pydantic import BaseModel, ByteSize, ConfigDict, Field
from pydantic_settings import CliPositionalArg

from cairn.engine.contract import MAX_LOGPROBS
from cairn.setting_types import ApiKeys, Bytes, JsonObject, JsonText, ListText, ServedNames, Texts

__all__ = ["CertificateOptions", "CorsOptions", "ImageOptions", "ServerLimits", "ServerOptions"]


class _Options(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=(), allow_inf_nan=False)


class ModelOptions(_Options):
    """The model and its names."""

    model: CliPositionalArg[str] = Field(
        "",
        description="folder of the checkpoint: config.json, safetensors, tokenizer; a GGUF file; or a name on the hub",
    )
    served_model_name: ServedNames = Field(
        None, description="the model's name in the API, or several: a b; answers have the first. MODEL unless given"
    )

    @property
    def model_names(self) -> tuple[str, ...]:
        """The names that the model answers to, at least one."""
        return tuple(self.served_model_name or [self.model])

    @property
    def model_name(self) -> str:
        """The model's name in answers and metrics."""
        return self.model_names[0]


class ListenOptions(_Options):
    """Where and how the server listens, and whom it answers."""

    host: str = Field(
        "127.0.0.1",
        description="address to listen on; vLLM listens on all (0.0.0.0), cairn on this machine only unless told",
        max_length=255,
    )
    port: int = Field(8000, description="port to listen on; 0 takes a free one", ge=0, le=65535)
    root_path: str | None = Field(
        None,
        description="what a proxy in front puts before every path and may leave there: /cairn",
        pattern=r"^(/[\w.~-]+)+$",
        max_length=256,
    )
    api_key: ApiKeys = Field(
        None,
        description="key that clients must send, or several: a b or a,b; better as CAIRN_API_KEY: others cannot see it",
    )
    forwarded_allow_ips: ListText | None = Field(
        None,
        description="proxies whose X-Forwarded-For is believed: addresses and networks as a,b, or *; "
        "FORWARDED_ALLOW_IPS or loopback unless given",
    )
    shutdown_timeout: float = Field(30.0, description="seconds open requests have after SIGTERM", ge=0, le=86400)
    request_timeout: float = Field(3600.0, description="seconds an answer may take", gt=0, le=86400)
    max_body_bytes: Bytes = Field(ByteSize(16 << 20), description="largest request body", validate_default=False)
    enable_request_id_headers: bool = Field(
        False, description="X-Request-Id in answers to probes (/health, /metrics, ...), too; all others have one"
    )
    uvicorn_log_level: Literal["critical", "error", "warning", "info", "debug", "trace"] | None = Field(
        None, description="least severity that the HTTP library logs; as --log-level unless given"
    )


class CertificateOptions(_Options):
    """Certificates of HTTPS. Without `ssl_certfile` the server speaks HTTP."""

    ssl_keyfile: str | None = Field(
        None, description="file with the key of --ssl-certfile, if that has none", min_length=1
    )
    ssl_certfile: str | None = Field(None, description="file with the certificate of HTTPS: no HTTP then", min_length=1)
    ssl_ca_certs: str | None = Field(
        None, description="file with what clients' certificates are checked by", min_length=1
    )
    ssl_cert_reqs: int = Field(
        0, description="certificates of clients: 0 none is asked for, 1 may be sent, 2 must be sent", ge=0, le=2
    )
    ssl_ciphers: str | None = Field(None, description="ciphers of TLS 1.2, as OpenSSL names them", min_length=1)


class CorsOptions(_Options):
    """What web pages of other origins may do. Without `allowed_origins`: nothing."""

    allowed_origins: Texts | None = Field(
        None,
        description='web pages that may read answers (CORS): ["https://chat.example"], or ["*"]; none unless given',
    )
    allowed_methods: Texts = Field('["*"]', description="HTTP methods that they may use")
    allowed_headers: Texts = Field('["*"]', description="headers that they may send")
    allow_credentials: bool = Field(False, description="they may send cookies and other credentials")


class ResponseStoreOptions(_Options):
    """How much of /v1/responses is kept."""

    max_stored_responses: int = Field(
        4096, description="responses of /v1/responses kept for clients to go on from; 0 for none", ge=0, le=1 << 24
    )
    stored_response_bytes: Bytes = Field(
        ByteSize(256 << 20), description="bytes of those responses and their input together", validate_default=False
    )


class ChatOptions(_Options):
    """How chats are rendered, and what is found in their answers."""

    chat_template: str | None = Field(
        None, description="chat template instead of the checkpoint's: a file, or the template itself", min_length=1
    )
    default_chat_template_kwargs: JsonObject | None = Field(
        None, description='chat_template_kwargs of requests that do not send them: {"enable_thinking": false}'
    )
    trust_request_chat_template: bool = Field(
        False, description="run the chat_template of requests, in the sandbox that checkpoints' own are run in"
    )
    enable_auto_tool_choice: bool = Field(True, description="look for tool calls in answers when the model may choose")
    tool_call_parser: (
        Literal[
            "gemma4",
            "granite4",
            "hermes",
            "json",
            "lfm2",
            "nemotron_json",
            "none",
            "openai",
            "pythonic",
            "qwen3_coder",
            "qwen3_xml",
            "xml",
        ]
        | None
    ) = Field(None, description="how tool calls are written; as in the chat template unless given")
    reasoning_parser: (
        Literal["deepseek_r1", "gemma4", "nano_v3", "nemotron_v3", "none", "openai_gptoss", "qwen3", "think"] | None
    ) = Field(None, description="how reasoning is written; as in the chat template unless given")


class LeniencyOptions(_Options):
    """What is done with parts of requests that are not served."""

    strict_tools: bool = Field(
        False, description="refuse tools that only OpenAI or Anthropic run (web_search, ...); left out unless given"
    )
    lenient_schemas: Literal["none", "tools", "all"] = Field(
        "tools",
        description="where keywords of JSON Schema that no grammar is made for are left out, not refused: in tools "
        "that have to be called, in none, or in all: in response_format, too",
    )


class AnswerOptions(_Options):
    """What answers hold, and what is sampled where a request does not say it."""

    max_logprobs: int = Field(
        20,
        description="most log-probabilities for each token that a request may ask for; -1 for the whole vocabulary",
        ge=-1,
        le=MAX_LOGPROBS,
    )
    return_tokens_as_token_ids: bool = Field(
        False, description="log-probabilities call tokens token_id:5, unless a request says otherwise"
    )
    enable_force_include_usage: bool = Field(False, description="usage in every chunk of every stream")
    enable_prompt_tokens_details: bool = Field(True, description="cached tokens in the usage of answers")
    enable_per_request_metrics: bool = Field(
        False, description="the time of queue, prefill and decode in answers, as metrics"
    )
    stream_interval: int = Field(
        1, description="tokens of an answer that come in one event, unless a request says otherwise", ge=1, lt=1 << 31
    )
    generation_config: str = Field(
        "auto",
        description="where sampling defaults come from: auto for the checkpoint's generation_config.json, vllm for "
        "none, or a folder with such a file",
        min_length=1,
    )
    override_generation_config: JsonText | None = Field(
        None, description='sampling defaults that replace those of --generation-config: {"temperature": 0.6}'
    )


class EndpointOptions(_Options):
    """What else is served and logged."""

    enable_tokenizer_info_endpoint: bool = Field(
        False, description="serve /tokenizer_info: the tokenizer's settings and the chat template"
    )
    disable_fastapi_docs: bool = Field(False, description="do not serve /openapi.json")
    enable_docs: bool = Field(
        False, description="serve /docs and /redoc, pages whose scripts browsers fetch from cdn.jsdelivr.net"
    )
    disable_log_stats: bool = Field(False, description="no line about throughput every 10 seconds; /metrics stays")


class ServerOptions(
    EndpointOptions,
    AnswerOptions,
    LeniencyOptions,
    ChatOptions,
    ResponseStoreOptions,
    CorsOptions,
    CertificateOptions,
    ListenOptions,
    ModelOptions,
):
    """The settings of `cairn serve` about HTTP, a flag for each; `--help` has those of the last parent first. Sizes in
    bytes, times in seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageOptions:
    """Limits of images. Sizes in bytes and pixels, times in seconds.

    `limit`: images in one prompt. `domains`: hosts that are fetched from; None for all public ones. `max_bytes`,
    `max_pixels`: of one image, as it comes and decoded. `max_request_bytes`, `max_request_pixels`: of a request's
    images together; decoded, they have to fit one message to the engine. `max_open_bytes`: of all open requests'
    images, as they come and decoded; beyond it, requests are answered with 503. `max_named_bytes`: of files that are
    kept because clients have given them a name. `fetch_seconds`: for one image, redirects included. `decode_seconds`:
    for one image, from when a thread has begun it. `max_fetches`, `decoders`: images fetched and decoded at once.
    `max_client_fetches`: of the fetches, those for one client.
    """

    limit: int = 16
    domains: tuple[str, ...] | None = None
    max_bytes: int = 16 << 20
    max_pixels: int = 16 << 20
    max_request_bytes: int = 64 << 20
    max_request_pixels: int = 20 << 20
    max_open_bytes: int = 2 << 30
    max_named_bytes: int = 128 << 20
    fetch_seconds: float = 5.0
    decode_seconds: float = 10.0
    max_redirects: int = 3
    max_fetches: int = 32
    max_client_fetches: int = 16
    decoders: int = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerLimits:
    """Limits that no flag sets, and those of images. Times in seconds.

    `max_open`: open requests, waiting ones included; None: as many as the engine takes. `head_seconds`, `body_seconds`:
    for a client to send the headers and the body of its request. `stall_seconds`: how long it may leave a response
    unread. `stats_seconds`: a caller's whole wait for the engine's counters; `view_seconds`: for showing or emptying
    its cache. `log_seconds`: between two throughput lines. `max_background`: responses that are made at a time while no
    client waits.
    """

    max_open: int | None = None
    head_seconds: float = 30.0
    body_seconds: float = 60.0
    stall_seconds: float = 60.0
    stats_seconds: float = 5.0
    view_seconds: float = 60.0
    log_seconds: float = 10.0
    max_background: int = 256
    images: ImageOptions = field(default_factory=ImageOptions)
