"""The package's sources as syntax trees, and what they import: what the tests of the house rules look at."""

import ast
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

ROOT = Path(__file__).parents[1]
SRC = ROOT / "src"


@dataclass(frozen=True, eq=False)
class Source:
    """One module: its dotted name, and its tree."""

    name: str
    tree: ast.Module
    is_package: bool = False

    @property
    def room(self):
        """The part below `cairn`: a folder, or a module at the top."""
        return self.name.split(".")[1] if "." in self.name else ""

    @cached_property
    def nodes(self):
        """All nodes of the tree: it takes most of a rule's time to find them."""
        return tuple(ast.walk(self.tree))

    def at(self, node):
        return f"{self.name}:{node.lineno}"


@dataclass(frozen=True)
class Import:
    """`target` is the full dotted name, what is taken out of a module included. `eager`: it runs when the importing
    module is imported, which one inside a function or under TYPE_CHECKING does not. `late`: inside a function."""

    target: str
    line: int
    eager: bool
    late: bool = False


@cache
def sources() -> Sequence[Source]:
    """All modules of the package."""
    return [_read(path) for path in sorted((SRC / "cairn").rglob("*.py"))]


def file_of(module: Source) -> Path:
    """Where a module of the package lies."""
    path = SRC.joinpath(*module.name.split("."))
    return path / "__init__.py" if module.is_package else path.with_suffix(".py")


def source(name: str, text: str) -> Source:
    """A module that exists in a test only."""
    return Source(name, ast.parse(text))


@cache
def imports(module: Source) -> Sequence[Import]:
    """Every import, wherever it stands."""
    return list(_imports(module, module.tree, eager=True))


def within(target: str, module: str) -> bool:
    """Whether a dotted name is `module` or something in it."""
    return target == module or target.startswith(module + ".")


def _read(path: Path) -> Source:
    parts = path.relative_to(SRC).with_suffix("").parts
    is_package = parts[-1] == "__init__"
    return Source(".".join(parts[:-1] if is_package else parts), ast.parse(path.read_text()), is_package)


def _imports(module: Source, node: ast.AST, eager: bool, late: bool = False) -> Iterator[Import]:
    match node:
        case ast.Import():
            for alias in node.names:
                yield Import(alias.name, node.lineno, eager, late)
        case ast.ImportFrom():
            base = _base(module, node)
            for alias in node.names:
                yield Import(f"{base}.{alias.name}", node.lineno, eager, late)
        case ast.If() if _is_type_checking(node.test):
            for child in node.body:
                yield from _imports(module, child, False, late)
            for child in node.orelse:
                yield from _imports(module, child, eager, late)
        case _:
            late = late or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
            eager = eager and not late
            for child in ast.iter_child_nodes(node):
                # No expression has an import in it, and most of a tree is expressions.
                if not isinstance(child, ast.expr):
                    yield from _imports(module, child, eager, late)


def _base(module: Source, node: ast.ImportFrom) -> str:
    if not node.level:
        return node.module or ""
    package = module.name.split(".")[: None if module.is_package else -1]
    package = package[: len(package) - node.level + 1]
    return ".".join([*package, *([node.module] if node.module else [])])


def _is_type_checking(test: ast.expr) -> bool:
    return (isinstance(test, ast.Name) and test.id == "TYPE_CHECKING") or (
        isinstance(test, ast.Attribute) and test.attr == "TYPE_CHECKING"
    )
