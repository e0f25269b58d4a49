"""`make demo-pd`: a conversation with a prefill and a decode server behind a proxy, until the prefill server is killed.

Prints what came from where, and an exit code that says whether the promises were kept.
"""

import json
import os
import platform
import signal
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from types import MappingProxyType

from rich import box
from rich.console import Console
from rich.table import Table

from demo.checks import Check
from demo.corpus import Corpus
from demo.demo_pd_checks import check_pair, check_same_answers, due, due_back
from demo.demo_pd_job import Asked, Pages, Place, converse
from demo.server import running, serve_command
from demo.table import check_lines
from demo.terminal import leave, run_demo

__all__ = ["main"]

TRANSFER = ("--kv-transfer-config", '{"kv_connector":"NixlConnector","kv_role":"kv_both"}')
ANY_PORT = MappingProxyType({"VLLM_NIXL_SIDE_CHANNEL_PORT": "0"})
EXACT, DEFAULT = "exact", "default"
FLAGS: Mapping[str, tuple[str, ...]] = MappingProxyType({EXACT: ("--exact", "--dtype", "float32"), DEFAULT: ()})

EXACT_NOTE = (
    "With --exact a prompt's end that is no multiple of 64 is resumed by the very same prompt alone, and answers are "
    "not shared: D takes every new state from P, and of keys and values what no earlier prompt had."
)


def main(arguments: Sequence[str] | None = None) -> int:
    """0: all promises kept; 1: one was broken, or the demo could not be run."""
    return run_demo(_run, "demo-pd", arguments, about=__doc__)


def _run(model: Path, out: Path, console: Console) -> int:
    corpus = Corpus()
    lone = _ask_one(model, out, corpus, console)
    checks: list[Check] = []
    runs: dict[str, list[Asked]] = {}
    for name, flags in FLAGS.items():
        exact = name == EXACT
        asked, pages = _ask_pair(name, model, out, corpus, console)
        found = [check_same_answers(asked, lone)] if exact else []
        found += check_pair(asked, pages, exact=exact)
        console.print(_table(f"P, D and a proxy {' '.join(flags)}".strip(), asked, pages, exact))
        if exact:
            console.print(EXACT_NOTE, style="dim")
        console.print(check_lines(found))
        console.print()
        runs[name] = asked
        checks += found
    result = out / "result.json"
    result.write_text(json.dumps(_plain(runs, checks), indent=2) + "\n")
    console.print(f"all figures: {result}", style="dim")
    return 0 if all(check.kept for check in checks) else 1


def _ask_one(model: Path, out: Path, corpus: Corpus, console: Console) -> list[Asked]:
    """The same conversation with one server, which nobody kills."""
    command = serve_command(model, *FLAGS[EXACT])
    console.print("a lone server, --exact", style="dim")
    with running(command, out / "lone.log") as server, Place(server.url, server.url) as place:
        return converse(place, corpus, lambda: None)


def _ask_pair(name: str, model: Path, out: Path, corpus: Corpus, console: Console) -> tuple[list[Asked], Pages]:
    flags = (*FLAGS[name], *TRANSFER)
    console.print(f"P, D: cairn serve {' '.join((str(model), *flags))}", style="dim")
    with ExitStack() as stack:
        prefill, decode = (
            stack.enter_context(running(serve_command(model, *flags), out / f"{name}-{role}.log", ANY_PORT))
            for role in ("prefill", "decode")
        )
        proxy = [sys.executable, "-m", "cairn", "proxy", "--port", "0"]
        proxy += ["--prefill", prefill.url, "--decode", decode.url]
        front = stack.enter_context(running(proxy, out / f"{name}-proxy.log"))
        place = stack.enter_context(Place(front.url, decode.url, prefill.url))
        return converse(place, corpus, prefill.kill), place.pages()


def _table(title: str, asked: Sequence[Asked], pages: Pages, exact: bool) -> Table:
    table = Table(title=title, box=box.SIMPLE_HEAD, title_justify="left")
    table.add_column("request", no_wrap=True)
    for header in ("prompt\ntokens", "shared\nearlier", "D had", "from P", "D\ncomputed", "KiB\nto D", "at most"):
        table.add_column(header, justify="right")
    for header in ("KiB back\nto P", "at most"):
        table.add_column(header, justify="right")
    for one in asked:
        tokens = (len(one.prompt_ids), one.shared.paths, one.hit, one.received, one.computed)
        moved = (one.pulled, due(one, pages, exact=exact), one.pulled_back, 0 if exact else due_back(one, pages))
        table.add_row(one.label, *(f"{count:,}" for count in tokens), *(f"{count >> 10:,}" for count in moved))
    return table


def _plain(runs: Mapping[str, Sequence[Asked]], checks: Sequence[Check]) -> dict[str, object]:
    return {
        "cairn": version("cairn-serve"),
        "machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} CPUs",
        "requests": {name: [asdict(one) for one in asked] for name, asked in runs.items()},
        "checks": [asdict(check) | {"kept": check.kept} for check in checks],
    }


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, leave)
    sys.exit(main())
