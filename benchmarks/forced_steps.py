"""Steps that verify drafts all of which are right, beside decode steps: see `benchmarks.speculation`."""

import argparse
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from benchmarks.forced_answers import Engine, FixedDrafter, FixedHead
from benchmarks.quantization import CLOCKS

__all__ = ["measure_forced", "measure_head"]


def step_ms(engine: Engine, steps: int) -> float:
    """The median after one step that is not counted: the fold of what it verifies is the next one's."""
    engine.step()
    times = []
    for _ in range(steps):
        begin = engine.clock()
        engine.step()
        times.append(1000 * (engine.clock() - begin))
    return statistics.median(times)


def measure_forced(options: argparse.Namespace, name: str, model: Path, precision: str) -> Iterator[dict[str, Any]]:
    """A row for each number of drafts."""
    engine = Engine(model, precision, 1 + max(options.depths), CLOCKS[options.clock])
    engine.drafting.drafter = fixed = FixedDrafter(engine.texts)
    for depth in options.depths:
        num_tokens = (options.windows + 1) * (options.steps + 1) * (2 + depth) + 8
        fixed.depth = 0
        engine.force(engine.draw(options.context), engine.draw(num_tokens))
        windows = []
        for _ in range(options.windows + 1):  # the first one records
            fixed.depth = 0
            plain = step_ms(engine, options.steps)
            fixed.depth = depth
            windows.append((plain, step_ms(engine, options.steps)))
        fixed.depth = 0
        engine.until_idle()
        decode_ms, verify_ms = (statistics.median(column) for column in zip(*windows[1:], strict=True))
        rows_cost = statistics.median(wide_costs(engine, options, 1 + depth))
        ratios = sorted((1 + depth) * plain / verify for plain, verify in windows[1:])
        yield {
            "part": "forced",
            "precision": precision,
            "case": f"{name}, {depth} drafts",
            "drafts": depth,
            "decode_ms": decode_ms,
            "verify_ms": verify_ms,
            "verify_cost": verify_ms / decode_ms,
            "rows_cost": rows_cost,
            "none_tokens_per_s": 1000 / decode_ms,
            "tokens_per_s": 1000 * (1 + depth) / verify_ms,
            "ratio": (1 + depth) * decode_ms / verify_ms,
            "ratios": ratios,
            "bar": 0.8 * (1 + depth) / rows_cost,
        }
    engine.core.close()


def wide_costs(engine: Engine, options: argparse.Namespace, sequences: int) -> list[float]:
    """Decode steps of so many sequences over those of one, by window."""
    costs = []
    num_tokens = options.steps + 8
    for _ in range(options.windows):
        engine.force(engine.draw(options.context), engine.draw(num_tokens))
        engine.step()
        alone = step_ms(engine, options.steps)
        engine.until_idle()
        for _ in range(sequences):
            prompt, answer = engine.draw(options.context), engine.draw(num_tokens + 2 * sequences)
            engine.texts[engine.submit(prompt, len(answer))] = np.concatenate([prompt, answer])
        while engine.step() < sequences:
            pass
        engine.step()
        costs.append(step_ms(engine, options.steps) / alone)
        engine.until_idle()
    return costs


def measure_head(options: argparse.Namespace, name: str, model: Path, precision: str) -> Iterator[dict[str, Any]]:
    """A row for each number of drafts of a head, and one for none: beside an engine without a head, in turn. Prompts'
    times are the first tokens'."""
    clock = CLOCKS[options.clock]
    plain, headed = (Engine(model, precision, 2, clock, method) for method in ("none", "mtp"))
    headed.drafting.drafter = fixed = FixedHead(headed.texts, headed.core)
    for depth in (0, *options.depths):
        num_tokens = (options.windows + 1) * (options.steps + 1) * (1 + depth) + 8
        fixed.depth = 0
        first = [_first_token_ms(engine, options.context, num_tokens) for engine in (plain, headed)]
        windows = []
        for _ in range(options.windows + 1):  # the first one records
            decode_ms = step_ms(plain, options.steps)
            fixed.depth = depth
            windows.append((decode_ms, step_ms(headed, options.steps)))
            fixed.depth = 0
        for engine in (plain, headed):
            engine.until_idle()
        decode_ms, draft_ms = (statistics.median(column) for column in zip(*windows[1:], strict=True))
        yield {
            "part": "head",
            "precision": precision,
            "case": f"{name}, {depth} drafts of its head",
            "drafts": depth,
            "decode_ms": decode_ms,
            "verify_ms": draft_ms,
            "verify_cost": draft_ms / decode_ms,
            "first_token_cost": first[1] / first[0],
            "none_tokens_per_s": 1000 / decode_ms,
            "tokens_per_s": 1000 * (1 + depth) / draft_ms,
            "ratio": (1 + depth) * decode_ms / draft_ms,
            "ratios": sorted((1 + depth) * plain_ms / drafts_ms for plain_ms, drafts_ms in windows[1:]),
            "bar": None if depth else 0.97,
        }
    plain.core.close()
    headed.core.close()


def _first_token_ms(engine: Engine, context: int, num_tokens: int) -> float:
    prompt, answer = engine.draw(context), engine.draw(num_tokens)
    begin = engine.clock()
    engine.force(prompt, answer)
    return 1000 * (engine.clock() - begin)
