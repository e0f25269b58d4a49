"""What is said about transfers at the start: vLLM's JSON and variables, secret, peers; every mistake by name."""

import importlib.util
import json
import os
import re

import pytest

from cairn.cli import engine_config, main
from cairn.cli.run import warn
from cairn.engine.contract import KvTransferConfig
from cairn.errors import ConfigError
from cairn.paths import read_secret_file
from cairn.settings.kv import free_side_channel_port, kv_transfer_settings
from test_settings import load

_PORT = "VLLM_NIXL_SIDE_CHANNEL_PORT"
PUBLISHED = {
    "kv_connector": "NixlConnector",
    "kv_role": "kv_both",
    "kv_load_failure_policy": "recompute",
    "kv_connector_extra_config": {},
}


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch):
    for name in list(os.environ):
        if name.startswith(("CAIRN_", "VLLM_")):
            monkeypatch.delenv(name)
    # These tests are about what is said, not about what is installed.
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)


@pytest.fixture
def secret(tmp_path):
    file = tmp_path / "secret"
    file.write_bytes(b"s" * 32 + b"\n")
    file.chmod(0o600)
    return file


def transfer(*flags, **keys):
    return engine_config(load("m", "--kv-transfer-config", json.dumps(PUBLISHED | keys), *flags)).kv_transfer


def refusal(*flags, **keys):
    with pytest.raises(ConfigError) as caught:
        transfer(*flags, **keys)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_the_published_configuration():
    assert transfer() == KvTransferConfig()
    assert engine_config(load("m")).kv_transfer is None


@pytest.mark.parametrize("role", ["kv_both", "kv_producer", "kv_consumer"])
def test_roles_are_a_matter_of_the_request(role):
    assert transfer(kv_role=role) == KvTransferConfig()


def test_keys_of_other_connectors_have_no_effect():
    others = {
        "engine_id": "e",
        "kv_buffer_device": "cuda",
        "kv_buffer_size": 1e9,
        "kv_rank": 0,
        "kv_parallel_size": 2,
        "kv_ip": "10.0.0.1",
        "kv_port": 14579,
        "enable_permute_local_kv": False,
    }
    assert transfer(**others) == transfer(**dict.fromkeys(others)) == KvTransferConfig()


def test_keys_that_have_one():
    own = {
        "lease_seconds": 5,
        "lease_share": 0.25,
        "max_leases": 100,
        "max_leases_per_client": 10,
        "backends": ["UCX"],
    }
    config = transfer(kv_load_failure_policy="fail", kv_connector_extra_config=own)
    assert config == KvTransferConfig(
        on_failure="fail", lease_seconds=5.0, lease_share=0.25, max_leases=100, max_leases_per_client=10
    )


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"kv_connector": "LMCacheConnectorV1"}, "kv_connector: NixlConnector is the only connector"),
        ({"kv_connector": None}, "kv_connector: NixlConnector is the only connector"),
        ({"kv_role": "producer"}, "kv_role: .*'producer'"),
        ({"kv_load_failure_policy": "retry"}, "kv_load_failure_policy: .*'retry'"),
        ({"kv_connector_module_path": "my.module"}, "kv_connector_module_path: is not supported"),
        ({"made_up": 1}, "made_up: is not supported"),
        ({"kv_port": 65536}, "kv_port: .*65536"),
        ({"kv_port": "1"}, "kv_port: .*'1'"),
        ({"kv_rank": -1}, "kv_rank: .*-1"),
        ({"engine_id": "e" * 257}, "engine_id: "),
        ({"kv_connector_extra_config": None}, "kv_connector_extra_config: "),
        ({"kv_connector_extra_config": {"lease_seconds": 0}}, r"extra_config\.lease_seconds: .*'0'"),
        ({"kv_connector_extra_config": {"lease_seconds": 601}}, r"extra_config\.lease_seconds: .*'601'"),
        ({"kv_connector_extra_config": {"lease_share": 0}}, r"extra_config\.lease_share: .*'0'"),
        ({"kv_connector_extra_config": {"lease_share": 1.01}}, r"extra_config\.lease_share: .*'1\.01'"),
        ({"kv_connector_extra_config": {"lease_share": True}}, r"extra_config\.lease_share: .*'True'"),
        ({"kv_connector_extra_config": {"max_leases": 0}}, r"extra_config\.max_leases: .*'0'"),
        ({"kv_connector_extra_config": {"max_leases": 65537}}, r"extra_config\.max_leases: .*'65537'"),
        ({"kv_connector_extra_config": {"max_leases": 1.5}}, r"extra_config\.max_leases: .*'1\.5'"),
        ({"kv_connector_extra_config": {"max_leases_per_client": 0}}, r"max_leases_per_client: .*'0'"),
        ({"kv_connector_extra_config": {"max_leases_per_client": 65537}}, r"max_leases_per_client: .*'65537'"),
        ({"kv_connector_extra_config": {"backends": ["GDS"]}}, r"extra_config\.backends\.0: .*'GDS'"),
        ({"kv_connector_extra_config": {"num_threads": 4}}, r"extra_config\.num_threads: is not supported"),
    ],
)
def test_a_wrong_key_is_named(keys, said):
    assert re.search(f"^--kv-transfer-config: .*{said}", refusal(**keys))


