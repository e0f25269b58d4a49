"""A server under everything at once, for as long as it takes: `make soak-server`, or

    python tests/server/soak.py [--model FOLDER] [--seconds 600] [--seed N] [--clients 12] [--json FILE]

Clients that stream, leave, ask for several answers, forms, tools and salts, ask for nonsense, send half a request, all
at a server whose queue and pool are too small for them. What must not happen: a 5xx but 503, an answer that does not
come, memory or file descriptors that grow, pages that stay held, an accounting that does not add up.
"""

import argparse
import asyncio
import contextlib
import json
import random
import socket
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import httpx
import psutil

FLAGS = (
    *("--kv-cache-memory-bytes", "2MiB", "--max-num-seqs", "4", "--max-waiting", "12", "--max-model-len", "1024"),
    *("--max-num-batched-tokens", "256", "--request-timeout", "60", "--max-body-bytes", "256KiB"),
)
ANSWER_SECONDS = 90.0
START_SECONDS = 120.0
REST_SECONDS = 60.0
LONGEST_SECONDS = 90.0
"""What a slow machine may take for `enough`."""
_VOCABULARY = range(20, 4000)
_SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
_TOOL = {
    "type": "function",
    "function": {"name": "look", "parameters": {"type": "object", "properties": {"x": {"type": "string"}}}},
}


class Server:
    """`cairn serve` in a child process."""

    def __init__(self, model: Path, log: Path, flags: Sequence[str] = FLAGS) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port: int = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        command = [sys.executable, "-m", "cairn", "serve", str(model), "--port", str(self.port), *flags]
        with log.open("wb") as out:
            self.process = subprocess.Popen([*command, "--served-model-name", "tiny"], stdout=out, stderr=out)
        self.http = httpx.Client(base_url=self.url, timeout=30)
        self.log = log

    def wait_ready(self) -> None:
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline and self.process.poll() is None:
            with contextlib.suppress(httpx.TransportError):
                if self.http.get("/ready").status_code == 200:
                    return
            time.sleep(0.1)
        raise RuntimeError(f"the server is not ready: {self.log.read_text()[-2000:]}")

    def metric(self, start: str) -> float:
        lines = self.http.get("/metrics").text.splitlines()
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(start))

    def footprint(self) -> tuple[int, int]:
        """Bytes of memory and file descriptors of all its processes."""
        own = psutil.Process(self.process.pid)
        found = [own, *own.children(recursive=True)]
        return sum(one.memory_info().rss for one in found), sum(one.num_fds() for one in found)

    def end(self) -> int:
        self.http.close()
        self.process.terminate()
        try:
            return self.process.wait(60)
        finally:
            self.process.kill()


