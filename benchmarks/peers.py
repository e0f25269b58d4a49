"""cairn beside other servers with OpenAI's API: the same checkpoint, the same loads, in turn on one machine.

    python -m benchmarks.peers [--servers cairn vllm] [--server NAME=LINE ...] [--sizes tiny small | --model FOLDER]
                               [--loads prefix_repetition decode cold sampled] [--rounds 3] [--threads 2]
                               [--quantization int8 | int4] [--isa avx2] [--bounds]
                               [--quick] [--json FILE] [--plot FILE] [--keep FOLDER] [--seed N]

Servers: cairn, vllm (set up by `make bench-vllm`), vllm-auto (with as many threads as it chooses) and llama-server (set
up by `make bench-llama`; wants --gguf beside --model) are known; any other is a command line whose model must be called
`bench`, `--server 'mine=OMP_NUM_THREADS={threads} my-server --model {model} --port {port}'`. The placeholders are
python, model, gguf, port, threads, cpus, cache_gib, cache_mib, isa, llama_bin, name, path, max_model_len, max_num_seqs
and max_num_batched_tokens.

--quantization and --isa hold for all servers: weights of as many bits, and no more instructions of this processor than
CAIRN_MAX_CPU_ISA of that name leaves. A server that has a GGUF file must first compute what transformers does.

Loads, each with prompts that are token ids:
  prefix_repetition  a tenth of the published comparison: 10 prefixes of 600 tokens, 200 of its own behind, 100 answers
                     of 100 tokens, 10 at a time: duration, time per output token, time to first token, share cached
  decode             tokens a second at 1, 4, 8 and 16 sequences, contexts short
  cold               prompts of 1,200 and 4,800 tokens never seen, the same again, 4,800 that share two thirds with an
                     earlier one, and the next that do so: milliseconds to the first token
  sampled            tokens a second at 8 sequences, greedy and with temperature 0.8, top_p 0.95 and top_k 20, of the
                     same model with a vocabulary of 151,936
and of each server: seconds from its start until /health answers, resident memory of all its processes after the loads,
and the share of a core that it uses over 10 seconds without requests.

A round is one turn of each server, alone on the machine and newly started; every second round goes backwards. The table
has medians over the rounds, and how many times better the first server is than each other one. --bounds: before each
round, what the machine can do at most; see `machine_bounds`.
"""

import argparse
import asyncio
import json
import os
import re
import shlex
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from types import FrameType
from typing import NoReturn

from benchmarks.made_model import PEER_SHAPES, PUBLISHED_VOCABULARY, make_peer_model
from benchmarks.peer_agreement import check_agreement
from benchmarks.peer_gguf import FORMS, gguf_of
from benchmarks.peer_llama import ISAS, NATIVE
from benchmarks.peer_loads import FULL, LOADS, QUICK, Figures, Scale, figures_of
from benchmarks.peer_report import Turn, bounds_table_of, medians_of, plot, ratios_of, table_of
from benchmarks.peer_servers import PEERS, Peer, PeerError, Place, RunningServer, command_of, environment_of, started
from benchmarks.peer_setup import CHECK_SECONDS, run
from benchmarks.reporting import as_json, check_positive, circumstances, make_console
from demo.server import free_port

from cairn.errors import CairnError

START_SECONDS = 900.0
SETTLE_SECONDS = 2.0
WIDE = "sampled"
"""The load of the checkpoint with the wide vocabulary."""

_OWN_NAME = re.compile(r"[a-z0-9][a-z0-9_.-]*")


def order_of(servers: Sequence[str], rounds: int) -> list[tuple[int, str]]:
    """(round, server) of every turn: forwards and backwards by turns."""
    return [(number, name) for number in range(rounds) for name in servers[:: 1 if number % 2 == 0 else -1]]


def take_turn(
    peer: Peer,
    place: Place,
    flags: Sequence[str],
    loads: Sequence[str],
    scale: Scale,
    seed: Sequence[int],
    log: Path,
    seconds: float,
) -> Figures:
    """All figures of one newly started server. Raises PeerError with the end of its log."""
    with started(peer, place, log, seconds, flags) as server:
        print(f"{peer.name}: healthy after {server.healthy_seconds:.1f} s", flush=True)
        try:
            figures = asyncio.run(figures_of(server.url, place.model, loads, scale, seed))
        except (PeerError, TimeoutError) as error:
            raise PeerError(f"{peer.name}: {error or 'a load took too long'}\n{server.log_tail()}") from error
        memory = server.rss_bytes() / (1 << 20)
        idle = idle_share(server, scale.idle_seconds)
        return {"healthy_s": server.healthy_seconds, **figures, "rss_mib": memory, "idle_core_share": idle}


def idle_share(server: RunningServer, seconds: float) -> float:
    """Processor time of all its processes over `seconds` without requests, as a share of one core."""
    time.sleep(SETTLE_SECONDS)
    start, before = time.monotonic(), server.cpu_seconds()
    time.sleep(seconds)
    return max(0.0, server.cpu_seconds() - before) / (time.monotonic() - start)


