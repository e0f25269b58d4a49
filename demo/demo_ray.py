"""`make demo-ray`: conversations with two replicas on Ray Serve, until one of them is killed.

Prints which replica answered what and how much of it was cached there, and an exit code that says whether the promises
were kept.
"""

import json
import os
import platform
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from demo.checks import SLACK, Check
from demo.corpus import Corpus
from demo.demo_ray_job import CONVERSATIONS, TURNS, FleetClient, Turn, converse
from demo.local_ray import local_ray
from demo.server import DemoError
from demo.table import check_lines
from demo.terminal import leave, run_demo

__all__ = ["check_turns", "main", "turns_table"]

NAME, REPLICAS = "cairn", 2
SETTINGS = (("kv_cache_memory_bytes", "256MiB"), ("served_model_name", "tiny"), ("num_cpus", 0))
COME_BACK_SECONDS = 90.0
POLL_SECONDS = 0.2


def main(arguments: Sequence[str] | None = None) -> int:
    """0: all promises kept; 1: one was broken, or the demo could not be run."""
    return run_demo(
        _run,
        "demo-ray",
        arguments,
        about=__doc__,
        out="folder for result.json",
        unanswered="the fleet did not answer: {error!r}",
    )


def _run(model: Path, out: Path, console: Console) -> int:
    with fleet(model.absolute(), console) as url, FleetClient(url) as client:
        turns = converse(client, Corpus(), _kill)
        came_back = _wait_replicas(client)
    checks = check_turns(turns, came_back)
    console.print(turns_table(turns))
    console.print(check_lines(checks))
    result = out / "result.json"
    result.write_text(json.dumps(_plain(turns, checks), indent=2) + "\n")
    console.print(f"\nall figures: {result}", style="dim")
    return 0 if all(check.kept for check in checks) else 1


@contextmanager
def fleet(model: Path, console: Console) -> Iterator[str]:
    """A Ray of its own with REPLICAS replicas; gives their address. Raises DemoError when they do not start."""
    from ray import serve

    from cairn.deploy.ray import app

    settings = {"model": str(model), "num_replicas": REPLICAS, **dict(SETTINGS)}
    words = " ".join(f"{name}={value}" for name, value in settings.items())
    console.print(f"serve run cairn.deploy.ray:app {words}", style="dim")
    try:
        with local_ray("ERROR") as url:
            serve.run(app(settings), name=NAME)
            yield url
    except RuntimeError as error:
        raise DemoError(f"{error} (logs: {Path(tempfile.gettempdir()) / 'ray' / 'session_latest' / 'logs'})") from error


def _kill(replica: str) -> None:
    """End its process without a word, as a machine that fails does."""
    import ray

    (name,) = (
        found["name"]
        for found in ray.util.list_named_actors(all_namespaces=True)
        if found["name"].endswith(f"#{replica}")
    )
    actor: Any = ray.get_actor(name, namespace="serve")
    os.kill(ray.get(actor.__ray_call__.remote(lambda _: os.getpid()), timeout=10), signal.SIGKILL)


def _wait_replicas(client: FleetClient) -> int:
    """How many replicas there are, as soon as they are REPLICAS again, or after COME_BACK_SECONDS."""
    deadline = time.monotonic() + COME_BACK_SECONDS
    while (count := len(client.prompt_tokens())) < REPLICAS and time.monotonic() < deadline:
        time.sleep(POLL_SECONDS)
    return count


def turns_table(turns: Sequence[Turn]) -> Table:
    """A row a turn: for each conversation its replica, and how much of the prompt that had cached."""
    letters = {replica: chr(ord("A") + number) for number, replica in enumerate(_replicas(turns))}
    table = Table(
        title="Cached of the prompt's tokens, and the replica that answered", box=box.SIMPLE_HEAD, title_justify="left"
    )
    table.add_column("turn", no_wrap=True)
    for number in range(CONVERSATIONS):
        table.add_column(f"conversation {number + 1}", justify="right")
    killed = letters[turns[0].replica]
    for turn in range(TURNS + 1):
        row = sorted((one for one in turns if one.turn == turn), key=lambda one: one.conversation)
        label = f"{turn + 1}" if turn < TURNS else f"{turn + 1}, {killed} killed"
        table.add_row(label, *(f"{one.cached:,} of {len(one.prompt_ids):,}  {letters[one.replica]}" for one in row))
    return table


def check_turns(turns: Sequence[Turn], num_replicas: int) -> list[Check]:
    """The promises. `num_replicas`: how many there were at the end."""
    killed = turns[0].replica
    before = {(one.conversation, one.turn): one.replica for one in turns}
    later = [one for one in turns if 0 < one.turn < TURNS]
    last = [one for one in turns if one.turn == TURNS]
    stayed = [one for one in last if before[one.conversation, TURNS - 1] != killed]
    moved = [one for one in later if one.replica != before[one.conversation, one.turn - 1]]
    return [
        Check("every conversation stays on the replica that has it cached", tuple(map(_say, moved))),
        Check(
            f"every turn has cached what it shares with earlier turns, less {SLACK} tokens at most",
            tuple(_say(one) for one in (*later, *stayed) if _misses(one)),
        ),
        Check(
            "conversations are spread over both replicas",
            () if len(_replicas([one for one in turns if one.turn < TURNS])) == REPLICAS else ("one has them all",),
        ),
        Check(
            "the killed replica answers nothing any more, and nobody has to wait for it",
            tuple(_say(one) for one in last if one.replica == killed or not one.answer_ids),
        ),
        Check(
            "Ray puts another replica in its place",
            () if num_replicas == REPLICAS else (f"{num_replicas} of {REPLICAS} are there",),
        ),
    ]


def _misses(one: Turn) -> bool:
    # more than was ever computed would be somebody else's tokens
    return not one.shared.paths - SLACK <= one.cached <= one.shared.paths


def _say(one: Turn) -> str:
    return (
        f"conversation {one.conversation + 1}, turn {one.turn + 1}: {one.cached:,} cached on {one.replica}, "
        f"{one.shared.paths:,} shared"
    )


def _replicas(turns: Sequence[Turn]) -> list[str]:
    """In the order in which they answered first."""
    return list(dict.fromkeys(one.replica for one in turns))


def _plain(turns: Sequence[Turn], checks: Sequence[Check]) -> dict[str, object]:
    return {
        "cairn": version("cairn-serve"),
        "machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} CPUs",
        "turns": [asdict(one) for one in turns],
        "checks": [asdict(check) | {"kept": check.kept} for check in checks],
    }


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, leave)
    sys.exit(main())
