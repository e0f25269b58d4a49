"""Hosts and ports as URLs and log lines write them."""

import ipaddress
from urllib.parse import unquote, urlsplit

import pytest

from cairn.addresses import join_host_port, make_url


@pytest.mark.parametrize(
    ("host", "joined", "url"),
    [
        ("127.0.0.1", "127.0.0.1:80", "http://127.0.0.1:80"),
        ("prefill-0.pd", "prefill-0.pd:80", "http://prefill-0.pd:80"),
        ("::1", "[::1]:80", "http://[::1]:80"),
        ("::", "[::]:80", "http://[::]:80"),
        ("::ffff:10.0.0.1", "[::ffff:10.0.0.1]:80", "http://[::ffff:10.0.0.1]:80"),
        ("[::1]", "[::1]:80", "http://[::1]:80"),
        ("fe80::1%eth0", "[fe80::1%eth0]:80", "http://[fe80::1%25eth0]:80"),
    ],
)
def test_forms(host, joined, url):
    assert (join_host_port(host, 80), make_url("http", host, 80)) == (joined, url)
    parts = urlsplit(url)
    assert parts.port == 80 and unquote(parts.hostname) == host.strip("[]")
    if ":" in host:
        ipaddress.IPv6Address(unquote(parts.hostname))