class Soak:
    """What clients do, and what came of it. `wrong`: what must not be."""

    def __init__(self, server: Server, seed: int) -> None:
        self.server = server
        self.seed = seed
        self.statuses: Counter[str] = Counter()
        self.actions: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.memory: list[tuple[float, int]] = []
        shared = random.Random(seed)
        self._bases = [[shared.choice(_VOCABULARY) for _ in range(400)] for _ in range(6)]

    async def run(self, seconds: float, clients: int, enough: Callable[[], bool] = lambda: True) -> None:
        """Until the time is up and there was `enough`, or the longest time is up, or something is wrong."""
        began = time.monotonic()

        def goes_on() -> bool:
            gone = time.monotonic() - began
            return not self.wrong and (gone < seconds or (gone < LONGEST_SECONDS and not enough()))

        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=self.server.url, timeout=ANSWER_SECONDS, limits=limits) as http:
            work = [self._client(http, random.Random((self.seed << 16) + i), goes_on) for i in range(clients)]
            await asyncio.gather(*work, self._watch(goes_on))

    async def _watch(self, goes_on: Callable[[], bool]) -> None:
        while goes_on():
            self.memory.append((time.monotonic(), self.server.footprint()[0]))
            await asyncio.sleep(1.0)

    async def _client(self, http: httpx.AsyncClient, draw: random.Random, goes_on: Callable[[], bool]) -> None:
        acts = (
            *([self._whole] * 6 + [self._stream] * 4 + [self._leave] * 4 + [self._cancel] * 3),
            *(self._nonsense, self._burst, self._half, self._look, self._reset),
        )
        while goes_on():
            act = draw.choice(acts)
            self.actions[act.__name__.lstrip("_")] += 1
            try:
                await act(http, draw)
            except httpx.TimeoutException:
                self.wrong.append(f"{act.__name__}: no answer within {ANSWER_SECONDS} s")
            except httpx.TransportError as error:
                self.wrong.append(f"{act.__name__}: {error!r}")
            await asyncio.sleep(draw.random() / 10)

    # -- what is asked -------------------------------------------------------------------------------------------------

    def _request(self, draw: random.Random) -> tuple[str, dict]:
        body: dict = {"max_tokens": draw.randint(1, 40), "temperature": draw.choice([0, 0.7, 1.3])}
        if draw.random() < 0.3:
            path = "/v1/chat/completions"
            words = ["tell", "me", "more", "of", "that", "file", "and", "its", "end"]
            says = [" ".join(draw.choices(words, k=draw.randint(1, 20))) for _ in range(draw.choice([1, 3]))]
            body["messages"] = [
                {"role": "assistant" if i % 2 else "user", "content": text} for i, text in enumerate(says)
            ]
            if draw.random() < 0.4:
                body |= {"tools": [_TOOL], "tool_choice": draw.choice(["auto", "required", "none"])}
        else:
            path = "/v1/completions"
            base = draw.choice(self._bases)
            body["prompt"] = base[: draw.randint(1, 300)] + draw.choices(_VOCABULARY, k=draw.randint(0, 60))
        return path, body | self._extras(draw, tools="tools" in body)

    def _extras(self, draw: random.Random, *, tools: bool) -> dict:
        forms: list[dict] = [
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": _SCHEMA}}},
            {"structured_outputs": {"regex": "[a-f]{4,9}"}},
            {"structured_outputs": {"choice": ["yes", "no"]}},
        ]
        extras: list[dict] = [
            {"n": draw.randint(2, 4)},
            {"stop": draw.choice(["e", ["the", " a"], "\n"])},
            {"cache_salt": draw.choice(["one", "two"])},
            {"min_p": 0.1, "frequency_penalty": 0.5, "logit_bias": {"17": 5}},
            {"priority": draw.randint(-3, 0)},  # a later one would wait for as long as there are others
            {"stop_token_ids": [draw.choice(_VOCABULARY)], "ignore_eos": True},
            {"return_token_ids": True, "seed": 5},
            {"allowed_token_ids": draw.sample(_VOCABULARY, 20), "bad_words": ["e", "the end", "in"]},
            {"truncate_prompt_tokens": draw.choice([-1, 1, 16])},
        ]
        found: dict = {}
        for extra in draw.sample(extras, draw.choice([0, 0, 1, 2])):
            found |= extra
        if not tools and draw.random() < 0.2:
            found |= draw.choice(forms)
        return found

    # -- what clients do -----------------------------------------------------------------------------------------------

    async def _whole(self, http: httpx.AsyncClient, draw: random.Random) -> None:
        path, body = self._request(draw)
        self._judge(await http.post(path, json=body), body)

    async def _stream(self, http: httpx.AsyncClient, draw: random.Random) -> None:
        path, body = self._request(draw)
        response = await http.post(path, json=body | {"stream": True})
        self._judge(response, body)
        if response.status_code == 200 and not response.text.endswith("data: [DONE]\n\n"):
            self.wrong.append(f"a stream without an end: {body}")

    async def _leave(self, http: httpx.AsyncClient, draw: random.Random) -> None:
        """In the middle of a stream."""
        path, body = self._request(draw)
        left = draw.randint(0, 8)
        async with http.stream("POST", path, json=body | {"stream": True, "max_tokens": 200}) as response:
            if response.status_code != 200:
                await response.aread()
                self._judge(response, body)
                return
            async with contextlib.aclosing(response.aiter_lines()) as lines:
                async for _ in lines:
                    left -= 1
                    if left < 0:
                        break
        self.statuses["left"] += 1

    async def _cancel(self, http: httpx.AsyncClient, draw: random.Random) -> None:
        """Before the answer."""
        path, body = self._request(draw)
        try:
            async with asyncio.timeout(draw.choice([0.0, 0.01, 0.1, 0.5])):
                self._judge(await http.post(path, json=body), body)
        except TimeoutError:
            self.statuses["cancelled"] += 1

    async def _burst(self, http: httpx.AsyncClient, draw: random.Random) -> None:
        """More at once than may wait."""
        asked = [self._request(draw) for _ in range(20)]
        answers = await asyncio.gather(*(http.post(path, json=body | {"max_tokens": 2}) for path, body in asked))
        for response, (_, body) in zip(answers, asked, strict=True):
            self._judge(response, body)

    async def _nonsense(self, http: httpx.AsyncClient, draw: random.Random) -> None:
        """What is refused, by its status."""
        path, body = self._request(draw)
        wrong, status = draw.choice(
            [
                ({"n": 0}, 400),
                ({"n": 10**6}, 400),
                ({"stop": ["x"] * 10_000}, 400),
                ({"logit_bias": {"999999": 1}}, 400),
                ({"structured_outputs": {"regex": "("}}, 400),
                ({"structured_outputs": {"json": '{"a":' * 10_000}}, 400),
                ({"cache_salt": "two\nlines"}, 400),
                ({"model": "another"}, 404),
                ({"user": "x" * (300 << 10)}, 413),
            ]
        )
        body = {name: value for name, value in body.items() if name not in ("tools", "tool_choice")}
        response = await http.post(path, json={**body, "response_format": None, **wrong})
        if response.status_code not in (status, 429):
            self.wrong.append(f"{response.status_code} for {str(wrong)[:100]}: {response.text[:300]}")
        self.statuses[str(response.status_code)] += 1

    async def _half(self, http: httpx.AsyncClient, draw: random.Random) -> None:
        """Half a request, and then nothing."""
        whole = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 50\r\n\r\n" + b'{"prompt": [1, 2'
        _, writer = await asyncio.open_connection("127.0.0.1", self.server.port)
        writer.write(whole[: draw.randint(0, len(whole))])
        await asyncio.sleep(draw.random() / 10)
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()

    async def _look(self, http: httpx.AsyncClient, draw: random.Random) -> None:
        paths = ("/metrics", "/cache?max_nodes=50", "/health", "/ready", "/load", "/server_info", "/v1/models")
        self._judge(await http.get(draw.choice(paths)), {})

    async def _reset(self, http: httpx.AsyncClient, draw: random.Random) -> None:
        response = await http.post("/reset_prefix_cache")
        if response.status_code != 409:
            self._judge(response, {})

    def _judge(self, response: httpx.Response, body: dict) -> None:
        self.statuses[str(response.status_code)] += 1
        failed = response.status_code >= 400 and response.status_code not in (429, 503)
        if failed and not _dead_end(response.text):
            self.wrong.append(f"{response.status_code} for {str(body)[:500]}: {response.text[:500]}")
        if response.status_code == 429 and response.headers.get("retry-after") != "1":
            self.wrong.append("429 without Retry-After")
        if response.status_code == 200 and 'data: {"error"' in response.text and not _dead_end(response.text):
            self.wrong.append(f"an error within a stream for {str(body)[:500]}: {response.text[-500:]}")

    # -- afterwards ----------------------------------------------------------------------------------------------------

    def growth(self) -> float:
        """Bytes a minute by which memory grows: Theil's slope (the median of all pairs') over the last two thirds."""
        samples = self.memory[len(self.memory) // 3 :]
        step = max(1, len(samples) // 120)
        samples = samples[::step]
        slopes = [(b - a) / (t - s) for i, (s, a) in enumerate(samples) for t, b in samples[i + 1 :]]
        return 60 * statistics.median(slopes) if slopes else 0.0

    def at_rest(self) -> dict[str, float]:
        """Wait for the end of everything; then nothing is held, and the accounting has come out right."""
        server, deadline = self.server, time.monotonic() + REST_SECONDS
        names = ("num_requests_running", "num_requests_waiting", "held_pages", "open_leases")
        audits = server.metric("cairn:audits_total")
        server.http.post("/v1/completions", json={"prompt": [1, 2, 3], "max_tokens": 1})
        while True:
            found = {name: server.metric(f"{'vllm' if 'num' in name else 'cairn'}:{name}") for name in names}
            found["load"] = server.http.get("/load").json()["server_load"]
            if not any(found.values()) and server.metric("cairn:audits_total") > audits:
                return found
            if time.monotonic() > deadline:
                self.wrong.append(f"not at rest after {REST_SECONDS} s: {found}")
                return found
            time.sleep(0.1)


def _dead_end(text: str) -> bool:
    """Whether an answer could neither go on nor end within its form, which is nobody's fault."""
    return "cannot be held to the form" in text


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=Path("build/model"))
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--clients", type=int, default=12)
    parser.add_argument("--growth", type=float, default=2.0, help="most MiB a minute; default: %(default)s")
    parser.add_argument("--json", type=Path, default=Path("build/soak-server.json"))
    arguments = parser.parse_args()
    arguments.json.parent.mkdir(parents=True, exist_ok=True)
    server = Server(arguments.model, arguments.json.with_suffix(".log"))
    try:
        server.wait_ready()
        soak = Soak(server, arguments.seed)
        before = server.footprint()
        asyncio.run(soak.run(arguments.seconds, arguments.clients))
        rest = soak.at_rest()
        after, growth = server.footprint(), soak.growth() / (1 << 20)
        if growth > arguments.growth:
            soak.wrong.append(f"memory grows by {growth:.2f} MiB a minute")
        audits, preemptions = server.metric("cairn:audits_total"), server.metric("vllm:num_preemptions_total")
    finally:
        code = server.end()
    if code:
        soak.wrong.append(f"the server ended with {code}")
    found = {
        "seconds": arguments.seconds,
        "seed": arguments.seed,
        "actions": dict(soak.actions),
        "statuses": dict(soak.statuses),
        "rest": rest,
        "audits": audits,
        "preemptions": preemptions,
        "mebibytes": [round(size / (1 << 20), 1) for size in (before[0], after[0])],
        "mebibytes_by_second": [round(size / (1 << 20), 1) for _, size in soak.memory],
        "descriptors": [before[1], after[1]],
        "growth_mebibytes_per_minute": round(growth, 3),
        "wrong": soak.wrong,
    }
    arguments.json.write_text(json.dumps(found, indent=2) + "\n")
    print(json.dumps({name: value for name, value in found.items() if name != "mebibytes_by_second"}, indent=2))
    return int(bool(soak.wrong))


if __name__ == "__main__":
    sys.exit(main())