def learned_flags(peer: Peer, place: Place, log: Path, seconds: float) -> tuple[str, ...]:
    """What the peer's own log says that it should have been started with; needs a start where it has such a flag."""
    if peer.learned is None:
        return ()
    with started(peer, place, log, seconds) as server:
        flags = peer.learned.of(server.log.read_text(errors="replace"))
    print(f"{peer.name}: {' '.join(flags) or 'no ' + peer.learned.flag}", flush=True)
    return flags


def measured_bounds(threads: int, isa: str) -> dict[str, float]:
    """By a process of its own, whose instructions are limited from its start. Raises PeerError."""
    command = [sys.executable, "-m", "benchmarks.machine_bounds", "--threads", str(threads), "--json"]
    environ = environment_of({"CAIRN_MAX_CPU_ISA": isa}, os.environ)
    found: dict[str, float] = json.loads(
        run(command, "the machine's bounds cannot be measured", CHECK_SECONDS, environ)
    )
    return found


class Comparison:
    """Turn after turn; what is known so far can be saved at any time."""

    def __init__(self, arguments: argparse.Namespace, peers: Sequence[Peer], scale: Scale, logs: Path) -> None:
        self._arguments = arguments
        self._peers = {peer.name: peer for peer in peers}
        self._scale = scale
        self._logs = logs
        self._flags: dict[tuple[str, str], tuple[str, ...]] = {}
        self._commands: dict[str, str] = {}
        self._agreements: dict[str, dict[str, float]] = {}
        self.bounds: list[dict[str, float]] = []
        self.turns: list[Turn] = []

    @property
    def servers(self) -> list[str]:
        return [*self._peers]

    def run(self, model: str, folder: Path, loads: Sequence[str]) -> None:
        """All turns on one checkpoint. Raises PeerError."""
        gguf = self._gguf(folder)
        for name, peer in self._peers.items():
            # What none can do is said before the first of them has taken its turn.
            command_of(peer, self._place(folder, gguf))
            if peer.wants_gguf:
                self._agree(name, model, self._place(folder, gguf))
        for turn, (number, name) in enumerate(order_of(self.servers, self._arguments.rounds)):
            if self._arguments.bounds and turn % len(self._peers) == 0:
                self.bounds.append(measured_bounds(self._arguments.threads, self._arguments.isa))
            flags = self._learn(name, model, self._place(folder, gguf))
            place, peer = self._place(folder, gguf), self._peers[name]
            self._commands[f"{name}, {model}"] = _as_line(*command_of(peer, place, flags))
            log = self._logs / f"{model}-{number}-{name}.log"
            print(f"{model}, round {number + 1}: {name} ({log})", flush=True)
            seed = (self._arguments.seed, number)
            figures = take_turn(peer, place, flags, loads, self._scale, seed, log, self._arguments.start_timeout)
            self.turns.append(Turn(name, model, number, round(os.getloadavg()[0], 2), figures))
            self.save()

    def save(self) -> None:
        """Write the figures so far to --json."""
        arguments = self._arguments
        result = {
            **circumstances(),
            "servers": self.servers,
            "commands": self._commands,
            "threads": arguments.threads,
            "quantization": arguments.quantization,
            "isa": arguments.isa,
            "agreement_with_transformers": self._agreements,
            "bounds": self.bounds,
            "rounds": arguments.rounds,
            "seed": arguments.seed,
            "scale": asdict(self._scale),
            "medians": medians_of(self.turns),
            "times_better": ratios_of(self.turns, self.servers),
            "turns": [asdict(turn) for turn in self.turns],
        }
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(as_json(result))

    def _learn(self, name: str, model: str, place: Place) -> tuple[str, ...]:
        if (name, model) not in self._flags:
            log = self._logs / f"{model}-learn-{name}.log"
            self._flags[name, model] = learned_flags(self._peers[name], place, log, self._arguments.start_timeout)
        return self._flags[name, model]

    def _agree(self, name: str, model: str, place: Place) -> None:
        """Raises PeerError where a server with a GGUF file computes something else than transformers."""
        log = self._logs / f"{model}-agree-{name}.log"
        with started(self._peers[name], place, log, self._arguments.start_timeout) as server:
            found = check_agreement(server.url, name, place.model, place.quantization, (self._arguments.seed,))
        print(f"{name}, {model}, beside transformers: {found}", flush=True)
        self._agreements[f"{name}, {model}"] = asdict(found)

    def _gguf(self, folder: Path) -> Path | None:
        """The user's, or one that is made where a server wants it and the checkpoint is one of ours."""
        arguments = self._arguments
        if arguments.model is not None or not any(peer.wants_gguf for peer in self._peers.values()):
            return arguments.gguf
        place = self._place(folder, None)
        return gguf_of(folder, place.quantization, place.llama, place.isa or NATIVE)

    def _place(self, folder: Path, gguf: Path | None) -> Place:
        asked = self._arguments
        return Place(
            folder, free_port(), asked.threads, asked.cache_gib, gguf, asked.peers, asked.quantization, asked.isa
        )