@pytest.mark.parametrize("text", ["{", "[]", "5", "NixlConnector", "{}", '{"kv_role": "kv_both"}', "[" * 5000])
def test_what_is_no_configuration(text):
    with pytest.raises(ConfigError, match=r"^--kv-transfer-config: (the JSON|kv_connector): ") as caught:
        kv_transfer_settings(text)
    assert "\n" not in str(caught.value)


def test_the_side_channel_comes_from_vllms_variables(monkeypatch):
    monkeypatch.setenv("VLLM_NIXL_SIDE_CHANNEL_HOST", "127.0.0.1")
    monkeypatch.setenv("VLLM_NIXL_SIDE_CHANNEL_PORT", "0")
    monkeypatch.setenv("VLLM_SSM_CONV_STATE_LAYOUT", "DS")
    assert transfer() == KvTransferConfig(host="127.0.0.1", port=0)
    monkeypatch.setenv("VLLM_NIXL_SIDE_CHANNEL_HOST", "")
    monkeypatch.setenv("VLLM_NIXL_SIDE_CHANNEL_PORT", "65535")
    assert transfer() == KvTransferConfig(port=65535)


def test_what_kubernetes_sets_for_a_service_is_no_port(monkeypatch, caplog):
    monkeypatch.setenv("VLLM_NIXL_SIDE_CHANNEL_PORT", "tcp://10.0.0.1:5600")
    assert transfer().port == 5600
    (record,) = caplog.records
    assert "a Service named vllm-nixl-side-channel." in record.getMessage()


@pytest.mark.parametrize(
    ("environ", "port"), [({}, "0"), ({_PORT: ""}, "0"), ({_PORT: "tcp://10.0.0.1:5600"}, "0"), ({_PORT: "5"}, "5")]
)
def test_any_port_is_taken_unless_one_is_said(environ, port):
    free_side_channel_port(environ)
    assert environ == {_PORT: port}


@pytest.mark.parametrize("port", ["-1", "65536", "http", "5600.0", "9" * 5000, "\u0665"])
def test_a_wrong_port_is_named(monkeypatch, port):
    monkeypatch.setenv("VLLM_NIXL_SIDE_CHANNEL_PORT", port)
    assert refusal().startswith("VLLM_NIXL_SIDE_CHANNEL_PORT: must be a port from 0")


@pytest.mark.parametrize("host", ["a b", "tcp://host", "h" * 254, "höst", "*"])
def test_a_wrong_host_is_named(monkeypatch, host, secret):
    monkeypatch.setenv("VLLM_NIXL_SIDE_CHANNEL_HOST", host)
    assert refusal("--kv-secret-file", str(secret)).startswith("VLLM_NIXL_SIDE_CHANNEL_HOST: must be a host name")


def test_variables_are_not_looked_at_without_transfers(monkeypatch):
    monkeypatch.setenv("VLLM_NIXL_SIDE_CHANNEL_PORT", "nonsense")
    assert engine_config(load("m")).kv_transfer is None


@pytest.mark.parametrize("host", ["10.0.0.5", "0.0.0.0", "::", "prefill-0.pd", "127.0.0.1.example.com"])
def test_only_loopback_without_a_secret(monkeypatch, host, secret):
    monkeypatch.setenv("VLLM_NIXL_SIDE_CHANNEL_HOST", host)
    said = refusal()
    assert said.startswith(f"VLLM_NIXL_SIDE_CHANNEL_HOST: {host} is not loopback") and "--kv-secret-file" in said
    assert transfer("--kv-secret-file", str(secret)) == KvTransferConfig(host=host, secret_file=str(secret))


