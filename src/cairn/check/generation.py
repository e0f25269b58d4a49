"""Whether a model answers here as it does in transformers: perplexity of a text, and greedy answers side by side.

Two implementations add in different orders, so their logits differ in the last bits; where two tokens are almost
equally likely, either may come first. An answer is therefore right if its tokens are the same, or if at the first token
that differs transformers finds both equally likely within the tolerance of the dtype. From there on the answers
continue different texts and are not compared. So it is with a prompt that is sent again and comes from the cache, whose
states may be stored in fewer bits: there the first answer's own log-probabilities say what is equally likely.
"""

import asyncio
import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import asdict, dataclass, field
from importlib.resources import files
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from rich.console import Console, Group, RenderableType
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from cairn.check.reference import TransformersReference, check_packages
from cairn.engine.contract import EngineClient, GenerateRequest, StopConditions, TextTokenizer, TokenLogprobs
from cairn.errors import EngineDead
from cairn.models.decoder_config import MADE_AT_LOAD
from cairn.types import SamplingParams

__all__ = ["GenerationReport", "check_generation", "render_generation"]

NUM_PROMPTS = 20
MAX_TOKENS = 32
MAX_TEXT_TOKENS = 1024

_SHORTEST = 16

_NUM_LIKELY = 5
"""Tokens whose log-probabilities are asked for with an answer."""


@dataclass(frozen=True, slots=True)
class Tolerance:
    """How far apart two right implementations may be. `perplexity`: as a share; `logprob`: nats between two tokens that
    count as equally likely; `num_outliers`: answers that may part at others, where rounding chose another expert."""

    perplexity: float
    logprob: float
    num_outliers: int


TOLERANCES: Mapping[str, Tolerance] = MappingProxyType(
    {
        "float32": Tolerance(perplexity=1e-4, logprob=1e-3, num_outliers=0),
        "bfloat16": Tolerance(perplexity=0.02, logprob=0.15, num_outliers=2),
        "int8": Tolerance(perplexity=0.05, logprob=0.5, num_outliers=4),
        "int4": Tolerance(perplexity=0.1, logprob=0.8, num_outliers=4),
    }
)
"""By what the weights of the products are served in."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerComparison:
    """One greedy answer by both.

    `first_difference`: place of the first token that differs, None where none does; `gap`: how much more likely
    transformers finds its own token there, in nats. `cached_tokens`: tokens of the prompt that came from the cache when
    it was sent again; `cached_answer_equal`: whether it then got the same answer, and `cached_gap`: if not, how much
    more likely the first answer's token was where they part, None for more than is told.
    """

    prompt_tokens: int
    text: str
    transformers_text: str
    first_difference: int | None
    gap: float
    cached_tokens: int
    cached_answer_equal: bool
    cached_gap: float | None = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationReport:
    """What was found. `dtype`: what the weights of the products are served in."""

    model: str
    dtype: str
    text_tokens: int
    perplexity: float
    transformers_perplexity: float
    answers: tuple[AnswerComparison, ...]

    @property
    def tolerance(self) -> Tolerance:
        return TOLERANCES[self.dtype]

    @property
    def num_equal(self) -> int:
        return sum(answer.first_difference is None for answer in self.answers)

    @property
    def num_near_ties(self) -> int:
        return len(self.answers) - self.num_equal - len(self.outliers)

    @property
    def outliers(self) -> list[int]:
        """The answers that part from transformers' where the tokens are not equally likely."""
        return [number for number, answer in enumerate(self.answers) if answer.gap > self.tolerance.logprob]

    @property
    def problems(self) -> list[str]:
        """What is not as it should be, a sentence each; empty for the same model."""
        problems, tolerance = [], self.tolerance
        apart = abs(self.perplexity / self.transformers_perplexity - 1)
        if not apart <= tolerance.perplexity:
            problems.append(f"the perplexities are {apart:.2%} apart; at most {tolerance.perplexity:.2%} is rounding")
        if len(self.outliers) > tolerance.num_outliers:
            problems.append(
                f"answers {', '.join(map(str, self.outliers))} part where transformers' token is up to "
                f"{max(answer.gap for answer in self.answers):.3f} nats more likely; up to {tolerance.logprob:g} is "
                f"rounding, and {tolerance.num_outliers} answers may be beyond it"
            )
        for number, answer in enumerate(self.answers):
            if not answer.cached_tokens:
                problems.append(f"answer {number}: the same prompt again found nothing in the cache")
            elif answer.cached_gap is None or answer.cached_gap > tolerance.logprob:
                apart_by = "much less" if answer.cached_gap is None else f"{answer.cached_gap:.3f} nats less"
                problems.append(
                    f"answer {number} is another one when its prompt is cached, from a token on that was {apart_by} "
                    f"likely; up to {tolerance.logprob:g} is rounding"
                )
        return problems

    def as_json(self) -> dict[str, Any]:
        """The whole report, the verdict included."""
        return {
            "ok": not self.problems,
            "problems": self.problems,
            "num_equal": self.num_equal,
            "num_near_ties": self.num_near_ties,
            "outliers": self.outliers,
            "tolerance": asdict(self.tolerance),
            **asdict(self),
        }


