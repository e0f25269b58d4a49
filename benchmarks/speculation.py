"""What drafts bring on the CPU, beside the same engine without: --speculative-config '{"method": "none"}'.

    python -m benchmarks.speculation [--parts forced trained small head mtp] [--precisions bfloat16]
                                     [--depths 1 3 7 15] [--rounds 4] [--most-drafts 31] [--clock wall]
                                     [--cpu-threads N]
                                     [--seed 0] [--json FILE] [--plot FILE]

`forced`: decode steps, and steps that verify k drafts all of which are right, in turn, of a Qwen3.5 with 333 M random
parameters and of the demo's model. A step that verifies is timed with the fold of the one before. What its rows cost is
the time of a decode step of 1 + k sequences over that of one sequence. Bar: .8 times (1 + k) tokens over that cost.

`trained`: the demo's model, whose drafts are looked up as a server does by default, and `small`: the 333 M model. Files
that are edited, and tokens that are drawn at random, are forced: what the model samples gives way to the known token,
with drafts and without, so the drafter sees what it would see if the model had answered so. Both engines compute the
same requests; windows of the one and of the other are timed in turn, behind the first token. Of eight sequences the
next one begins when one has ended. Steps in which all eight decode are timed, until one ends and there is no next one:
from then on there are fewer, sooner with drafts than without. Steps of all shapes have been recorded before, those of
eight sequences included, and nothing else has been learned. In all of these drafts are looked up.

`head`: steps with drafts of the checkpoint's own head, all of which are forced to be right, and without, beside an
engine that has no head: a Qwen3.5 with 333 M random parameters and a head, and the demo's model. `mtp`: the demo's
model, whose head was trained, with method `mtp`, beside an engine that has no head.
"""

import argparse
import os
import statistics
import tempfile
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from benchmarks.draft_texts import FIRST_TOKEN, NUM_TOKENS, DraftTexts
from benchmarks.forced_answers import Engine
from benchmarks.forced_steps import measure_forced, measure_head
from benchmarks.hand_turned import GREEDY, NOTHING
from benchmarks.made_model import make_peer_model
from benchmarks.quantization import CLOCKS, wait_as_a_server_does
from benchmarks.reporting import add_output_flags, as_json, check_positive, circumstances, make_console, save_figure
from rich.console import Console
from rich.progress import track
from rich.table import Table

from cairn.errors import CairnError
from cairn.kernels.cpu.features import cpu_features
from cairn.models.random_weights.make_model import make_model
from cairn.scheduler.speculation import Drafter, SpeculativeConfig
from cairn.types import Keys, SamplingParams

PARTS = ("forced", "trained", "small", "head", "mtp")
PRECISIONS = ("bfloat16", "int8", "int4")
DEMO_MODEL = Path(__file__).parents[1] / "demo" / "model"
CODE, ANSWER, FILE = 600, 300, 1_200
"""Tokens of a prompt that is code, of an answer, and of a file that is edited."""

COUNTS = ("verifications", "accepted_tokens", "draft_tokens")
SEQUENCES, AT_ONCE = 8, 16
"""Requests that run at once, and those of a round in which so many do."""

Window = tuple[int, float]
"""How many tokens came, and the seconds."""


@dataclass(frozen=True)
class Asked:
    """One request. `answer`: the one that is forced, None for the model's own."""

    prompt: Keys
    answer: Keys | None = None
    prediction: Keys = field(default_factory=lambda: NOTHING)


@dataclass(frozen=True)
class Case:
    """`rounds`: requests that run at once, `SEQUENCES` at most, one round after the other. `window`: tokens of one, so
    many of each sequence, where two engines take turns."""

    name: str
    rounds: Sequence[Sequence[Asked]]
    bar: float | None
    sampling: SamplingParams = GREEDY
    window: int = 100


@dataclass(frozen=True)
class Side:
    """One of the two that are compared: an engine, and who drafts in it meanwhile."""

    engine: Engine
    drafter: Drafter | None


