"""Which fields vLLM's request bodies have: from a folder of its sources to tests/data/vllm_request_fields.json.

    python tools/vllm_request_fields.py build/vllm-0.33.0

reads the request classes without importing anything, shows what the newest version in the file has not, and adds this
version to the file. Then tests/server/test_vllm_fields.py wants a status for each new field.
"""

import argparse
import ast
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

DATA = Path(__file__).parents[1] / "tests" / "data" / "vllm_request_fields.json"
CLASSES = {
    "/v1/completions": ("CompletionRequest",),
    "/v1/chat/completions": ("ChatCompletionRequest",),
    "/v1/responses": ("ResponsesRequest",),
    "/v1/messages": ("AnthropicMessagesRequest",),
    "/v1/messages/count_tokens": ("AnthropicCountTokensRequest",),
    "/tokenize": ("TokenizeCompletionRequest", "TokenizeChatRequest"),
    "/detokenize": ("DetokenizeRequest",),
}
_VERSION = re.compile(r"^Version: (\d+\.\d+\.\d+)", re.MULTILINE)


def find_package(folder: Path) -> Path:
    """The package within an unpacked source archive, or the folder itself if it is the package."""
    return folder / "vllm" if (folder / "vllm" / "entrypoints").is_dir() else folder


def read_version(folder: Path) -> str:
    """Of the archive's PKG-INFO, or of an installed package's METADATA. Raises ValueError if there is neither."""
    package = find_package(folder)
    for path in [folder / "PKG-INFO", *sorted(package.parent.glob("vllm-*.dist-info/METADATA"))]:
        if path.is_file() and (found := _VERSION.search(path.read_text())):
            return found[1]
    raise ValueError(f"{folder} has neither PKG-INFO nor METADATA: is it vLLM's source archive, or site-packages/vllm?")


def read_classes(package: Path) -> dict[str, ast.ClassDef]:
    """The classes of the modules that define requests, by name."""
    found: dict[str, ast.ClassDef] = {}
    for path in sorted((package / "entrypoints").rglob("*protocol*.py")):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef):
                found.setdefault(node.name, node)
    return found


def fields_of(name: str, classes: dict[str, ast.ClassDef]) -> Iterator[str]:
    """The fields of a class and of its bases. Raises KeyError for a class that is not there."""
    node = classes[name]
    for base in node.bases:
        if isinstance(base, ast.Name) and base.id in classes:
            yield from fields_of(base.id, classes)
    for one in node.body:
        if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name):
            is_private = one.target.id.startswith(("_", "model_config"))
            if not is_private and "ClassVar" not in ast.dump(one.annotation):
                yield one.target.id


def read_fields(folder: Path) -> dict[str, list[str]]:
    """By endpoint, in alphabetical order."""
    classes = read_classes(find_package(folder))
    return {
        endpoint: sorted({field for name in names for field in fields_of(name, classes)})
        for endpoint, names in CLASSES.items()
    }


def show_changes(version: str, old: dict[str, list[str]], new: dict[str, list[str]]) -> Iterator[str]:
    for endpoint, fields in new.items():
        before = set(old.get(endpoint, ()))
        yield from (f"{version}: {endpoint} has {field}" for field in fields if field not in before)
        yield from (f"{version}: {endpoint} has no more {field}" for field in sorted(before - set(fields)))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="vLLM's unpacked source archive, or the installed package")
    parser.add_argument("--output", type=Path, default=DATA, help="the file to add the version to")
    args = parser.parse_args()
    try:
        version, fields = read_version(args.folder), read_fields(args.folder)
    except (ValueError, OSError, SyntaxError) as error:
        print(error, file=sys.stderr)
        return 2
    except KeyError as error:
        print(f"{args.folder} has no class {error}: look for its new name", file=sys.stderr)
        return 2
    data: dict[str, dict[str, list[str]]] = json.loads(args.output.read_text()) if args.output.is_file() else {}
    others = [one for one in data if one != version]
    newest = max(others, key=lambda one: [int(part) for part in one.split(".")], default=None)
    for line in show_changes(version, data[newest] if newest else {}, fields):
        print(line)
    data[version] = fields
    args.output.parent.mkdir(exist_ok=True)
    args.output.write_text(json.dumps(data, indent=1, sort_keys=True) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
