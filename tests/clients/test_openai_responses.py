"""openai's client on /v1/responses: whole, streamed, with tools, parsed, stored, and gone on from."""

import json

import openai
import pytest

from conftest import ENOUGH, PARAMETERS, Place

TOOL = {"type": "function", "name": "weather", "parameters": PARAMETERS, "strict": True}


def test_a_response_and_the_same_as_events(client, server):
    asked = {"model": server.model, "input": "Say hello.", "max_output_tokens": 8, "temperature": 0}
    whole = client.responses.create(**asked)
    assert (whole.object, whole.status, whole.incomplete_details.reason) == (
        "response",
        "incomplete",
        "max_output_tokens",
    )
    (message,) = whole.output
    assert (message.type, message.role) == ("message", "assistant") and whole.output_text == message.content[0].text
    assert whole.usage.output_tokens == 8 and whole.error is None
    events = list(client.responses.create(**asked, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [event.type for event in events[:2]] == ["response.created", "response.in_progress"]
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == whole.output_text
    assert events[-1].type == "response.incomplete" and events[-1].response.output_text == whole.output_text
    assert events[-1].response.usage.input_tokens_details.cached_tokens > 0


def test_the_streams_helper_adds_up_to_the_response(client, server):
    asked = {"model": server.model, "input": "Say hello.", "temperature": 0}
    text = client.responses.create(**asked, max_output_tokens=8).output_text
    with client.responses.stream(**asked, max_output_tokens=8, extra_body={"stop": text[-3:]}) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_response()
    assert {"response.output_item.added", "response.content_part.done", "response.completed"} <= kinds
    assert final.status == "completed" and text.startswith(final.output_text)


@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "weather"}])
def test_a_tool_and_the_turn_behind_it(client, server, choice):
    asked = {"model": server.model, "tools": [TOOL], "parallel_tool_calls": False}
    first = client.responses.create(input="Weather?", tool_choice=choice, max_output_tokens=ENOUGH, **asked)
    (call,) = first.output
    assert (call.type, call.name, first.status) == ("function_call", "weather", "completed")
    assert json.loads(call.arguments)["city"] in ("Oslo", "Rome")
    result = [{"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}]
    second = client.responses.create(input=result, previous_response_id=first.id, max_output_tokens=4, **asked)
    assert second.previous_response_id == first.id
    # All of the first prompt is there again, and more of it than a beginning that every prompt has.
    assert second.usage.input_tokens_details.cached_tokens > first.usage.input_tokens // 2


def test_a_streamed_tool(client, server):
    asked = {"model": server.model, "tools": [TOOL], "parallel_tool_calls": False, "tool_choice": "required"}
    with client.responses.stream(input="Weather?", max_output_tokens=ENOUGH, **asked) as stream:
        events = list(stream)
    pieces = [event.delta for event in events if event.type == "response.function_call_arguments.delta"]
    (done,) = [event for event in events if event.type == "response.function_call_arguments.done"]
    assert "".join(pieces) == done.arguments and json.loads(done.arguments)["city"] in ("Oslo", "Rome")


def test_a_response_parsed_into_a_model(client, server):
    parsed = client.responses.parse(
        model=server.model, input="Which city?", text_format=Place, max_output_tokens=ENOUGH
    )
    assert isinstance(parsed.output_parsed, Place)


def test_a_stored_response_is_gone_on_from_found_and_forgotten(client, server):
    asked = {"model": server.model, "max_output_tokens": 4}
    first = client.responses.create(input="Call me Ada. " * 20, instructions="Be kind.", **asked)
    assert client.responses.retrieve(first.id).output == first.output
    (item,) = client.responses.input_items.list(first.id)
    assert item.role == "user"
    second = client.responses.create(input="Who am I?", instructions="Be kind.", previous_response_id=first.id, **asked)
    assert second.usage.input_tokens > first.usage.input_tokens
    assert second.usage.input_tokens_details.cached_tokens >= first.usage.input_tokens - 64
    client.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError, match=r"Response with id .* not found"):
        client.responses.retrieve(first.id)
    unstored = client.responses.create(input="x", store=False, **asked)
    with pytest.raises(openai.NotFoundError):
        client.responses.create(input="y", previous_response_id=unstored.id, **asked)


def test_errors_are_the_clients_own(client, server):
    with pytest.raises(openai.BadRequestError) as refused:
        client.responses.create(model=server.model, input="x", max_output_tokens=-1)
    assert refused.value.param == "max_output_tokens"
    orphan = [{"type": "function_call_output", "call_id": "nobody", "output": "x"}]
    with pytest.raises(openai.BadRequestError, match="call_id"):
        client.responses.create(model=server.model, input=orphan)
    with pytest.raises(openai.BadRequestError, match=r"tools\[0\].*name"):
        client.responses.create(model=server.model, input="x", tools=[{"type": "function", "parameters": PARAMETERS}])


def test_a_tool_that_openai_runs_is_left_out(client, server):
    asked = {"model": server.model, "input": "x", "max_output_tokens": 1}
    answer = client.responses.create(tools=[{"type": "web_search"}, TOOL], **asked)
    assert [tool.name for tool in answer.tools] == ["weather"]
    assert answer.usage.input_tokens == client.responses.create(tools=[TOOL], **asked).usage.input_tokens
