"""Starts of servers with NIXL, then rounds of every fault over NIXL, and of every attack of strangers, for as long as
it takes: `make soak`, or

    python tests/pd/soak.py [--model FOLDER] [--starts 20] [--rounds 20] [--seed N] [--from FAULT] [--only FAULT]
                            [--json FILE]

The processes live on from round to round unless the fault kills them. During an attack a plain request starts within a
second of what it takes alone; after it pages, leases, descriptors, threads and memory are as they were. The first
failure ends the run with exit code 1 and the command that plays the same rounds from the same fault on.
"""

import argparse
import json
import sys
import time
from pathlib import Path

import attacks
import nixl_faults
from nixl_world import World, world_of
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from server_starts import ServerStarts, StartFailed

_ROUNDS_TO_STRIKE = 10
_STRIDE = 1_000_000
"""So far apart are the rounds of two seeds."""


def main() -> int:
    arguments = _arguments()
    console = Console(stderr=True)
    faults = _faults(arguments)
    found: dict = {"seed": arguments.seed, "rounds": arguments.rounds, "faults": {}}
    began = time.monotonic()
    columns = (TextColumn("{task.description:<34}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    try:
        with Progress(*columns, console=console) as progress:
            found["starts"] = _start(arguments, progress)
        if "failure" in found["starts"]:
            console.print(found["starts"]["failure"], markup=False)
            return 1
        with world_of(arguments.model) as world, Progress(*columns, console=console) as progress:
            whole = progress.add_task("all", total=len(faults) * arguments.rounds)
            for fault in faults:
                found["faults"][fault.__name__] = _soak(world, fault, arguments, lambda: progress.advance(whole))
                found["processes"] = world.started
                progress.console.print(f"{fault.__name__}: {found['faults'][fault.__name__]}")
                if "failure" in found["faults"][fault.__name__]:
                    break
    finally:
        found["seconds"] = round(time.monotonic() - began, 1)
        found["played"] = sum(each["rounds"] for each in found["faults"].values())
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(found, indent=2) + "\n")
    failed = [(name, each) for name, each in found["faults"].items() if "failure" in each]
    for name, each in failed:
        console.print(f"{each['failure']}\nPlay it again: make soak SEED={arguments.seed} FROM={name}", markup=False)
    if not failed:
        played = f"{found['starts']['starts']} starts, {found['played']} rounds of {len(faults)} faults"
        console.print(f"{played} in {found['seconds']:.0f} s: {arguments.json}")
    return int(bool(failed))


def _start(arguments: argparse.Namespace, progress: Progress) -> dict:
    """How many servers were started, and how one failed, if any did."""
    task = progress.add_task("starts", total=arguments.starts)
    starts = ServerStarts(arguments.model, arguments.json.parent / "starts")
    try:
        return {"starts": starts.play(arguments.starts, lambda: progress.advance(task))}
    except StartFailed as error:
        return {"starts": int(progress.tasks[task].completed), "failure": str(error)}


def _soak(world: World, fault, arguments: argparse.Namespace, advance) -> dict:
    """All rounds of one fault: how many were played, how often it struck, and what failed, if anything did."""
    if fault in attacks.ATTACKS:
        return _soak_attack(world, fault, arguments, advance)
    struck, counter = 0, nixl_faults.EFFECTS[fault]
    began = time.monotonic()
    for number in range(arguments.rounds):
        seed = arguments.seed * _STRIDE + number
        try:
            struck += nixl_faults.struck(nixl_faults.play(world, fault, seed), counter)
        except Exception as error:
            return {"rounds": number, "struck": struck, "failure": f"{fault.__name__}, seed {seed}: {error!r}"}
        advance()
    result = {"rounds": arguments.rounds, "struck": struck, "seconds": round(time.monotonic() - began, 1)}
    # a few rounds may well miss the moment
    enough = struck or arguments.rounds < _ROUNDS_TO_STRIKE
    return result if enough else result | {"failure": f"{fault.__name__} never struck"}


def _soak_attack(world: World, attack, arguments: argparse.Namespace, advance) -> dict:
    """All rounds of one attack: what a plain request's first token took, in seconds, at worst."""
    found = {"rounds": 0, "alone": 0.0, "worst": 0.0}
    for number in range(arguments.rounds):
        seed = arguments.seed * _STRIDE + number
        try:
            seconds = attacks.play(world, attack, seed)
        except Exception as error:
            return found | {"failure": f"{attack.__name__}, seed {seed}: {error!r}"}
        found["rounds"] += 1
        for name, value in seconds.items():
            found[name] = round(max(found[name], value), 4)
        advance()
    return found


def _faults(arguments: argparse.Namespace) -> tuple:
    everything = (*nixl_faults.FAULTS, *attacks.ATTACKS)
    names = [fault.__name__ for fault in everything]
    for name in (arguments.first, arguments.only):
        if name and name not in names:
            sys.exit(f"{name} is none of {', '.join(names)}")
    first = names.index(arguments.first) if arguments.first else 0
    return tuple(f for f in everything[first:] if arguments.only in ("", f.__name__))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=Path("build/model"))
    parser.add_argument("--starts", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--from", dest="first", default="", metavar="FAULT")
    parser.add_argument("--only", default="", metavar="FAULT")
    parser.add_argument("--json", type=Path, default=Path("build/soak.json"))
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
