"""What the HTTP room needs to know besides the engine."""

from dataclasses import dataclass, field

__all__ = ["ImageOptions", "ServerOptions"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageOptions:
    """What images may be and where they may come from. Sizes in bytes and pixels, times in seconds.

    `limit`: images in one prompt. `domains`: hosts that are fetched from; None for all that are public. `max_bytes`,
    `max_pixels`: of one image as it comes, and decoded. `max_request_bytes`, `max_request_pixels`: of all of a
    request's together; decoded, they have to fit one message to the engine. `max_open_bytes`: of all open requests'
    together, as they come and decoded; a request whose images find no room is answered with 503. `fetch_seconds`: for
    one image, redirects included. `decode_seconds`: for one image, from the moment a thread has taken it.
    `max_fetches`, `decoders`: how many are fetched and decoded at once. `max_client_fetches`: how many of them for one
    client, whose silent servers others need not wait for.
    """

    limit: int = 16
    domains: tuple[str, ...] | None = None
    max_bytes: int = 16 << 20
    max_pixels: int = 16 << 20
    max_request_bytes: int = 64 << 20
    max_request_pixels: int = 20 << 20
    max_open_bytes: int = 2 << 30
    fetch_seconds: float = 5.0
    decode_seconds: float = 10.0
    max_redirects: int = 3
    max_fetches: int = 32
    max_client_fetches: int = 16
    decoders: int = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerOptions:
    """Sizes in bytes, times in seconds.

    `enable_auto_tool_choice`: calls of a model that may choose are looked for. `tool_call_parser`, `reasoning_parser`:
    how calls and reasoning are written; None: as the chat template writes them.

    `api_keys`: one of them must come with a request; none: anybody may ask. `forwarded_allow_ips`: addresses and
    networks of proxies whose X-Forwarded-For is believed, or `*`. `max_open`: requests being answered at once,
    those that wait in the engine included; None: as many as the engine takes. `head_seconds`, `body_seconds`: how long
    a client may take to send headers and body of its request. `stall_seconds`: how long it may leave unread what it was
    sent. `request_seconds`: how long an answer may take. `stats_seconds`, `view_seconds`: how long who asks for the
    engine's counters, or looks at or empties its cache, waits in all, behind others included. `shutdown_seconds`: how
    long open requests may go on after SIGTERM. `log_seconds`: between two throughput lines.
    """

    model_name: str
    version: str
    host: str = "127.0.0.1"
    port: int = 8000
    api_keys: tuple[str, ...] = ()
    forwarded_allow_ips: tuple[str, ...] = ("127.0.0.1", "::1")
    max_open: int | None = None
    max_body_bytes: int = 16 << 20
    head_seconds: float = 30.0
    body_seconds: float = 60.0
    stall_seconds: float = 60.0
    request_seconds: float = 3600.0
    stats_seconds: float = 5.0
    view_seconds: float = 60.0
    shutdown_seconds: float = 30.0
    log_seconds: float = 10.0
    images: ImageOptions = field(default_factory=ImageOptions)
    enable_auto_tool_choice: bool = True
    tool_call_parser: str | None = None
    reasoning_parser: str | None = None
