"""Flags, environment variables and the YAML file: one model, one order of precedence, clear errors."""

import argparse
import logging
import os
import re
import shlex
import subprocess
import sys

import pytest

from cairn.cli import engine_config
from cairn.deploy.ray.settings import RaySettings
from cairn.engine.contract import EngineConfig
from cairn.errors import ConfigError
from cairn.server.options import ServerLimits
from cairn.settings.proxy import ProxySettings
from cairn.settings.serve import ServeSettings, add_flags, load_settings
from cairn.settings.sources import warn_of_service_links


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch):
    for name in list(os.environ):
        if name.startswith(("CAIRN_", "VLLM_")):
            monkeypatch.delenv(name)


def load(*arguments):
    parser = argparse.ArgumentParser(allow_abbrev=False, exit_on_error=False)
    source = add_flags(parser)
    return load_settings(parser.parse_args(list(arguments)), source)


def test_defaults():
    config, options = engine_config(load("m")), load("m")
    assert (config.model, config.block_size) == ("m", 16)
    assert (load("m").cpu_threads, config.kv_cache_memory_bytes, config.max_num_seqs) == (None, None, None)
    assert (config.max_num_batched_tokens, config.max_waiting) == (2048, 1024)
    assert config.enable_prefix_caching and not config.exact and config.mamba_cache_mode == "auto"
    assert (options.host, options.port, options.model_name, options.api_key) == ("127.0.0.1", 8000, "m", None)
    assert options.shutdown_timeout == 30.0 and ServerLimits().max_open is None


def test_whatever_the_engine_is_built_with_can_be_set():
    """Settings are passed on by name: one that is called otherwise would be the engine's default whatever is asked."""
    assert EngineConfig.model_fields.keys() - ServeSettings.model_fields.keys() == {
        "kv_events",
        "kv_transfer",
        "speculative",
    }


VLLM_COMMAND_LINE = """
    m --port 9 --host 0.0.0.0 --tensor-parallel-size 1 --block-size 128 --max-model-len 777 --seed 5
    --max-num-batched-tokens 99 --max-num-seqs 3 --gpu-memory-utilization 0.8 --enforce-eager
    --trust-remote-code --dtype bfloat16 --served-model-name name --api-key key
    --no-enable-prefix-caching --mamba-cache-mode align --no-disable-hybrid-kv-cache-manager
    --eviction lru --exact --max-waiting 4 --shutdown-timeout 1.5 --kv-cache-memory-bytes 2GiB --cpu-threads 2
"""


def test_every_flag_of_a_vllm_command_line():
    settings = load(*shlex.split(VLLM_COMMAND_LINE))
    config, options = engine_config(settings), settings
    assert (config.block_size, config.max_model_len, config.seed, config.dtype) == (128, 777, 5, "bfloat16")
    assert (config.max_num_batched_tokens, config.max_num_seqs, config.max_waiting) == (99, 3, 4)
    assert (config.enable_prefix_caching, config.mamba_cache_mode) == (False, "align")
    assert (config.eviction, config.exact, config.kv_cache_memory_bytes) == ("lru", True, 2 << 30)
    assert (options.host, options.port, options.model_name, options.api_key) == ("0.0.0.0", 9, "name", ["key"])
    assert (options.shutdown_timeout, settings.cpu_threads) == (1.5, 2)
    assert config.enforce_eager and config.cudagraph_capture_sizes is None


@pytest.mark.parametrize("words", ["1 2 4", "1,2,4", "[1,2,4]", "1 2 --cudagraph-capture-sizes 4"])
def test_sizes_of_graphs_come_in_any_form(words):
    assert load("m", "--cudagraph-capture-sizes", *shlex.split(words)).cudagraph_capture_sizes == [1, 2, 4]
    assert load("--cudagraph-capture-sizes", *shlex.split(words), "m").model == "m"


@pytest.mark.parametrize("words", ["0", "x", "1 x", "70000"])
def test_sizes_of_graphs_are_counts(words):
    with pytest.raises(ConfigError, match=r"^--cudagraph-capture-sizes: "):
        load("m", "--cudagraph-capture-sizes", *words.split())


def test_numbers_are_no_model():
    with pytest.raises(ConfigError, match=r"^MODEL is missing"):
        load("--cudagraph-capture-sizes", "1", "2")


def test_flag_before_variable_before_file_before_default(tmp_path, monkeypatch):
    file = tmp_path / "serve.yaml"
    file.write_text("model: from-file\nmax-num-seqs: 2\nmax_waiting: 2\nblock-size: 2\nenable-prefix-caching: false\n")
    monkeypatch.setenv("CAIRN_MAX_NUM_SEQS", "3")
    monkeypatch.setenv("CAIRN_MAX_WAITING", "3")
    settings = load("--config", str(file), "--max-num-seqs", "4")
    assert (settings.max_num_seqs, settings.max_waiting, settings.block_size, settings.port) == (4, 3, 2, 8000)
    assert settings.model == "from-file" and not settings.enable_prefix_caching


