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
from pathlib import Path
from typing import Any

from cairn.cli import main
from cairn.engine.contract import EngineConfig
from cairn.engine.core import Core
from cairn.engine.text.tokenizer import ModelTokenizer
from cairn.scheduler.request import Spec
from cairn.server import run
from doubles.scripted_core import scripted_core
from engine.chat_templates import DROPS_REASONING

TOOLS, RESULT = "# Tools", "<tool_response>"
SHOWN = 500


def note(**fields: object) -> None:
    """One write a line: the HTTP server and the engine are two processes."""
    with open(os.environ["REQUESTS"], "a") as file:
        file.write(json.dumps(fields) + "\n")


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


def answer_to(spec: Spec, prompt: str) -> str:
    """What the scripts have for a prompt."""
    task, answer = find_answer(prompt, json.loads(Path(os.environ["SCRIPTS"]).read_text()))
    note(id=spec.request_id, task=task)
    return answer


def build_scripted_core(config: EngineConfig) -> Core:
    return scripted_core(config, ModelTokenizer(Path(config.model)), answer_to)


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
