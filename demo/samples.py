"""What the model writes: a few prompts and their answers, to look at."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from rich.console import Group
from rich.rule import Rule
from rich.syntax import Syntax

from demo.client import Client

__all__ = ["PROMPTS", "Sample", "show_samples", "write_samples"]

PROMPTS: Sequence[str] = (
    'def read_lines(path):\n    """Return the lines of a file."""\n    with open(',
    "class Stack:\n    def __init__(self):\n        self.items = []\n\n    def push(self, item):\n",
    "def main():\n    import argparse\n    parser = argparse.ArgumentParser(",
)
QUESTION = "Write a Python function named is_empty: Return True if the queue is empty."
FIELDS: Mapping[str, Any] = MappingProxyType(
    {"max_tokens": 80, "temperature": 0.7, "repetition_penalty": 1.1, "seed": 1, "cache_salt": "samples"}
)
"""So small a model repeats itself when it is taken greedily."""


@dataclass(frozen=True, slots=True)
class Sample:
    prompt: str
    answer: str


def write_samples(client: Client) -> list[Sample]:
    """The completions of PROMPTS, each up to the next top-level statement, and the answer to QUESTION."""
    stop = ["\n\n\n", "\nclass ", "\ndef "]
    samples = [Sample(prompt, client.complete(prompt, stop=stop, **FIELDS).text) for prompt in PROMPTS]
    answer = client.chat([{"role": "user", "content": QUESTION}], **FIELDS).text
    return [*samples, Sample(f"# {QUESTION}\n", answer)]


def show_samples(samples: Sequence[Sample]) -> Group:
    """Prompts with their answers as Python, a line between them."""
    parts: list[Rule | Syntax] = []
    for sample in samples:
        parts += [Rule(style="dim"), Syntax(sample.prompt + sample.answer, "python", background_color="default")]
    return Group(*parts, Rule(style="dim"))
