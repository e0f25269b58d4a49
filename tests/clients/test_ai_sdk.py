"""`@ai-sdk/openai-compatible`, what OpenCode and others ask servers with, whole and streamed: node/ai-sdk/agent.mjs."""

import json
import shutil
from pathlib import Path

import pytest
from agent_server import DEADLINE, DONE, NOTE, TEXT, Tool, node_program, run_program

SCRIPT = Path(__file__).parent / "node" / "ai-sdk" / "agent.mjs"


@pytest.mark.timeout(DEADLINE + 30)
@pytest.mark.parametrize("way", ["generate", "stream"])
def test_a_task_in_steps(agent_server, tmp_path, way):
    package = node_program("ai-sdk", "ai/package.json")
    folder = tmp_path / "work"
    folder.mkdir()
    # imports are looked for beside the script
    script = shutil.copy(SCRIPT, package.parents[2] / f"agent-{tmp_path.name}.mjs")
    task = agent_server.task(
        Tool("write_file", {"name": NOTE, "text": TEXT}, "written"),
        Tool("read_file", {"name": NOTE}, TEXT),
        Tool("list_files", {}, NOTE),
    )
    words = [agent_server.url, agent_server.model, way, f"Do {task}"]
    out = json.loads(run_program(["node", script, *words], folder, CAIRN_API_KEY=agent_server.key))
    assert out["texts"] == ["", "Now the second step.", "", DONE]
    assert out["results"] == ["written", TEXT, [NOTE]] and (folder / NOTE).read_text() == TEXT
    agent_server.check_requests("/v1/chat/completions")
    uses = agent_server.uses(task, expected=4)
    agent_server.check_cache(uses)
    assert [
        (use["inputTokens"], use["outputTokens"], use["inputTokenDetails"]["cacheReadTokens"]) for use in out["uses"]
    ] == uses
