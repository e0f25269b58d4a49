"""Hosts and ports as URLs and log lines write them."""


def join_host_port(host: str, port: int) -> str:
    """`host:port`, with an IPv6 address in brackets: `[::1]:8000`, `[fe80::1%eth0]:8000`."""
    return f"[{host}]:{port}" if ":" in host and not host.startswith("[") else f"{host}:{port}"


def make_url(scheme: str, host: str, port: int) -> str:
    """`scheme://host:port`. The zone of an IPv6 address stands after `%25` in URLs (RFC 6874)."""
    if ":" in host:
        host = host.replace("%", "%25")
    return f"{scheme}://{join_host_port(host, port)}"