# -- what cairn answers ------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class EngineAnswer:
    """What the engine has answered so far. `cached_tokens`: of its prompt."""

    token_ids: list[int] = field(default_factory=list)
    cached_tokens: int = 0
    prompt_logprobs: TokenLogprobs | None = None
    logprobs: TokenLogprobs | None = None


@dataclass(frozen=True, slots=True)
class ServedAnswer:
    """The greedy answer to a prompt, and the one to the same prompt sent again."""

    prompt: list[int]
    first: EngineAnswer
    again: EngineAnswer


@dataclass(frozen=True, slots=True)
class Served:
    """What the engine said. `sum_logprobs`: of the text's tokens but the first, in nats."""

    text: list[int]
    sum_logprobs: float
    answers: list[ServedAnswer]


async def generate_all(engine: EngineClient, advance: Callable[[], None]) -> Served:
    """Ask a started engine for everything. `advance` is called after each answer.

    Raises RequestError when a request is refused, and EngineDead.
    """
    limit = engine.info.max_model_len - 1
    text = engine.tokenizer.encode(read_text())[: min(MAX_TEXT_TOKENS, limit)]
    scored = await _ask(engine, "text", text, max_tokens=1, prompt_logprobs=0)
    assert scored.prompt_logprobs is not None
    total = sum(pair[1] for _rank, (pair, *_best) in scored.prompt_logprobs)
    advance()
    answers = []
    for number, prompt in enumerate(prompts_of(text, limit - MAX_TOKENS)):
        first = await _ask(engine, f"first-{number}", prompt, max_tokens=MAX_TOKENS, logprobs=_NUM_LIKELY)
        again = await _ask(engine, f"again-{number}", prompt, max_tokens=MAX_TOKENS)
        answers.append(ServedAnswer(prompt, first, again))
        advance()
    return Served(text, total, answers)


def read_text() -> str:
    """The text whose perplexity is measured and of which the prompts are parts: prose, code, JSON, four languages."""
    return files("cairn.check").joinpath("text.txt").read_text(encoding="utf-8")


def prompts_of(text: Sequence[int], limit: int) -> list[list[int]]:
    """Token ids of NUM_PROMPTS prompts: pieces of the text of rising length, at places spread over it."""
    prompts = []
    for number in range(NUM_PROMPTS):
        share = (number + 1) / NUM_PROMPTS
        length = max(_SHORTEST, min(limit, int(len(text) * share * share)))
        start = (len(text) - length) * (number * 7 % NUM_PROMPTS) // NUM_PROMPTS
        prompts.append(list(text[start : start + length]))
    return prompts


async def _ask(
    engine: EngineClient,
    request_id: str,
    prompt: list[int],
    *,
    max_tokens: int,
    prompt_logprobs: int | None = None,
    logprobs: int | None = None,
) -> EngineAnswer:
    request = GenerateRequest(
        request_id=request_id,
        prompt=np.array(prompt, "<i8").tobytes(),
        sampling=SamplingParams(temperature=0.0),
        stop_conditions=StopConditions(max_tokens=max_tokens, ignore_eos=True),
        prompt_logprobs=prompt_logprobs,
        logprobs=logprobs,
        skip_special_tokens=False,
        # one prompt may begin like another one: only its own second sighting is to be cached
        cache_salt=f"{len(prompt)}-{zlib.crc32(np.array(prompt).tobytes())}-{prompt_logprobs}",
    )
    answer = EngineAnswer()
    async with aclosing(engine.generate(request)) as outputs:  # type: ignore[type-var]
        async for output in outputs:
            if output.error is not None:
                raise EngineDead(f"{request_id}: {output.error}")
            answer.token_ids += output.token_ids
            answer.prompt_logprobs = answer.prompt_logprobs or output.prompt_logprobs
            if output.logprobs is not None:
                answer.logprobs = (
                    output.logprobs if answer.logprobs is None else answer.logprobs.concat(output.logprobs)
                )
            if output.cache is not None:
                answer.cached_tokens = output.cache.cached_tokens
    return answer


# -- the comparison ----------------------------------------------------------------------------------------------------


