"""Four images, then five, the fifth put in before a long shared text: how much of each prompt each policy finds cached.

    python -m benchmarks.incremental_images [--model FOLDER] [--size tiny|small] [--json FILE] [--plot FILE] [--seed N]

The published case (vllm#43587): prompts of 3,946 and 4,584 tokens that begin with the same 1,775, which is three whole
blocks of 544 (1,632 tokens) and a part of the fourth. Four requests, one at a time, greedy, into an engine core that
has seen nothing:
    4 images       cold
    4 images       repeated
    5 images       the same four, a fifth, the same text
    5 images       repeated
Policies, each in a core of its own: `align` with blocks of 544 tokens, as published; `granular`, one block a step, so
that every block's end gets a checkpoint; `auto` with blocks of 16 and of 544 tokens; `off`, no cache. Rounds are passes
through the model until the first token. One table with steps of up to 8,192 tokens, as published, and one with 2,048.
The last table asks for text alone, with the vision model loaded and without.
"""

import argparse
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import MappingProxyType

import numpy as np
import torch
from benchmarks.core_requests import run_request
from benchmarks.reporting import (
    add_model_flags,
    add_output_flags,
    as_json,
    circumstances,
    make_console,
    model_folder,
    save_figure,
)
from rich.console import Console
from rich.table import Table

from cairn.engine.build import build_core
from cairn.engine.contract import EngineConfig, GenerateRequest, Pixels, RenderedPrompt, StopConditions
from cairn.engine.text.tokenizer import ModelTokenizer
from cairn.types import SamplingParams

FOUR_TOKENS, FIVE_TOKENS = 3_946, 4_584
IMAGE_SIZE, FIFTH_SIZE = (672, 672), (1696, 384)
"""Pixels: 441 and 636 tokens with patches of 16 pixels, 2 x 2 of them a token, and the two that enclose an image."""
BLOCK = 544
BUDGETS = (8_192, 2_048)
WORKLOADS = ("4 images", "4 images, repeated", "5 images, incremental", "5 images, repeated")
POLICIES = MappingProxyType(
    {
        "align": {"mamba_cache_mode": "align", "block_size": BLOCK},
        "granular": {"mamba_cache_mode": "granular", "block_size": BLOCK},
        "auto": {"mamba_cache_mode": "auto"},
        "auto, blocks of 544": {"mamba_cache_mode": "auto", "block_size": BLOCK},
        "off": {"enable_prefix_caching": False},
    }
)
PUBLISHED = MappingProxyType({"align": ("96.5 %", "0.0 %", "94.9 %"), "granular": ("", "35.6 %", "")})
TEXTS = ("text", "text, repeated", "text, another end", "text, next turn")


@dataclass(frozen=True, slots=True)
class Asked:
    """One request: tokens of its prompt, those it found cached, passes until its first token, images encoded for it,
    milliseconds until its first token."""

    policy: str
    budget: int
    workload: str
    tokens: int
    cached: int
    rounds: int
    encoded: int
    ttft_ms: float

    @property
    def share(self) -> str:
        return f"{100 * self.cached / self.tokens:.1f} %"


class Asker:
    """One core, asked one request at a time."""

    def __init__(self, folder: Path, budget: int, policy: str, **settings: object) -> None:
        given = {"max_num_batched_tokens": budget, "max_num_seqs": 1, "kv_cache_memory_bytes": 1 << 30, **settings}
        self.core = build_core(EngineConfig(model=str(folder), **given))  # type: ignore[arg-type]
        self._budget, self._policy, self._count = budget, policy, 0

    def ask(self, workload: str, prompt: RenderedPrompt) -> Asked:
        """Asks for one token."""
        self._count += 1
        request = GenerateRequest(
            request_id=str(self._count),
            prompt=np.array(prompt.token_ids, dtype="<i8").tobytes(),
            sampling=SamplingParams(temperature=0.0),
            stop_conditions=StopConditions(max_tokens=1),
            boundaries=prompt.boundaries,
            images=prompt.images,
        )
        before = self.core.stats()
        first, _, cached = run_request(self.core, request)
        after = self.core.stats()
        return Asked(
            policy=self._policy,
            budget=self._budget,
            workload=workload,
            tokens=len(prompt.token_ids),
            cached=cached,
            rounds=after.steps.forward_passes - before.steps.forward_passes,
            encoded=after.images.num_encoded - before.images.num_encoded,
            ttft_ms=first * 1e3,
        )


class Prompts:
    """The two prompts, of exactly the published lengths."""

    def __init__(self, tokenizer: ModelTokenizer, seed: int) -> None:
        rng = np.random.default_rng(seed)
        self._tokenizer = tokenizer
        images = [_image(rng, *IMAGE_SIZE) for _ in range(4)]
        fifth = _image(rng, *FIFTH_SIZE)
        text = _text_of_length(lambda words: len(self._render([*images, words]).token_ids), FOUR_TOKENS)
        self.four = self._render([*images, text])
        self.five = self._render([*images, fifth, text])
        lengths = len(self.four.token_ids), len(self.five.token_ids)
        assert lengths == (FOUR_TOKENS, FIVE_TOKENS), lengths

    @property
    def in_order(self) -> tuple[RenderedPrompt, ...]:
        """One for each workload."""
        return self.four, self.four, self.five, self.five

    @property
    def shared(self) -> int:
        """Tokens that both begin with: up to the end of the fourth image."""
        pairs = zip(self.four.token_ids, self.five.token_ids, strict=False)
        return next(place for place, (one, other) in enumerate(pairs) if one != other)

    def _render(self, parts: Sequence[Pixels | str]) -> RenderedPrompt:
        content = [
            {"type": "text", "text": part} if isinstance(part, str) else {"type": "image", "image": part}
            for part in parts
        ]
        return self._tokenizer.render_chat([{"role": "user", "content": content}])


