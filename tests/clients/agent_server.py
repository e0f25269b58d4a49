"""A server whose model works at tasks: it writes a file, reads it, lists the folder, and says that it is done.

Its answers are forced (`scripted_serve.py`), in one of two forms that models have: `json`, the tiny model's template
with calls as JSON, and `xml`, one that opens a thought, with calls as XML. Both take a system message only at the
beginning.
"""

import contextlib
import itertools
import json
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path
from typing import NamedTuple

import pytest

FORMS = ("json", "xml")
NOTE, TEXT, DONE = "note.txt", "one line", "All done: there is one line."
BUILD = Path(__file__).parents[2] / "build" / "clients" / "node"
# A cold prompt of ten thousand tokens takes seconds, and on cores that others use, a minute or two.
DEADLINE = 240
READ_SECONDS = 10
SLACK = 16
"""Tokens: of what came before, so many may be computed once more, where an answer ends otherwise in the template."""
CONTEXT = 131072
KNOWN_NAMES = ("gpt-5.5",)
"""Further names of the model: programs ask models that they know in other ways."""


class Tool(NamedTuple):
    """A call, and what its result has in it."""

    name: str
    arguments: dict[str, object]
    result: str


class Use(NamedTuple):
    """One request: tokens of its prompt, of its answer, and those that came from the cache."""

    prompt: int
    output: int
    cached: int


def agent_model(model, folder):
    """The tiny checkpoint, with room for an agent's prompt: its attention knows no positions."""
    target = folder / "model"
    shutil.copytree(model, target)
    config = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps(config | {"max_position_embeddings": CONTEXT}))
    return target


def write_call(form, name, arguments):
    """As the form's template writes it."""
    if form == "json":
        return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"
    lines = "".join(
        f"<parameter={key}>\n{value if isinstance(value, str) else json.dumps(value)}\n</parameter>\n"
        for key, value in arguments.items()
    )
    return f"<tool_call>\n<function={name}>\n{lines}</function>\n</tool_call>"


class AgentServer:
    """Gives tasks to its model, and knows what it was asked. `folder`: for its files."""

    def __init__(self, server, form, folder):
        self.root, self.url, self.model, self.key, self.form = server.root, server.url, server.model, server.key, form
        self._scripts, self._requests, self._log = (folder / name for name in ("scripts", "requests", "log.jsonl"))
        self._tasks = {"": self._say("A small task", thought="A title.")}
        self._count = itertools.count(1)
        self._learn()

    def task(self, *tools):
        """The name of a new task: each of the tools is called in turn, when the result of the one before is there; one
        call stands behind words, and the last answer is `DONE`."""
        name = f"task {self.form}-{next(self._count)}."
        steps, after = [], ""
        for number, tool in enumerate(tools):
            called = write_call(self.form, tool.name, tool.arguments)
            steps.append({"after": after, "say": self._say("Now the second step." if number == 1 else "", called)})
            after = tool.result
        self._tasks[name] = [*steps, {"after": after, "say": self._say(DONE)}]
        self._learn()
        self._asked = len(self._lines(self._requests))
        return name

    def _say(self, text, called="", thought="The tool that fits is clear."):
        if self.form == "json":
            return text + called
        return f"{thought}\n</think>\n\n{text}" + ("\n\n" if text and called else "") + called

    def _learn(self):
        fresh = self._scripts.with_suffix(".new")
        fresh.write_text(json.dumps(self._tasks))
        fresh.replace(self._scripts)

    @staticmethod
    def _lines(path):
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def check_requests(self, path):
        """No request since the task was given was refused, and at least one went to `path`."""
        asked = [line for line in self._lines(self._requests)[self._asked :] if "status" in line]
        assert [line for line in asked if line["status"] != 200] == []
        assert path in {line["path"] for line in asked}

    def uses(self, task, expected):
        """What the task's requests cost, in their order, once all `expected` have ended."""
        end = time.monotonic() + READ_SECONDS
        while True:
            ids = {line["id"] for line in self._lines(self._requests) if line.get("task") == task}
            ended = [line for line in self._lines(self._log)[1:] if line["id"] in ids]
            if len(ended) >= expected or time.monotonic() > end:
                break
            time.sleep(0.1)
        assert len(ids) == expected, f"{len(ids)} requests of the task, not {expected}"
        return [Use(line["in"], line["out"], line["cached_tokens"]) for line in sorted(ended, key=lambda one: one["n"])]

    def check_cache(self, uses):
        """Each request but the first finds the prompt before it, and the answer to that, in the cache."""
        for before, use in itertools.pairwise(uses):
            assert before.prompt + before.output - SLACK <= use.cached <= use.prompt, uses


def node_program(name, pattern):
    """A file of a program from npm's registry; the test is skipped where it could not be installed."""
    if not (BUILD / name / ".installed").exists():
        pytest.skip(f"{name} is not installed: node 20, npm and a registry that has it are needed")
    (found,) = (BUILD / name / "node_modules").glob(pattern)
    return found


def run_program(command, folder, **environment):
    """Run it in `folder`, with `home` beside it as its home, and no network but a proxy that is not there. Returns what
    it printed."""
    home = folder.parent / "home"
    home.mkdir(exist_ok=True)
    # nobody listens there
    nowhere = "http://127.0.0.1:9"
    proxies = dict.fromkeys(("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy"), nowhere)
    local = {"NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1"}
    homes = {
        "HOME": home,
        "XDG_CONFIG_HOME": home,
        "XDG_DATA_HOME": home,
        "XDG_CACHE_HOME": home,
        "XDG_STATE_HOME": home,
    }
    process = subprocess.Popen(
        [str(word) for word in command],
        cwd=folder,
        env={"PATH": os.environ["PATH"]}
        | {name: str(value) for name, value in (proxies | local | homes | environment).items()},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        out, error = process.communicate(timeout=DEADLINE)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 0, f"{out[-2000:]}\n{error[-2000:]}"
    return out
