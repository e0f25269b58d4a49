"""--speculative-config: vLLM's JSON; every mistake by name, and what the engine makes of it."""

import json
import re

import pytest

from cairn.cli import engine_config, main
from cairn.engine.build import make_drafter
from cairn.engine.contract import EngineConfig, SpeculativeConfig
from cairn.engine.devices import Device
from cairn.engine.wire import decode_config
from cairn.errors import ConfigError
from cairn.scheduler.lookup_drafter import LookupDrafter
from cairn.scheduler.mtp_drafter import MTPDrafter
from test_settings import load

GPU = Device(backend="cuda")


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch):
    monkeypatch.delenv("CAIRN_SPECULATIVE_CONFIG", raising=False)


def speculative(text):
    return engine_config(load("m", "--speculative-config", text)).speculative


def test_what_is_not_given_is_auto():
    assert engine_config(load("m")).speculative == speculative("{}") == SpeculativeConfig(method="auto")


def test_vllms_words():
    text = '{"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_min": 3, "prompt_lookup_max": 4}'
    asked = SpeculativeConfig(method="ngram", num_speculative_tokens=5, prompt_lookup_min=3, prompt_lookup_max=4)
    assert speculative(text) == engine_config(load("m", "-sc", text)).speculative == asked
    for method in ("suffix", "mtp", "none"):
        assert speculative(json.dumps({"method": method, "prompt_lookup_min": None})).method == method


@pytest.mark.parametrize("method", ["qwen3_next_mtp", "qwen3_5_mtp", "nemotron_h_mtp"])
def test_a_familys_own_name_of_its_head_is_mtp(method):
    assert speculative(json.dumps({"method": method})).method == "mtp"


def test_one_length_of_what_is_looked_up_gives_way_to_the_other():
    default = SpeculativeConfig()
    assert speculative('{"prompt_lookup_max": 1}').prompt_lookup_min == 1
    assert speculative('{"prompt_lookup_max": 64}').prompt_lookup_min == default.prompt_lookup_min
    assert speculative('{"prompt_lookup_min": 40}').prompt_lookup_max == 40
    assert speculative('{"prompt_lookup_min": 3}').prompt_lookup_max == default.prompt_lookup_max


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"method": "eagle"}', "method: must be auto, mtp, ngram, suffix or none, not 'eagle'"),
        ('{"method": "mtp", "num_speculative_tokens": 33}', "num_speculative_tokens: must be 1 to 32, not 33"),
        ('{"method": 5}', "method: .*'5'"),
        ('{"model": "draft"}', "model: there are no draft models; leave it out"),
        ('{"num_speculative_tokens": 0}', "num_speculative_tokens: must be 1 to 32, not 0"),
        ('{"num_speculative_tokens": 33}', "num_speculative_tokens: must be 1 to 32, not 33"),
        ('{"num_speculative_tokens": "5"}', "num_speculative_tokens: .*'5'"),
        ('{"prompt_lookup_min": 0}', "prompt_lookup_min: must be 1 to 64, not 0"),
        ('{"prompt_lookup_max": 65}', "prompt_lookup_max: must be 1 to 64, not 65"),
        ('{"prompt_lookup_min": 5, "prompt_lookup_max": 4}', "prompt_lookup_min: must be at most prompt_lookup_max"),
        ('{"draft_tensor_parallel_size": 1}', "draft_tensor_parallel_size: is not supported; leave it out"),
        ("ngram", "the JSON: "),
        ("[]", "the JSON: "),
    ],
)
def test_a_wrong_key_is_named(text, said, capsys):
    with pytest.raises(ConfigError) as caught:
        speculative(text)
    assert re.search(f"^--speculative-config: {said}", str(caught.value)) and "\n" not in str(caught.value)
    assert main(["serve", "m", "--speculative-config", text]) == 2
    assert capsys.readouterr().err.startswith("cairn: --speculative-config: ")


def test_it_comes_to_the_core():
    config = EngineConfig(model="m", speculative=SpeculativeConfig(method="suffix", num_speculative_tokens=3))
    assert decode_config(config.model_dump_json().encode()) == config


@pytest.mark.parametrize("method", ["auto", "ngram", "suffix"])
def test_the_cpu_looks_up(method):
    config = EngineConfig(model="m", speculative=SpeculativeConfig(method=method))
    assert isinstance(make_drafter(config, Device()), LookupDrafter)


def test_nobody_drafts():
    assert make_drafter(EngineConfig(model="m", speculative=SpeculativeConfig(method="none")), Device()) is None
    for method in ("auto", "none"):
        assert make_drafter(EngineConfig(model="m", speculative=SpeculativeConfig(method=method)), GPU) is None


@pytest.mark.parametrize("method", ["auto", "mtp"])
def test_a_head_drafts_where_there_is_one(method):
    config = EngineConfig(model="m", speculative=SpeculativeConfig(method=method))
    assert isinstance(make_drafter(config, Device(), has_head=True), MTPDrafter)


@pytest.mark.parametrize("method", ["mtp", "ngram", "suffix"])
def test_a_gpu_drafts_where_it_is_asked_to(method):
    config = EngineConfig(model="m", speculative=SpeculativeConfig(method=method))
    drafter = make_drafter(config, GPU, has_head=method == "mtp")
    assert type(drafter) is (MTPDrafter if method == "mtp" else LookupDrafter)
