"""What --quantization int8 and int4 gain and cost: one process with all engines, window after window in turn.

    python -m benchmarks.quantization [--model DIR] [--sequences 1 8] [--windows 5] [--decode-steps 32] [--context 512]
                                      [--prompt 1024] [--error-prompts 16] [--cpu-threads N] [--clock wall|processor]
                                      [--small-pages] [--json FILE]

Without --model a Qwen3.5 of 333 M random parameters is made. The baseline is the same checkpoint in bfloat16.
  decode    tokens a second of so many sequences with contexts of --context tokens: windows of --decode-steps steps
  prefill   tokens a second of one cold prompt of --prompt tokens, up to its first token
  weights   bytes that the model keeps in memory
  error     of the logits behind random prompts of 64 tokens, against the same checkpoint in float32: the distance over
            the float32 logits' distance from their mean, the Kullback-Leibler divergence, and how often the likeliest
            token is the same. bfloat16's is next to it.
Seconds are those of the wall, or with --clock processor those that the process computed, all threads together: on a
machine that others use as well, those of one thread say more. --small-pages: what all of it would take where Linux
gives no huge pages.
"""

import argparse
import ctypes
import gc
import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from benchmarks.made_model import given_or_made
from benchmarks.reporting import as_json, check_positive, circumstances, make_console
from rich.table import Table
from torch import Tensor

from cairn.engine.build import build_core
from cairn.engine.contract import EngineConfig, GenerateRequest, StopConditions
from cairn.engine.core import Core
from cairn.engine.cpu_threads import thread_variables
from cairn.errors import CairnError
from cairn.models.registry import open_model
from cairn.models.weights.tensor_headers import read_headers
from cairn.types import SamplingParams

SHOWN = ("windows", "decode_steps", "context", "prompt", "error_prompts", "cpu_threads", "clock", "small_pages", "seed")
"""What goes into the JSON of the flags."""

_PR_SET_THP_DISABLE = 41

FIRST_TOKEN, LAST_TOKEN = 64, 4_000
ERROR_PROMPT = 64
WARM_UP = 4
Precision = Literal["float32", "bfloat16", "int8", "int4"]
QUANTIZED: Mapping[Precision, Literal["int8", "int4"]] = {"int8": "int8", "int4": "int4"}
CLOCKS = {"wall": time.perf_counter, "processor": time.process_time}
COMPARED: tuple[Precision, ...] = ("bfloat16", *QUANTIZED)


