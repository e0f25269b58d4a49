"""Which hosts may be spoken to."""

import pytest

from cairn.errors import ConfigError
from cairn.transfer.peers import PeerPolicy, is_loopback


@pytest.mark.parametrize("host", ["127.0.0.1", "127.9.9.9", "localhost", "LOCALHOST", "::1"])
def test_loopback_needs_neither_list_nor_secret(host):
    assert is_loopback(host) and PeerPolicy().refusal(host) is None


@pytest.mark.parametrize(
    "host", ["", "0.0.0.0", "::", "10.0.0.1", "localhost.evil.org", "127.0.0.1.", "127.1", "a" * 300]
)
def test_everything_else_is_not_loopback(host):
    assert not is_loopback(host) and PeerPolicy(has_secret=True).refusal(host) == "is not on --kv-peer-allowlist"


def test_addresses_networks_and_names_are_listed():
    policy = PeerPolicy(["10.0.0.5", "192.168.0.0/24", "fd00::/8", "prefill-0.Example.org"], has_secret=True)
    for host in ("10.0.0.5", "192.168.0.200", "fd12::1", "PREFILL-0.example.org"):
        assert policy.refusal(host) is None
    for host in (
        "10.0.0.6",
        "192.168.1.1",
        "fe80::1",
        "x.prefill-0.example.org",
        "prefill-0.example.org.",
        "fd12::1%x",
    ):
        assert policy.refusal(host) == "is not on --kv-peer-allowlist"


def test_without_a_secret_the_list_opens_nothing():
    assert "kv-secret-file" in PeerPolicy(["10.0.0.5"]).refusal("10.0.0.5")


@pytest.mark.parametrize(
    "entry", ["", "10.0.0.1/8", "10.0.0", "a b", "http://x", "*", "x" * 300, "10.0.0.256", "fe80::1%0"]
)
def test_an_entry_that_is_none_is_a_wrong_setting(entry):
    with pytest.raises(ConfigError, match="kv-peer-allowlist"):
        PeerPolicy([entry])


def test_names_may_end_in_a_digit_and_addresses_may_not_be_mistyped():
    policy = PeerPolicy(["prefill-0", "p1.pool-2"], has_secret=True)
    assert policy.refusal("prefill-0") is None and policy.refusal("P1.pool-2") is None
    for entry in ("10.0.0", "10.0.0.256", "0x7f000001", "host.0x7f", "1", "a..b", ""):
        with pytest.raises(ConfigError, match="kv-peer-allowlist"):
            PeerPolicy([entry])
