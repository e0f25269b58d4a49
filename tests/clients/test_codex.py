"""OpenAI's Codex CLI on /v1/responses: its own tools, its own files, nothing of its requests left out."""

import json

import pytest
from agent_server import DEADLINE, DONE, KNOWN_NAMES, NOTE, TEXT, Tool, node_program, run_program

CONFIG = """
model = "{model}"
model_provider = "cairn"
[model_providers.cairn]
name = "cairn"
base_url = "{url}"
env_key = "CAIRN_API_KEY"
wire_api = "responses"
"""


def run_codex(agent_server, folder, task, *options):
    """The items that it has completed, and what it says of tokens."""
    program = node_program("codex", "@openai/codex-*/vendor/*/bin/codex")
    home = folder.parent / "home"
    home.mkdir()
    (home / "config.toml").write_text(CONFIG.format(model=agent_server.model, url=agent_server.url))
    command = [program, "exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", "--json"]
    words = [*command, *options, f"Do {task}"]
    events = run_program(words, folder, CODEX_HOME=home, CAIRN_API_KEY=agent_server.key).splitlines()
    *before, last = map(json.loads, events)
    told = [last["usage"][name] for name in ("input_tokens", "output_tokens", "cached_input_tokens")]
    return [event["item"] for event in before if event["type"] == "item.completed"], told


def check_task(agent_server, folder, task, told):
    assert (folder / NOTE).read_text().rstrip("\n") == TEXT
    agent_server.check_requests("/v1/responses")
    uses = agent_server.uses(task, expected=4)
    agent_server.check_cache(uses)
    assert told == [sum(each) for each in zip(*uses, strict=True)]


def commands(items):
    return [(item["exit_code"], item["aggregated_output"]) for item in items if item["type"] == "command_execution"]


def messages(items):
    return [item["text"] for item in items if item["type"] == "agent_message"]


@pytest.mark.timeout(DEADLINE + 30)
def test_codex_does_a_task(agent_server, tmp_path):
    folder = tmp_path / "work"
    folder.mkdir()
    task = agent_server.task(
        Tool("exec_command", {"cmd": f"printf '{TEXT}' > {NOTE}"}, "exited with code 0"),
        Tool("exec_command", {"cmd": f"cat {NOTE}"}, TEXT),
        Tool("exec_command", {"cmd": "ls"}, NOTE),
    )
    items, told = run_codex(agent_server, folder, task)
    assert commands(items) == [(0, ""), (0, TEXT), (0, f"{NOTE}\n")]
    assert messages(items) == ["Now the second step.", DONE]
    check_task(agent_server, folder, task, told)


@pytest.mark.timeout(DEADLINE + 30)
def test_codex_patches_a_file_where_it_knows_the_models_name(agent_server, tmp_path):
    (name,) = KNOWN_NAMES
    folder = tmp_path / "work"
    folder.mkdir()
    patch = f"*** Begin Patch\n*** Add File: {NOTE}\n+{TEXT}\n*** End Patch\n"
    task = agent_server.task(
        Tool("apply_patch", {"input": patch}, NOTE),
        Tool("exec_command", {"cmd": f"cat {NOTE}"}, TEXT),
        Tool("exec_command", {"cmd": "ls"}, NOTE),
    )
    items, told = run_codex(agent_server, folder, task, "-m", name)
    (change,) = [item for item in items if item["type"] == "file_change"]
    assert [(one["kind"], one["path"]) for one in change["changes"]] == [("add", str(folder / NOTE))]
    assert commands(items) == [(0, f"{TEXT}\n"), (0, f"{NOTE}\n")]
    assert messages(items) == ["Now the second step.", DONE]
    check_task(agent_server, folder, task, told)