@pytest.mark.parametrize(
    ("given", "peers"),
    [
        ("10.0.0.5", ("10.0.0.5",)),
        ("10.0.0.0/8, prefill-0.pd,::1", ("10.0.0.0/8", "prefill-0.pd", "::1")),
        ('["10.0.0.5", "prefill-0.pd"]', ("10.0.0.5", "prefill-0.pd")),
        ("[]", ()),
    ],
)
def test_peers(given, peers, monkeypatch):
    assert transfer("--kv-peer-allowlist", given).peers == peers
    monkeypatch.setenv("CAIRN_KV_PEER_ALLOWLIST", given)
    assert transfer().peers == peers


def test_peers_from_a_file(tmp_path):
    file = tmp_path / "c.yaml"
    for text in ("[prefill-0.pd, 10.0.0.5]", "prefill-0.pd,10.0.0.5"):
        file.write_text(f"kv-peer-allowlist: {text}\n")
        assert transfer("--config", str(file)).peers == ("prefill-0.pd", "10.0.0.5")


@pytest.mark.parametrize(
    "given", ["a,,b", " ", "[", "[1]", '["a", 5]', '[["a"]]', "[" * 5000, "a b", "http://a", "10.0.0.0/33"]
)
def test_peers_that_are_none(given):
    assert refusal(f"--kv-peer-allowlist={given}").startswith("--kv-peer-allowlist: ")
    with pytest.raises(ConfigError, match=r"^--kv-peer-allowlist: "):
        engine_config(load("m", f"--kv-peer-allowlist={given}"))


@pytest.mark.parametrize("content", [b"x" * 16, b"x" * 16 + b"\n", b"x" * 4096 + b"\r\n", bytes(16)])
def test_secrets(secret, content):
    secret.write_bytes(content)
    read_secret_file(secret)


@pytest.mark.parametrize("content", [b"", b"\n", b"x" * 15 + b"\n", b"x" * 4097, b"x" * 4097 + b"\n", b"x" * 100_000])
def test_secrets_of_a_wrong_size(secret, content):
    secret.write_bytes(content)
    with pytest.raises(ConfigError, match="16 to 4096 are taken"):
        read_secret_file(secret)


@pytest.mark.parametrize(
    ("mode", "fine"), [(0o400, True), (0o640, True), (0o604, False), (0o602, False), (0o666, False)]
)
def test_a_secret_that_everybody_may_read(secret, mode, fine):
    secret.chmod(mode)
    if fine:
        read_secret_file(secret)
    else:
        with pytest.raises(ConfigError, match="chmod o= "):
            read_secret_file(secret)


def test_a_secret_that_is_no_file(tmp_path):
    os.mkfifo(tmp_path / "pipe", 0o600)
    for path, said in (
        (tmp_path, "must be a file"),
        (tmp_path / "pipe", "must be a file"),
        (tmp_path / "x", "cannot be"),
    ):
        with pytest.raises(ConfigError, match=f"^--kv-secret-file {re.escape(str(path))}: {said}"):
            read_secret_file(path)


def test_a_wrong_secret_is_found_without_transfers(tmp_path):
    """Not only on the day on which they are switched on."""
    with pytest.raises(ConfigError, match=r"^--kv-secret-file .*/none: cannot be read: "):
        engine_config(load("m", "--kv-secret-file", str(tmp_path / "none")))


def test_without_nixl_it_says_how_to_install_it(monkeypatch, capsys):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "nixl" else name)
    flags = ["--kv-transfer-config", json.dumps(PUBLISHED)]
    assert (
        main(["serve", "m", *flags], core="doubles.echo_core:build_echo_core", load_tokenizer=lambda *names: None) == 2
    )
    error = capsys.readouterr().err
    assert error.count("cairn: --kv-transfer-config") == 1 and "pip install 'cairn-serve[nixl]'" in error


def test_tensor_parallel_size_is_passed_on():
    assert engine_config(load("m")).tensor_parallel_size == 1
    assert engine_config(load("m", "--tensor-parallel-size", "4")).tensor_parallel_size == 4


def test_what_has_no_effect_is_said(secret, caplog):
    """Nothing else tells an operator that a list which opens nothing is still closed."""
    warn(load("m", "--kv-secret-file", str(secret), "--kv-peer-allowlist", "10.0.0.5"))
    warn(load("m", "--kv-transfer-config", "{}", "--kv-peer-allowlist", "10.0.0.5"))
    assert [record.message for record in caplog.records] == [
        "--kv-peer-allowlist has no effect without --kv-transfer-config",
        "--kv-peer-allowlist has no effect without --kv-secret-file: only loopback peers are allowed",
    ]
