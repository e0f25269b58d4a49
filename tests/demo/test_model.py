"""demo/model: what is in the folder, and that it writes Python."""

import ast
import json
import math
from pathlib import Path

import httpx
import pytest
from demo.client import Client
from demo.samples import FIELDS, PROMPTS, QUESTION
from demo.server import serve_command, serving
from safetensors import safe_open

MODEL = Path(__file__).parents[2] / "demo" / "model"
TEXT = '''\
class Reader:
    """Read lines from a file."""

    def __init__(self, path, encoding="utf-8"):
        self.path = path
        self.encoding = encoding
        self._file = None

    def close(self):
        """Close the file."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def readline(self):
        if self._file is None:
            raise ValueError("I/O operation on closed file")
        return self._file.readline()
'''
"""Python that is nobody's: not of the standard library."""


def test_the_folder_holds_what_its_card_says():
    weights = MODEL / "model.safetensors"
    assert weights.stat().st_size <= 12_000_000
    training = json.loads((MODEL / "training.json").read_text())
    with safe_open(weights, "pt") as file:
        shapes = [file.get_slice(name).get_shape() for name in file.keys()]  # noqa: SIM118 - it is no mapping
    assert sum(math.prod(shape) for shape in shapes) == training["weights"]
    card = (MODEL / "README.md").read_text()
    assert f"{training['steps']:,} steps" in card and f"{training['bits_per_byte_held_out']:.2f} bits a byte" in card
    assert "PYTHON SOFTWARE FOUNDATION LICENSE" in (MODEL / "LICENSE").read_text()


@pytest.fixture(scope="module")
def url(tmp_path_factory):
    with serving(serve_command(MODEL), tmp_path_factory.mktemp("model") / "log") as url:
        yield url


def whole_statements(source):
    """The statements that are complete: the tree of the longest beginning, in lines, that is Python."""
    lines = source.splitlines()
    for end in range(len(lines), 0, -1):
        try:
            return ast.parse("\n".join(lines[:end]))
        except SyntaxError:
            pass
    return ast.parse("")


@pytest.mark.more
@pytest.mark.parametrize("prompt", PROMPTS)
def test_completions_are_python(url, prompt):
    """Most of them go on with whole statements; the second time the prompt comes from the cache."""
    own = len(ast.unparse(whole_statements(prompt)))
    with Client(url) as client:
        replies = [client.complete(prompt, **FIELDS | {"seed": seed}) for seed in range(6)]
        again = client.complete(prompt, **FIELDS | {"seed": 5})
    longer = [len(ast.unparse(whole_statements(prompt + reply.text))) > own for reply in replies]
    assert sum(longer) >= 3, [reply.text for reply in replies]
    assert again.cached_tokens == len(again.prompt_ids) and again.answer_ids == replies[-1].answer_ids


@pytest.mark.more
def test_an_answer_ends_by_itself_and_a_stop_string_ends_it_before(url):
    sent = {"messages": [{"role": "user", "content": QUESTION}], "max_tokens": 400, "temperature": 0}
    (whole,) = httpx.post(f"{url}/v1/chat/completions", json=sent).json()["choices"]
    text = whole["message"]["content"]
    assert whole["finish_reason"] == "stop" and text.startswith("def is_empty(")
    (cut,) = httpx.post(f"{url}/v1/chat/completions", json=sent | {"stop": "):"}).json()["choices"]
    assert cut["finish_reason"] == "stop" and cut["stop_reason"] == "):"
    assert cut["message"]["content"] == text.partition("):")[0]


@pytest.mark.more
def test_it_finds_python_likelier_than_its_lines_in_another_order(url):
    def bits_per_byte(text):
        body = {"prompt": text, "max_tokens": 1, "prompt_logprobs": 0, "return_token_ids": True}
        (choice,) = httpx.post(f"{url}/v1/completions", json=body).json()["choices"]
        told = choice["prompt_logprobs"][1:]
        nats = -sum(one[str(token)]["logprob"] for one, token in zip(told, choice["prompt_token_ids"][1:], strict=True))
        return nats / math.log(2) / len(text.encode())

    shuffled = "\n".join(sorted(TEXT.splitlines(), key=lambda line: line[::-1]))
    assert bits_per_byte(TEXT) < 0.6 < bits_per_byte(shuffled)
