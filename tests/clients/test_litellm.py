"""litellm: as an openai server, as a vLLM server, and its Anthropic adapter on either."""

import asyncio
import json

import litellm
import pytest

from conftest import ENOUGH, PARAMETERS

HELLO = [{"role": "user", "content": "Say hello."}]
TOOL = {"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}}


@pytest.fixture(params=["openai", "hosted_vllm"])
def asked(request, server):
    model = f"{request.param}/{server.model}"
    return {"model": model, "api_base": server.url, "api_key": server.key, "max_retries": 0}


def test_a_chat_and_the_same_as_a_stream(asked):
    asked = dict(**asked, messages=HELLO, max_tokens=8, temperature=0)
    whole = litellm.completion(**asked)
    assert whole.choices[0].finish_reason == "length" and whole.usage.completion_tokens == 8
    chunks = list(litellm.completion(**asked, stream=True, stream_options={"include_usage": True}))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-1].usage.completion_tokens == 8


@pytest.mark.parametrize("effort", ["low", "none"])
def test_reasoning_effort(asked, effort):
    answer = litellm.completion(
        **asked, messages=HELLO, max_tokens=4, reasoning_effort=effort, allowed_openai_params=["reasoning_effort"]
    )
    assert answer.usage.completion_tokens == 4


def test_tools_and_forms(asked):
    answer = litellm.completion(
        **asked, messages=HELLO, tools=[TOOL], tool_choice="required", max_tokens=ENOUGH, parallel_tool_calls=False
    )
    (call,) = answer.choices[0].message.tool_calls
    assert call.function.name == "weather" and call.function.arguments.startswith("{")
    # Of a schema hosted_vllm leaves out that there are no further fields, so that a random object need not end.
    cities = {"type": "array", "items": PARAMETERS["properties"]["city"], "minItems": 1, "maxItems": 2}
    form = {"type": "json_schema", "json_schema": {"name": "cities", "schema": cities, "strict": True}}
    answer = litellm.completion(**asked, messages=HELLO, response_format=form, max_tokens=ENOUGH)
    assert set(json.loads(answer.choices[0].message.content)) <= {"Oslo", "Rome"}


def test_a_completion(asked, server):
    asked["model"] = f"text-completion-openai/{server.model}"
    answer = litellm.text_completion(**asked, prompt="Once", max_tokens=4)
    assert answer.usage.completion_tokens == 4 and answer.choices[0].finish_reason == "length"


def test_responses(server):
    asked = {"model": f"openai/{server.model}", "api_base": server.url, "api_key": server.key, "max_output_tokens": 16}
    whole = litellm.responses(**asked, input="Say hello.", temperature=0)
    assert whole.status == "incomplete" and whole.usage.output_tokens == 16
    events = list(litellm.responses(**asked, input="Say hello.", temperature=0, stream=True))
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert text == whole.output[0].content[0].text
    # litellm tells of every end as this one
    assert events[-1].type == "response.completed" and events[-1].response.usage.output_tokens == 16
    second = litellm.responses(**asked, input="Again.", previous_response_id=whole.id)
    assert second.usage.input_tokens > whole.usage.input_tokens


def test_its_anthropic_adapter_and_anthropics_own_way(server):
    """hosted_vllm is spoken to as a chat, openai as /v1/responses (with 16 tokens or more), anthropic directly."""
    ways = {"hosted_vllm": server.url, "openai": server.url, "anthropic": server.root}
    for model, base in ((f"{way}/{server.model}", base) for way, base in ways.items()):
        asked = {"model": model, "api_base": base, "api_key": server.key, "messages": HELLO, "max_tokens": 16}
        answer = asyncio.run(litellm.anthropic_messages(**asked))
        assert answer["role"] == "assistant" and answer["usage"]["output_tokens"] == 16
        assert answer["stop_reason"] == "max_tokens" and answer["content"][0]["type"] == "text"


def test_an_error_is_litellms(asked):
    with pytest.raises(litellm.BadRequestError, match="temperature"):
        litellm.completion(**asked, messages=HELLO, temperature=-1)
    with pytest.raises(litellm.ContextWindowExceededError):
        litellm.completion(**asked, messages=[{"role": "user", "content": "a " * 40_000}])
    with pytest.raises(litellm.NotFoundError):
        litellm.completion(**asked | {"model": "openai/another"}, messages=HELLO)
