"""An application on Ray Serve as its clients, its metrics and the system's list of processes show it."""

import json
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, Self

import httpx
import openai
import psutil
from demo.local_ray import runs_actor
from prometheus_client.parser import text_string_to_metric_families
from ray import serve
from ray.serve.api import RunTarget

from cairn.deploy.ray import app

__all__ = ["Fleet", "OpenStream", "Replica", "events", "until"]

SECONDS = 120.0
POLL_SECONDS = 0.05
LABEL = "replica"
LONG = 7_900
"""Tokens: an answer that nobody waits for."""

EVENT, DONE = "data: ", "[DONE]"


def until(condition: Callable[[], Any], what: str, seconds: float = SECONDS) -> Any:
    """What `condition` gives once that is true. Raises AssertionError when it is not within `seconds`."""
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline, f"within {seconds:g} s: not {what}"
        time.sleep(POLL_SECONDS)
    return found


def events(text: str) -> list[Any]:
    """The JSON of a stream's events."""
    lines = [line.removeprefix(EVENT) for line in text.splitlines() if line.startswith(EVENT)]
    return [json.loads(line) for line in lines if line != DONE]


class Replica:
    """The process of a replica, and those of its engine."""

    def __init__(self, process: psutil.Process) -> None:
        self.process = process
        self.pid = process.pid
        self.engine = process.children(recursive=True)

    def kill(self) -> None:
        """Without a word, as a machine that fails."""
        self.process.kill()


class OpenStream:
    """An answer that is read as it comes, in a thread of its own, until the block is left."""

    def __init__(self, url: str, key: str, prompt: str | list[int]) -> None:
        """Raises AssertionError when no event comes."""
        self._url, self._headers = url, {"Authorization": f"Bearer {key}"}
        self._body = {"prompt": prompt, "max_tokens": LONG, "ignore_eos": True, "stream": True}
        self._events: list[str] = []
        self._leaving = threading.Event()
        self._thread = threading.Thread(target=self._read)

    def __enter__(self) -> Self:
        self._thread.start()
        until(lambda: self._events or not self._thread.is_alive(), "the first event")
        return self

    def __exit__(self, *_: object) -> None:
        self._leaving.set()
        self._thread.join(SECONDS)
        assert not self._thread.is_alive(), "the stream has neither gone on nor ended"

    @property
    def has_ended(self) -> bool:
        return not self._thread.is_alive()

    @property
    def is_done(self) -> bool:
        """Whether the end of the stream has been told."""
        return self._events[-1:] == [DONE]

    @property
    def is_whole(self) -> bool:
        """Whether the answer has come to its own end."""
        return any(
            choice["finish_reason"] == "length" for event in self.events() for choice in event.get("choices", ())
        )

    def events(self) -> list[Any]:
        """What has come so far."""
        return [json.loads(text) for text in self._events if text != DONE]

    def _read(self) -> None:
        with httpx.stream(
            "POST", self._url, json=self._body, headers=self._headers, timeout=SECONDS, trust_env=False
        ) as response:
            for line in response.iter_lines():
                if line.startswith(EVENT):
                    self._events.append(line.removeprefix(EVENT))
                if self._leaving.is_set():
                    return


class Fleet:
    """The application `name`, which answers at `url`."""

    def __init__(self, name: str, url: str, key: str) -> None:
        self.name, self.url, self._key = name, url, key
        headers = {"Authorization": f"Bearer {key}"}
        self.http = httpx.Client(base_url=url, headers=headers, timeout=SECONDS, trust_env=False)

    def deploy(self, prefix: str, settings: Mapping[str, Any], wait: bool) -> None:
        """Start it, or change it. Without `wait` it may still be starting afterwards."""
        target = RunTarget(app(settings), name=self.name, route_prefix=prefix)
        serve.run_many([target], wait_for_applications_running=wait)

    def delete(self) -> None:
        """Take it off Ray: it ends as one that is not needed any more does."""
        serve.delete(self.name)

    def close(self) -> None:
        self.http.close()

    def client(self, **options: Any) -> openai.OpenAI:
        options = {"max_retries": 0, "timeout": SECONDS} | options
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=self._key, **options)

    def complete(self, prompt: str | list[int], **fields: Any) -> dict[str, Any]:
        """The answer's JSON. Raises AssertionError when it is refused."""
        response = self.http.post(
            "/v1/completions", json={"prompt": prompt, "temperature": 0, "max_tokens": 4} | fields
        )
        assert response.status_code == 200, response.text
        return response.json()

    def stream(self, prompt: str | list[int]) -> "OpenStream":
        """One that has begun, and does not end by itself for a while."""
        return OpenStream(f"{self.url}/v1/completions", self._key, prompt)

    # -- what it says of itself ------------------------------------------------------------------------------------

    def metric(self, name: str) -> dict[str, float]:
        """The sum of a metric's samples, by replica."""
        text = self.http.get("/metrics").raise_for_status().text
        found: dict[str, float] = {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                if sample.name == name:
                    replica = sample.labels[LABEL]
                    found[replica] = found.get(replica, 0.0) + sample.value
        return found

    def total(self, name: str) -> float:
        return sum(self.metric(name).values())

    def assert_nothing_is_held(self) -> None:
        """Nothing runs on any replica, and no page is held."""
        until(lambda: self.total("vllm:num_requests_running") == 0, "every request ended")
        until(lambda: self.total("cairn:held_pages") == 0, "every page given back")
        assert self.total("cairn:open_leases") == 0

    # -- its processes ---------------------------------------------------------------------------------------------

    def replicas(self, deployment: str = "replica") -> list[Replica]:
        """Those whose engine's process runs."""
        found = []
        for process in psutil.Process().children(recursive=True):
            try:
                if runs_actor(process.cmdline(), f"ServeReplica:{self.name}:{deployment}"):
                    found.append(Replica(process))
            except psutil.NoSuchProcess:
                continue
        return [replica for replica in found if replica.engine]

    def num_ready(self) -> int:
        """Replicas that answer."""
        try:
            return len(self.metric("vllm:num_requests_running"))
        except httpx.HTTPError:
            return 0

    def wait_replicas(self, count: int) -> list[Replica]:
        """Until so many replicas answer, and no other one is there."""
        until(lambda: self.num_ready() == count == len(self.replicas()), f"{count} replicas of {self.name}")
        return self.replicas()