def _image(rng: np.random.Generator, width: int, height: int) -> Pixels:
    return Pixels(width=width, height=height, rgb=rng.integers(0, 256, 3 * width * height, dtype=np.uint8).tobytes())


def _text_of_length(tokens_with: Callable[[str], int], wanted: int) -> str:
    """Words that bring a prompt to so many tokens."""
    words = "Compare the images one by one, and say what is in each of them. " * 400
    low, high = 0, len(words)
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if tokens_with(words[:middle]) <= wanted else (low, middle - 1)
    text = words[:low]
    while tokens_with(text) < wanted:
        text += "."
    return text


def measure(folder: Path, budgets: Sequence[int], seed: int, policies: Sequence[str] = tuple(POLICIES)) -> list[Asked]:
    """Every policy's four requests with every budget."""
    prompts = Prompts(ModelTokenizer(folder), seed)
    found = []
    for budget in budgets:
        for policy in policies:
            settings = POLICIES[policy]
            asker = Asker(folder, budget, policy, **settings)
            found += [asker.ask(workload, prompt) for workload, prompt in zip(WORKLOADS, prompts.in_order, strict=True)]
    return found


def measure_text(folder: Path, seed: int) -> dict[str, list[Asked]]:
    """The same prompts of text alone with the vision model and without it."""
    tokenizer = ModelTokenizer(folder)
    rng = np.random.default_rng(seed)
    words = " ".join(str(number) for number in rng.integers(0, 10_000, 400))
    first = {"role": "user", "content": words}
    answered = [first, {"role": "assistant", "content": "So it is."}, {"role": "user", "content": "And now?"}]
    other = {"role": "user", "content": words[:1500] + " something else " * 40}
    prompts = [tokenizer.render_chat(chat) for chat in ([first], [first], [other], answered)]
    found = {}
    for name, alone in (("with the vision model", False), ("without it", True)):
        asker = Asker(folder, BUDGETS[-1], name, language_model_only=alone)
        found[name] = [asker.ask(workload, prompt) for workload, prompt in zip(TEXTS, prompts, strict=True)]
    return found


def show(console: Console, found: Sequence[Asked], shared: int) -> None:
    for budget in dict.fromkeys(asked.budget for asked in found):
        table = Table(
            "policy",
            *(f"{workload}\ncached / rounds" for workload in WORKLOADS),
            "published",
            title=f"steps of up to {budget:,} tokens; both prompts begin with the same {shared:,}",
        )
        for policy in POLICIES:
            row = [asked for asked in found if asked.policy == policy and asked.budget == budget]
            cells = (f"{asked.share} ({asked.cached:,}) / {asked.rounds}" for asked in row)
            table.add_row(policy, *cells, ", ".join(filter(None, PUBLISHED.get(policy, ()))))
        console.print(table)
    for asked in found:
        if asked.policy == "auto" and asked.budget == found[0].budget:
            console.print(
                f"auto, {asked.workload}: {asked.encoded} images encoded, first token in {asked.ttft_ms:.0f} ms"
            )


def show_text(console: Console, text: dict[str, list[Asked]]) -> None:
    table = Table("text alone", *TEXTS)
    for name, row in text.items():
        table.add_row(name, *(f"{asked.share} ({asked.cached:,})" for asked in row))
    console.print(table)


def plot(found: Sequence[Asked], path: Path) -> None:
    """Bars of the cached share, one group a workload, with the rounds above; one plot for each length of a step."""
    budgets = list(dict.fromkeys(asked.budget for asked in found))
    with save_figure(path, 9, 3.2 * len(budgets)) as figure:
        for axes, budget in zip(figure.subplots(len(budgets), 1, squeeze=False)[:, 0], budgets, strict=True):
            for index, policy in enumerate(POLICIES):
                row = [asked for asked in found if asked.policy == policy and asked.budget == budget][1:]
                places = [place + (index - 2) * 0.17 for place in range(len(row))]
                bars = axes.bar(places, [100 * asked.cached / asked.tokens for asked in row], width=0.16, label=policy)
                axes.bar_label(bars, [f"{asked.rounds}" for asked in row], fontsize=8)
            axes.set_xticks(range(len(WORKLOADS) - 1), WORKLOADS[1:])
            axes.set_ylabel("tokens cached, %")
            axes.set_title(f"steps of up to {budget:,} tokens; above each bar: rounds", fontsize=9)
        figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=len(POLICIES), frameon=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_model_flags(parser)
    add_output_flags(parser)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    console = make_console(160)
    with model_folder(arguments, "qwen3_5_vl") as folder:
        shared = Prompts(ModelTokenizer(folder), arguments.seed).shared
        found = measure(folder, BUDGETS, arguments.seed)
        text = measure_text(folder, arguments.seed)
    show(console, found, shared)
    show_text(console, text)
    if arguments.json:
        result = {
            **circumstances(),
            "shared_tokens": shared,
            "images": [asdict(asked) for asked in found],
            "text": {name: [asdict(asked) for asked in row] for name, row in text.items()},
        }
        arguments.json.write_text(as_json(result))
    if arguments.plot:
        plot(found, arguments.plot)


if __name__ == "__main__":
    main()
