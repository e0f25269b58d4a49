"""Sampling defaults of generation_config.json: where they come from, and that a request's own fields win."""

import json

import pytest

from cairn.errors import ConfigError
from cairn.server.generation_config import load_default_sampling

PUBLISHED = {
    "do_sample": True,
    "eos_token_id": [1],
    "temperature": 0.6,
    "top_k": 20,
    "top_p": 0.95,
    "max_new_tokens": 40,
}
FOUND = {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "max_tokens": 40}
CHAT = {"messages": [{"role": "user", "content": "Hello."}]}
TEXT = {"prompt": "Hello."}


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "generation_config.json").write_text(json.dumps(PUBLISHED))
    return tmp_path


@pytest.fixture(scope="module")
def server(running_server):
    running = running_server(default_sampling=FOUND | {"repetition_penalty": 1.05})
    yield running
    running.drain()
    running.join()


def test_the_checkpoints_file_is_read(folder, caplog):
    assert load_default_sampling("auto", None, folder) == FOUND
    assert "temperature 0.6" in caplog.text and "--generation-config vllm" in caplog.text


def test_single_ones_are_replaced(folder):
    overrides = '{"temperature": 1, "min_p": 0.1, "unknown": 5}'
    assert load_default_sampling("auto", overrides, folder) == FOUND | {"temperature": 1, "min_p": 0.1}
    assert load_default_sampling("vllm", '{"top_k": -1}', folder) == {"top_k": -1}


def test_another_folder_and_none(folder, tmp_path_factory, caplog):
    empty = tmp_path_factory.mktemp("empty")
    assert load_default_sampling(str(folder), None, empty) == FOUND
    assert load_default_sampling("auto", None, empty) == load_default_sampling("vllm", None, folder) == {}
    caplog.clear()
    load_default_sampling("vllm", None, folder)
    assert caplog.text == ""


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ('{"temperature": "hot"}', "temperature must be 0 to 100, not 'hot'"),
        ('{"temperature": true}', "temperature"),
        ('{"temperature": NaN}', "temperature"),
        ('{"top_p": 0}', "top_p must be above 0 and at most 1, not 0"),
        ('{"top_k": 2.5}', "top_k must be a whole number, 0 to"),
        ('{"max_new_tokens": 0}', "max_new_tokens"),
        ("[]", "must be a JSON object"),
        ("{", "is no JSON"),
    ],
)
def test_what_is_wrong_is_named(folder, text, named):
    with pytest.raises(ConfigError, match="--override-generation-config") as caught:
        load_default_sampling("auto", text, folder)
    assert named in str(caught.value)
    (folder / "generation_config.json").write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_default_sampling("auto", None, folder)
    assert named in str(caught.value) and "generation_config.json" in str(caught.value)


def test_a_folder_without_the_file(tmp_path):
    with pytest.raises(ConfigError, match="--generation-config: there is no"):
        load_default_sampling(str(tmp_path / "nowhere"), None, tmp_path)


def asked(server, path, body):
    assert server.post(path, {"model": "echo"} | body).status_code == 200
    request = server.requests[-1]
    return request.sampling, request.stop_conditions.max_tokens


@pytest.mark.parametrize(("path", "body"), [("/v1/completions", TEXT), ("/v1/chat/completions", CHAT)])
def test_defaults_are_for_what_is_not_sent(server, path, body):
    sampling, _ = asked(server, path, body)
    named = (sampling.temperature, sampling.top_k, sampling.top_p, sampling.repetition_penalty)
    assert named == (0.6, 20, 0.95, 1.05)
    sampling, _ = asked(server, path, body | {"temperature": 0, "top_k": -1})
    assert (sampling.temperature, sampling.top_k, sampling.top_p) == (0, 0, 0.95)


@pytest.mark.parametrize(
    ("path", "body", "most"),
    [
        ("/v1/completions", TEXT, 16),
        ("/v1/completions", TEXT | {"max_tokens": 5}, 5),
        ("/v1/completions", TEXT | {"max_tokens": 50}, 40),
        ("/v1/completions", TEXT | {"max_tokens": 0, "echo": True}, 1),
        ("/v1/chat/completions", CHAT, 40),
        ("/v1/chat/completions", CHAT | {"max_tokens": 7}, 7),
        ("/v1/chat/completions", CHAT | {"max_completion_tokens": 70}, 40),
        ("/v1/messages", CHAT | {"max_tokens": 70}, 40),
    ],
)
def test_max_new_tokens_bounds_every_answer(server, path, body, most):
    _, max_tokens = asked(server, path, body)
    assert max_tokens == most