class Answers:
    """Those of one side to the requests of a round, from when the first of them have their first tokens on: as many as
    a round has at once, and the next one as soon as one has ended."""

    def __init__(self, side: Side, asked: Sequence[Asked], sampling: SamplingParams) -> None:
        self._engine = engine = side.engine
        engine.drafting.drafter = side.drafter
        # not what the other side has cached: a prompt that is resumed has other bits than one that is computed
        self._sampling, self._namespace = sampling, "none" if side.drafter is None else "drafts"
        self.tokens: dict[str, list[int]] = {}
        self._waiting, self.has_ended = deque(asked), False
        for _ in asked[:SEQUENCES]:
            self._submit(self._waiting.popleft())
        while not self._all_decode:
            self._step()

    def advance(self, num_tokens: int | None) -> Window:
        """Turn on until so many tokens have come, None for all, or one of the answers has ended that no other one comes
        after: what comes then comes of fewer sequences. Steps that compute a prompt are not counted."""
        count, seconds = 0, 0.0
        while not self.has_ended and (num_tokens is None or count < num_tokens):
            is_counted, begin = self._all_decode, self._engine.clock()
            came = self._step()
            if is_counted:
                seconds += self._engine.clock() - begin
                count += came
        return count, seconds

    def finish(self) -> None:
        while self._engine.core.has_work:
            self._step()

    @property
    def _all_decode(self) -> bool:
        return all(self.tokens.values())

    def _submit(self, asked: Asked) -> None:
        length = ANSWER if asked.answer is None else len(asked.answer)
        name = self._engine.submit(asked.prompt, length, self._sampling, asked.prediction, self._namespace)
        if asked.answer is not None:
            self._engine.texts[name] = np.concatenate([asked.prompt, asked.answer])
        self.tokens[name] = []

    def _step(self) -> int:
        count = 0
        for output in self._engine.core.step():
            self.tokens[output.request_id] += output.token_ids
            count += len(output.token_ids)
            if output.finish_reason is not None and self._waiting:
                self._submit(self._waiting.popleft())
            elif output.finish_reason is not None:
                self.has_ended = True
        return count


def answer_round(sides: Sequence[Side], case: Case, asked: Sequence[Asked]) -> tuple[list[list[Window]], list[Answers]]:
    """Of each side its windows, and its answers. One engine answers for one side after the other; two take turns within
    the answers."""
    windows: list[list[Window]] = [[], []]
    if sides[0].engine is sides[1].engine:
        answers = []
        for side, own in zip(sides, windows, strict=True):
            answers.append(Answers(side, asked, case.sampling))
            own.append(answers[-1].advance(None))
            answers[-1].finish()
        return windows, answers
    answers = [Answers(side, asked, case.sampling) for side in sides]
    while not all(each.has_ended for each in answers):
        for each, own in zip(answers, windows, strict=True):
            if not each.has_ended:
                own.append(each.advance(case.window * min(len(asked), SEQUENCES)))
    for each in answers:
        each.finish()
    return windows, answers


def measure_case(sides: Sequence[Side], case: Case) -> dict[str, Any]:
    """`sides`: without drafts, and with."""
    windows: list[list[Window]] = [[], []]
    counters = sides[1].engine.core._scheduler.state.counters.spec_decode
    before = counters.num_drafts, counters.num_draft_tokens, counters.num_accepted_tokens
    num_same = num_answers = 0
    for asked in case.rounds:
        found, answers = answer_round(sides, case, asked)
        for own, new in zip(windows, found, strict=True):
            own += new
        num_same += sum(one == other for one, other in zip(*(each.tokens.values() for each in answers), strict=True))
        num_answers += len(asked)
    rates = [[count / seconds for count, seconds in own if count > 1] for own in windows]
    none, drafts = (sum(count for count, _ in own) / sum(seconds for _, seconds in own) for own in windows)
    after = counters.num_drafts, counters.num_draft_tokens, counters.num_accepted_tokens
    num_drafts, num_draft_tokens, num_accepted = (now - then for now, then in zip(after, before, strict=True))
    return {
        "case": case.name,
        "none_tokens_per_s": none,
        "tokens_per_s": drafts,
        "ratio": drafts / none,
        "ratios": sorted(one / other for other, one in zip(*rates, strict=False)),
        "bar": case.bar,
        "num_verifications": num_drafts,
        "num_draft_tokens": num_draft_tokens,
        "num_accepted_tokens": num_accepted,
        "same_answers": num_same / num_answers,
    }


def edit_bar(precision: str) -> float | None:
    """As issue 42 has it, for this processor."""
    features = cpu_features()
    if precision == "int8":
        return 3.0
    if precision == "bfloat16":
        return 3.0 if features.get("avx512bf16") else 1.8
    return None