def test_what_fits_the_machine_gives_way_to_flag_variable_and_file(tmp_path, monkeypatch):
    file = tmp_path / "serve.yaml"
    file.write_text("model: m\ncpu-threads: 3\nkv-cache-memory-bytes: 3MiB\nmax-num-seqs: 3\n")

    def sizes(*flags):
        settings = load("--config", str(file), *flags)
        config = engine_config(settings)
        return settings.cpu_threads, config.kv_cache_memory_bytes, config.max_num_seqs

    assert sizes() == (3, 3 << 20, 3)
    for name, value in (("CPU_THREADS", "2"), ("KV_CACHE_MEMORY_BYTES", "2MiB"), ("MAX_NUM_SEQS", "2")):
        monkeypatch.setenv(f"CAIRN_{name}", value)
    assert sizes() == (2, 2 << 20, 2)
    flags = ("--cpu-threads", "1", "--kv-cache-memory-bytes", "1MiB", "--max-num-seqs", "1")
    assert sizes(*flags) == (1, 1 << 20, 1)


def test_the_file_may_be_named_by_a_variable(tmp_path, monkeypatch):
    (tmp_path / "c.yaml").write_text("port: 1234\n")
    monkeypatch.setenv("CAIRN_CONFIG", str(tmp_path / "c.yaml"))
    monkeypatch.setenv("CAIRN_MODEL", "from-variable")
    monkeypatch.setenv("CAIRN_HOST", "")
    settings = load()
    assert (settings.port, settings.model, settings.host) == (1234, "from-variable", "127.0.0.1")


@pytest.mark.parametrize(
    ("text", "size"),
    [("1GiB", 1 << 30), ("512MiB", 512 << 20), ("1e9", 10**9), ("1.5 GB", 1_500_000_000), ("4096", 4096), ("2k", 2000)],
)
def test_sizes(text, size):
    assert load("m", "--kv-cache-memory-bytes", text).kv_cache_memory_bytes == size


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("--port", "-1"),
        ("--port", "65536"),
        ("--port", "http"),
        ("--block-size", "0"),
        ("--block-size", "4097"),
        ("--max-model-len", "0"),
        ("--max-model-len", "1.5"),
        ("--max-num-seqs", "0"),
        ("--max-num-batched-tokens", "0"),
        ("--max-waiting", "0"),
        ("--seed", "-1"),
        ("--seed", str(2**63)),
        ("--dtype", "float8"),
        ("--max-model-len", "1.5K"),
        ("--max-logprobs", "-2"),
        ("--root-path", "cairn"),
        ("--ssl-cert-reqs", "3"),
        ("--allowed-origins", "[1]"),
        ("--default-chat-template-kwargs", "[]"),
        ("--uvicorn-log-level", "loud"),
        ("--mamba-cache-mode", "some"),
        ("--eviction", "fifo"),
        ("--kv-cache-memory-bytes", "0"),
        ("--kv-cache-memory-bytes", "1XB"),
        ("--kv-cache-memory-bytes", "lots"),
        ("--kv-cache-memory-bytes", "1e99"),
        ("--shutdown-timeout", "-1"),
        ("--shutdown-timeout", "nan"),
        ("--request-timeout", "0"),
        ("--cpu-threads", "0"),
        ("--log-level", "loud"),
        ("--tensor-parallel-size", "0"),
        ("--served-model-name", ""),
        ("--api-key", ""),
    ],
)
def test_a_wrong_value_is_one_line_with_the_flag_and_the_value(flag, value):
    with pytest.raises(ConfigError) as caught:
        load("m", f"{flag}={value}")
    assert str(caught.value).startswith(f"{flag}: ") and "\n" not in str(caught.value)
    assert value[:80] in str(caught.value)


def test_a_wrong_variable_is_named(monkeypatch):
    monkeypatch.setenv("CAIRN_MAX_NUM_SEQS", "many")
    with pytest.raises(ConfigError, match=r"^CAIRN_MAX_NUM_SEQS \(--max-num-seqs\): .*'many'"):
        load("m")


