"""Servers with OpenAI's API as child processes: started by a command line, waited for, measured, and always stopped."""

import contextlib
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

import httpx
import psutil
from benchmarks.peer_llama import NATIVE, programs_of
from benchmarks.peer_setup import PeerError

from cairn.http.cookies import no_cookies

__all__ = [
    "PEERS",
    "SERVED_NAME",
    "LearnedFlag",
    "Peer",
    "PeerError",
    "Place",
    "RunningServer",
    "command_of",
    "environment_of",
    "started",
]

SERVED_NAME = "bench"
MAX_MODEL_LEN = 16_384
MAX_NUM_SEQS = 16
MAX_NUM_BATCHED_TOKENS = 2_048

STOP_SECONDS = 30.0
KILL_SECONDS = 10.0
POLL_SECONDS = 0.05
TRY_SECONDS = 5.0
LOG_TAIL = 6_000
_VLLM_ISA = "avx2"
_VLLM_HELD = Path(__file__).parent / "vllm_avx2"
_OWN_VARIABLES = ("CAIRN_", "VLLM_", "LLAMA_", "GGML_", "OMP_", "KMP_", "GOMP_", "MKL_", "OPENBLAS_")
_VARIABLE = re.compile(r"[A-Z_][A-Z0-9_]*=")


@dataclass(frozen=True, slots=True)
class LearnedFlag:
    """A flag whose value a server's own log names: `pattern` has it as its first group."""

    flag: str
    pattern: str

    def of(self, log: str) -> tuple[str, ...]:
        """The flag and its value, or nothing where the log does not say."""
        found = re.search(self.pattern, log)
        return () if found is None else (self.flag, found.group(1))


@dataclass(frozen=True, slots=True)
class Peer:
    """`line`: variables as NAME=VALUE, the program, its arguments; placeholders are the fields of `Place`. `learned`: a
    flag that is only known once the server has been started without it. `quantized`: flags by quantization; one that is
    not there cannot be had. `set_up`: the make target that sets it up."""

    name: str
    line: str
    learned: LearnedFlag | None = None
    quantized: Mapping[str, Sequence[str]] = field(default_factory=dict)
    set_up: str = ""

    @property
    def wants_gguf(self) -> bool:
        return "{gguf}" in self.line

    def flags_of(self, place: "Place") -> Sequence[str]:
        """Those of the place's quantization. Raises PeerError where it, or the instruction set, cannot be had."""
        if place.isa and not any(name in self.line for name in ("{isa}", "{llama_bin}")):
            raise PeerError(f"{self.name} cannot be held to some instructions: no --isa with it")
        if place.isa and "{vllm_held}" in self.line and place.isa != _VLLM_ISA:
            raise PeerError(f"{self.name} can be held to {_VLLM_ISA} alone: no --isa {place.isa} with it")
        if place.quantization and place.quantization not in self.quantized:
            known = ", ".join(self.quantized) or "none"
            raise PeerError(f"{self.name} has no --quantization {place.quantization} here; known: {known}")
        return self.quantized.get(place.quantization, ())


@dataclass(frozen=True, slots=True)
class Place:
    """What a command line is told: the checkpoint's folder, the same as a GGUF file for servers that want one, a free
    port, threads of number crunching, and the GiB that keys, values and states may take. `quantization`: of weights, as
    cairn's --quantization; `isa`: as CAIRN_MAX_CPU_ISA; of both nothing where they are empty."""

    model: Path
    port: int
    threads: int
    cache_gib: int
    gguf: Path | None = None
    peers: Path = Path("build/peers")
    quantization: str = ""
    isa: str = ""

    @property
    def llama(self) -> Path:
        """Where llama.cpp is."""
        return self.peers.absolute() / "llama"

    def values(self) -> dict[str, str]:
        """By placeholder. `cpus`: as many of this process's CPUs as there are threads, as a list."""
        cpus = sorted(os.sched_getaffinity(0))[: self.threads]
        environment = self.peers.absolute() / "vllm"
        openmp = environment / "lib" / "libiomp5.so"
        return {
            "python": sys.executable,
            "model": str(self.model),
            "gguf": str(self.gguf or ""),
            "port": str(self.port),
            "threads": str(self.threads),
            "cpus": ",".join(map(str, cpus)),
            "cache_gib": str(self.cache_gib),
            "cache_mib": str(self.cache_gib << 10),
            "isa": self.isa,
            "llama_bin": str(programs_of(self.llama, self.isa or NATIVE)),
            "vllm_bin": str(environment / "bin"),
            "vllm_openmp": str(openmp) if openmp.is_file() else "",
            "vllm_onednn": self.isa.upper(),
            "vllm_held": str(_VLLM_HELD) if self.isa else "",
            "path": os.environ.get("PATH", os.defpath),
            "name": SERVED_NAME,
            "max_model_len": str(MAX_MODEL_LEN),
            "max_num_seqs": str(MAX_NUM_SEQS),
            "max_num_batched_tokens": str(MAX_NUM_BATCHED_TOKENS),
        }