def edit_cases(texts: DraftTexts, rounds: int, precision: str) -> Iterator[Case]:
    """A file that is edited, in the prompt or in the prediction alone."""
    edits = [texts.edit(number, FILE) for number in range(rounds)]
    of_prompt = [[Asked(asked, edited)] for asked, edited, _ in edits]
    yield Case("edit of the prompt", of_prompt, edit_bar(precision))
    edits = [texts.edit(number + rounds, FILE) for number in range(rounds)]
    predicted = [[Asked(asked[-32:], edited, file)] for asked, edited, file in edits]
    yield Case("edit of the prediction", predicted, edit_bar(precision))


def random_cases(texts: DraftTexts, rounds: int, first: int) -> Iterator[Case]:
    """What cannot be predicted."""
    for name, number in (("random tokens", NUM_TOKENS - FIRST_TOKEN), ("random, of 8 tokens", 8)):
        drawn = [[Asked(texts.passage(first + round_, CODE), texts.random(ANSWER, number))] for round_ in range(rounds)]
        yield Case(name, drawn, 0.97)


def trained_cases(options: argparse.Namespace, texts: DraftTexts) -> Iterator[Case]:
    """Of a model that has learned something. No two rounds have the same text: answers are looked up, too."""
    rounds, seed, first = options.rounds, options.seed, 2 * options.rounds
    for name, sampling, bar in (
        ("code goes on, greedy", GREEDY, 1.5),
        ("code goes on, temperature .8", SamplingParams(temperature=0.8, seed=seed), None),
        ("temperature 2", SamplingParams(temperature=2.0, seed=seed), 0.97),
    ):
        yield Case(name, [[Asked(texts.passage(first + round_, CODE))] for round_ in range(rounds)], bar, sampling)
        first += rounds
    yield from random_cases(texts, rounds, first)
    first += rounds
    at_once = [
        [Asked(texts.passage(first + AT_ONCE * round_ + n, CODE)) for n in range(AT_ONCE)] for round_ in range(rounds)
    ]
    yield Case(f"code goes on, {SEQUENCES} sequences", at_once, 1.0)


def sides_of(options: argparse.Namespace, part: str, model: Path, precision: str, method: str = "suffix") -> list[Side]:
    """Without drafts, and with. Of the demo's model, whose steps are short, the same engine, so that nothing else
    differs; of the 333 M model two, which take turns within its long answers, and where there is a head to be left
    out."""
    most, clock = options.most_drafts, CLOCKS[options.clock]
    drafting = plain = Engine(model, precision, SEQUENCES, clock, method, most)
    if part in ("small", "mtp"):
        plain = Engine(model, precision, SEQUENCES, clock, "none")
    drafter = drafting.drafting.drafter
    for engine in {plain, drafting}:
        engine.record_steps(most if engine is drafting else 1)
    return [Side(plain, None), Side(drafting, drafter)]


def measure_texts(
    options: argparse.Namespace, part: str, model: Path, precision: str, method: str = "suffix"
) -> Iterator[dict[str, Any]]:
    sides = sides_of(options, part, model, precision, method)
    texts = DraftTexts(DEMO_MODEL / "tokenizer.json", options.seed)
    if part != "small":
        cases = [*edit_cases(texts, options.rounds, precision), *trained_cases(options, texts)]
    else:
        cases = list(edit_cases(texts, 1, precision))
    for case in (case for case in cases if any(word in case.name for word in options.cases)):
        yield {"part": part, "precision": precision, "method": method, **measure_case(sides, case)}
    for engine in {side.engine for side in sides}:
        engine.core.close()


def table_of(rows: Sequence[dict[str, Any]], part: str) -> Table:
    last = ("tokens a verification", "accepted", "same answers")
    if part in ("forced", "head"):
        last = ("rows cost" if part == "forced" else "a first token costs", "a step costs")
    table = Table(
        "weights", "case", "none, tokens/s", "drafts, tokens/s", "times", "of windows", "bar", *last, title=part
    )
    for row in (row for row in rows if row["part"] == part):
        if part in ("forced", "head"):
            cost = row["rows_cost"] if part == "forced" else row["first_token_cost"]
            remarks = [f"{cost:.2f}", f"{row['verify_cost']:.2f}"]
        else:
            number, accepted, drafted = (row[f"num_{name}"] for name in COUNTS)
            remarks = (
                [f"{1 + accepted / number:.1f}", f"{accepted / drafted:.0%} of {drafted}"] if number else ["", "0"]
            )
            remarks.append(f"{row['same_answers']:.0%}")
        ratios, bar = row["ratios"], row["bar"]
        table.add_row(
            row["precision"],
            row["case"],
            f"{row['none_tokens_per_s']:,.1f}",
            f"{row['tokens_per_s']:,.1f}",
            f"{row['ratio']:.2f}",
            f"{ratios[0]:.2f} to {ratios[-1]:.2f}, {statistics.median(ratios):.2f}",
            "" if bar is None else f"{bar:.2f} {'held' if row['ratio'] >= bar else 'missed'}",
            *remarks,
        )
    return table


