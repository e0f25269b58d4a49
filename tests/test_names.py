"""Names that were given up do not come back: `old_names.txt` says which, by room."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from source_scan import source, sources

OLD_NAMES = Path(__file__).with_name("old_names.txt")


def read_old_names() -> set[tuple[str, str]]:
    lines = OLD_NAMES.read_text().splitlines()
    return {(room, name) for room, name in (line.split() for line in lines if line and line[0] != "#")}


def identifiers(tree: ast.Module) -> Iterator[tuple[str, ast.AST]]:
    """Every name that a module binds or uses, parts of imported modules and keywords included."""
    for node in ast.walk(tree):
        match node:
            case ast.ClassDef(name=name) | ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                yield name, node
            case ast.arg(arg=name) | ast.keyword(arg=str(name)) | ast.Name(id=name) | ast.Attribute(attr=name):
                yield name, node
            case ast.alias(name=name):
                yield from ((part, node) for part in name.split("."))


def old_names(modules, old):
    for module in modules:
        for name, node in identifiers(module.tree):
            if (module.room, name) in old or ("*", name) in old:
                yield f"{module.at(node)} calls something {name}, which is called otherwise now"


def test_no_old_name_is_back():
    assert [*old_names(sources(), read_old_names())] == []


@pytest.mark.parametrize(
    "text",
    [
        "class Old: ...",
        "def Old(): ...",
        "def f(Old): ...",
        "f(Old=1)",
        "x = y.Old",
        "Old = 1",
        "from cairn.cache import Old",
        "import cairn.Old.x",
    ],
)
@pytest.mark.parametrize("room", ["cache", "*"])
def test_an_old_name_is_found(room, text):
    assert [*old_names([source("cairn.cache.example", text)], {(room, "Old")})]


def test_another_rooms_name_is_not():
    assert not [*old_names([source("cairn.cache.example", "Old = 1")], {("scheduler", "Old")})]