def test_a_key_is_never_shown():
    with pytest.raises(ConfigError) as caught:
        load("m", "--api-key", "k" * 513)
    assert "kkk" not in str(caught.value) and "--api-key" in str(caught.value)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("max-num-seqs: many", r"max_num_seqs \(--max-num-seqs\): .*'many'"),
        ("prot: 5", "no setting 'prot'"),
        ("config: other.yaml", "no setting 'config'"),
        ("- a\n- b", "must hold `name: value` lines"),
        ("a: [", "not a YAML file"),
        ("!!python/object/apply:os.system ['true']", "not a YAML file"),
    ],
)
def test_a_wrong_file_is_named(tmp_path, text, said):
    file = tmp_path / "c.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=said) as caught:
        load("m", "--config", str(file))
    assert str(file) in str(caught.value) and "\n" not in str(caught.value)


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(ConfigError, match="cannot be read"):
        load("m", "--config", str(tmp_path / "none.yaml"))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "MODEL is missing"),
        (["m", "--disable-hybrid-kv-cache-manager"], "always a hybrid one"),
    ],
)
def test_what_is_missing(arguments, said):
    with pytest.raises(ConfigError, match=said):
        load(*arguments)


def test_several_api_keys(tmp_path, monkeypatch):
    def keys(*flags):
        return load("m", *flags).api_key

    assert keys("--api-key", "a,b") == keys("--api-key", "a", "--api-key", "b") == ["a", "b"]
    file = tmp_path / "serve.yaml"
    file.write_text("api-key: [c, d]\n")
    assert keys("--config", str(file)) == ["c", "d"]
    monkeypatch.setenv("CAIRN_API_KEY", "e,f")
    assert keys("--config", str(file)) == ["e", "f"]
    assert keys("--api-key", "g") == ["g"]


def test_keys_with_blanks_between_them(tmp_path, monkeypatch):
    """vLLM's form, beside the other two and mixed with them."""

    def keys(*arguments):
        settings = load(*arguments)
        return settings.model, settings.api_key

    assert keys("m", "--api-key", "a", "b") == ("m", ["a", "b"])
    assert keys("m", "--api-key", "a,b", "c", "--port", "1", "--api-key", "d", "e") == ("m", ["a", "b", "c", "d", "e"])
    assert keys("--api-key", "a", "b", "--port", "1", "m") == keys("--api-key", "a", "b", "--", "m")
    assert keys("m", "--api-key=a", "--api-key=b") == ("m", ["a", "b"])
    # a folder is MODEL where nothing else is
    assert keys("--api-key", "a", "b", str(tmp_path)) == (str(tmp_path), ["a", "b"])
    assert keys("--api-key", "a", str(tmp_path)) == (str(tmp_path), ["a"])
    assert keys("m", "--api-key", "a", str(tmp_path)) == ("m", ["a", str(tmp_path)])
    monkeypatch.setenv("CAIRN_MODEL", "from-env")
    assert keys("--api-key", "a", str(tmp_path)) == ("from-env", ["a", str(tmp_path)])
    monkeypatch.delenv("CAIRN_MODEL")
    file = tmp_path / "serve.yaml"
    file.write_text("model: from-file\n")
    assert keys("--config", str(file), "--api-key", "a", str(tmp_path)) == ("from-file", ["a", str(tmp_path)])


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("m", "--api-key", "good", ""), "^--api-key: must not be empty"),
        (("m", "--api-key", "", "good"), "^--api-key: must not be empty"),
        (("m", "--api-key", "good", "b d"), "^--api-key: "),
        (("m", "--api-key", "good", "schl\u00fcssel"), "^--api-key: "),
        (("m", "--api-key", *("good",) * 65), "^--api-key: .* at most 64"),
        (("--api-key", "good", "sekret"), "^MODEL is missing: all words after --api-key are keys"),
    ],
)
def test_words_that_are_no_keys(arguments, said):
    with pytest.raises(ConfigError, match=said) as caught:
        load(*arguments)
    assert not {"good", "sekret", "b d"} & set(str(caught.value).split("'")) and "\n" not in str(caught.value)


@pytest.mark.parametrize("given", [",", "a,", "two words", "schl\u00fcssel", "x" * 513, ",".join("x" * 65)])
def test_api_keys_that_are_none(given, monkeypatch):
    """None of them is read as "no key", and none is shown."""
    monkeypatch.setenv("CAIRN_API_KEY", given)
    with pytest.raises(ConfigError, match="CAIRN_API_KEY") as caught:
        load("m")
    assert given not in str(caught.value) or given == ","


def test_an_empty_list_of_keys_is_not_no_key(tmp_path):
    file = tmp_path / "serve.yaml"
    file.write_text("api-key: []\n")
    with pytest.raises(ConfigError, match="api-key"):
        load("m", "--config", str(file))