def plot(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Times as fast as without drafts, with the bars."""
    with save_figure(path, 9, 0.28 * len(rows) + 1.2) as figure:
        axes, places = figure.subplots(), range(len(rows))
        axes.barh(places, [row["ratio"] for row in rows], color="#4c78a8")
        for place, row in zip(places, rows, strict=True):
            axes.plot([row["ratios"][0], row["ratios"][-1]], [place, place], color="black", linewidth=1)
            if row["bar"] is not None:
                axes.plot([row["bar"]] * 2, [place - 0.4, place + 0.4], color="#e45756")
        axes.set_yticks(places, [f"{row['part']}, {row['precision']}: {row['case']}" for row in rows], fontsize=7)
        axes.axvline(1, color="grey", linewidth=0.8)
        axes.invert_yaxis()
        axes.set_xlabel("tokens a second over those without drafts; red: the bar")


def parse(words: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=[*PARTS])
    parser.add_argument("--precisions", nargs="+", choices=PRECISIONS, default=["bfloat16"])
    parser.add_argument("--depths", nargs="+", type=int, default=[1, 3, 7, 15], help="drafts of a step, at most 32")
    parser.add_argument("--rounds", type=int, default=4, help="texts of each case")
    parser.add_argument("--cases", nargs="+", default=[""], help="of texts, those with one of these in their names")
    most = SpeculativeConfig().num_speculative_tokens
    parser.add_argument("--most-drafts", type=int, default=most, help="of a verification, where none are forced")
    parser.add_argument("--windows", type=int, default=3, help="of a forced depth")
    parser.add_argument("--steps", type=int, default=8, help="of a forced window")
    parser.add_argument("--context", type=int, default=256, help="tokens of a prompt before forced steps")
    parser.add_argument("--clock", choices=tuple(CLOCKS), default="wall")
    parser.add_argument("--cpu-threads", type=int, default=len(os.sched_getaffinity(0)))
    add_output_flags(parser)
    arguments = parser.parse_args(words)
    check_positive(parser, arguments, "depths", "rounds", "most_drafts", "windows", "steps", "context", "cpu_threads")
    return arguments


def measure(options: argparse.Namespace, console: Console) -> Iterator[dict[str, Any]]:
    with tempfile.TemporaryDirectory(prefix="cairn-speculation-") as scratch:
        models = {"demo": DEMO_MODEL, "small": Path(scratch) / "model"}
        with_heads = {"demo": DEMO_MODEL, "small": Path(scratch) / "with-head"}
        if "head" in options.parts:
            make_model("qwen3_5", with_heads["small"], size="small", seed=options.seed, dtype="bfloat16", mtp=True)
        if {"forced", "small"} & set(options.parts):
            make_peer_model(models["small"], size="small", vocab_size=None, seed=options.seed)
        for part in options.parts:
            for precision in track(options.precisions, part, console=console, transient=True):
                if part == "forced":
                    for name, model in models.items():
                        yield from measure_forced(options, name, model, precision)
                elif part == "head":
                    for name, model in with_heads.items():
                        yield from measure_head(options, name, model, precision)
                elif part == "mtp":
                    yield from measure_texts(options, part, DEMO_MODEL, precision, "mtp")
                else:
                    yield from measure_texts(options, part, models["small" if part == "small" else "demo"], precision)


def main() -> None:
    arguments = parse()
    wait_as_a_server_does(arguments.cpu_threads, "benchmarks.speculation")
    torch.set_num_threads(arguments.cpu_threads)
    console = make_console()
    try:
        rows = list(measure(arguments, console))
    except CairnError as error:
        raise SystemExit(f"speculation: {error}") from error
    for part in arguments.parts:
        console.print(table_of(rows, part))
    names = ("precisions", "rounds", "most_drafts", "windows", "steps", "context", "clock", "cpu_threads", "seed")
    if arguments.json:
        sizes = {name: getattr(arguments, name) for name in names}
        arguments.json.write_text(as_json({**circumstances(), **sizes, "rows": rows}))
    if arguments.plot:
        plot(rows, arguments.plot)


if __name__ == "__main__":
    main()
