"""What the HTTP room needs to know besides the engine."""

from dataclasses import dataclass

__all__ = ["ServerOptions"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerOptions:
    """Sizes in bytes, times in seconds.

    `max_open`: requests being answered at once, those that wait in the engine included. `body_seconds`: how long a
    client may take to send its request. `request_seconds`: how long an answer may take. `shutdown_seconds`: how long
    open requests may go on after SIGTERM. `log_seconds`: between two throughput lines.
    """

    model_name: str
    version: str
    host: str = "127.0.0.1"
    port: int = 8000
    api_key: str | None = None
    max_open: int = 1032
    max_body_bytes: int = 16 << 20
    body_seconds: float = 60.0
    request_seconds: float = 3600.0
    shutdown_seconds: float = 30.0
    log_seconds: float = 10.0
