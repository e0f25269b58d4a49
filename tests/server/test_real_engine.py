"""The whole thing: `cairn serve` as a process of its own, a real tiny model, and clients that know nothing of us."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx
import numpy as np
import openai
import psutil
import pytest

START_SECONDS, END_SECONDS = 90, 30


class Served:
    """`cairn serve` in a child process, its log in a file."""

    def __init__(self, model: Path, log: Path, *flags: str) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.log = log
        command = [sys.executable, "-m", "cairn", "serve", str(model), "--port", str(self.port)]
        pool = () if "--kv-cache-memory-bytes" in flags else ("--kv-cache-memory-bytes", "1GiB")
        command += ["--served-model-name", "tiny", *pool, *flags]
        with log.open("wb") as out:
            environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
            self.process = subprocess.Popen(command, stdout=out, stderr=out, env=environment)
        self.http = httpx.Client(base_url=f"http://127.0.0.1:{self.port}", timeout=60)

    def wait_healthy(self) -> "Served":
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            assert self.process.poll() is None, self.log.read_text()
            try:
                if self.http.get("/health").status_code == 200:
                    return self
            except httpx.TransportError:
                pass
            time.sleep(0.1)
        raise AssertionError(f"not healthy in time: {self.log.read_text()}")

    def openai(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.http.base_url}/v1", api_key="none", max_retries=0, timeout=60)

    def complete(self, prompt, **fields) -> dict:
        body = {"model": "tiny", "prompt": prompt, "max_tokens": 4, "temperature": 0} | fields
        response = self.http.post("/v1/completions", json=body)
        assert response.status_code == 200, response.text
        return response.json()

    def metric(self, start: str) -> float:
        lines = self.http.get("/metrics").text.splitlines()
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(start))

    def until(self, condition) -> None:
        deadline = time.monotonic() + 20
        while not condition():
            assert time.monotonic() < deadline, "it did not happen within 20 s"
            time.sleep(0.02)

    def assert_at_rest(self) -> None:
        """Nothing runs, nothing is held, and the accounting has been recounted since."""
        audits = self.metric("cairn:audits_total")
        self.complete([1, 2, 3], max_tokens=1)
        self.until(lambda: self.metric("cairn:audits_total") > audits)
        assert self.metric("cairn:held_pages") == self.metric("cairn:open_leases") == 0
        assert self.http.get("/health").status_code == 200

    def end(self) -> int:
        self.http.close()
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(END_SECONDS)
        finally:
            self.process.kill()


@pytest.fixture(scope="module")
def served(tiny_model, tmp_path_factory):
    server = Served(tiny_model, tmp_path_factory.mktemp("served") / "log", "--exact").wait_healthy()
    yield server
    assert server.end() == 0, server.log.read_text()


def ids(seed: int, length: int) -> list[int]:
    return np.random.default_rng(seed).integers(20, 4000, length).tolist()


def cache(answer: dict) -> dict:
    found = answer["cairn"]["cache"]
    assert found["cached_tokens"] == answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    return found


def test_a_second_identical_prompt_is_all_cached_and_runs_no_forward_pass(served):
    prompt = ids(1, 777)
    first = served.complete(prompt, max_tokens=1)
    passes = served.metric("cairn:forward_passes_total")
    second = served.complete(prompt, max_tokens=1)
    assert served.metric("cairn:forward_passes_total") == passes
    assert cache(second) == {
        "prompt_tokens": 777,
        "matched_tokens": 777,
        "cached_tokens": 777,
        "computed_tokens": 0,
        "reason": "none",
        "lost_tokens": {},
        "received_tokens": 0,
        "tier_tokens": 0,
        "prefill_cached_tokens": None,
        "held_breakpoints": 0,
    }
    assert second["choices"][0]["text"] == first["choices"][0]["text"]


def test_prompts_that_share_1500_of_2200_tokens(served):
    served.complete(ids(2, 2200))
    found = cache(served.complete(ids(2, 2200)[:1500] + ids(3, 700)))
    assert found["cached_tokens"] >= 1437 and found["matched_tokens"] == 1500
    assert found["reason"] == "no_checkpoint"


def test_salts_keep_apart(served):
    prompt = ids(4, 300)
    served.complete(prompt)
    assert cache(served.complete(prompt, cache_salt="a"))["reason"] == "namespace"
    assert cache(served.complete(prompt, cache_salt="a"))["cached_tokens"] == 300


def test_a_chat_grows_through_the_openai_client(served):
    client = served.openai()
    messages = [{"role": "system", "content": "Answer in one word."}]
    shared = 0
    for turn in range(3):
        messages.append({"role": "user", "content": f"Question {turn}: " + "why does it do that? " * 20})
        parts = client.chat.completions.create(
            model="tiny",
            messages=messages,
            max_tokens=8,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
        chunks = list(parts)
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
        usage = chunks[-1].usage
        assert usage.prompt_tokens_details.cached_tokens >= shared - 63
        shared = usage.prompt_tokens
        messages.append({"role": "assistant", "content": text})


def test_several_answers_to_one_prompt_and_what_is_told_of_their_tokens(served):
    prompt, counter = ids(11, 500), "cairn:computed_prompt_tokens_total"
    computed = served.metric(counter)
    client, drawn = (
        served.openai(),
        {"temperature": 0.8, "max_tokens": 6, "logprobs": 2, "extra_body": {"ignore_eos": True}},
    )
    answer = client.completions.create(model="tiny", prompt=prompt, n=3, seed=5, **drawn)
    assert served.metric(counter) == computed + 500
    for i, choice in enumerate(answer.choices):
        alone = client.completions.create(model="tiny", prompt=prompt, seed=5 + i, **drawn).choices[0]
        assert (choice.text, choice.logprobs) == (alone.text, alone.logprobs)
        assert len(choice.logprobs.tokens) == 6
    whole = served.complete(prompt, echo=True, max_tokens=1, logprobs=0)
    assert len(whole["choices"][0]["logprobs"]["tokens"]) == 501
    assert cache(whole)["reason"] == "disabled"
    served.assert_at_rest()


def test_the_tokenizer_round_trips(served):
    text = "def main() -> None:\n    print('café')\n"
    tokens = served.http.post("/tokenize", json={"prompt": text}).json()["tokens"]
    assert served.http.post("/detokenize", json={"tokens": tokens}).json()["prompt"] == text


def test_a_client_that_leaves_midstream_leaves_nothing_behind(served):
    body = {"model": "tiny", "prompt": ids(5, 200), "max_tokens": 20_000, "ignore_eos": True, "stream": True}
    with served.http.stream("POST", "/v1/completions", json=body) as response:
        lines = response.iter_lines()
        next(lines)
        served.until(lambda: served.metric("cairn:held_pages") > 0)
    served.until(lambda: served.metric("vllm:num_requests_running") == 0)
    served.assert_at_rest()


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({"prompt": []}, "prompt", "empty"),
        ({"prompt": ""}, "prompt", "empty"),
        ({"prompt": [7] * 40_000}, "prompt", "32768"),
        ({"prompt": [7, 4096]}, "prompt", "below 4096"),
        ({"prompt": [7, -1]}, "prompt", "below 4096"),
        ({"prompt": [7], "max_tokens": -1}, "max_tokens", "1 to 2147483647"),
        ({"prompt": [7], "max_tokens": 40_000}, "max_tokens", "32768"),
    ],
)
def test_bad_requests_are_refused_by_field(served, body, param, words):
    response = served.http.post("/v1/completions", json={"model": "tiny"} | body)
    error = response.json()["error"]
    assert response.status_code == 400 and error["param"] == param and words in error["message"]
    served.assert_at_rest()


def test_invalid_json_is_refused(served):
    headers = {"content-type": "application/json"}
    response = served.http.post("/v1/completions", content=b'{"prompt": [1, 2', headers=headers)
    assert response.status_code == 400 and "JSON" in response.json()["error"]["message"]
    served.assert_at_rest()


@pytest.mark.more
def test_a_pool_smaller_than_one_request_refuses_that_request_alone(tiny_model, tmp_path):
    server = Served(tiny_model, tmp_path / "log", "--kv-cache-memory-bytes", "1MiB").wait_healthy()
    try:
        response = server.http.post("/v1/completions", json={"model": "tiny", "prompt": ids(6, 600)})
        assert response.status_code == 400, response.text
        assert "--kv-cache-memory-bytes" in response.json()["error"]["message"]
        answers = [server.complete(ids(7, 300), max_tokens=100, ignore_eos=True) for _ in range(2)]
        assert answers[0]["usage"]["completion_tokens"] == 100
        server.assert_at_rest()
    finally:
        assert server.end() == 0, server.log.read_text()


@pytest.mark.more
def test_align_shows_the_old_behaviour_and_start_up_speaks_in_words(tiny_model, tmp_path):
    server = Served(tiny_model, tmp_path / "log", "--mamba-cache-mode", "align").wait_healthy()
    try:
        server.complete(ids(2, 2200))
        found = cache(server.complete(ids(2, 2200)[:1500] + ids(3, 700)))
        assert found["cached_tokens"] == 0 and found["reason"] == "no_checkpoint"
    finally:
        assert server.end() == 0
    log = server.log.read_text()
    assert "2048 bytes per token" in log.replace(",", "") and "checkpoint" in log


@pytest.mark.more
def test_the_death_of_the_core_answers_everybody_and_ends_the_server(tiny_model, tmp_path):
    server = Served(tiny_model, tmp_path / "log").wait_healthy()
    try:
        body = {"model": "tiny", "prompt": ids(8, 50), "max_tokens": 20_000, "ignore_eos": True, "stream": True}
        with server.http.stream("POST", "/v1/completions", json=body) as response:
            lines = response.iter_lines()
            next(lines)
            (core,) = psutil.Process(server.process.pid).children()
            core.kill()
            events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
        assert "error" in events[-1]
        assert server.process.wait(END_SECONDS) != 0
    finally:
        server.end()


BROKEN = {
    "missing folder": ("no such folder", lambda folder: None),
    "broken config": ("config.json", lambda folder: (folder / "config.json").write_text("{")),
    "unknown architecture": (
        "model_type",
        lambda folder: (folder / "config.json").write_text('{"model_type": "unheard_of"}'),
    ),
    "truncated safetensors": ("safetensors", lambda folder: truncate(next(folder.glob("*.safetensors")))),
}


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


@pytest.mark.more
@pytest.mark.parametrize("what", BROKEN)
def test_a_folder_that_cannot_be_served_exits_2(tiny_model, tmp_path, what):
    words, spoil = BROKEN[what]
    folder = tmp_path / "model"
    if what == "missing folder":
        words = str(folder)
    else:
        folder.mkdir()
        for path in tiny_model.iterdir():
            (folder / path.name).write_bytes(path.read_bytes())
        spoil(folder)
    server = Served(folder, tmp_path / "log")
    assert server.process.wait(START_SECONDS) == 2
    server.end()
    log = server.log.read_text()
    assert words in log and "Traceback" not in log