_SAME_LIMITS = (
    "--max-model-len {max_model_len} --max-num-seqs {max_num_seqs} --max-num-batched-tokens {max_num_batched_tokens}"
)

# Its threads are the CPUs it is bound to. Intel's OpenMP, which comes with the build, is preloaded as its manual asks.
_VLLM = (
    "PATH={vllm_bin}:{path} LD_PRELOAD={vllm_openmp} ATEN_CPU_CAPABILITY={isa} ONEDNN_MAX_CPU_ISA={vllm_onednn} "
    "PYTHONPATH={vllm_held} VLLM_CPU_OMP_THREADS_BIND= "
    "VLLM_CPU_KVCACHE_SPACE={cache_gib} VLLM_NO_USAGE_STATS=1 DO_NOT_TRACK=1 VLLM_HOST_IP=127.0.0.1 "
    "GLOO_SOCKET_IFNAME=lo HF_HUB_OFFLINE=1 {vllm_bin}/vllm serve {model} --host 127.0.0.1 --port {port} "
    "--served-model-name {name} --dtype bfloat16 --no-enable-log-requests --enable-prefix-caching "
    "--mamba-cache-mode align --prefix-match-unit 32 --enable-prompt-tokens-details " + _SAME_LIMITS
)
# Without --block-size it misses prompts of many lengths when they are sent again.
_BLOCK_SIZE = LearnedFlag("--block-size", r"Setting attention block size to (\d+) tokens")

PEERS: Mapping[str, Peer] = MappingProxyType(
    {
        "cairn": Peer(
            "cairn",
            "HF_HUB_OFFLINE=1 CAIRN_MAX_CPU_ISA={isa} {python} -m cairn serve {model} --host 127.0.0.1 --port {port} "
            "--served-model-name {name} --dtype bfloat16 --cpu-threads {threads} "
            "--kv-cache-memory-bytes {cache_gib}GiB " + _SAME_LIMITS,
            quantized={name: ("--quantization", name) for name in ("int8", "int4")},
        ),
        "vllm": Peer("vllm", _VLLM.replace("THREADS_BIND=", "THREADS_BIND={cpus}"), _BLOCK_SIZE, set_up="bench-vllm"),
        # Left alone it reserves a core for its scheduler.
        "vllm-auto": Peer(
            "vllm-auto", _VLLM.replace("THREADS_BIND=", "THREADS_BIND=auto"), _BLOCK_SIZE, set_up="bench-vllm"
        ),
        # Weights are quantized in the GGUF file.
        "llama-server": Peer(
            "llama-server",
            "{llama_bin}/llama-server --model {gguf} --host 127.0.0.1 --port {port} --alias {name} --threads {threads} "
            "--threads-batch {threads} --threads-http 2 --parallel {max_num_seqs} --kv-unified "
            "--ctx-size {max_model_len} --batch-size {max_num_batched_tokens} --cache-ram {cache_mib} "
            "--no-ui --offline",
            quantized={"int8": (), "int4": ()},
            set_up="bench-llama",
        ),
    }
)
"""Command lines for one and the same load: the same limits, the same memory, the same threads."""


def command_of(peer: Peer, place: Place, flags: Sequence[str] = ()) -> tuple[dict[str, str], list[str]]:
    """The variables that are set (those with an empty value are taken away) and the command, with `flags` at its end.

    Raises PeerError naming a placeholder that there is not, one that has no value, or what the server cannot do.
    """
    values = place.values()
    words = []
    for word in shlex.split(peer.line):
        try:
            words.append(word.format_map(values))
        except (KeyError, IndexError, ValueError) as error:
            known = ", ".join(f"{{{name}}}" for name in values)
            raise PeerError(f"{peer.name}: {word!r} has a placeholder that is not one of {known}") from error
        if "{gguf}" in word and place.gguf is None:
            raise PeerError(f"{peer.name} needs the checkpoint as a GGUF file: --gguf FILE")
    variables = {}
    while words and _VARIABLE.match(words[0]):
        name, _, value = words.pop(0).partition("=")
        variables[name] = value
    if not words:
        raise PeerError(f"{peer.name}: the command line names no program")
    return variables, [*words, *peer.flags_of(place), *flags]


