"""What one step's draw costs, for all rows together: microseconds against drawing them one by one.

    python -m benchmarks.sampler [--rows 1 8 64 256] [--vocab-sizes 4096 151936] [--repeats N] [--json FILE] [--seed N]

What is told is CPU time of the one thread that draws. A draw sees other logits than the one before (what a processor
learns of those would flatter it), of two shapes: `peaked` ones fall with the logarithm of a token's rank, as a language
model's do; `flat` ones are normal noise, as those of a model with random weights, where top_p keeps most of the
vocabulary. Penalties look at histories of 1,000 tokens, 200 of them drawn; the time to append what was drawn to the
counts is counted.

The baseline `row by row` is how cairn drew before: for each row a chain of new tensors of the whole vocabulary, float64
from the temperature on, a full sort for top_p, the penalties' counts anew from the history, and noise for every token
(Gumbel 1954) from a new generator. It takes at most --baseline-rows rows; what is told is per row for both.
"""

import argparse
import hashlib
import statistics
import time
from collections.abc import Callable
from math import log

import numpy as np
import torch
from benchmarks.reporting import add_output_flags, as_json, circumstances, make_console
from rich.table import Table
from torch import Tensor

from cairn.kernels.sampling.logits_processors import TorchTokenCounts
from cairn.kernels.sampling.metadata import SamplingMetadata, TokenHistory
from cairn.kernels.sampling.sampler import TorchSampler
from cairn.kernels.staging import Staging
from cairn.types import SamplingParams

CASES = {
    "greedy": SamplingParams(temperature=0),
    "temperature .8": SamplingParams(0.8, seed=1),
    "top_k 20, top_p .95": SamplingParams(0.8, 20, 0.95, 1),
    "top_p .95": SamplingParams(0.8, 0, 0.95, 1),
    "top_k 20, top_p .95, penalties": SamplingParams(
        0.8, 20, 0.95, 1, frequency_penalty=0.5, presence_penalty=0.5, repetition_penalty=1.1
    ),
}
HISTORY, PROMPT = 1_000, 800
BATCHES = 5
MOST_BATCH_BYTES = 1 << 28


def peaked(generator: torch.Generator, rows: int, vocab_size: int) -> Tensor:
    ranks = torch.rand(rows, vocab_size, generator=generator).argsort(-1) + 1
    return ranks.float().log_().mul_(-1.3) + 0.3 * torch.randn(rows, vocab_size, generator=generator)


def flat(generator: torch.Generator, rows: int, vocab_size: int) -> Tensor:
    return torch.randn(rows, vocab_size, generator=generator)


def draw_row(logits: Tensor, sample: SamplingMetadata) -> int:
    """The baseline: one row."""
    params = sample.params
    if params.repetition_penalty != 1:
        tokens = torch.from_numpy(np.unique(sample.history))
        old = logits[tokens]
        better, worse = old / params.repetition_penalty, old * params.repetition_penalty
        logits = logits.index_copy(0, tokens, torch.where(old > 0, better, worse))
    if params.frequency_penalty or params.presence_penalty:
        used, counts = np.unique(sample.history[sample.num_prompt_tokens :], return_counts=True)
        loss = params.frequency_penalty * torch.from_numpy(counts).to(logits.dtype) + params.presence_penalty
        logits = logits.index_add(0, torch.from_numpy(used), -loss)
    if params.temperature == 0:
        return int(np.argmax(logits.numpy()))
    scaled = logits.double().sub_(logits.max()).div_(params.temperature)
    if params.min_p > 0:
        scaled = scaled.masked_fill(scaled < scaled.max() + log(params.min_p), -torch.inf)
    if 0 < params.top_k < len(scaled):
        scaled = scaled.masked_fill(scaled < scaled.topk(params.top_k).values[-1], -torch.inf)
    if params.top_p < 1:
        ranked, order = scaled.sort(descending=True, stable=True)
        probabilities = ranked.softmax(-1)
        before = probabilities.cumsum(-1) - probabilities
        scaled = scaled.index_fill(0, order[(before >= params.top_p).logical_and_(before > 0)], -torch.inf)
    digest = hashlib.blake2b(f"{params.seed} {sample.position}".encode(), digest_size=8).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest, "little"))
    uniform = torch.rand(len(scaled), generator=generator, dtype=torch.float64)
    noise = uniform.clamp_(min=torch.finfo(torch.float64).tiny).log_().neg_().log_().neg_()
    return int(np.argmax((scaled + noise).numpy()))


