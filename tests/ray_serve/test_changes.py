"""Fleets that grow, shrink, are updated, or cannot start."""

import psutil
import pytest
from exchanges import KEY
from fleet import Fleet, until
from load import Load

from cairn.deploy.ray import app
from cairn.errors import ConfigError
from conftest import MODEL_FOLDER


def test_a_rolling_update_under_load_fails_no_request(fleet: Fleet, deploy):
    before = {replica.pid for replica in fleet.replicas()}
    load = Load(fleet.url, KEY)
    with load.running():
        until(lambda: len(load.asked) > 8, "load")
        deploy("cairn", "/fleet", num_replicas=2, max_num_seqs=48)
        until(lambda: not any(map(psutil.pid_exists, before)), "the replicas of before gone")
        num_asked = len(load.asked)
        until(lambda: len(load.asked) > num_asked + 8, "load afterwards")
    assert load.failed == []
    assert not before & {replica.pid for replica in fleet.wait_replicas(2)}


def test_the_number_of_replicas_follows_the_load_from_none_and_back(deploy):
    fleet = deploy(
        "scaled",
        "/scaled",
        min_replicas=0,
        max_replicas=2,
        target_pressure=0.5,
        max_num_seqs=4,
        upscale_delay_s=1,
        downscale_delay_s=2,
        look_back_period_s=2,
    )
    try:
        fleet.wait_replicas(0)
        # the first one waits for the replica that it has started
        assert fleet.complete("Once upon a time")["usage"]["completion_tokens"] == 4
        fleet.wait_replicas(1)
        many, few = Load(fleet.url, KEY, num_clients=6), Load(fleet.url, KEY, num_clients=1)
        with many.running():
            fleet.wait_replicas(2)
            until(lambda: all(fleet.metric("vllm:prompt_tokens_total").values()), "both used")
        with few.running():
            fleet.wait_replicas(1)
        assert many.failed == few.failed == [] and len(many.asked) > 8 and few.asked
        fleet.wait_replicas(0)
    finally:
        fleet.delete()


def test_a_folder_that_holds_no_model_is_refused_before_anything_is_started(tmp_path):
    for folder, reason in ((tmp_path / "nowhere", "there is no such folder"), (tmp_path, "config.json is missing")):
        with pytest.raises(ConfigError, match=reason) as refused:
            app({"model": str(folder)})
        assert str(folder) in str(refused.value)


def test_a_model_that_cannot_be_loaded_is_503_with_the_reason(deploy, tmp_path):
    for name in ("config.json", "tokenizer.json"):
        (tmp_path / name).write_bytes((MODEL_FOLDER / name).read_bytes())
    fleet = deploy("broken", "/broken", wait=False, model=str(tmp_path), replica_timeout=5, num_replicas=1)
    try:

        def reason() -> str:
            answer = fleet.http.post("/v1/completions", json={"prompt": "a", "max_tokens": 1})
            if answer.status_code == 404:
                return ""  # there is no such application yet
            assert answer.status_code == 503 and int(answer.headers["retry-after"]) > 0
            return answer.json()["error"]["message"]

        # first while Ray tries again, and then when it has given up
        until(lambda: f"one could not be started: {tmp_path}" in reason(), "the reason")
        told = until(lambda: (text := reason()).startswith("no replica could be started") and text, "the last word")
        assert f"no replica could be started: {tmp_path}" in told and "safetensors" in told and len(told) < 600
    finally:
        fleet.delete()