def environment_of(variables: Mapping[str, str], environ: Mapping[str, str]) -> dict[str, str]:
    """`environ` with these variables, without what a person may have set for servers and threads of their own."""
    kept = {name: value for name, value in environ.items() if not name.startswith(_OWN_VARIABLES)}
    return {name: value for name, value in (kept | dict(variables)).items() if value or name not in variables}


@dataclass(frozen=True, slots=True)
class RunningServer:
    """A healthy server. `healthy_seconds`: from its start until /health answered 200."""

    url: str
    process: "subprocess.Popen[bytes]"
    log: Path
    healthy_seconds: float

    def tree(self) -> list[psutil.Process]:
        """Its process and all below it."""
        try:
            parent = psutil.Process(self.process.pid)
            return [parent, *parent.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []

    def rss_bytes(self) -> int:
        """Resident memory of all its processes; pages that several share count for each."""
        return sum(_measured(lambda one=one: one.memory_info().rss) for one in self.tree())

    def cpu_seconds(self) -> float:
        """User and system time of all its processes that are still there."""
        return sum(_measured(lambda one=one: sum(one.cpu_times()[:2])) for one in self.tree())

    def log_tail(self) -> str:
        return tail_of(self.log)


def _measured(read) -> float:
    """0 of a process that has ended meanwhile."""
    try:
        return read()
    except psutil.NoSuchProcess:
        return 0


@contextmanager
def started(peer: Peer, place: Place, log: Path, seconds: float, flags: Sequence[str] = ()) -> Iterator[RunningServer]:
    """Start `peer` and give it once it is healthy; what it says goes to the file `log`. Its whole process group is
    ended when the block is left, however that happens.

    Raises PeerError with the end of the log when it ends by itself or is not healthy within `seconds`.
    """
    variables, command = command_of(peer, place, flags)
    start = time.monotonic()
    with log.open("wb") as output:
        try:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environment_of(variables, os.environ),
                start_new_session=True,
            )
        except OSError as error:
            hint = f"; `make {peer.set_up}` sets it up" if peer.set_up else ""
            raise PeerError(f"{peer.name}: {command[0]} cannot be started{hint}: {error}") from error
    url = f"http://127.0.0.1:{place.port}"
    try:
        _wait_healthy(peer, process, url, log, start + seconds)
        yield RunningServer(url, process, log, time.monotonic() - start)
    finally:
        _end(process)


def _wait_healthy(peer: Peer, process: "subprocess.Popen[bytes]", url: str, log: Path, deadline: float) -> None:
    with httpx.Client(timeout=TRY_SECONDS, trust_env=False, cookies=no_cookies()) as http:
        while True:
            if process.poll() is not None:
                raise PeerError(f"{peer.name} ended with exit code {process.returncode}:\n{tail_of(log)}")
            with contextlib.suppress(httpx.TransportError):
                if http.get(f"{url}/health").status_code == 200:
                    return
            if time.monotonic() > deadline:
                raise PeerError(f"{peer.name} was not healthy in time:\n{tail_of(log)}")
            time.sleep(POLL_SECONDS)


def _end(process: "subprocess.Popen[bytes]") -> None:
    """Ask the process group to end, then kill what is left of it, and what has left it. A Ctrl-C does not stop this."""
    before = _ignored_interrupts()
    try:
        try:
            below = psutil.Process(process.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            below = []
        _signal_group(process.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(STOP_SECONDS)
        _signal_group(process.pid, signal.SIGKILL)
        _, alive = psutil.wait_procs(below, timeout=POLL_SECONDS)
        for one in alive:
            with contextlib.suppress(psutil.NoSuchProcess):
                one.kill()
        psutil.wait_procs(alive, timeout=KILL_SECONDS)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(KILL_SECONDS)
    finally:
        if before is not None:
            signal.signal(signal.SIGINT, before)


def _ignored_interrupts():
    """The handler there was; None outside the main thread, where none can be set."""
    try:
        return signal.signal(signal.SIGINT, signal.SIG_IGN)
    except ValueError:
        return None


def _signal_group(group: int, what: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, what)


def tail_of(log: Path) -> str:
    return log.read_text(errors="replace")[-LOG_TAIL:].strip()
