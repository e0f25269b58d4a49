"""`cairn serve` with its own engine, where only the drawn tokens are scripted: each answer is forced token by token
through the door that grammars and thinking budgets use. Model, states, scheduler, prefix cache, chat template, parsers
and HTTP application are what they always are.

    python scripted_serve.py FORM MODEL FLAGS...     (FORM: json or xml, see `agent_server.py`)

Environment:
    SCRIPTS     a JSON file: {task: [{"after": text, "say": answer}, ...], "": answer}
    REQUESTS    JSON lines are written there: {"method", "path", "status", "error"} for each HTTP request, and
                {"id", "task"} for each one that reaches the engine

A prompt belongs to the first task whose name is in it. Its answer is the one behind as many tool results as follow the
name, and comes only where the last result has `after` in it: so it comes only where calls and results have reached the
chat template. Prompts of no task, and those that offer no tools (a program may ask for a title), get the answer "".
"""

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from cairn.cli import main
from cairn.engine.build import build_core
from cairn.engine.contract import EngineConfig
from cairn.engine.core import Core
from cairn.engine.specs import SpecBuilder
from cairn.engine.text.tokenizer import ModelTokenizer
from cairn.scheduler.request import Constraint, Spec
from cairn.server import run
from cairn.step import TokenMask
from engine.chat_templates import DROPS_REASONING

TOOLS, RESULT = "# Tools", "<tool_response>"
SHOWN = 500


def note(**fields: object) -> None:
    """One write a line: the HTTP server and the engine are two processes."""
    with open(os.environ["REQUESTS"], "a") as file:
        file.write(json.dumps(fields) + "\n")


class Script:
    """One answer, and nothing else. Implements `scheduler.request.Constraint`. `grammar`: what the request itself holds
    its answer to; where that forbids the next token, the grammar has its way, and the script is not kept."""

    def __init__(self, token_ids: Sequence[int], vocab_size: int, grammar: Constraint | None) -> None:
        self._token_ids = token_ids
        self._vocab_size = vocab_size
        self._grammar = grammar

    def allowed(self, output: Sequence[int]) -> TokenMask | None:
        mask = np.zeros(-(-self._vocab_size // 32), np.int32)
        token = self._token_ids[min(len(output), len(self._token_ids) - 1)]
        mask.view(np.uint32)[token // 32] = 1 << token % 32
        held = None if self._grammar is None else self._grammar.allowed(output)
        return mask if held is None or (held & mask).any() else held


class ScriptedSpecs(SpecBuilder):
    """Holds every answer to its script."""

    def __init__(self, builder: SpecBuilder, tokenizer: ModelTokenizer, vocab_size: int) -> None:
        self._builder, self._tokenizer, self._size = builder, tokenizer, vocab_size

    def build(self, *arguments: Any, **named: Any) -> list[Spec]:
        return [self._script(spec) for spec in self._builder.build(*arguments, **named)]

    def _script(self, spec: Spec) -> Spec:
        prompt = self._tokenizer.decode(spec.prompt.tolist())
        task, answer = find_answer(prompt, json.loads(Path(os.environ["SCRIPTS"]).read_text()))
        note(id=spec.request_id, task=task)
        eos = self._tokenizer.eos_token_id
        assert eos is not None, "an answer could not end"
        token_ids = [*self._tokenizer.encode(answer, add_special_tokens=False), eos]
        return replace(spec, constraint=Script(token_ids, self._size, spec.constraint))


def find_answer(prompt: str, scripts: dict[str, Any]) -> tuple[str, str]:
    """The task, "" where there is none, and the answer."""
    places = {name: prompt.find(name) for name in scripts if name and name in prompt}
    if not places or TOOLS not in prompt:
        return "", scripts[""]
    task = min(places, key=places.__getitem__)
    _, *results = prompt[places[task] :].split(RESULT)
    step = scripts[task][min(len(results), len(scripts[task]) - 1)]
    if results and step["after"] not in results[-1]:
        return task, scripts[""]
    return task, step["say"]


def build_scripted_core(config: EngineConfig) -> Core:
    core = build_core(config)
    core._specs = ScriptedSpecs(core._specs, ModelTokenizer(Path(config.model)), core.info.vocab_size)
    return core


class NotedRequests:
    """ASGI: what is asked, what status it gets, and how an error begins."""

    def __init__(self, app: Any) -> None:
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        status, error = 0, b""

        async def noted_send(message: Any) -> None:
            nonlocal status, error
            if message["type"] == "http.response.start":
                status = message["status"]
            elif status >= 400:
                error += message.get("body", b"")[: SHOWN - len(error)]
            if message["type"] != "http.response.start" and not message.get("more_body"):
                note(method=scope["method"], path=scope["path"], status=status, error=error.decode(errors="replace"))
            await send(message)

        await self._app(scope, receive, noted_send)


def note_requests() -> None:
    create = run.create_web_server
    run.create_web_server = lambda app, **options: create(NotedRequests(app), **options)


if __name__ == "__main__":
    form, *arguments = sys.argv[1:]
    template = ["--chat-template", DROPS_REASONING] if form == "xml" else []
    note_requests()
    sys.exit(main(["serve", *arguments, *template], core="scripted_serve:build_scripted_core"))
