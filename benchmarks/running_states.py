"""What --mamba-ssm-cache-dtype costs: a part of `benchmarks.state_dtypes`, which see.

Texts are computed without a cache: a prompt, and then the tokens that really follow it, one decode step each, whatever
the model would draw.
"""

import gc
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
import torch
from benchmarks.core_requests import greedy_request
from benchmarks.forced_answers import ForcedAnswers
from benchmarks.quantization import errors
from numpy.typing import NDArray
from rich.table import Table
from torch import Tensor

from cairn.engine.build import build_core
from cairn.engine.contract import EngineConfig, SpeculativeConfig
from cairn.engine.core import Core

__all__ = ["RUNNING", "Text", "cut_texts", "measure_running", "running_table"]

Ids = NDArray[np.int64]

Running = Literal["float32", "float16", "bfloat16", "model in bfloat16"]
RUNNING: tuple[Running, ...] = get_args(Running)
"""What states are in, of a model in float32; and a model in bfloat16 with states in float32, which is what bfloat16
models are off anyway."""

STEPS = (1, 16, 64, 256)
"""Decode steps after which logits are compared, if there are so many."""


class Text(NamedTuple):
    """`prompt` is computed in one go, `answer` token by token."""

    prompt: Ids
    answer: Ids


def cut_texts(tokens: Ids, count: int, prompt: int, answer: int) -> list[Text]:
    """The first ones, one behind the other. Raises RuntimeError for too few tokens."""
    length = prompt + answer
    if len(tokens) < count * length:
        raise RuntimeError(f"{len(tokens)} tokens are too few for {count} texts of {length}")
    pieces = (tokens[number * length : (number + 1) * length] for number in range(count))
    return [Text(piece[:prompt], piece[prompt:]) for piece in pieces]


def compute_logits(model: Path, running: Running, texts: Sequence[Text]) -> tuple[Tensor, int]:
    """float64 [texts, answer, vocabulary]: behind the prompt, and behind each token of the answer but the last; and the
    bytes of a checkpoint."""
    seen = list[Tensor]()
    is_float32 = running != "model in bfloat16"
    config = EngineConfig(
        model=str(model),
        dtype="float32" if is_float32 else "bfloat16",
        mamba_ssm_cache_dtype=running if is_float32 else "float32",  # type: ignore[arg-type]
        checkpoint_dtype="auto" if is_float32 else "float32",
        device="cpu",
        max_num_seqs=1,
        enable_prefix_caching=False,
        language_model_only=True,
        speculative=SpeculativeConfig(method="none"),
    )
    core: Core = build_core(config, observe=lambda sample, logits: seen.append(logits.double().flatten()))
    forced = ForcedAnswers(core)
    for number, text in enumerate(texts):
        forced.texts[str(number)] = np.concatenate(text)
        core.submit(greedy_request(str(number), text.prompt, len(text.answer)))
        while core.has_work:
            core.step()
    size = core.info.cache.checkpoint_bytes
    core.close()
    del core
    gc.collect()
    return torch.stack(seen).view(len(texts), len(texts[0].answer), -1), size


def measure_running(model: Path, texts: Sequence[Text]) -> dict[str, Any]:
    """By what states are in: how far logits are from those of float32 states after the prompt, and after so many decode
    steps; the perplexity of the answers; bytes of a checkpoint."""
    answers = torch.from_numpy(np.stack([text.answer for text in texts]))
    steps = [step for step in STEPS if step < answers.shape[1]]
    found: dict[str, Any] = {}
    exact = torch.empty(0)
    for running in RUNNING:
        logits, size = compute_logits(model, running, texts)
        if running == "float32":
            exact = logits
        truth = logits.log_softmax(2).gather(2, answers[:, :, None])
        found[running] = {
            "prefill": errors(logits[:, 0], exact[:, 0]),
            "decode": {str(step): errors(logits[:, step], exact[:, step]) for step in steps},
            "answer": errors(logits.flatten(0, 1), exact.flatten(0, 1)),
            "perplexity": math.exp(-truth.mean().item()),
            "checkpoint_bytes": size,
        }
    return found


def running_table(found: dict[str, Any]) -> Table:
    """`found`: by model what `measure_running` gave. The distance after the prompt, after each number of steps, and the
    perplexity of the answers."""
    table = Table("", *RUNNING, title="running states: logits to float32 ones'")
    for column in table.columns[1:]:
        column.justify = "right"
    for model, of in found.items():
        rows = [("after the prompt", [of[name]["prefill"]["distance"] for name in RUNNING])]
        for step in of["float32"]["decode"]:
            rows.append((f"after {step} steps", [of[name]["decode"][step]["distance"] for name in RUNNING]))
        rows.append(("likeliest token the same", [of[name]["answer"]["same_likeliest"] for name in RUNNING]))
        for what, values in rows:
            table.add_row(f"{model}, {what}", *(f"{value:.3g}" for value in values))
        if model == "trained":
            table.add_row("perplexity of the answers", *(f"{of[name]['perplexity']:.4f}" for name in RUNNING))
        table.add_row(f"{model}, bytes of a checkpoint", *(f"{of[name]['checkpoint_bytes']:,}" for name in RUNNING))
    return table