class Engine:
    """One core. `logits`: those of each sampled row since they were last taken."""

    def __init__(
        self,
        model: Path,
        precision: Precision,
        tokens: int,
        sequences: int,
        seed: int,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._clock = clock
        self.logits: list[Tensor] = []
        config = EngineConfig(
            model=str(model),
            dtype="float32" if precision == "float32" else "bfloat16",
            quantization=QUANTIZED.get(precision),
            max_num_seqs=sequences,
            max_num_batched_tokens=2048,
            enable_prefix_caching=False,
            kv_cache_memory_bytes=max(256 << 20, 32_768 * tokens * sequences),
        )
        self.core: Core = build_core(config, observe=lambda sample, logits: self.logits.append(logits.clone()))
        self._rng = np.random.default_rng(seed)
        self._count = 0

    def submit(self, length: int, answer: int) -> None:
        prompt = self._rng.integers(FIRST_TOKEN, LAST_TOKEN, length).astype(np.int64)
        self._count += 1
        self.core.submit(
            GenerateRequest(
                request_id=str(self._count),
                prompt=prompt.tobytes(),
                sampling=SamplingParams(temperature=0.0),
                stop_conditions=StopConditions(max_tokens=answer, ignore_eos=True),
            )
        )

    def finish(self) -> None:
        while self.core.has_work:
            self.core.step()
        self.logits.clear()

    def prefill_seconds(self, length: int) -> float:
        """Of one prompt, up to its first token."""
        self.submit(length, 1)
        begin = self._clock()
        while self.core.has_work:
            self.core.step()
        seconds = self._clock() - begin
        self.logits.clear()
        return seconds

    def start_decoding(self, sequences: int, context: int, answer: int) -> None:
        """So many sequences, all in decode when this returns. Raises RuntimeError if they do not get there."""
        for _ in range(sequences):
            self.submit(context, answer)
        steps = -(-sequences * context // 2048) + 4
        if not any(len(self.core.step()) == sequences for _ in range(steps)):
            raise RuntimeError(f"{sequences} sequences of {context} tokens do not all decode after {steps} steps")
        for _ in range(WARM_UP):
            self.core.step()

    def decode_seconds(self, steps: int) -> float:
        begin = self._clock()
        for _ in range(steps):
            self.core.step()
        seconds = self._clock() - begin
        self.logits.clear()
        return seconds

    def logits_behind(self, prompts: int) -> Tensor:
        """float64 [prompts, vocabulary], in the order of the prompts: the same ones in every engine with this seed."""
        found = []
        for _ in range(prompts):
            self.submit(ERROR_PROMPT, 1)
            while self.core.has_work:
                self.core.step()
            found.append(self.logits[-1].double())
            self.logits.clear()
        return torch.stack(found)


def weight_bytes(model: Path, precision: Precision) -> int:
    return open_model(model, "bfloat16", QUANTIZED.get(precision)).weight_bytes(read_headers(model))


def errors(found: Tensor, wanted: Tensor) -> dict[str, float]:
    """Of logits, against better ones."""
    spread = wanted - wanted.mean(dim=1, keepdim=True)
    shift = found - wanted
    shift = shift - shift.mean(dim=1, keepdim=True)
    by, of = wanted.log_softmax(dim=1), found.log_softmax(dim=1)
    return {
        "distance": (shift.norm() / spread.norm()).item(),
        "kl_divergence": (by.exp() * (by - of)).sum(dim=1).mean().item(),
        "same_likeliest": (found.argmax(dim=1) == wanted.argmax(dim=1)).double().mean().item(),
    }


def measure(arguments: argparse.Namespace, model: Path) -> dict[str, Any]:
    """All figures, as they go into the JSON."""
    of_error: dict[str, Tensor] = {}
    for precision in ("float32", *COMPARED):
        engine = Engine(model, precision, ERROR_PROMPT + 16, 1, arguments.seed)
        of_error[precision] = engine.logits_behind(arguments.error_prompts)
        engine.core.close()
        del engine
        gc.collect()
    sizes = {precision: weight_bytes(model, precision) for precision in COMPARED}
    answer = WARM_UP + (arguments.windows + 1) * arguments.decode_steps + 8
    tokens = max(arguments.prompt, arguments.context + answer) + 64
    engines = {
        precision: Engine(model, precision, tokens, max(arguments.sequences), arguments.seed, CLOCKS[arguments.clock])
        for precision in COMPARED
    }
    rates: dict[str, dict[str, list[float]]] = {"prefill": {precision: [] for precision in COMPARED}}
    for window in range(arguments.windows + 1):
        for precision, engine in engines.items():
            seconds = engine.prefill_seconds(arguments.prompt)
            if window:  # The first one makes code for shapes.
                rates["prefill"][precision].append(arguments.prompt / seconds)
    for count in arguments.sequences:
        own = rates[f"decode_{count}"] = {precision: [] for precision in COMPARED}
        for engine in engines.values():
            engine.start_decoding(count, arguments.context, answer)
        for _ in range(arguments.windows):
            for precision, engine in engines.items():
                own[precision].append(count * arguments.decode_steps / engine.decode_seconds(arguments.decode_steps))
        for engine in engines.values():
            engine.finish()
    for engine in engines.values():
        engine.core.close()
    return {
        "rates": rates,
        "medians": {case: {name: statistics.median(of) for name, of in own.items()} for case, own in rates.items()},
        "ratios": {case: {name: ratio_of(own, name) for name in QUANTIZED} for case, own in rates.items()},
        "weight_bytes": sizes,
        "weight_ratio": {name: sizes[name] / sizes["bfloat16"] for name in QUANTIZED},
        "logits_error": {name: errors(of_error[name], of_error["float32"]) for name in COMPARED},
        "logits_error_to_bfloat16": {name: errors(of_error[name], of_error["bfloat16"]) for name in QUANTIZED},
    }


def ratio_of(own: dict[str, list[float]], name: str) -> float:
    """One over bfloat16: the median over windows that were measured next to each other."""
    pairs = zip(own[name], own["bfloat16"], strict=True)
    return statistics.median(one / other for one, other in pairs)


def rounded(ratios: dict[str, float]) -> list[str]:
    return [f"{ratio:.2f}" for ratio in ratios.values()]


def table_of(result: dict[str, Any]) -> Table:
    table = Table("", *COMPARED, *(f"{name} / bfloat16" for name in QUANTIZED), title="--quantization")
    for column in table.columns[1:]:
        column.justify = "right"
    for case, medians in result["medians"].items():
        figures = (f"{medians[name]:,.1f}" for name in COMPARED)
        table.add_row(f"{case.replace('_', ', sequences ')}, tokens/s", *figures, *rounded(result["ratios"][case]))
    sizes = (f"{result['weight_bytes'][name] / 1e6:,.0f}" for name in COMPARED)
    table.add_row("weights, MB", *sizes, *rounded(result["weight_ratio"]))
    for figure in ("distance", "kl_divergence", "same_likeliest"):
        found = (f"{result['logits_error'][name][figure]:.5f}" for name in COMPARED)
        table.add_row(f"logits to float32's: {figure}", *found)
        found = (f"{result['logits_error_to_bfloat16'][name][figure]:.5f}" for name in QUANTIZED)
        table.add_row(f"logits to bfloat16's: {figure}", "", *found)
    return table


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="a checkpoint with a vocabulary of at least 4,000")
    parser.add_argument("--sequences", nargs="+", type=int, default=[1, 8])
    parser.add_argument("--windows", type=int, default=5)
    parser.add_argument("--decode-steps", type=int, default=32, help="of a window")
    parser.add_argument("--context", type=int, default=512, help="tokens of each sequence that decodes")
    parser.add_argument("--prompt", type=int, default=1024, help="tokens")
    parser.add_argument("--error-prompts", type=int, default=16)
    parser.add_argument("--cpu-threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--clock", choices=tuple(CLOCKS), default="wall")
    parser.add_argument("--small-pages", action="store_true", help="this process gets no huge pages (Linux)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="write the figures here")
    arguments = parser.parse_args(words)
    check_positive(
        parser, arguments, "sequences", "windows", "decode_steps", "context", "prompt", "error_prompts", "cpu_threads"
    )
    return arguments


def wait_as_a_server_does(num_threads: int, module: str = "benchmarks.quantization") -> None:
    """Begin this module anew with the threads of a server, which wait for each other asleep: torch's read it when
    they start."""
    wanted = thread_variables(num_threads, os.environ)
    if not wanted.items() <= os.environ.items():
        words = [sys.executable, "-m", module, *sys.argv[1:]]
        os.execve(sys.executable, words, {**os.environ, **wanted})


def main() -> None:
    arguments = parse()
    wait_as_a_server_does(arguments.cpu_threads)
    if arguments.small_pages and ctypes.CDLL(None).prctl(_PR_SET_THP_DISABLE, 1, 0, 0, 0):
        raise SystemExit("quantization: --small-pages: this system has no such switch")
    with given_or_made(arguments.model) as model:
        try:
            result = measure(arguments, model)
        except CairnError as error:
            raise SystemExit(f"quantization: {error}") from error
    make_console().print(table_of(result))
    if arguments.json:
        sizes = {name: getattr(arguments, name) for name in SHOWN}
        arguments.json.write_text(as_json({**circumstances(), **sizes, **result}))


if __name__ == "__main__":
    main()