def median_us(action: Callable[[int], object], repeats: int) -> float:
    """`action` is told which batch of logits it sees."""
    action(0)
    times = []
    for repeat in range(repeats):
        start = time.thread_time()
        action(repeat + 1)
        times.append((time.thread_time() - start) * 1e6)
    return statistics.median(times)


def measure(case: str, shape: str, batches: list[Tensor], repeats: int, baseline_rows: int, seed: int) -> dict:
    rows, vocab_size = batches[0].shape
    rng, params = np.random.default_rng(seed), CASES[case]
    histories = rng.integers(0, vocab_size, (rows, HISTORY))
    penalties = {"num_prompt_tokens": PROMPT} if params.has_penalties else {}
    samples = [
        SamplingMetadata(params, HISTORY + row, history=histories[row] if penalties else None, **penalties)
        for row in range(rows)
    ]
    counts, slots = TorchTokenCounts(rows, vocab_size), range(rows)
    staging = Staging()
    admitted = [
        counts.admit([TokenHistory(slot, histories[slot, :PROMPT], histories[slot, PROMPT:])], staging)
        for slot in slots
        if penalties
    ]
    staging.send(batches[0].device)
    for admit in admitted:
        admit()

    def together(repeat: int) -> None:
        staging = Staging()
        sampler = TorchSampler([params] * rows, [sample.position for sample in samples], vocab_size, staging)
        staging.send(batches[0].device)
        sampler.sample(batches[repeat % len(batches)], slots, samples, counts).tolist()

    few = min(rows, baseline_rows)

    def row_by_row(repeat: int) -> None:
        for row in range(few):
            draw_row(batches[repeat % len(batches)][row], samples[row])

    with torch.inference_mode():
        new, old = median_us(together, repeats), median_us(row_by_row, max(3, repeats // 5))
    return {
        "case": case,
        "logits": shape,
        "vocab_size": vocab_size,
        "rows": rows,
        "batched_us": new,
        "batched_us_a_row": new / rows,
        "row_by_row_us_a_row": old / few,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 64, 256])
    parser.add_argument("--vocab-sizes", type=int, nargs="+", default=[4_096, 151_936])
    parser.add_argument("--repeats", type=int, default=21)
    parser.add_argument("--baseline-rows", type=int, default=8)
    add_output_flags(parser, with_plot=False)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    table = Table("vocabulary", "logits", "case", "rows", "µs", "µs a row", "row by row", "times", title="one draw")
    results = []
    for vocab_size in arguments.vocab_sizes:
        for rows in arguments.rows:
            for shape in (peaked, flat):
                generator = torch.Generator().manual_seed(arguments.seed)
                count = max(2, min(BATCHES, MOST_BATCH_BYTES // (4 * rows * vocab_size)))
                batches = [shape(generator, rows, vocab_size) for _ in range(count)]
                for case in CASES:
                    repeats = max(5, arguments.repeats // (1 + rows * vocab_size // 10**7))
                    row = measure(case, shape.__name__, batches, repeats, arguments.baseline_rows, arguments.seed)
                    results.append(row)
                    times = row["row_by_row_us_a_row"] / row["batched_us_a_row"]
                    figures = (row["batched_us"], row["batched_us_a_row"], row["row_by_row_us_a_row"])
                    table.add_row(
                        f"{vocab_size:,}",
                        shape.__name__,
                        case,
                        str(rows),
                        *(f"{one:,.0f}" for one in figures),
                        f"{times:.1f}",
                    )
    make_console(120).print(table)
    if arguments.json:
        result = {
            **circumstances(),
            "torch": torch.__version__,
            "seed": arguments.seed,
            "results": results,
        }
        arguments.json.write_text(as_json(result))


if __name__ == "__main__":
    main()
