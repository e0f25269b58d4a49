"""What the proxy needs to know."""

from dataclasses import dataclass

__all__ = ["ProxyOptions"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ProxyOptions:
    """Sizes in bytes, times in seconds. `prefill` and `decode`: base URLs, without a slash at the end. Without
    prefill servers the decode servers do it all, and prompts that begin alike still meet at the same one.

    `api_keys`: one of them must come with a request; none: anybody may ask. It goes on to the servers.
    `forwarded_allow_ips`: addresses and networks of proxies whose X-Forwarded-For is believed, or `*`.
    `max_open`: requests being answered at once. `max_attempts`: servers asked for one prefill, and for one answer.
    `body_seconds`: how long a client may take to send its request. `prefill_seconds`: how long one prefill may take.
    `stall_seconds`: the longest silence of a decode server. `request_seconds`: a request from start to end.
    `affinity_bytes`: how much of a prompt's beginning decides where it goes. A server is passed over when it has at
    least `load_slack` requests open and more than `load_factor` times the mean of its pool.
    `max_hints`, `hint_seconds`: how many second-turn hints are remembered, and for how long.
    """

    prefill: tuple[str, ...]
    decode: tuple[str, ...]
    version: str
    host: str = "127.0.0.1"
    port: int = 8000
    api_keys: tuple[str, ...] = ()
    forwarded_allow_ips: tuple[str, ...] = ("127.0.0.1", "::1")
    max_open: int = 1024
    max_body_bytes: int = 16 << 20
    max_attempts: int = 3
    body_seconds: float = 60.0
    connect_seconds: float = 5.0
    prefill_seconds: float = 600.0
    stall_seconds: float = 600.0
    request_seconds: float = 3600.0
    shutdown_seconds: float = 30.0
    health_seconds: float = 5.0
    health_timeout_seconds: float = 5.0
    affinity_bytes: int = 512
    load_factor: float = 1.5
    load_slack: int = 4
    max_hints: int = 65536
    hint_seconds: float = 1800.0
