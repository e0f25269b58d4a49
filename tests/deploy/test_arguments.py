"""What `serve run cairn.deploy.ray:app` and a config file's `args` may hold."""

import importlib.machinery
import importlib.util
from pathlib import Path

import pytest
import yaml

from cairn.deploy.ray import app
from cairn.deploy.ray.settings import load_ray_settings
from cairn.errors import ConfigError


def test_text_and_values_with_dashes_or_underscores():
    settings = load_ray_settings(
        {"model": "m", "num_replicas": "2", "max-num-seqs": 8, "enable-docs": "true", "memory": "2GiB"}
    )
    assert (settings.model, settings.num_replicas, settings.max_num_seqs) == ("m", 2, 8)
    assert settings.enable_docs and settings.memory == 2 << 30


def test_arguments_win_over_variables_those_over_the_file_and_that_over_defaults(tmp_path, monkeypatch):
    path = tmp_path / "c.yaml"
    path.write_text("model: of-file\nmax-num-seqs: 4\nblock-size: 32\nmax-model-len: 100\nnum-replicas: 3\n")
    monkeypatch.setenv("CAIRN_MAX_NUM_SEQS", "5")
    monkeypatch.setenv("CAIRN_BLOCK_SIZE", "64")
    settings = load_ray_settings({"config": str(path), "max_num_seqs": 6})
    assert (settings.max_num_seqs, settings.block_size, settings.max_model_len) == (6, 64, 100)
    assert (settings.model, settings.num_replicas, settings.num_ingresses) == ("of-file", 3, 1)


def test_replicas_need_no_file_that_a_variable_named(tmp_path, monkeypatch):
    path = tmp_path / "c.yaml"
    path.write_text("model: of-file\n")
    monkeypatch.setenv("CAIRN_CONFIG", str(path))
    told = load_ray_settings({}).as_arguments()
    monkeypatch.delenv("CAIRN_CONFIG")
    path.unlink()
    assert load_ray_settings(told).model == "of-file"


def test_a_wrong_variable_or_line_of_the_file_is_named(tmp_path, monkeypatch):
    path = tmp_path / "c.yaml"
    path.write_text("block-size: none\n")
    with pytest.raises(ConfigError, match=rf"^--config {path}: block_size"):
        load_ray_settings({"model": "m", "config": str(path)})
    monkeypatch.setenv("CAIRN_BLOCK_SIZE", "some")
    with pytest.raises(ConfigError, match=r"^CAIRN_BLOCK_SIZE .*'some'"):
        load_ray_settings({"model": "m", "config": str(path)})
    with pytest.raises(ConfigError, match=r"^application arguments: .*block-size.*'any'"):
        load_ray_settings({"model": "m", "config": str(path), "block_size": "any"})


def test_what_replicas_are_told_is_the_same_again(monkeypatch):
    monkeypatch.setenv("CAIRN_API_KEY", "k1,k2")
    settings = load_ray_settings({"model": "m", "kv_cache_memory_bytes": "64MiB", "served_model_name": ["a", "b"]})
    monkeypatch.delenv("CAIRN_API_KEY")
    again = load_ray_settings(settings.as_arguments())
    assert again == settings and again.api_key == ["k1", "k2"]


@pytest.mark.parametrize(
    ("args", "parts"),
    [
        ({"model": "m", "num_replica": 2}, ["there is no setting 'num_replica'"]),
        ({"num_replicas": 2}, ["model is missing"]),
        ({"model": "m", "num_replicas": "two"}, ["--num-replicas", "'two'"]),
        ({"model": "m", "num_replicas": 0}, ["--num-replicas", "greater than or equal to 1"]),
        ({"model": "m", "min_replicas": 3, "max_replicas": 2}, ["min_replicas is 3: at most max_replicas"]),
        ({"model": "m", "min_replicas": 0}, ["min_replicas has no effect without max_replicas"]),
        ({"model": "m", "port": 9000}, ["port has no effect here", "http_options"]),
        ({"model": "m", "ssl_certfile": "c.pem"}, ["ssl_certfile has no effect here"]),
        ({"model": "m", "scheduling_policy": "random"}, ["--scheduling-policy", "'fcfs', 'priority' or 'session'"]),
    ],
)
def test_a_wrong_argument_is_named(args, parts):
    with pytest.raises(ConfigError) as raised:
        load_ray_settings(args)
    assert all(part in str(raised.value) for part in ["application arguments", *parts]), raised.value


def test_without_ray_the_extra_is_named(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r'pip install "cairn-serve\[ray\]"'):
        app({"model": "m"})


def test_a_folder_of_that_name_is_no_ray(monkeypatch, tmp_path):
    (tmp_path / "ray").mkdir()
    found = importlib.machinery.PathFinder.find_spec("ray", [str(tmp_path)])
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: found)
    with pytest.raises(ConfigError, match=r'pip install "cairn-serve\[ray\]"'):
        app({"model": "m"})


def test_the_config_files_in_deploy_hold_settings_that_there_are():
    folder = Path(__file__).parents[2] / "deploy" / "ray"
    configs = [yaml.safe_load(path.read_text()) for path in sorted(folder.glob("*.yaml"))]
    assert len(configs) == 3
    for config in configs:
        if config.get("kind") == "RayService":
            config = yaml.safe_load(config["spec"]["serveConfigV2"])
        (application,) = config["applications"]
        assert application["import_path"] == "cairn.deploy.ray:app"
        assert load_ray_settings(application["args"]).model == application["args"]["model"]


def test_prefill_replicas_hand_over_by_nixl_unless_told_otherwise():
    alone = load_ray_settings({"model": "m"})
    assert alone.with_transfers() is alone
    pools = load_ray_settings({"model": "m", "num_prefill_replicas": 1}).with_transfers()
    assert '"NixlConnector"' in (pools.kv_transfer_config or "")
    told = load_ray_settings({"model": "m", "num_prefill_replicas": 1, "kv_transfer_config": "{}"})
    assert told.with_transfers().kv_transfer_config == "{}"
    assert load_ray_settings(pools.as_arguments()) == pools


def test_what_kubernetes_sets_for_a_service_is_no_port(monkeypatch):
    monkeypatch.setenv("CAIRN_PORT", "tcp://10.0.0.1:8000")
    assert load_ray_settings({"model": "m"}).model == "m"
    monkeypatch.setenv("CAIRN_PORT", "tcp://")
    with pytest.raises(ConfigError, match="CAIRN_PORT"):
        load_ray_settings({"model": "m"})


def test_arguments_that_are_no_text():
    with pytest.raises(ConfigError, match=r"^application arguments: MODEL: must be valid UTF-8"):
        load_ray_settings({"model": "/m\udcff"})
