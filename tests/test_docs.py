"""The documentation against the code: names that are written down must exist, and names that exist be written down."""

import argparse
import ast
import json
import re
from pathlib import Path
from typing import get_origin

import pytest
from msgspec.structs import replace
from pydantic import ByteSize

from cairn import __version__
from cairn.cache.checkpoint import Kind, Origin
from cairn.cache.placement import placement_for
from cairn.cache.reasons import Reason
from cairn.engine.contract import EngineConfig, EngineStats
from cairn.server.metrics import Metrics
from cairn.settings.serve import ServeSettings, add_flags
from cairn.settings.sources import add_setting_flags
from cairn.settings.vllm_flags import VLLM_FLAGS
from doubles.echo_core import build_echo_core
from source_scan import ROOT, SRC, sources

VLLM_TABLE = "## vLLM's other flags"
RUNNING = ("flags.md", "metrics.md", "files-and-signals.md", "endpoints.md")
"""Pages about a server that runs: what they name must exist."""
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])


def page(name: str) -> str:
    return (ROOT / "docs" / name).read_text()


def anchors(path: Path) -> set[str]:
    """The fragments of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", path.read_text(), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(path):
    links = [link for link in re.findall(r"\]\(([^)\s]+)", path.read_text()) if "://" not in link]
    lost = []
    for link in links:
        target, _, anchor = link.partition("#")
        page = path.parent / target if target else path
        if not page.exists() or (anchor and page.suffix == ".md" and anchor not in anchors(page)):
            lost.append(link)
    assert lost == []


def test_every_flag_is_described():
    parser = argparse.ArgumentParser()
    add_flags(parser)
    flags = {flag for action in parser._actions for flag in action.option_strings if flag.startswith("--")} - {"--help"}
    described, *named = (set(re.findall(r"`(--[a-z0-9-]+)(?![a-z0-9_-])", page(name))) for name in RUNNING)
    assert {flag for flag in flags - described if flag.replace("--no-", "--") not in described} == set()
    assert described - flags == {"--no-"}
    assert set().union(*named) <= flags


def test_every_flag_of_vllms_is_a_setting_or_in_the_table():
    """The list is made by tools/vllm_flags.py."""
    listed = json.loads((ROOT / "tests" / "data" / "vllm_serve_flags.json").read_text())
    settings, table = argparse.ArgumentParser(), [name for row in VLLM_FLAGS for name in row.names.split()]
    add_setting_flags(settings, ServeSettings)
    taken = {flag for action in settings._actions for flag in action.option_strings} | {"--model"}
    assert [flag for flag in listed["flags"] if flag not in taken and flag not in table] == []
    assert len(set(table)) == len(table) and taken.isdisjoint(table)
    minor = listed["version"].rpartition(".")[0]
    assert f"every flag of vLLM {minor}." in page("flags.md")


def test_the_table_of_vllms_flags_is_the_one_of_the_command():
    text = page("flags.md").split(VLLM_TABLE)[1].split("\n## ")[0]
    told = [line for line in text.splitlines() if line.startswith("| `-")]
    assert told == [
        f"| {', '.join(f'`{name}`' for name in row.names.split())} | {in_table(row)} | {row.why} |"
        for row in VLLM_FLAGS
    ]


def in_table(row) -> str:
    if not row.values:
        return "anything" if row.values is None else "not supported"
    return " or ".join(value if row.form == "switch" else f"`{value}`" for value in row.values.split())


def test_defaults_are_those_of_the_settings():
    table = page("flags.md").split(VLLM_TABLE)[0]
    rows = dict(re.findall(r"^\| `--([a-z-]+)` \| ([^|]+) \|", table, flags=re.MULTILINE))
    fields = ServeSettings.model_fields
    wrong = {flag: text for flag, text in rows.items() if text not in in_words(fields[flag.replace("-", "_")].default)}
    assert wrong == {}
    assert len(rows) > 20


def in_words(default) -> tuple[str, ...]:
    match default:
        case None:
            return ("none", "MODEL", "the model's", "fits the machine")
        case bool():
            return ("on",) if default else ("off",)
        case ByteSize():
            return (default.human_readable(separator="").replace(".0", ""),)
        case float():
            return (f"{default:g}",)
    return (str(default),)


def with_a_key(kind):
    """A record of counters, each of whose dictionaries has a key; or one such dictionary."""
    return (
        {"x": 1}
        if get_origin(kind) is dict
        else kind(
            **{
                name: {"x": {"y": 1}} if "dict[str, dict" in str(hint) else {"x": 1}
                for name, hint in kind.__annotations__.items()
                if "dict" in str(hint)
            }
        )
    )


def test_every_metric_is_described():
    stats = EngineStats(
        **{name: with_a_key(kind) for name, kind in EngineStats.__annotations__.items() if kind is not int}
    )
    info = build_echo_core(EngineConfig(model="echo")).info
    info = replace(
        info,
        side_channel="localhost:5600",
        reads_images=True,
        logs_requests=True,
        num_speculative_tokens=1,
        tiers=("host",),
        cache=replace(info.cache, shares_in_flight=True),
    )
    text = Metrics(info, "m").exposition(stats).decode()
    names = {name for name in re.findall(r"^# TYPE (\S+)", text, flags=re.MULTILINE) if not name.endswith("_created")}
    described = {name: set(re.findall(r"`((?:vllm|cairn):\w+)`", page(name))) for name in RUNNING}
    assert described["metrics.md"] == names
    assert set().union(*described.values()) <= names


@pytest.mark.parametrize("words", [Reason, Kind, Origin])
def test_every_word_of_a_closed_list_is_described(words):
    described = set(re.findall(r"`(\w+)`", page("cache.md")))
    assert {word.value for word in words} <= described


def test_every_placement_mode_is_described():
    modes = set(re.findall(r"^\| `(\w+)`(?: \(default\))? \|", page("cache.md").split("## Eviction")[0], re.MULTILINE))
    assert modes == set(ServeSettings.model_fields["mamba_cache_mode"].annotation.__args__)
    assert all(placement_for(mode, 16, exact=False) for mode in modes - {"none"})


def test_every_room_is_described_by_modules_that_exist():
    sections = re.split(r"^## (\S.*)$", page("rooms.md"), flags=re.MULTILINE)[1:]
    rooms = dict(zip(sections[::2], sections[1::2], strict=True))
    folders = {path.name for path in (SRC / "cairn").iterdir() if (path / "__init__.py").exists()}
    assert folders - rooms.keys() == {"cli", "settings"}
    for room, text in rooms.items():
        named = re.findall(r"`([\w/]+(?:\.py|/))`", text)
        folder = SRC / "cairn" / room if room in folders else SRC / "cairn"
        outside = {"benchmarks/", "demo/", "tests/", "tools/"}
        assert len(named) >= 2, room
        if room == "kernels":  # operations, of the same name in each backend
            named = [name for name in named if not (folder / "cpu" / name).exists()]
        assert [name for name in named if name not in outside and not (folder / name).exists()] == [], room


def test_every_module_says_what_it_is():
    modules = [module for module in sources() if not module.is_package]
    assert len(modules) > 100
    assert [module.name for module in modules if not ast.get_docstring(module.tree)] == []


def test_the_changelog_knows_the_version():
    assert re.search(rf"^## \[.*{re.escape(__version__)}", (ROOT / "CHANGELOG.md").read_text(), flags=re.MULTILINE)


def test_make_targets_that_are_named_exist():
    targets = set(re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    assert {"test", "test-long", "lint", "demo", "serve", "benchmarks", "clean"} <= targets
    for path in PAGES:
        for named in re.findall(r"(?:^    |`)make ([a-z][a-z-]*)", path.read_text(), flags=re.MULTILINE):
            assert named in targets, f"{path.name} names `make {named}`"