def compare(
    model: str,
    dtype: str,
    served: Served,
    reference: TransformersReference,
    decode: Callable[[Sequence[int]], str],
    advance: Callable[[], None],
) -> GenerationReport:
    """Have transformers compute the same, and set both side by side."""
    count = len(served.text) - 1
    truth = reference.sum_logprobs(served.text)
    advance()
    answers = []
    for answer in served.answers:
        served_ids, right = answer.first.token_ids, reference.generate(answer.prompt, MAX_TOKENS)
        place = next((at for at, (a, b) in enumerate(zip(served_ids, right.token_ids, strict=True)) if a != b), None)
        gap = 0.0
        if place is not None:
            gap = float(right.logprobs[place, right.token_ids[place]] - right.logprobs[place, served_ids[place]])
        answers.append(
            AnswerComparison(
                prompt_tokens=len(answer.prompt),
                text=decode(served_ids),
                transformers_text=decode(right.token_ids),
                first_difference=place,
                gap=gap,
                cached_tokens=answer.again.cached_tokens,
                cached_answer_equal=answer.again.token_ids == served_ids,
                cached_gap=gap_of(answer.first, answer.again),
            )
        )
        advance()
    return GenerationReport(
        model=model,
        dtype=dtype,
        text_tokens=len(served.text),
        perplexity=math.exp(-served.sum_logprobs / count),
        transformers_perplexity=math.exp(-truth / count),
        answers=tuple(answers),
    )


def gap_of(first: EngineAnswer, again: EngineAnswer) -> float | None:
    """How much more likely the first answer's token was than the other's where they part, in nats: 0 where they do not,
    None where the other's was not among the likeliest."""
    assert first.logprobs is not None
    for tokens, (_rank, (chosen, *best)) in zip(
        zip(first.token_ids, again.token_ids, strict=True), first.logprobs, strict=True
    ):
        if tokens[0] != tokens[1]:
            likely = dict(best)
            return chosen[1] - likely[tokens[1]] if tokens[1] in likely else None
    return 0.0


def render_generation(report: GenerationReport) -> RenderableType:
    """The answers side by side, and the verdict below them."""
    table = Table(title=f"greedy answers of {MAX_TOKENS} tokens", title_justify="left")
    for name in ("", "prompt", "cairn", "transformers", "same", "cached"):
        table.add_column(name, overflow="fold", max_width=44 if name in ("cairn", "transformers") else None)
    for number, answer in enumerate(report.answers):
        same = "yes" if answer.first_difference is None else f"{answer.first_difference} tokens, gap {answer.gap:.3f}"
        cached_gap = math.inf if answer.cached_gap is None else answer.cached_gap
        again = "same" if answer.cached_answer_equal else f"other, gap {cached_gap:.3f}"
        texts = (Text(repr(text)[1:-1]) for text in (answer.text, answer.transformers_text))
        table.add_row(str(number), str(answer.prompt_tokens), *texts, same, f"{answer.cached_tokens} {again}")
    lines = [
        Text(
            f"perplexity of {report.text_tokens:,} tokens in {report.dtype}: {report.perplexity:.4f}, "
            f"with transformers {report.transformers_perplexity:.4f}"
        ),
        Text(
            f"{report.num_equal} of {len(report.answers)} answers are the same token for token, "
            f"{report.num_near_ties} part where two tokens are equally likely within rounding, "
            f"{len(report.outliers)} elsewhere"
        ),
        *(Text(problem, style="red") for problem in report.problems),
        Text(
            "not the same model" if report.problems else "the same model", style="red" if report.problems else "green"
        ),
    ]
    return Group(table, *lines)


# -- both, one after the other -----------------------------------------------------------------------------------------


def check_generation(
    folder: Path, dtype: str, quantization: str | None, engine: EngineClient, console: Console
) -> GenerationReport:
    """Start `engine`, which serves the checkpoint in `folder`, ask it, end it, and compare with transformers: so the
    weights are in memory once at a time. `dtype`: what it is served in; `quantization`: what weights of products are
    in, if in none. A terminal shows progress.

    Raises ConfigError when transformers lacks a package for it, before anything is started, ModelError when it cannot
    load the checkpoint, ConfigError and EngineDead as the engine does.
    """
    check_packages(folder)
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("cairn answers", total=2 * (NUM_PROMPTS + 1))

        def advance() -> None:
            progress.advance(task)

        async def ask() -> tuple[Served, TextTokenizer]:
            try:
                await engine.start()
                return await generate_all(engine, advance), engine.tokenizer
            finally:
                await engine.stop(0.0)

        served, tokenizer = asyncio.run(ask())
        progress.update(task, description="transformers answers")
        reference = TransformersReference(folder, dtype)
        # What is served as it is stored has the very numbers that transformers reads.
        rounded_to = str(quantization) if quantization in MADE_AT_LOAD else dtype
        return compare(str(folder), rounded_to, served, reference, tokenizer.decode, advance)