def checkpoints(arguments: argparse.Namespace) -> list[tuple[str, Path, list[str]]]:
    """Name, folder and loads of each; those that are missing are made."""
    if arguments.model is not None:
        return [(arguments.model.resolve().name, arguments.model, arguments.loads)]
    found = []
    for size in arguments.sizes:
        for name, vocab_size, loads in (
            (size, None, [load for load in arguments.loads if load != WIDE]),
            (f"{size}-wide", PUBLISHED_VOCABULARY, [load for load in arguments.loads if load == WIDE]),
        ):
            folder = arguments.peers / "models" / name
            if loads and not (folder / "config.json").is_file():
                _make(folder, size, vocab_size)
            if loads:
                found.append((name, folder, loads))
    return found


def _make(folder: Path, size: str, vocab_size: int | None) -> None:
    """Under another name first: a folder of that name is a finished checkpoint."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        made = Path(scratch) / "model"
        make_peer_model(made, size=size, vocab_size=vocab_size, seed=0)
        made.rename(folder)


def peers_of(arguments: argparse.Namespace) -> list[Peer]:
    """The servers that are asked for, in their order. Raises PeerError naming the flag."""
    own = {}
    for text in arguments.server:
        name, equals, line = text.partition("=")
        if not equals or not _OWN_NAME.fullmatch(name) or not line.strip():
            raise PeerError(f"--server {text!r}: write NAME=COMMAND LINE, the name in lower case")
        own[name] = Peer(name, line)
    known = {**PEERS, **own}
    names = list(dict.fromkeys([*(arguments.servers or ([] if own else ["cairn", "vllm"])), *own]))
    for name in names:
        if name not in known:
            raise PeerError(f"--servers {name}: known are {', '.join(known)}; others with --server NAME=COMMAND LINE")
    return [known[name] for name in names]


def _as_line(variables: dict[str, str], command: Sequence[str]) -> str:
    return shlex.join([*(f"{name}={value}" for name, value in variables.items() if name != "PATH"), *command])


def _terminate(number: int, frame: FrameType | None) -> NoReturn:
    """Leave as after Ctrl-C: the servers are ended on the way."""
    raise KeyboardInterrupt


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--servers", nargs="+", metavar="NAME", help="default: cairn vllm, or those of --server alone")
    parser.add_argument("--server", action="append", default=[], metavar="NAME=LINE", help="one more, or another line")
    parser.add_argument("--sizes", nargs="+", choices=PEER_SHAPES, default=["tiny"], help="default: tiny")
    parser.add_argument("--model", type=Path, help="a checkpoint of your own for all loads")
    parser.add_argument("--gguf", type=Path, help="the same as --model for servers that want a GGUF file")
    parser.add_argument("--loads", nargs="+", choices=LOADS, default=[*LOADS], help="default: all")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2, help="of each server's number crunching")
    parser.add_argument("--quantization", choices=[name for name in FORMS if name], default="", help="of all weights")
    limits = [name for name in ISAS if name != NATIVE]
    parser.add_argument("--isa", choices=limits, default="", help="no more of this processor's instructions")
    parser.add_argument("--bounds", action="store_true", help="what the machine can do at most, before each round")
    parser.add_argument("--cache-gib", type=int, default=1, help="GiB of keys, values and states of each server")
    parser.add_argument("--start-timeout", type=float, default=START_SECONDS, help="seconds until /health must answer")
    parser.add_argument("--peers", type=Path, default=Path("build/peers"), help="environments and checkpoints")
    parser.add_argument("--quick", action="store_true", help="little of everything, to see that it works")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", type=Path, help="keep the servers' logs here")
    parser.add_argument("--json", type=Path, default=Path("build/benchmarks/peers.json"), help="figures; %(default)s")
    parser.add_argument("--plot", type=Path, help="a PNG or SVG; beside --json unless given")
    arguments = parser.parse_args(words)
    if arguments.gguf is not None and arguments.model is None:
        parser.error("--gguf is the same checkpoint as --model: give both")
    check_positive(parser, arguments, "rounds", "threads", "cache_gib")
    return arguments


def main() -> int:
    arguments = parse()
    signal.signal(signal.SIGTERM, _terminate)
    try:
        with ExitStack() as stack:
            logs = arguments.keep or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="cairn-peers-")))
            logs.mkdir(parents=True, exist_ok=True)
            scale = QUICK if arguments.quick else FULL
            comparison = Comparison(arguments, peers_of(arguments), scale, logs)
            found = checkpoints(arguments)
            for model, folder, loads in found:
                comparison.run(model, folder, loads)
    except (PeerError, CairnError) as error:
        print(f"peers: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    console = make_console()
    for model, *_ in found:
        console.print(table_of(comparison.turns, comparison.servers, model))
    if comparison.bounds:
        console.print(bounds_table_of(comparison.bounds, arguments.threads))
    print(f"written: {arguments.json}")
    if len(comparison.servers) > 1:
        path = arguments.plot or arguments.json.with_suffix(".svg")
        plot(comparison.turns, comparison.servers, path)
        print(f"written: {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