SERVICE = {
    "CAIRN_SERVICE_HOST": "10.0.0.1",
    "CAIRN_SERVICE_PORT": "8000",
    "CAIRN_SERVICE_PORT_HTTP": "8000",
    "CAIRN_PORT": "tcp://10.0.0.1:8000",
    "CAIRN_PORT_8000_TCP": "tcp://10.0.0.1:8000",
    "CAIRN_PORT_8000_TCP_PROTO": "tcp",
    "CAIRN_PORT_8000_TCP_PORT": "8000",
    "CAIRN_PORT_8000_TCP_ADDR": "10.0.0.1",
}
"""What Kubernetes sets in every pod for a Service named cairn."""


@pytest.mark.parametrize("link", ["tcp://10.0.0.1:8000", "tcp://[fd00::1]:8000", "udp://10.0.0.1:53"])
def test_what_kubernetes_sets_for_a_service_is_no_port(link, tmp_path, monkeypatch, caplog):
    for name, value in (SERVICE | {"CAIRN_PORT": link}).items():
        monkeypatch.setenv(name, value)
    settings = load("m")
    assert settings.port == 8000 and "port" not in settings.model_fields_set
    warn_of_service_links(settings)
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    for said in (f"CAIRN_PORT={link} has no effect", "a Service named cairn.", "--port", "enableServiceLinks: false"):
        assert said in record.getMessage()
    # whoever says the port elsewhere need not hear of it
    file = tmp_path / "serve.yaml"
    file.write_text("port: 9\n")
    for said in (load("m", "--port", "7"), load("m", "--config", str(file))):
        warn_of_service_links(said)
    assert (load("m", "--port", "7").port, load("m", "--config", str(file)).port) == (7, 9)
    assert len(caplog.records) == 1


@pytest.mark.parametrize(
    "value", ["80o0", "tcp://", "tcp://host:8000", "http://10.0.0.1:8000", "tcp://10.0.0.1", "8000 "]
)
def test_a_port_that_is_mistyped_is_refused(value, monkeypatch):
    monkeypatch.setenv("CAIRN_PORT", value)
    if value.strip() == "8000":
        assert load("m").port == 8000
        return
    with pytest.raises(ConfigError, match=r"^CAIRN_PORT \(--port\): "):
        load("m")


@pytest.mark.parametrize("model", [ServeSettings, ProxySettings, RaySettings])
def test_no_other_setting_is_named_like_a_services_variable(model):
    """A Service named cairn-x sets CAIRN_X_PORT and more: only `port` is passed over, by what it holds."""
    links = re.compile(r"(.*_)?(port(_\d+_\w+)?|service_host|service_port(_.*)?)")
    assert [name for name in model.model_fields if links.fullmatch(name)] == ["port"]


NO_UTF_8 = os.fsdecode(b"/m\xff")


@pytest.mark.parametrize(
    "name", ["MODEL", "TOKENIZER", "REQUEST_LOG", "KV_SECRET_FILE", "SSL_CERTFILE", "SERVED_MODEL_NAME"]
)
def test_variables_whose_bytes_are_no_text(name, monkeypatch):
    monkeypatch.setenv("CAIRN_MODEL", "m")
    monkeypatch.setenv(f"CAIRN_{name}", NO_UTF_8)
    with pytest.raises(ConfigError, match=rf"^CAIRN_{name} \(.*\): must be valid UTF-8"):
        load()


@pytest.mark.parametrize("value", ['"/m\\ud800"', '["a", "\\udfff"]', '"/m\\0"'])
def test_a_file_that_spells_no_text(value, tmp_path):
    file = tmp_path / "serve.yaml"
    file.write_text(f"served-model-name: {value}\n")
    with pytest.raises(ConfigError, match=r"served_model_name \(--served-model-name\): must ") as caught:
        load("m", "--config", str(file))
    str(caught.value).encode()


@pytest.mark.parametrize("flag", ["--allowed-origins", "--allowed-headers", "--default-chat-template-kwargs"])
def test_json_that_spells_no_text(flag):
    text = '{"a": ["\\ud800"]}' if "kwargs" in flag else '["\\ud800"]'
    with pytest.raises(ConfigError, match=f"^{flag}: must be"):
        load("m", flag, text)


def test_a_file_is_utf_8_whatever_the_locale(tmp_path):
    file = tmp_path / "serve.yaml"
    file.write_bytes("model: m  # mod\u00e8le\n".encode())
    script = (
        "import sys; from pathlib import Path; from cairn.settings.serve import read_settings_file; "
        "print(read_settings_file(Path(sys.argv[1]))[0])"
    )
    environ = os.environ | {"LC_ALL": "C", "PYTHONUTF8": "0"}
    command = [sys.executable, "-c", script, str(file)]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=20, check=True)
    assert done.stdout == "{'model': 'm'}\n"


def test_a_long_word_behind_a_key_is_no_folder():
    with pytest.raises(ConfigError, match=r"^MODEL is missing"):
        load("--api-key", "a", "x" * 300)
