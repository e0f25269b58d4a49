"""From flags to material and target: what depends on what, and what is kept secret."""

import argparse
import json

import pytest

from cairn.bench.client import Endpoint
from cairn.bench.flags import add_bench_flags, make_endpoint, make_workload, max_open_requests, parse_goals
from cairn.errors import ConfigError


@pytest.fixture(autouse=True)
def no_key_of_a_person(monkeypatch):
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)


def asked(*words):
    parser = argparse.ArgumentParser()
    add_bench_flags(parser)
    return parser.parse_args(["serve", *words])


def material(*words, kind="completions"):
    return make_workload(asked("--num-prompts", "20", "--random-input-len", "30", *words), kind)


def prompts(work):
    return [turn.prompt for conversation in work for turn in conversation.turns]


def test_warm_ups_leave_nothing_that_a_measured_prompt_could_use():
    made = material("--num-warmups", "5")
    assert len(made.warmups) == 5 and {len(prompt) for prompt in prompts(made.warmups)} == {30}
    assert not {prompt[:2] for prompt in prompts(made.warmups)} & {prompt[:2] for prompt in prompts(made.work)}
    assert material().warmups == [] and material().work == made.work


def test_arrivals_do_not_depend_on_the_prompts():
    rate = ("--request-rate", "4", "--burstiness", "2")
    due = material(*rate).due
    assert due == material(*rate, "--dataset-name", "prefix_repetition").due
    assert due != material(*rate, "--seed", "1").due
    assert due[-1] == pytest.approx(5.0) and material().due == [0.0] * 20


def test_chats_get_text_and_completions_get_ids():
    assert {type(prompt) for prompt in prompts(material().work)} == {tuple}
    chat = material("--num-warmups", "1", kind="chat")
    assert {type(prompt) for prompt in prompts(chat.work) + prompts(chat.warmups)} == {str}
    assert {len(prompt.split(" ")) for prompt in prompts(chat.work)} == {30}


def test_a_trace_brings_its_own_times_and_number(tmp_path):
    path = tmp_path / "t.jsonl"
    row = {"input_length": 600, "output_length": 5, "hash_ids": [1]}
    path.write_text("\n".join(json.dumps({**row, "timestamp": 500 * n}) for n in range(5)))
    words = ("--dataset-name", "trace", "--dataset-path", str(path))
    made = make_workload(asked(*words, "--trace-speedup", "2"), "completions")
    assert made.due == [0.0, 0.25, 0.5, 0.75, 1.0] and made.num_requests == 5 and made.ignore_eos
    assert make_workload(asked(*words, "--num-prompts", "3"), "completions").num_requests == 3


def test_lengths_in_general_go_where_no_special_one_stands():
    general = ("--num-prompts", "10", "--input-len", "9", "--output-len", "3")
    turn = make_workload(asked(*general), "completions").work[0].turns[0]
    assert (turn.num_tokens, turn.max_tokens) == (9, 3)
    turn = make_workload(asked(*general, "--random-input-len", "5"), "completions").work[0].turns[0]
    assert (turn.num_tokens, turn.max_tokens) == (5, 3)
    for dataset in ("prefix_repetition", "chat"):
        work = make_workload(asked(*general, "--dataset-name", dataset), "completions").work
        assert {turn.max_tokens for one in work for turn in one.turns} == {3}


def test_eos_is_ignored_where_lengths_are_made_up():
    assert material().ignore_eos
    assert not material("--dataset-name", "chat").ignore_eos
    assert material("--dataset-name", "chat", "--ignore-eos").ignore_eos
    turn = material().work[0].turns[0]
    assert Endpoint("u", "completions", "m", ignore_eos=True).body((), turn)["ignore_eos"] is True
    assert "ignore_eos" not in Endpoint("u", "completions", "m").body((), turn)


@pytest.mark.parametrize(
    ("words", "url", "kind", "backend"),
    [
        ([], "http://127.0.0.1:8000/v1/completions", "completions", "openai"),
        (["--host", "::1", "--port", "9"], "http://[::1]:9/v1/completions", "completions", "openai"),
        (["--host", "fe80::1%eth0"], "http://[fe80::1%eth0]:8000/v1/completions", "completions", "openai"),
        (
            ["--base-url", "http://[fe80::1%25eth0]:9"],
            "http://[fe80::1%eth0]:9/v1/completions",
            "completions",
            "openai",
        ),
        (["--base-url", "https://x/"], "https://x/v1/completions", "completions", "openai"),
        (["--base-url", "http://x/v1"], "http://x/v1/completions", "completions", "openai"),
        (["--base-url", "http://x/api/v1"], "http://x/api/v1/completions", "completions", "openai"),
        (
            ["--base-url", "http://x/v1", "--endpoint", "/completions"],
            "http://x/v1/completions",
            "completions",
            "openai",
        ),
        (["--backend", "openai-chat"], "http://127.0.0.1:8000/v1/chat/completions", "chat", "openai-chat"),
        (["--backend", "vllm"], "http://127.0.0.1:8000/v1/completions", "completions", "vllm"),
        (
            ["--endpoint", "/v1/chat/completions"],
            "http://127.0.0.1:8000/v1/chat/completions",
            "chat",
            "openai-chat",
        ),
    ],
)
def test_where_requests_go(words, url, kind, backend):
    target = make_endpoint(asked(*words))
    assert (target.url, target.kind, target.backend) == (url, kind, backend)


def test_keys_and_headers(monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "sk-env")
    assert make_endpoint(asked()).headers == {"Authorization": "Bearer sk-env"}
    assert make_endpoint(asked("--api-key", "sk-flag")).headers == {"Authorization": "Bearer sk-flag"}
    target = make_endpoint(asked("--header", "Authorization=Basic abc", "X-Team=a=b"))
    assert target.headers == {"Authorization": "Basic abc", "X-Team": "a=b"}
    endpoint = Endpoint("u", "chat", "m", headers=target.headers, secrets=target.secrets)
    assert "abc" not in repr(endpoint) and "sk-env" not in repr(endpoint)
    assert endpoint.redact("sk-env, Basic abc and a=b") == "***, *** and ***"


def test_only_what_is_given_is_sent():
    assert dict(make_endpoint(asked()).fields) == {}
    words = ("--temperature", "0", "--top-k", "-1", "--extra-body", '{"temperature": 1, "cache_salt": "x"}')
    assert dict(make_endpoint(asked(*words)).fields) == {"temperature": 1, "top_k": -1, "cache_salt": "x"}


def test_goals():
    assert parse_goals(["ttft:5", "e2el:7.5", "tpot:0"]) == {"ttft": 5.0, "e2el": 7.5, "tpot": 0.0}
    for wrong in ("ttft", "ttft:-1", "ttft:nan", "x:1"):
        with pytest.raises(ConfigError, match="--goodput"):
            parse_goals([wrong])


def test_open_requests_are_bounded_in_any_case(monkeypatch):
    limit = "cairn.bench.flags.resource.getrlimit"
    monkeypatch.setattr(limit, lambda kind: (256, 4096))
    assert (max_open_requests(None), max_open_requests(192)) == (192, 192)
    with pytest.raises(ConfigError, match=r"--max-concurrency 193 .* \(ulimit -n\)"):
        max_open_requests(193)
    monkeypatch.setattr(limit, lambda kind: (1 << 20, 1 << 20))
    assert max_open_requests(None) == 4096
