import json

from demo.checks import Check
from demo.client import Reply
from demo.job import Outcome
from demo.shared_prefix import Shared
from demo.table import as_json, check_lines, default_table, exact_table
from rich.console import Console


def outcome(part, label, cached, seconds, reason="no_checkpoint"):
    return Outcome(part, label, Shared(1500, 1511), Reply((1,) * 2200, (5, 6), "t", cached, reason, seconds, 13))


def lines_of(renderable):
    console = Console(width=116, color_system=None, highlight=False)
    with console.capture() as capture:
        console.print(renderable)
    return capture.get().splitlines()


def test_a_row_has_all_servers_side_by_side():
    ours, off, align = ([outcome("b", "branch", *facts)] for facts in ((1472, 0.14), (0, 0.338), (64, 1.2345)))
    text = "\n".join(lines_of(exact_table(ours, off, align)))
    row = next(line.split() for line in text.splitlines() if " branch " in line)
    assert row == ["b", "branch", "2,200", "1,511", "1,472", "no_checkpoint", "140", "338", "64", "1,234"]


def test_a_full_hit_needs_no_reason():
    (row,) = [line for line in lines_of(default_table([outcome("a", "again", 2200, 0.01, "none")])) if "again" in line]
    assert row.split() == ["a", "again", "2,200", "1,511", "2,200", "10"]


def test_parts_are_set_apart():
    outcomes = [outcome("a", "one", 0, 0.1), outcome("a", "two", 0, 0.1), outcome("b", "three", 0, 0.1)]
    lines = lines_of(default_table(outcomes))
    one, two, three = (next(i for i, line in enumerate(lines) if word in line) for word in ("one", "two", "three"))
    assert (two - one, three - two) == (1, 2)


def test_a_broken_promise_is_told_with_what_speaks_against_it():
    lines = lines_of(check_lines([Check("answers are identical"), Check("it is cached", ("c, chat: 5 cached",))]))
    assert [line.rstrip() for line in lines] == [
        "kept    answers are identical",
        "BROKEN  it is cached",
        "          c, chat: 5 cached",
    ]


def test_json_has_everything():
    plain = json.loads(json.dumps(as_json({"cairn": [outcome("a", "one", 7, 0.25)]}, [Check("kept", ())])))
    assert plain["requests"]["cairn"] == [
        {
            "part": "a",
            "request": "one",
            "prompt_tokens": 2200,
            "shared_with_prompts": 1500,
            "shared_with_paths": 1511,
            "cached_tokens": 7,
            "reason": "no_checkpoint",
            "first_token_seconds": 0.25,
            "forward_passes": 13,
            "answer_ids": [5, 6],
        }
    ]
    assert plain["checks"] == [{"promise": "kept", "kept": True, "against": []}]
