"""What a server costs that has nothing to do: CPU seconds of server and core, with and without --kv-transfer-config.

    python benchmarks/idle_cpu.py [--model FOLDER] [--seconds 10] [--hand-overs 10] [--json FILE] [--seed N]

Three servers of a tiny model: P and D hand prompts over through NIXL, and a plain one answers the same prompts. Then
nobody asks for anything, and /proc/PID/stat says how much of a core each process uses. Counted twice: right after the
last hand-over, while P still helps links that may be reading, and when that is over.
Exit code 1 when the processes of a server together use more than --limit of a core.
"""

import argparse
import json
import os
import platform
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

import httpx
import numpy as np
import psutil
from rich.console import Console
from rich.progress import track
from rich.table import Table

from cairn.http.cookies import no_cookies
from cairn.models.random_weights.make_model import make_model

TRANSFER = ["--kv-transfer-config", '{"kv_connector": "NixlConnector", "kv_role": "kv_both"}']
START_SECONDS, END_SECONDS = 90.0, 30.0
SETTLE_SECONDS, LINGER_SECONDS = 2.0, 62.0
TICKS = os.sysconf("SC_CLK_TCK")


class Server:
    """`cairn serve` in a child process."""

    def __init__(self, name: str, model: Path, folder: Path, flags: list[str]) -> None:
        self.name, self.log = name, folder / f"{name}.log"
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        command = [sys.executable, "-m", "cairn", "serve", str(model), "--served-model-name", "tiny"]
        command += ["--port", str(port), "--kv-cache-memory-bytes", "64MiB", *flags]
        environ = os.environ | {"OMP_NUM_THREADS": "1", "VLLM_NIXL_SIDE_CHANNEL_PORT": "0", "HF_HUB_OFFLINE": "1"}
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log, env=environ)
        self.http = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60, trust_env=False, cookies=no_cookies())

    def wait_healthy(self) -> None:
        until = time.monotonic() + START_SECONDS
        while time.monotonic() < until:
            if self.process.poll() is not None:
                break
            try:
                if self.http.get("/health").status_code == 200:
                    return
            except httpx.TransportError:
                pass
            time.sleep(0.1)
        raise SystemExit(f"{self.name} did not start: {self.log.read_text()[-2000:]}")

    def ask(self, prompt: list[int], max_tokens: int, params: dict | None = None) -> dict:
        body = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "kv_transfer_params": params}
        answer = self.http.post("/v1/completions", json={"model": "tiny"} | body)
        answer.raise_for_status()
        return answer.json()

    def processes(self) -> dict[str, int]:
        """Process ids: the server's own, and its core's."""
        (core,) = psutil.Process(self.process.pid).children()
        return {"server": self.process.pid, "core": core.pid}

    def end(self) -> None:
        self.http.close()
        self.process.terminate()
        try:
            self.process.wait(END_SECONDS)
        finally:
            self.process.kill()


def cpu_seconds(pid: int) -> float:
    """User and system time so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


def measure(servers: list[Server], seconds: float) -> dict[str, dict[str, float]]:
    """Share of a core, by server and process."""
    processes = {server.name: server.processes() for server in servers}
    before = {pid: cpu_seconds(pid) for each in processes.values() for pid in each.values()}
    start = time.monotonic()
    time.sleep(seconds)
    passed = time.monotonic() - start
    return {
        name: {what: (cpu_seconds(pid) - before[pid]) / passed for what, pid in each.items()}
        for name, each in processes.items()
    }


def work(p: Server, d: Server, plain: Server, arguments: argparse.Namespace) -> int:
    """Hand prompts over; returns how many tokens D has received."""
    rng, received = np.random.default_rng(arguments.seed), 0
    for _ in track(range(arguments.hand_overs), "hand-overs", console=Console(stderr=True)):
        prompt = rng.integers(20, 4000, 400).tolist()
        params = p.ask(prompt, 1, {"do_remote_decode": True})["kv_transfer_params"]
        received += d.ask(prompt, 4, params)["cairn"]["cache"].get("received_tokens", 0)
        plain.ask(prompt, 4)
    return received


def run(arguments: argparse.Namespace, folder: Path) -> dict:
    model = arguments.model or folder / "model"
    if arguments.model is None:
        make_model("nemotron_h", model)
    with ExitStack() as stack:
        servers = []
        for name, flags in (("P", TRANSFER), ("D", TRANSFER), ("plain", [])):
            servers.append(Server(name, model, folder, flags))
            stack.callback(servers[-1].end)
        for server in servers:
            server.wait_healthy()
        received = work(*servers, arguments)
        time.sleep(SETTLE_SECONDS)
        soon = measure(servers, arguments.seconds)
        time.sleep(max(0.0, LINGER_SECONDS - SETTLE_SECONDS - arguments.seconds))
        later = measure(servers, arguments.seconds)
    return {
        "python": platform.python_version(),
        "machine": f"{os.cpu_count()} x {platform.machine()}",
        "seconds": arguments.seconds,
        "hand_overs": arguments.hand_overs,
        "received_tokens": received,
        "limit": arguments.limit,
        "just_after": soon,
        "a_minute_later": later,
    }


def show(found: dict) -> None:
    table = Table(title=f"share of one core over {found['seconds']:g} s, after {found['hand_overs']} hand-overs")
    for heading in ("server", "process", "just after", "a minute later"):
        table.add_column(heading)
    for name, processes in found["just_after"].items():
        for what, share in processes.items():
            table.add_row(name, what, f"{share:.2%}", f"{found['a_minute_later'][name][what]:.2%}")
    Console().print(table)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--hand-overs", type=int, default=10)
    parser.add_argument("--limit", type=float, default=0.02)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="cairn-idle-") as folder:
        found = run(arguments, Path(folder))
    show(found)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(found, indent=2) + "\n")
    if found["received_tokens"] != 400 * arguments.hand_overs:
        print(f"only {found['received_tokens']} tokens were handed over", file=sys.stderr)
        return 1
    shares = [sum(found[when][name].values()) for when in ("just_after", "a_minute_later") for name in found[when]]
    return int(max(shares) > found["limit"])


if __name__ == "__main__":
    sys.exit(main())
