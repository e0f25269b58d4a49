"""Structured output and calls over HTTP with a real tiny model, and clients that know nothing of us."""

import json
import re

import httpx
import jsonschema
import openai
import pydantic
import pytest

from cairn.engine.build import build_core
from cairn.engine.text.tokenizer import ModelTokenizer

SECONDS = 60


@pytest.fixture(scope="module")
def client(running_server, tiny_model):
    server = running_server(
        {"model": "tiny"},
        build=build_core,
        model=str(tiny_model),
        tokenizer=ModelTokenizer(tiny_model),
        kv_cache_memory_bytes=16 << 20,
    )
    with server.client(timeout=SECONDS) as client:
        yield client
    server.drain()
    assert server.join() == 0


CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "What is the weather?"}], "max_tokens": 300}
PARAMETERS = {
    "type": "object",
    "properties": {
        "city": {"enum": ["Oslo", "Rome"]},
        "days": {"type": "array", "items": {"type": "integer", "minimum": 1, "maximum": 9}, "maxItems": 2},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}},
    {
        "type": "function",
        "function": {"name": "now", "parameters": {"type": "object", "properties": {}, "additionalProperties": False}},
    },
]


def test_a_client_parses_the_answer_into_its_own_class(client):
    class Weather(pydantic.BaseModel):
        model_config = pydantic.ConfigDict(extra="forbid")
        cloudy: bool
        wind: int = pydantic.Field(ge=0, le=12)

    message = client.chat.completions.parse(**CHAT, seed=3, response_format=Weather).choices[0].message
    assert isinstance(message.parsed, Weather)


@pytest.mark.parametrize("stream", [False, True])
def test_required_calls_have_the_tools_arguments(client, stream):
    fields = CHAT | {"tools": TOOLS, "tool_choice": "required", "seed": 5, "parallel_tool_calls": False}
    if stream:
        calls, finish = {}, None
        for chunk in client.chat.completions.create(**fields, stream=True):
            for part in chunk.choices[0].delta.tool_calls or []:
                call = calls.setdefault(part.index, {"name": part.function.name, "arguments": ""})
                call["arguments"] += part.function.arguments
            assert not chunk.choices[0].delta.content
            finish = chunk.choices[0].finish_reason or finish
        found = list(calls.values())
    else:
        choice = client.chat.completions.create(**fields).choices[0]
        finish = choice.finish_reason
        found = [call.function.model_dump() for call in choice.message.tool_calls]
        assert choice.message.content is None
    assert finish == "tool_calls" and len(found) == 1
    schema = {tool["function"]["name"]: tool["function"]["parameters"] for tool in TOOLS}[found[0]["name"]]
    jsonschema.validate(json.loads(found[0]["arguments"]), schema)


def test_a_named_call(client):
    fields = CHAT | {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "weather"}}}
    choices = client.chat.completions.create(**fields, n=3, seed=1).choices
    for choice in choices:
        (call,) = choice.message.tool_calls
        assert call.function.name == "weather" and choice.finish_reason == "tool_calls"
        jsonschema.validate(json.loads(call.function.arguments), PARAMETERS)
    assert len({choice.message.tool_calls[0].id for choice in choices}) == 3


@pytest.mark.parametrize("field", [{"structured_outputs": {"regex": "[a-f]{4}"}}, {"guided_regex": "[a-f]{4}"}])
def test_completions_have_forms_too(client, field):
    choices = client.completions.create(
        model="tiny", prompt="The word is", max_tokens=50, n=3, extra_body=field
    ).choices
    assert all(re.fullmatch("[a-f]{4}", choice.text) and choice.finish_reason == "stop" for choice in choices)


def test_a_form_that_cannot_be_is_the_clients_mistake(client):
    for body, words in (
        ({"guided_regex": "("}, "unclosed group"),
        ({"guided_regex": "(.{0,1000}){0,1000}x"}, "too many"),
        ({"guided_grammar": "start: <nope>"}, "unknown special token"),
    ):
        for _ in range(2):
            with pytest.raises(openai.BadRequestError, match=words):
                client.completions.create(model="tiny", prompt="x", extra_body=body)
    assert client.completions.create(model="tiny", prompt="x", max_tokens=2).choices[0].text is not None


@pytest.mark.parametrize("stream", [False, True])
def test_prompts_that_are_refused_behind_their_grammar_have_not_begun(client, stream):
    """The second one does not fit the pool, which the core finds out when the grammar is there."""

    def counted():
        lines = httpx.get(str(client.base_url.join("/metrics"))).text.splitlines()
        told = ("vllm:request_success_total", "vllm:prompt_tokens_total", "cairn:steps_total")
        return [line for line in lines if line.startswith(told)]

    before = counted()
    prompts, form = [[20, 21], [22] * 20_000], {"structured_outputs": {"regex": f"[a-f]{{4,{5 + stream}}}"}}
    with pytest.raises(openai.BadRequestError) as refused:
        client.completions.create(model="tiny", prompt=prompts, max_tokens=9, stream=stream, extra_body=form)
    assert refused.value.param == "prompt" and "--kv-cache-memory-bytes" in refused.value.message
    assert counted() == before
    choices = client.completions.create(model="tiny", prompt=prompts[:1] * 2, max_tokens=9, extra_body=form).choices
    assert [choice.finish_reason for choice in choices] == ["stop", "stop"]
