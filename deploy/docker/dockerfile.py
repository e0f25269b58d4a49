"""What a Dockerfile says, line by line, and what a build's context holds: as much of both as this folder needs."""

import json
import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import yaml


@dataclass(frozen=True, slots=True)
class Instruction:
    """`words` are those of the exec form, or the shell form as it is written, as one word."""

    name: str
    words: tuple[str, ...]

    @property
    def text(self) -> str:
        return " ".join(self.words)


def parse_dockerfile(text: str) -> Iterator[Instruction]:
    """Raises ValueError for a line that has a name alone."""
    lines = "".join(line + "\n" for line in text.splitlines() if not line.startswith("#"))
    for line in lines.replace("\\\n", " ").splitlines():
        if line.strip():
            name, rest = line.strip().split(maxsplit=1)
            yield Instruction(name.upper(), parse_words(rest))


def parse_words(rest: str) -> tuple[str, ...]:
    """The exec form's words, or the text as it is written."""
    return tuple(json.loads(rest)) if rest.lstrip().startswith("[") else (rest.strip(),)


def parse_health_check(check: Instruction) -> tuple[dict[str, str], tuple[str, ...]]:
    """Its options without dashes, and the words of its command."""
    options, _, command = check.text.partition(" CMD ")
    return dict(re.findall(r"--([a-z-]+)=(\S+)", options)), parse_words(command)


def assignments(one: Instruction) -> dict[str, str]:
    """What an ENV or an ARG sets; an ARG without a value sets nothing."""
    return dict(word.split("=", 1) for word in shlex.split(one.text) if "=" in word)


def load_compose(text: str, variables: Mapping[str, str]) -> Any:
    """A compose file with its variables filled in: in what YAML has read, as docker compose does it."""

    def filled(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: filled(each) for name, each in value.items()}
        if isinstance(value, list):
            return [filled(each) for each in value]
        return expand(value, variables) if isinstance(value, str) else value

    return filled(yaml.safe_load(text))


def merge_compose(below: Any, above: Any) -> Any:
    """Of two compose files what docker compose makes of mappings and single values. Lists are not merged, so a second
    file may only bring those that the first one has not."""
    if not isinstance(below, dict) or not isinstance(above, dict):
        if isinstance(below, list):
            raise ValueError(f"both files have this list: {below}, {above}")
        return above
    merged = {name: merge_compose(below[name], each) if name in below else each for name, each in above.items()}
    return {**below, **merged}


def expand(text: str, variables: Mapping[str, str]) -> str:
    """`${NAME}` and `${NAME:-default}`, as a compose file has them."""
    return re.sub(r"\$\{(\w+)(?::-([^}]*))?\}", lambda found: variables.get(found[1], "") or found[2] or "", text)


def is_ignored(path: Path, patterns: str) -> bool:
    """Whether a .dockerignore leaves a path of the context out: the last line that it or a folder above it fits."""
    ignored = False
    for pattern in (line.strip() for line in patterns.splitlines() if line.strip() and not line.startswith("#")):
        wanted = pattern.removeprefix("!")
        for part in (path, *path.parents[:-1]):
            if fnmatch(part.name, wanted[3:]) if wanted.startswith("**/") else fnmatch(str(part), wanted):
                ignored = not pattern.startswith("!")
    return ignored
