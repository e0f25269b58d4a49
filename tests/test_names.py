"""Names that were given up do not come back: `old_names.txt` says which, by room. And what docstrings name is there."""

import ast
import builtins
import io
import re
import tokenize
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from source_scan import Source, file_of, source, sources

OLD_NAMES = Path(__file__).with_name("old_names.txt")


def read_old_names() -> set[tuple[str, str]]:
    lines = OLD_NAMES.read_text().splitlines()
    return {(room, name) for room, name in (line.split() for line in lines if line and line[0] != "#")}


def identifiers(module: Source) -> Iterator[tuple[str, ast.AST]]:
    """Every name that a module binds or uses, parts of imported modules and keywords included."""
    for node in module.nodes:
        match node:
            case ast.ClassDef(name=name) | ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                yield name, node
            case ast.arg(arg=name) | ast.keyword(arg=str(name)) | ast.Name(id=name) | ast.Attribute(attr=name):
                yield name, node
            case ast.alias(name=name):
                yield from ((part, node) for part in name.split("."))


def old_names(modules, old):
    for module in modules:
        for name, node in identifiers(module):
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


FOREIGN = {
    "aclose": "Python's, of async generators",
    "auto_map": "transformers', which config.json may have",
    "chunk_size": "a field of config.json that changes nothing here",
    "k_scale": "a tensor of checkpoints",
    "session_id": "a field of vLLM's clients",
    "smart_resize": "transformers'",
    "stat": "the system's",
    "VerifyMode": "Python's",
    "sample_": "a prefix",
    "_evicted": "a part of metric names",
    "_hit": "a part of metric names",
}
"""Names in docstrings and comments that no code of the package has, and whose they are."""

OF_ALL_ROOMS = {"sample", "never_seen"}
"""Words of floor 0 and of closed lists: other rooms' names for what every room speaks of."""


def words_and_docstrings(module: Source) -> tuple[set[str], list[ast.Constant]]:
    """What docstrings of the module's room may name: its identifiers, and what is in its strings (JSON fields, flags,
    tensors, attributes by name). And its docstrings, and the strings after attributes, which describe them."""
    words, docstrings = set(module.name.split(".")), {}
    for node in module.nodes:
        if isinstance(node, ast.Constant):
            if isinstance(node.value, str) and id(node) not in docstrings:
                words.update(re.findall(r"\w+", node.value))
            continue
        for field in ("name", "id", "attr", "arg", "asname", "module"):
            if isinstance(name := getattr(node, field, None), str):
                words.update(name.split("."))
        for statement in body if isinstance(body := getattr(node, "body", None), list) else ():
            match statement:
                case ast.Expr(value=ast.Constant(value=str()) as text):
                    docstrings[id(text)] = text
    return words, [*docstrings.values()]


def comments(text: str) -> Iterator[tuple[int, str]]:
    if re.search(r"#[^\n]*`", text):
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            if token.type == tokenize.COMMENT:
                yield token.start[0], token.string


def unknown_names(modules: Sequence[Source], texts: dict[str, str]) -> Iterator[str]:
    """Names in backticks that nothing is called. A word in lower case has to be one of its room; a class or a dotted
    name may be another room's. `texts`: the modules' files by name."""
    own: dict[str, set[str]] = {}
    written = {}
    for module in modules:
        words, docstrings = words_and_docstrings(module)
        own.setdefault(module.room, set()).update(words)
        written[module.name] = [(node.lineno, node.value) for node in docstrings]
    everywhere = set().union(*own.values(), dir(builtins), OF_ALL_ROOMS)
    for module in modules:
        here = own[module.room] | set(dir(builtins)) | OF_ALL_ROOMS
        for line, text in [*written[module.name], *comments(texts[module.name])]:
            for name in re.findall(r"(?<!`)`([A-Za-z_][\w./]*)(?:\(\))?`(?!`)", text):
                parts = name.removesuffix(".py").replace("/", ".").split(".")
                known = here if len(parts) == 1 and name == name.lower() else everywhere
                if not all(part in known or part in FOREIGN for part in parts if part):
                    yield f"{module.name}:{line} names `{name}`, and nothing is called so"


def test_what_docstrings_and_comments_name_is_there():
    texts = {module.name: file_of(module).read_text() for module in sources()}
    assert [*unknown_names(sources(), texts)] == []


def test_foreign_names_are_not_more_than_needed():
    text = "".join(file_of(module).read_text() for module in sources())
    named = {part for name in re.findall(r"`([\w.]+)`", text) for part in name.split(".")}
    assert FOREIGN.keys() - named == set()


@pytest.mark.parametrize(
    ("text", "is_known"),
    [
        ('"""It calls `gone`."""\ndef here(): ...', False),
        ('"""It calls `here`."""\ndef here(): ...', True),
        ('def here():\n    """See `Other.gone`."""', False),
        ('def here():\n    """See `Other.there`."""', True),
        ('def here():\n    """See `there`, of another room."""', False),
        ("x = 1  # `gone` does more\n", False),
        ("x = 1  # `x` does more\n", True),
        ("class A:\n    x: int\n    '''What `gone` says.'''", False),
        ('"""See `gone.py`."""', False),
        ('"""See `scheduler/example.py`."""', True),
    ],
)
def test_a_name_that_is_not_there_is_found(text, is_known):
    other = "class Other:\n    def there(self): ..."
    modules = [source("cairn.cache.example", text), source("cairn.scheduler.example", other)]
    found = [*unknown_names(modules, {"cairn.cache.example": text, "cairn.scheduler.example": other})]
    assert (found == []) is is_known
