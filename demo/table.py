"""The tables that the demo prints, and the same as JSON."""

from collections.abc import Mapping, Sequence
from typing import Any

from rich import box
from rich.table import Table
from rich.text import Text

from demo.checks import Check
from demo.job import Outcome

__all__ = ["EXACT_NOTE", "as_json", "check_lines", "default_table", "exact_table"]

EXACT_NOTE = (
    "With --exact an answer's tokens are computed again by the next turn: decode steps round differently from "
    "prefill, so the keys they built are not shared; without it they are."
)


def exact_table(cached: Sequence[Outcome], off: Sequence[Outcome], align: Sequence[Outcome]) -> Table:
    """One row a request: what the client counted, what the cache did, and the same with it off and with `align`."""
    table = _table("The same requests with --exact: cairn's cache, no cache, and --mamba-cache-mode align")
    for header in ("prompt\ntokens", "shared\nearlier", "cached\ntokens"):
        table.add_column(header, justify="right")
    table.add_column("why not more")
    for header in ("TTFT\nms", "no cache\nTTFT ms", "align\ncached", "align\nTTFT ms"):
        table.add_column(header, justify="right")
    for ours, without, aligned in zip(cached, off, align, strict=True):
        table.add_row(
            *_facts(ours),
            _milliseconds(ours),
            _milliseconds(without),
            f"{aligned.reply.cached_tokens:,}",
            _milliseconds(aligned),
            end_section=ours.part != _next_part(cached, ours),
        )
    return table


def default_table(outcomes: Sequence[Outcome], title: str = "The same without --exact") -> Table:
    """The requests without --exact."""
    table = _table(title)
    for header in ("prompt\ntokens", "shared\nearlier", "cached\ntokens"):
        table.add_column(header, justify="right")
    table.add_column("why not more")
    table.add_column("TTFT\nms", justify="right")
    for outcome in outcomes:
        end_section = outcome.part != _next_part(outcomes, outcome)
        table.add_row(*_facts(outcome), _milliseconds(outcome), end_section=end_section)
    return table


def check_lines(checks: Sequence[Check]) -> Text:
    """One line a promise, and below a broken one what speaks against it."""
    lines = Text()
    for check in checks:
        lines.append("kept    " if check.kept else "BROKEN  ", style="green" if check.kept else "bold red")
        lines.append(f"{check.promise}\n")
        for against in check.against:
            lines.append(f"          {against}\n")
    lines.rstrip()
    return lines


def as_json(runs: Mapping[str, Sequence[Outcome]], checks: Sequence[Check]) -> dict[str, Any]:
    """Everything in the tables, by name of the server, as plain data."""
    return {
        "requests": {name: [_plain(outcome) for outcome in outcomes] for name, outcomes in runs.items()},
        "checks": [{"promise": check.promise, "kept": check.kept, "against": list(check.against)} for check in checks],
    }


def _table(title: str) -> Table:
    table = Table(title=title, box=box.SIMPLE_HEAD, title_justify="left")
    table.add_column("")
    table.add_column("request", no_wrap=True)
    return table


def _facts(outcome: Outcome) -> tuple[str, ...]:
    reply = outcome.reply
    return (
        outcome.part,
        outcome.label,
        f"{len(reply.prompt_ids):,}",
        f"{outcome.shared.paths:,}",
        f"{reply.cached_tokens:,}",
        "" if reply.reason == "none" else reply.reason,
    )


def _milliseconds(outcome: Outcome) -> str:
    return f"{outcome.reply.first_token_seconds * 1e3:,.0f}"


def _next_part(outcomes: Sequence[Outcome], outcome: Outcome) -> str:
    following = outcomes.index(outcome) + 1
    return outcomes[following].part if following < len(outcomes) else outcome.part


def _plain(outcome: Outcome) -> dict[str, Any]:
    reply = outcome.reply
    return {
        "part": outcome.part,
        "request": outcome.label,
        "prompt_tokens": len(reply.prompt_ids),
        "shared_with_prompts": outcome.shared.prompts,
        "shared_with_paths": outcome.shared.paths,
        "cached_tokens": reply.cached_tokens,
        "reason": reply.reason,
        "first_token_seconds": round(reply.first_token_seconds, 6),
        "forward_passes": reply.forward_passes,
        "answer_ids": list(reply.answer_ids),
    }
