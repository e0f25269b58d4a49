"""langchain-openai: plain, streamed, structured, with tools."""

from typing import Literal

import openai
import pytest
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel, ConfigDict, SecretStr

from conftest import ENOUGH


class Place(BaseModel):
    """A city. What may have further fields might never end."""

    model_config = ConfigDict(extra="forbid")
    city: Literal["Oslo", "Rome"]


@tool(args_schema=Place)
def weather(city: Literal["Oslo", "Rome"]) -> str:
    """Tells the weather."""
    return f"sunny in {city}"


def chat(server, **settings):
    key = SecretStr(server.key)
    return ChatOpenAI(model=server.model, base_url=server.url, api_key=key, max_retries=0, **settings)


def test_invoke(server):
    answer = chat(server, max_tokens=8, temperature=0).invoke([("system", "Be kind."), ("user", "Say hello.")])
    assert isinstance(answer, AIMessage) and answer.content
    assert answer.usage_metadata["output_tokens"] == 8
    assert answer.response_metadata["finish_reason"] == "length"


def test_a_stream_adds_up_to_the_answer(server):
    model = chat(server, max_tokens=8, temperature=0, stream_usage=True)
    whole = model.invoke("Say hello.")
    total = None
    for chunk in model.stream("Say hello."):
        total = chunk if total is None else total + chunk
    assert total.content == whole.content and total.usage_metadata["output_tokens"] == 8
    assert total.usage_metadata["input_token_details"]["cache_read"] > 0


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_structured_output(server, method):
    answer = chat(server, max_tokens=ENOUGH).with_structured_output(Place, method=method).invoke("Which city?")
    assert isinstance(answer, Place)


def test_json_mode(server):
    """A random model need not end its JSON, which the client then says; what it began is held to the form."""
    model = chat(server, max_tokens=32).bind(response_format={"type": "json_object"})
    try:
        text = model.invoke("Write JSON.").content
    except openai.LengthFinishReasonError as cut_off:
        text = cut_off.completion.choices[0].message.content
    assert text.startswith("{")


def test_tools_and_the_turn_behind_them(server):
    model = chat(server, max_tokens=ENOUGH).bind_tools(
        [weather], tool_choice="weather", strict=True, parallel_tool_calls=False
    )
    question = HumanMessage("What is the weather?")
    answer = model.invoke([question])
    (call,) = answer.tool_calls
    assert call["name"] == "weather" and call["args"]["city"] in ("Oslo", "Rome")
    told = ToolMessage(weather.invoke(call["args"]), tool_call_id=call["id"])
    last = chat(server, max_tokens=4).bind_tools([weather]).invoke([question, answer, told])
    assert last.usage_metadata["input_token_details"]["cache_read"] > 0


def test_the_responses_api(server):
    model = chat(server, max_tokens=8, temperature=0, use_responses_api=True)
    whole = model.invoke("Say hello.")
    assert whole.text and whole.usage_metadata["output_tokens"] == 8
    total = None
    for chunk in model.stream("Say hello."):
        total = chunk if total is None else total + chunk
    assert total.text == whole.text and total.usage_metadata["output_tokens"] == 8
    assert total.usage_metadata["input_token_details"]["cache_read"] > 0


def test_tools_of_the_responses_api(server):
    model = chat(server, max_tokens=ENOUGH, use_responses_api=True)
    question = HumanMessage("What is the weather?")
    answer = model.bind_tools([weather], tool_choice="weather", strict=True, parallel_tool_calls=False).invoke(
        [question]
    )
    (call,) = answer.tool_calls
    assert call["name"] == "weather" and call["args"]["city"] in ("Oslo", "Rome")
    told = ToolMessage(weather.invoke(call["args"]), tool_call_id=call["id"])
    last = chat(server, max_tokens=4, use_responses_api=True).bind_tools([weather]).invoke([question, answer, told])
    assert last.usage_metadata["output_tokens"] == 4
    place = model.with_structured_output(Place, method="json_schema").invoke("Which city?")
    assert isinstance(place, Place)


def test_an_error_is_openais(server):
    with pytest.raises(openai.BadRequestError, match="temperature"):
        chat(server, temperature=-1.0).invoke("Say hello.")
