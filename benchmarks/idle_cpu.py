"""What a server costs that has nothing to do: CPU seconds of server and core, with and without --kv-transfer-config.

    python -m benchmarks.idle_cpu [--model FOLDER] [--seconds 10] [--hand-overs 10] [--json FILE] [--seed N]

Three servers of a tiny model: P and D hand prompts over through NIXL, and a plain one answers the same prompts. Then
nobody asks for anything, and /proc/PID/stat says how much of a core each process uses. Counted twice: right after the
last hand-over, while P still helps links that may be reading, and when that is over.
Exit code 1 when the processes of a server together use more than --limit of a core.
"""

import argparse
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

import httpx
import numpy as np
import psutil
from benchmarks.pd_servers import TRANSFER_FLAGS
from benchmarks.reporting import add_output_flags, as_json, circumstances, cpu_seconds, make_console
from demo.server import Child, running, serve_command
from rich.console import Console
from rich.progress import track
from rich.table import Table

from cairn.models.random_weights.make_model import make_model

FLAGS = {"P": TRANSFER_FLAGS, "D": TRANSFER_FLAGS, "plain": ()}
VARIABLES = {"OMP_NUM_THREADS": "1", "VLLM_NIXL_SIDE_CHANNEL_PORT": "0", "HF_HUB_OFFLINE": "1"}
SETTLE_SECONDS, LINGER_SECONDS = 2.0, 62.0


def ask(server: Child, prompt: list[int], max_tokens: int, params: dict | None = None) -> dict:
    body = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "kv_transfer_params": params}
    answer = httpx.post(f"{server.url}/v1/completions", json={"model": "tiny"} | body, timeout=60, trust_env=False)
    return answer.raise_for_status().json()


def measure(servers: dict[str, Child], seconds: float) -> dict[str, dict[str, float]]:
    """Share of a core, by server and process: the server's own, and its core's."""
    processes = {}
    for name, server in servers.items():
        process = psutil.Process(server.process.pid)
        (core,) = process.children()
        processes[name] = {"server": process, "core": core}
    before = {process: cpu_seconds(process) for each in processes.values() for process in each.values()}
    start = time.monotonic()
    time.sleep(seconds)
    passed = time.monotonic() - start
    return {
        name: {what: (cpu_seconds(process) - before[process]) / passed for what, process in each.items()}
        for name, each in processes.items()
    }


def hand_over_prompts(servers: dict[str, Child], num_prompts: int, seed: int) -> int:
    """Hand prompts over; returns how many tokens D has received."""
    rng, received = np.random.default_rng(seed), 0
    for _ in track(range(num_prompts), "hand-overs", console=Console(stderr=True)):
        prompt = rng.integers(20, 4000, 400).tolist()
        params = ask(servers["P"], prompt, 1, {"do_remote_decode": True})["kv_transfer_params"]
        received += ask(servers["D"], prompt, 4, params)["cairn"]["cache"].get("received_tokens", 0)
        ask(servers["plain"], prompt, 4)
    return received


def run(arguments: argparse.Namespace, folder: Path) -> dict:
    model = arguments.model or folder / "model"
    if arguments.model is None:
        make_model("nemotron_h", model)
    with ExitStack() as stack:
        servers = {}
        for name, flags in FLAGS.items():
            command = serve_command(model, "--served-model-name", "tiny", "--kv-cache-memory-bytes", "64MiB", *flags)
            servers[name] = stack.enter_context(running(command, folder / f"{name}.log", VARIABLES))
        received = hand_over_prompts(servers, arguments.hand_overs, arguments.seed)
        time.sleep(SETTLE_SECONDS)
        soon = measure(servers, arguments.seconds)
        time.sleep(max(0.0, LINGER_SECONDS - SETTLE_SECONDS - arguments.seconds))
        later = measure(servers, arguments.seconds)
    return {
        **circumstances(),
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
    make_console().print(table)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--hand-overs", type=int, default=10)
    parser.add_argument("--limit", type=float, default=0.02)
    add_output_flags(parser, with_plot=False)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="cairn-idle-") as folder:
        found = run(arguments, Path(folder))
    show(found)
    if arguments.json is not None:
        arguments.json.write_text(as_json(found))
    if found["received_tokens"] != 400 * arguments.hand_overs:
        print(f"only {found['received_tokens']} tokens were handed over", file=sys.stderr)
        return 1
    shares = [sum(found[when][name].values()) for when in ("just_after", "a_minute_later") for name in found[when]]
    return int(max(shares) > found["limit"])


if __name__ == "__main__":
    sys.exit(main())
