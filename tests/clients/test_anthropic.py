"""Anthropic's client: messages, streams, tools, counted tokens, marks of the cache, errors."""

import json

import anthropic
import pytest

from conftest import ENOUGH, PARAMETERS

TOOL = {"name": "weather", "description": "Tells it.", "input_schema": PARAMETERS}
GREEDY = {"temperature": 0}
HELLO = [{"role": "user", "content": "Say hello."}]


@pytest.fixture
def client(server):
    with anthropic.Anthropic(base_url=server.root, api_key=server.key, max_retries=0) as client:
        yield client


def prompt_tokens(usage):
    return usage.input_tokens + usage.cache_read_input_tokens + usage.cache_creation_input_tokens


def test_a_message_and_its_counted_tokens(client, server):
    counted = client.messages.count_tokens(model=server.model, messages=HELLO, system="Be kind.", tools=[TOOL])
    message = client.messages.create(
        model=server.model, messages=HELLO, system="Be kind.", tools=[TOOL], max_tokens=8, extra_body=GREEDY
    )
    assert (message.type, message.role, message.stop_reason) == ("message", "assistant", "max_tokens")
    assert [block.type for block in message.content] == ["text"] and message.usage.output_tokens == 8
    assert prompt_tokens(message.usage) == counted.input_tokens


def test_a_stream_adds_up_to_the_message(client, server):
    asked = {"model": server.model, "messages": HELLO, "max_tokens": 8, "extra_body": GREEDY}
    whole = client.messages.create(**asked)
    with client.messages.stream(**asked) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_message()
    assert kinds[0] == "message_start" and kinds[-1] == "message_stop"
    assert {"content_block_start", "content_block_delta", "content_block_stop", "message_delta"} <= set(kinds)
    assert final.content[0].text == whole.content[0].text and final.stop_reason == "max_tokens"
    assert final.usage.output_tokens == 8 and final.usage.cache_read_input_tokens > 0
    assert prompt_tokens(final.usage) == prompt_tokens(whole.usage)


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "weather"}])
def test_a_tool_and_the_turn_behind_it(client, server, choice):
    choice = choice | {"disable_parallel_tool_use": True}
    asked = {"model": server.model, "tools": [TOOL], "max_tokens": ENOUGH}
    first = client.messages.create(messages=HELLO, tool_choice=choice, **asked)
    (call,) = first.content
    assert (first.stop_reason, call.type, call.name) == ("tool_use", "tool_use", "weather")
    assert call.input["city"] in ("Oslo", "Rome")
    result = {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "sunny"}]}
    turns = [*HELLO, {"role": "assistant", "content": first.content}, {"role": "user", "content": [result]}]
    second = client.messages.create(messages=turns, **asked | {"max_tokens": 4})
    assert second.usage.cache_read_input_tokens > 0 and second.usage.output_tokens == 4


def test_a_streamed_tool(client, server):
    with client.messages.stream(
        model=server.model, messages=HELLO, tools=[TOOL], max_tokens=ENOUGH,
        tool_choice={"type": "tool", "name": "weather", "disable_parallel_tool_use": True},
    ) as stream:  # fmt: skip
        pieces = [event.partial_json for event in stream if event.type == "input_json"]
        final = stream.get_final_message()
    assert json.loads("".join(pieces)) == final.content[0].input
    assert final.content[0].input["city"] in ("Oslo", "Rome") and final.stop_reason == "tool_use"


def test_an_answer_held_to_a_schema(client, server):
    form = {"format": {"type": "json_schema", "schema": PARAMETERS}}
    message = client.messages.create(model=server.model, messages=HELLO, max_tokens=ENOUGH, output_config=form)
    assert json.loads(message.content[0].text)["city"] in ("Oslo", "Rome")


def test_marks_of_the_cache_are_counted(client, server):
    system = [{"type": "text", "text": "Rules of the house. " * 40, "cache_control": {"type": "ephemeral"}}]
    asked = {"model": server.model, "system": system, "max_tokens": 1}
    first = client.messages.create(messages=HELLO, **asked)
    again = client.messages.create(messages=[{"role": "user", "content": "Something else."}], **asked)
    assert first.usage.cache_read_input_tokens < 4 and first.usage.cache_creation_input_tokens > 100
    assert again.usage.cache_read_input_tokens >= first.usage.cache_creation_input_tokens
    assert again.usage.cache_creation_input_tokens == 0


def test_errors_are_the_clients_own(client, server):
    with pytest.raises(anthropic.BadRequestError) as refused:
        client.messages.create(model=server.model, messages=HELLO, max_tokens=0)
    assert refused.value.body["type"] == "error" and "max_tokens" in refused.value.body["error"]["message"]
    orphan = [{"type": "tool_result", "tool_use_id": "nobody", "content": "x"}]
    with pytest.raises(anthropic.BadRequestError, match="tool_use"):
        client.messages.create(model=server.model, messages=[{"role": "user", "content": orphan}], max_tokens=1)
    with pytest.raises(anthropic.BadRequestError, match=r"the prompt is too long: 4[0-9]{4} tokens > 32767"):
        client.messages.create(model=server.model, messages=[{"role": "user", "content": "a " * 40_000}], max_tokens=1)
    with pytest.raises(anthropic.NotFoundError):
        client.messages.create(model="another", messages=HELLO, max_tokens=1)
    with pytest.raises(anthropic.AuthenticationError):
        anthropic.Anthropic(base_url=server.root, api_key="wrong", max_retries=0).messages.count_tokens(
            model=server.model, messages=HELLO
        )
