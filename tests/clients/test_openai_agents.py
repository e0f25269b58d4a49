"""openai-agents on /v1/responses and /v1/chat/completions: an agent with three function tools, whole and streamed."""

import asyncio
from pathlib import Path

import openai
import pytest
from agent_server import DEADLINE, DONE, NOTE, TEXT, Tool
from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)

PATHS = {OpenAIResponsesModel: "/v1/responses", OpenAIChatCompletionsModel: "/v1/chat/completions"}
# Unless told so, it gives the thoughts of no model but DeepSeek's back on chats, and the cache ends where one was.
MORE = {OpenAIResponsesModel: {}, OpenAIChatCompletionsModel: {"should_replay_reasoning_content": lambda context: True}}


@pytest.fixture
def tools(tmp_path):
    @function_tool
    def write_file(name: str, text: str) -> str:
        """Writes a file."""
        (tmp_path / name).write_text(text)
        return "written"

    @function_tool
    def read_file(name: str) -> str:
        """Reads a file."""
        return (tmp_path / name).read_text()

    @function_tool
    def list_files() -> list[str]:
        """Lists the files."""
        return sorted(path.name for path in Path(tmp_path).iterdir())

    return [write_file, read_file, list_files]


@pytest.mark.timeout(DEADLINE + 30)
@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("model", [OpenAIResponsesModel, OpenAIChatCompletionsModel])
def test_an_agent_does_a_task(agent_server, tmp_path, tools, model, streamed):
    set_tracing_disabled(True)
    task = agent_server.task(
        Tool("write_file", {"name": NOTE, "text": TEXT}, "written"),
        Tool("read_file", {"name": NOTE}, TEXT),
        Tool("list_files", {}, NOTE),
    )

    async def work():
        client = openai.AsyncOpenAI(base_url=agent_server.url, api_key=agent_server.key, max_retries=0)
        agent = Agent(
            name="Writer",
            instructions="You work with files. " * 40,
            tools=tools,
            model=model(model=agent_server.model, openai_client=client, **MORE[model]),
            model_settings=ModelSettings(include_usage=True),
        )
        async with client, asyncio.timeout(DEADLINE):
            if not streamed:
                return await Runner.run(agent, f"Do {task}")
            running = Runner.run_streamed(agent, f"Do {task}")
            async for _ in running.stream_events():
                pass
            return running

    result = asyncio.run(work())
    assert result.final_output == DONE and (tmp_path / NOTE).read_text() == TEXT
    agent_server.check_requests(PATHS[model])
    uses = agent_server.uses(task, expected=4)
    agent_server.check_cache(uses)
    told = result.context_wrapper.usage.request_usage_entries
    assert [(use.input_tokens, use.output_tokens, use.input_tokens_details.cached_tokens) for use in told] == uses
