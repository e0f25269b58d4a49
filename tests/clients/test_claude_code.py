"""Claude Code on /v1/messages: its own tools, its own files, nothing of its requests left out."""

import json

import pytest
from agent_server import DEADLINE, DONE, NOTE, TEXT, Tool, node_program, run_program


def ask(agent_server, folder, words):
    program = node_program("claude-code", "@anthropic-ai/claude-code-linux-*/claude")
    out = run_program(
        [program, "-p", words, "--output-format", "json", "--dangerously-skip-permissions"],
        folder,
        ANTHROPIC_BASE_URL=agent_server.root,
        ANTHROPIC_API_KEY=agent_server.key,
        ANTHROPIC_MODEL=agent_server.model,
        ANTHROPIC_DEFAULT_HAIKU_MODEL=agent_server.model,
        CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC="1",
        IS_SANDBOX="1",
    )
    return json.loads(out)


@pytest.mark.timeout(2 * DEADLINE + 30)
def test_claude_code_does_a_task_and_a_second_session_finds_its_beginning(agent_server, tmp_path):
    folder = tmp_path / "work"
    folder.mkdir()
    task = agent_server.task(
        Tool("Write", {"file_path": str(folder / NOTE), "content": TEXT}, "created"),
        Tool("Read", {"file_path": str(folder / NOTE)}, TEXT),
        Tool("Bash", {"command": "ls", "description": "List the folder"}, NOTE),
    )
    result = ask(agent_server, folder, f"Do {task}")
    assert (result["is_error"], result["result"], result["num_turns"]) == (False, DONE, 4)
    assert result["permission_denials"] == [] and (folder / NOTE).read_text() == TEXT
    agent_server.check_requests("/v1/messages")
    uses = agent_server.uses(task, expected=4)
    agent_server.check_cache(uses)
    told = result["usage"]
    prompt = told["input_tokens"] + told["cache_read_input_tokens"] + told["cache_creation_input_tokens"]
    assert (prompt, told["output_tokens"], told["cache_read_input_tokens"]) == tuple(map(sum, zip(*uses, strict=True)))

    again = agent_server.task()
    assert ask(agent_server, folder, f"And now please do {again}")["result"] == DONE
    (use,) = agent_server.uses(again, expected=1)
    # instructions and tools; what was said, and the environment, come behind them
    assert use.cached > use.prompt * 3 / 4
