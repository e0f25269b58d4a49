"""The flags of `vllm serve`, read from vLLM's sources without importing them: tests/data/vllm_serve_flags.json.

    python tools/vllm_flags.py VERSION FOLDER

FOLDER holds the package `vllm` of that VERSION. Names are facts; nothing else of the sources is kept.
"""

import ast
import json
import sys
from collections.abc import Iterator
from pathlib import Path

OUT = Path(__file__).parent.parent / "tests" / "data" / "vllm_serve_flags.json"
_ENGINE = "engine/arg_utils.py"
_FRONTEND = ("entrypoints/common/cli_args.py", "entrypoints/launchers/cli_args.py", "entrypoints/openai/cli_args.py")
_FRONTEND_CLASSES = ("BaseFrontendArgs", "FrontendArgs")


def main() -> None:
    version, folder = sys.argv[1], Path(sys.argv[2])
    frontend = next(path for name in _FRONTEND if (path := folder / name).is_file())
    trees = [ast.parse(path.read_text()) for path in (folder / _ENGINE, frontend)]
    flags = sorted({name for tree in trees for name in (*_added(tree), *_fields(tree))})
    assert len(flags) > 200 and {"--max-model-len", "-tp", "--api-key", "--config"} <= set(flags), flags
    OUT.parent.mkdir(exist_ok=True)
    OUT.write_text(json.dumps({"version": version, "flags": flags}, indent=1) + "\n")
    print(f"{OUT}: {len(flags)} flags of vLLM {version}")


def _added(tree: ast.AST) -> Iterator[str]:
    """The option strings of every `add_argument`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "add_argument":
            for one in node.args:
                if isinstance(one, ast.Constant) and isinstance(one.value, str) and one.value.startswith("-"):
                    yield one.value


def _fields(tree: ast.AST) -> Iterator[str]:
    """The fields of the classes that are made flags as a whole."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef) and node.name in _FRONTEND_CLASSES:
            for one in node.body:
                if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name):
                    yield "--" + one.target.id.replace("_", "-")


if __name__ == "__main__":
    main()
