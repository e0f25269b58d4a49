"""Which addresses are public, and names with several."""

import asyncio
import socket

import pytest

from cairn.errors import InvalidRequest
from cairn.server.images.address import SystemResolver, is_public, resolve_public

INNER = """
0.0.0.0 0.1.2.3 10.0.0.1 10.255.255.255 100.64.0.1 100.100.100.200 127.0.0.1 127.8.8.8 169.254.169.254 169.254.0.1
172.16.0.1 172.31.255.255 192.0.0.1 192.0.0.192 192.0.2.1 192.168.0.1 198.18.0.1 198.51.100.1 203.0.113.1 224.0.0.1
239.1.1.1 240.0.0.1 255.255.255.255 168.63.129.16
:: ::1 ::ffff:127.0.0.1 ::ffff:169.254.169.254 ::ffff:10.1.1.1 ::127.0.0.1 fe80::1 fe80::1%eth0 fc00::1 fd00:ec2::254
ff02::1 2001:db8::1 2002:7f00:1::1 2002:808:808::1 2001:0:4136:e378:8000:63bf:3fff:fdd2 64:ff9b::127.0.0.1
64:ff9b::169.254.169.254 64:ff9b:1::10.0.0.1 100::1 fec0::1
localhost 1 0x7f000001 127.1 example.com
"""
PUBLIC = """
1.1.1.1 8.8.8.8 93.184.216.34 172.15.0.1 172.32.0.1 192.169.0.1 11.0.0.1 169.253.1.1 223.255.255.254
2606:4700:4700::1111 2001:4860:4860::8888 ::ffff:8.8.8.8 64:ff9b::8.8.8.8
"""


@pytest.mark.parametrize("address", INNER.split())
def test_inner(address):
    assert not is_public(address)


@pytest.mark.parametrize("address", PUBLIC.split())
def test_public(address):
    assert is_public(address)


def test_nothing_outside_the_public_ranges():
    """All of IPv4, a network of 256 at a time, against the registry's special ones (RFC 6890 and its updates)."""
    special = {
        *((first, None) for first in (0, 10, 127, *range(224, 256))),
        *((100, second) for second in range(64, 128)),
        *((172, second) for second in range(16, 32)),
        *((169, 254), (192, 168), (198, 18), (198, 19)),
    }
    for first in range(256):
        for second in range(256):
            if (first, None) in special or (first, second) in special:
                assert not is_public(f"{first}.{second}.77.77")


class Given:
    def __init__(self, *found):
        self.found = found

    async def addresses(self, host, port):
        return list(self.found)


class Nothing:
    def __init__(self, error):
        self.error = error

    async def addresses(self, host, port):
        raise self.error


def test_one_inner_address_is_enough():
    assert asyncio.run(resolve_public(Given("8.8.8.8", "1.1.1.1"), "h", 80)) == ["8.8.8.8", "1.1.1.1"]
    for found in (("8.8.8.8", "10.0.0.1"), ("::1",), ("8.8.8.8", "::ffff:127.0.0.1")):
        with pytest.raises(InvalidRequest, match="no public one"):
            asyncio.run(resolve_public(Given(*found), "h", 80))


@pytest.mark.parametrize("error", [socket.gaierror("none"), UnicodeError("label too long"), OSError("down")])
def test_names_without_addresses(error):
    with pytest.raises(InvalidRequest, match="cannot be resolved"):
        asyncio.run(resolve_public(Nothing(error), "h", 80))
    with pytest.raises(InvalidRequest, match="cannot be resolved"):
        asyncio.run(resolve_public(Given(), "h", 80))


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "127.1", "0x7f000001", "2130706433", "0177.0.0.1"])
def test_every_way_to_write_loopback_ends_there(host):
    found = asyncio.run(SystemResolver().addresses(host, 80))
    assert found and not any(map(is_public, found))
