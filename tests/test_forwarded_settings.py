"""Which proxies in front are believed: the flag, the setting, uvicorn's variable; every mistake by name."""

import os

import pytest

from cairn.cli import main
from cairn.errors import ConfigError
from cairn.http.web_server import parse_trusted_proxies
from test_settings import load


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch):
    for name in list(os.environ):
        if name.startswith(("CAIRN_", "FORWARDED_")):
            monkeypatch.delenv(name)


@pytest.mark.parametrize(
    ("text", "environ", "names"),
    [
        (None, {}, ("127.0.0.1", "::1")),
        (None, {"FORWARDED_ALLOW_IPS": "10.0.0.5"}, ("10.0.0.5",)),
        (None, {"FORWARDED_ALLOW_IPS": ""}, ()),
        (None, {"FORWARDED_ALLOW_IPS": "*"}, ("*",)),
        ("10.0.0.0/8, fd00::/8", {"FORWARDED_ALLOW_IPS": "*"}, ("10.0.0.0/8", "fd00::/8")),
        ('["10.0.0.1", "::1"]', {}, ("10.0.0.1", "::1")),
        ("*", {}, ("*",)),
    ],
)
def test_forms(text, environ, names):
    assert parse_trusted_proxies(text, environ) == names


@pytest.mark.parametrize(
    "text", ["proxy.example", "10.0.0.1/8", "10.0.0.1,", "*,10.0.0.1", "[1]", "[", "10.0.0.300", " "]
)
def test_mistakes(text, monkeypatch, capsys):
    with pytest.raises(ConfigError, match=r"^--forwarded-allow-ips: must (hold|be) "):
        parse_trusted_proxies(text)
    assert main(["serve", "m", "--forwarded-allow-ips", text]) == 2
    assert "--forwarded-allow-ips" in capsys.readouterr().err
    if text.strip():
        monkeypatch.setenv("FORWARDED_ALLOW_IPS", text)
        assert main(["proxy", "--decode", "http://d:1"]) == 2
        assert "FORWARDED_ALLOW_IPS" in capsys.readouterr().err


def test_too_many():
    with pytest.raises(ConfigError, match="at most 4096"):
        parse_trusted_proxies(",".join(["10.0.0.1"] * 4097))


def test_flag_and_file(tmp_path):
    assert parse_trusted_proxies(load("m").forwarded_allow_ips) == ("127.0.0.1", "::1")
    assert parse_trusted_proxies(load("m", "--forwarded-allow-ips", "10.0.0.5").forwarded_allow_ips) == ("10.0.0.5",)
    file = tmp_path / "settings.yaml"
    file.write_text("forwarded-allow-ips: [10.0.0.5, 10.1.0.0/16]\n")
    assert parse_trusted_proxies(load("m", "--config", str(file)).forwarded_allow_ips) == ("10.0.0.5", "10.1.0.0/16")
