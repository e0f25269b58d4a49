"""OpenCode on /v1/chat/completions, through the provider package that it names for servers like this one."""

import json

import pytest
from agent_server import CONTEXT, DEADLINE, DONE, NOTE, TEXT, Tool, node_program, run_program


@pytest.mark.timeout(DEADLINE + 30)
def test_opencode_does_a_task(agent_server, tmp_path):
    program = node_program("opencode", "opencode-linux-*/bin/opencode")
    folder = tmp_path / "work"
    folder.mkdir()
    name, model = "cairn", agent_server.model
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "name": name,
        "options": {"baseURL": agent_server.url, "apiKey": agent_server.key},
        "models": {model: {"name": model, "limit": {"context": CONTEXT, "output": 4096}}},
    }
    config = {"model": f"{name}/{model}", "small_model": f"{name}/{model}", "provider": {name: provider}}
    (folder / "opencode.json").write_text(json.dumps(config | {"autoupdate": False, "share": "disabled"}))
    task = agent_server.task(
        Tool("write", {"filePath": str(folder / NOTE), "content": TEXT}, "Wrote"),
        Tool("read", {"filePath": str(folder / NOTE)}, TEXT),
        Tool("bash", {"command": "ls", "description": "List the folder"}, NOTE),
    )
    out = run_program(
        [program, "run", "--format", "json", f"Do {task}"],
        folder,
        OPENCODE_DISABLE_MODELS_FETCH="1",
        OPENCODE_DISABLE_AUTOUPDATE="1",
    )
    parts = [json.loads(line)["part"] for line in out.splitlines()]
    ran = [(part["tool"], part["state"]["status"]) for part in parts if part["type"] == "tool"]
    assert ran == [("write", "completed"), ("read", "completed"), ("bash", "completed")]
    assert [part["text"] for part in parts if part["type"] == "text"] == ["Now the second step.", DONE]
    assert (folder / NOTE).read_text() == TEXT
    agent_server.check_requests("/v1/chat/completions")
    uses = agent_server.uses(task, expected=4)
    agent_server.check_cache(uses)
    told = [part["tokens"] for part in parts if part["type"] == "step-finish"]
    assert [(each["input"] + each["cache"]["read"], each["cache"]["read"]) for each in told] == [
        (use.prompt, use.cached) for use in uses
    ]
