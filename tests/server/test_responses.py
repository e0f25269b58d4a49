"""OpenAI's Responses API. The engine echoes: what the last user says is what the model answers."""

import asyncio
import json
import re
import threading

import pytest

from cairn.engine.client import CoreClient
from cairn.errors import InvalidRequest, NotFound
from cairn.server.openai_responses.requests import ResponsesRequest
from cairn.server.openai_responses.store import ResponseStore, StoredResponse
from cairn.server.openai_responses.tools import ToolTable
from cairn.server.openai_responses.translation import make_input_items, to_chat
from doubles.byte_tokenizer import ByteTokenizer
from server.asking import CALL, SCHEMA, XML
from tiers import more

TOOL = {"type": "function", "name": "weather", "description": "Tells it.", "parameters": SCHEMA}
NAMED = {"type": "function", "name": "weather"}


def body(given="Hello.", **fields):
    return {"model": "echo", "max_output_tokens": 900, "input": given} | fields


def answer(server, given="Hello.", **fields):
    response = server.post("/v1/responses", body(given, **fields))
    assert response.status_code == 200, response.text
    return response.json()


def events(server, given="Hello.", **fields):
    """The data of a stream's events."""
    response = server.post("/v1/responses", body(given, stream=True, **fields))
    assert response.headers["content-type"].startswith("text/event-stream"), response.text
    found = []
    for event in response.text.split("\n\n")[:-1]:
        name, data = event.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
        assert found[-1]["sequence_number"] == len(found) - 1
    return found


def prompt_of(server):
    """What the engine was asked last, as text."""
    ids = server.requests[-1].prompt
    tokens = [int.from_bytes(ids[i : i + 8], "little") for i in range(0, len(ids), 8)]
    return server._tokenizer.decode(tokens)


def chat_prompt(server, messages, **fields):
    """What the engine is asked for the same chat."""
    response = server.post("/v1/chat/completions", {"model": "echo", "messages": messages, "max_tokens": 9} | fields)
    assert response.status_code == 200, response.text
    return prompt_of(server)


def user(text):
    return {"role": "user", "content": text}


def without_ids(response):
    """What is other in the same response twice: ids, times, and what the cache knew."""
    output = [item | {"id": "id"} | ({"call_id": "call"} if "call_id" in item else {}) for item in response["output"]]
    return response | {"id": "id", "output": output} | dict.fromkeys(("created_at", "completed_at", "usage", "cairn"))


CALLED = {"type": "function_call", "call_id": "a", "name": "weather", "arguments": "{}"}
RESULT = {"type": "function_call_output", "call_id": "a", "output": "rain"}


# -- answers and streams -----------------------------------------------------------------------------------------------


def test_an_answer(server):
    found = answer(server, "What is a lease?", instructions="Be brief.", metadata={"a": "b"}, temperature=0)
    assert found["object"] == "response" and found["status"] == "completed" and found["error"] is None
    assert [item["type"] for item in found["output"]] == ["message"]
    (part,) = found["output"][0]["content"]
    assert "What is a lease?" in part["text"] and part["type"] == "output_text"
    said_again = {"instructions": "Be brief.", "metadata": {"a": "b"}, "temperature": 0, "max_output_tokens": 900}
    assert found | said_again == found
    usage = found["usage"]
    assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]
    again = answer(server, "What is a lease?", instructions="Be brief.")["usage"]
    assert again["input_tokens_details"]["cached_tokens"] == again["input_tokens"] == usage["input_tokens"]


def test_what_was_asked_for_is_said_again(server):
    fields = {
        "max_tool_calls": 3,
        "metadata": {"a": "b"},
        "prompt_cache_key": "k",
        "safety_identifier": "s",
        "user": "u",
    }
    found = answer(server, **fields)
    assert found | fields == found


def test_truncation_auto_cuts_off_the_beginning(serve):
    server = serve(max_model_len=100)
    refused = server.post("/v1/responses", body("0123456789" * 20, max_output_tokens=10))
    assert refused.status_code == 400
    found = answer(server, "0123456789" * 20, max_output_tokens=10, truncation="auto")
    assert found["usage"]["input_tokens"] == 90 and found["truncation"] == "auto"


def test_reasoning_and_calls_are_items(xml):
    given = f"A thought.</think>So be it.\n{CALL}\n{CALL}"
    found = answer(xml, given, tools=[TOOL], reasoning={"effort": "high", "summary": "auto"})
    # the echo goes on behind the calls
    assert [item["type"] for item in found["output"]] == ["reasoning", "message", *["function_call"] * 2, "message"]
    thought, _, first, second, _ = found["output"]
    assert thought["content"][0]["text"].endswith("A thought.") and thought["summary"] == []
    assert json.loads(first["arguments"]) == {"city": "Oslo"} and first["name"] == "weather"
    assert first["call_id"] != second["call_id"] and len({item["id"] for item in found["output"]}) == 5
    # a byte is a token, and the closing tag is none of either
    reasoning = found["usage"]["output_tokens_details"]["reasoning_tokens"]
    assert reasoning == len(thought["content"][0]["text"])
    without = answer(xml, given, tools=[TOOL], reasoning={"effort": "high"}, include_reasoning=False)
    assert [item["type"] for item in without["output"]] == ["message", *["function_call"] * 2, "message"]


OPENING = ["response.created", "response.in_progress"]
DELTAS = {"message": "response.output_text", "reasoning": "response.reasoning_text"}


def expected_events(response):
    """The published sequence for a response, each run of deltas as one."""
    names = list(OPENING)
    for item in response["output"]:
        names.append("response.output_item.added")
        if item["type"] == "function_call":
            names += [f"response.function_call_arguments.{one}" for one in ("delta", "done")]
        else:
            own = DELTAS[item["type"]]
            names += ["response.content_part.added", f"{own}.delta", f"{own}.done", "response.content_part.done"]
        names.append("response.output_item.done")
    return [*names, f"response.{response['status']}"]


@pytest.mark.parametrize(
    ("given", "fields"),
    [
        ("Hello.", {}),
        ("Hello.", {"max_output_tokens": 3}),
        (f"So.\n{CALL}\n{CALL}", {"tools": [TOOL]}),
        (f"A thought.</think>So.\n{CALL}", {"tools": [TOOL], "reasoning": {"effort": "low"}}),
        (f"A thought.</think>So.\n{CALL}", {"tools": [TOOL], "reasoning": {"effort": "low"}, "max_output_tokens": 12}),
    ],
)
def test_a_stream_adds_up_to_the_answer(xml, given, fields):
    found, whole = events(xml, given, **fields), answer(xml, given, **fields)
    last = found[-1]["response"]
    del whole["kv_transfer_params"], last["kv_transfer_params"]
    assert without_ids(last) == without_ids(whole)
    names = [event["type"] for event in found]
    assert [one for one, before in zip(names, [None, *names], strict=False) if one != before] == expected_events(whole)
    for event in found[:2]:
        assert event["response"]["status"] == "in_progress" and event["response"]["output"] == []
    for place, item in enumerate(last["output"]):
        own = [event for event in found if event.get("output_index") == place]
        added, done = own[0], own[-1]
        assert added["item"]["id"] == item["id"] and added["item"]["status"] == "in_progress"
        assert done["item"] == item
        assert {event["item_id"] for event in own[1:-1]} == {item["id"]}
        joined = "".join(event["delta"] for event in own if event["type"].endswith(".delta"))
        assert joined == (item["arguments"] if "arguments" in item else item["content"][0]["text"])


@pytest.mark.parametrize(
    ("fields", "status", "details"),
    [
        ({"max_output_tokens": 3}, "incomplete", {"reason": "max_output_tokens"}),
        ({"stop": ["llo"]}, "completed", None),
        ({}, "completed", None),
    ],
)
def test_why_it_ended(server, fields, status, details):
    for found in (answer(server, **fields), events(server, **fields)[-1]["response"]):
        assert (found["status"], found["incomplete_details"]) == (status, details)
        assert found["output"][0]["status"] == status


def test_logprobs_are_those_of_the_text(xml):
    given, include = "A thought.</think>So be it.", ["message.output_text.logprobs"]
    fields = {"include": include, "top_logprobs": 2, "reasoning": {"effort": "high"}}
    found = answer(xml, given, **fields)
    part = found["output"][1]["content"][0]
    assert part["text"].startswith("So be it.") and len(part["logprobs"]) == len(part["text"])
    assert "".join(entry["token"] for entry in part["logprobs"]) == part["text"]
    assert {len(entry["top_logprobs"]) for entry in part["logprobs"]} == {2}
    deltas = [one for one in events(xml, given, **fields) if one["type"] == "response.output_text.delta"]
    assert [entry for one in deltas for entry in one["logprobs"]] == part["logprobs"]
    assert answer(xml, given)["output"][0]["content"][0]["logprobs"] == []


# -- the same as a chat ------------------------------------------------------------------------------------------------


def test_the_prompt_is_that_of_the_same_chat(xml):
    """Instructions, tools, calls, their outputs and reasoning are where a chat has them."""
    said = [
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "How is the weather?"}]},
        {
            "type": "reasoning",
            "id": "x",
            "summary": [],
            "content": [{"type": "reasoning_text", "text": "I should ask."}],
        },
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Let me see."}]},
        {"type": "function_call", "call_id": "a", "name": "weather", "arguments": '{"city": "Oslo"}'},
        {"type": "function_call", "call_id": "b", "name": "weather", "arguments": '{"city": "Rome"}'},
        RESULT,
        RESULT | {"call_id": "b", "output": [{"type": "input_text", "text": "no such city"}]},
        user("Go on."),
    ]
    answer(xml, said, tools=[TOOL], instructions="Be brief.", max_output_tokens=9)
    prompt = prompt_of(xml)
    calls = [
        {"id": name, "type": "function", "function": {"name": "weather", "arguments": json.dumps({"city": city})}}
        for name, city in (("a", "Oslo"), ("b", "Rome"))
    ]
    chat = [
        {"role": "system", "content": "Be brief."},
        user("How is the weather?"),
        {"role": "assistant", "content": "Let me see.", "tool_calls": calls, "reasoning_content": "I should ask."},
        {"role": "tool", "tool_call_id": "a", "content": "rain"},
        {"role": "tool", "tool_call_id": "b", "content": "no such city"},
        user("Go on."),
    ]
    tool = {"type": "function", "function": {name: value for name, value in TOOL.items() if name != "type"}}
    assert chat_prompt(xml, chat, tools=[tool]) == prompt
    assert prompt.index("Be brief.") < prompt.index("rain") < prompt.index("no such city")


def test_a_developers_message_is_that_of_a_chat(server):
    said = [{"role": "developer", "content": "Be kind."}, user("Hi.")]
    answer(server, said, instructions="Be brief.")
    assert prompt_of(server) == chat_prompt(server, [{"role": "system", "content": "Be brief."}, *said])


def test_an_answer_without_an_end_is_gone_on_with(server):
    begun = {"type": "message", "role": "assistant", "content": "One, two,", "status": "incomplete"}
    answer(server, [user("Count."), begun])
    assert prompt_of(server).endswith("One, two,")
    answer(server, [user("Count."), begun | {"status": "completed"}])
    assert prompt_of(server).endswith("One, two,assistant\n")


@pytest.mark.parametrize(
    ("fields", "sent"),
    [
        ({"tool_choice": "auto"}, {"tool_choice": "auto"}),
        (
            {"tool_choice": "required", "parallel_tool_calls": False},
            {"tool_choice": "required", "parallel_tool_calls": False},
        ),
        (
            {"tool_choice": {"type": "function", "name": "weather"}},
            {"tool_choice": {"type": "function", "function": {"name": "weather"}}},
        ),
        (
            {"tool_choice": {"type": "allowed_tools", "mode": "required", "tools": [NAMED]}},
            {
                "tool_choice": {
                    "type": "allowed_tools",
                    "allowed_tools": {
                        "mode": "required",
                        "tools": [{"type": "function", "function": {"name": "weather"}}],
                    },
                }
            },
        ),
        (
            {"text": {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA}}, "tools": None},
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}},
        ),
        (
            {"text": {"format": {"type": "json_object"}}, "tools": None},
            {"response_format": {"type": "json_object"}},
        ),
    ],
)
def test_tool_choice_and_formats_are_a_chats(xml, fields, sent):
    answer(xml, **{"tools": [TOOL], "max_output_tokens": 60} | fields)
    structure = xml.requests[-1].structure
    tool = {"type": "function", "function": {name: value for name, value in TOOL.items() if name != "type"}}
    chat_prompt(xml, [user("Hello.")], **({"tools": [tool]} if "response_format" not in sent else {}) | sent)
    assert xml.requests[-1].structure is None or xml.requests[-1].structure.kind == structure.kind
    assert (structure is None) == (sent.get("tool_choice") == "auto")


def test_what_the_model_has_read_and_written(server, xml):
    shown = answer(server, "Hello.", enable_response_messages=True)
    (read,), (written,) = shown["input_messages"], shown["output_messages"]
    assert read["message"] == prompt_of(server) and len(read["tokens"]) == shown["usage"]["input_tokens"]
    (message,) = shown["output"]
    assert (
        written["message"] == message["content"][0]["text"]
        and len(written["tokens"]) == shown["usage"]["output_tokens"]
    )
    assert {one["type"] for one in (read, written)} == {"raw_message_tokens"}
    last = events(server, "Hello.", enable_response_messages=True)[-1]["response"]
    assert last["input_messages"] == [read] and last["output_messages"][0]["message"] == written["message"]
    plain = answer(server, "Hello.")
    assert plain["input_messages"] is plain["output_messages"] is None
    thought = {"enable_response_messages": True, "input": "hm</think>So.", "reasoning": {"effort": "low"}}
    assert "hm</think>" in answer(xml, **thought)["output_messages"][0]["message"]
    assert answer(xml, **thought, include_reasoning=False)["output_messages"] == []


@pytest.mark.parametrize("way", ["previous_response_id", more("items")])
def test_six_turns_hit_what_a_chat_hits(serve, way):
    """The same conversation, with reasoning and calls, through both APIs, on a server each."""
    hits, prompts = [], []
    tool = {"type": "function", "function": {name: value for name, value in TOOL.items() if name != "type"}}
    for api in ("responses", "chat"):
        server = serve(tokenizer=ByteTokenizer(chat_template=XML), max_model_len=16384)
        said, found, seen, previous = [], [], [], None
        for turn in range(6):
            text = f"Turn {turn}. " + "And so on. " * 4 + f"</think>So.\n{CALL}"
            if api == "chat":
                said.append(user(text))
                sent = {"messages": [{"role": "system", "content": "Be kind."}, *said], "tools": [tool]}
                sent |= {"reasoning_effort": "high"}
                path, sent = "/v1/chat/completions", sent | {"max_tokens": 430}
            else:
                said = [*said, user(text)] if way == "items" else [*said[-1:], user(text)]
                said = said if way == "items" or turn else [user(text)]
                sent = {"instructions": "Be kind.", "input": said, "tools": [TOOL], "max_output_tokens": 430}
                sent |= {"reasoning": {"effort": "high"}}
                if way != "items" and previous is not None:
                    sent["previous_response_id"] = previous
                path = "/v1/responses"
            response = server.post(path, {"model": "echo"} | sent)
            assert response.status_code == 200, response.text
            reply = response.json()
            seen.append(prompt_of(server))
            if api == "chat":
                message = reply["choices"][0]["message"]
                said.append(message)
                calls = [call["id"] for call in message.get("tool_calls", ())]
                said += [{"role": "tool", "tool_call_id": call, "content": "rain"} for call in calls]
            else:
                previous = reply["id"]
                calls = [item["call_id"] for item in reply["output"] if item["type"] == "function_call"]
                outputs = [RESULT | {"call_id": call} for call in calls]
                said = [*said, *reply["output"], *outputs] if way == "items" else outputs
            assert calls, "the answer has a call to look at"
            found.append(reply["cairn"]["cache"])
            server.assert_nothing_is_held()
        hits.append(found)
        prompts.append(seen)
    strip = re.compile(r"call_[0-9a-f]{24}")
    assert [strip.sub("call", one) for one in prompts[0]] == [strip.sub("call", one) for one in prompts[1]]
    assert hits[0] == hits[1]
    assert hits[0][-1]["cached_tokens"] > 500


# -- in the background -------------------------------------------------------------------------------------------------


def until_status(server, response, *statuses):
    found = []

    def has_it():
        found.append(server.get(f"/v1/responses/{response['id']}").json())
        return found[-1]["status"] in statuses

    server.until(has_it)
    return found[-1]


def test_a_response_is_made_in_the_background(server):
    made = answer(server, background=True)
    assert made["status"] == "queued" and made["background"] is True and made["output"] == []
    ended = until_status(server, made, "completed")
    waited = answer(server)
    assert without_ids(ended) | {"background": False} == without_ids(waited)
    assert ended["id"] == made["id"] and ended["usage"]["output_tokens"] == waited["usage"]["output_tokens"]
    going_on = answer(server, "And?", previous_response_id=made["id"])
    assert going_on["previous_response_id"] == made["id"]
    refused = server.post(f"/v1/responses/{made['id']}/cancel")
    assert refused.status_code == 400 and "has ended" in refused.json()["error"]["message"]


def test_what_is_made_in_the_background_can_be_cancelled_and_deleted(serve):
    server = serve(model="echo:pause_after=2")
    made = answer(server, "Hello, hello, hello.", background=True)
    path = f"/v1/responses/{made['id']}"
    until_status(server, made, "in_progress")
    item = {"type": "item_reference", "id": f"msg_{made['id'].removeprefix('resp_')}_0"}
    for sent, named in (
        ({"previous_response_id": made["id"]}, "previous_response_id"),
        ({"input": [item]}, "input[0]"),
    ):
        refused = server.post("/v1/responses", body() | sent)
        assert refused.status_code == 400 and refused.json()["error"]["message"].startswith(named), refused.text
    cancelled = server.post(f"{path}/cancel")
    assert cancelled.status_code == 200 and cancelled.json()["status"] == "cancelled"
    assert cancelled.json()["output"][0]["status"] == "incomplete" and server.get(path).json() == cancelled.json()
    second = answer(server, background=True)
    assert server._http.delete(f"{server.url}/v1/responses/{second['id']}").status_code == 200
    assert server.get(f"/v1/responses/{second['id']}").status_code == 404
    server.core.resume()
    server.assert_nothing_is_held()


def test_a_failure_in_the_background_is_what_the_response_says(serve, monkeypatch):
    """As long as the server is there: it ends with its engine, here when it has been asked."""
    was_asked, stop = threading.Event(), CoreClient.stop

    async def stop_later(engine, seconds):
        await asyncio.to_thread(was_asked.wait, 10)
        await stop(engine, seconds)

    monkeypatch.setattr(CoreClient, "stop", stop_later)
    server = serve(model="echo:fail_at_step=3")
    try:
        ended = until_status(server, answer(server, "Hello, hello, hello.", background=True), "failed")
    finally:
        was_asked.set()
    assert ended["error"]["code"] == "server_error" and ended["output"][0]["status"] == "incomplete"


def test_a_server_ends_what_it_makes_in_the_background(serve):
    server = serve(model="echo:pause_after=2", options={"max_background": 1})
    made = answer(server, background=True)
    full = server.post("/v1/responses", body(background=True))
    assert full.status_code == 429 and "background" in full.json()["error"]["message"]
    until_status(server, made, "in_progress")
    server.drain()
    assert server.join() == 0


# -- what is stored ----------------------------------------------------------------------------------------------------


def test_a_stored_response_can_be_had_again(server):
    made = answer(server, [user("Hello."), user("There.")])
    path = f"/v1/responses/{made['id']}"
    assert server.get(path).json() == made
    items = server.get(f"{path}/input_items").json()
    assert [item["content"][0]["text"] for item in items["data"]] == ["There.", "Hello."] and not items["has_more"]
    page = server.get(f"{path}/input_items?order=asc&limit=1").json()
    assert page["has_more"] and page["first_id"] == page["last_id"] == items["last_id"]
    rest = server.get(f"{path}/input_items?order=asc&after={page['last_id']}").json()
    assert [item["id"] for item in rest["data"]] == [items["first_id"]]
    refused = server.post(f"{path}/cancel")
    assert refused.status_code == 400 and "Cannot cancel a synchronous response." in refused.json()["error"]["message"]
    deleted = server._http.delete(server.url + path)
    assert deleted.json() == {"id": made["id"], "object": "response", "deleted": True}
    for again in (server.get(path), server.get(f"{path}/input_items"), server.post(f"{path}/cancel")):
        assert again.status_code == 404 and again.json()["error"]["param"] == "response_id"


def test_a_stream_is_stored_too_and_store_false_is_not(server):
    streamed = events(server)[-1]["response"]
    assert server.get(f"/v1/responses/{streamed['id']}").json() == streamed
    made = answer(server, store=False)
    assert made["store"] is False and server.get(f"/v1/responses/{made['id']}").status_code == 404


def test_the_conversation_goes_on_without_the_old_instructions(server):
    first = answer(server, "Hello.", instructions="Be brief.")
    text = first["output"][0]["content"][0]["text"]
    answer(server, "And?", previous_response_id=first["id"], instructions="Be kind.")
    said = [{"role": "system", "content": "Be kind."}, user("Hello."), {"role": "assistant", "content": text}]
    assert prompt_of(server) == chat_prompt(server, [*said, user("And?")])


def test_items_may_be_referred_to(server):
    first = answer(server, "Hello.")
    item = first["output"][0]
    answer(server, [user("So:"), {"type": "item_reference", "id": item["id"]}, user("And?")])
    said = [user("So:"), {"role": "assistant", "content": item["content"][0]["text"]}, user("And?")]
    assert prompt_of(server) == chat_prompt(server, said)


@pytest.mark.parametrize("other", ["key", "salt", "no salt"])
def test_nobody_has_somebody_elses_response(serve, other):
    server = serve({"api_key": ("secret", "other")})
    own, theirs = {"Authorization": "Bearer secret"}, {"Authorization": "Bearer other"}
    made = server.post("/v1/responses", body(cache_salt="salt"), headers=own).json()
    keys, salt = (theirs, "salt") if other == "key" else (own, "pepper" if other == "salt" else None)
    sent = body(previous_response_id=made["id"]) | ({} if salt is None else {"cache_salt": salt})
    error = server.post("/v1/responses", sent, headers=keys)
    assert error.status_code == 404 and error.json()["error"]["param"] == "previous_response_id"
    reference = {"type": "item_reference", "id": made["output"][0]["id"]}
    sent = {name: value for name, value in sent.items() if name != "previous_response_id"} | {"input": [reference]}
    assert server.post("/v1/responses", sent, headers=keys).status_code == 404
    query = "" if salt is None else f"?cache_salt={salt}"
    for method, path in (("get", ""), ("get", "/input_items"), ("delete", ""), ("post", "/cancel")):
        url = f"{server.url}/v1/responses/{made['id']}{path}{query}"
        assert server._http.request(method, url, headers=keys).status_code == 404
    kept = server._http.get(f"{server.url}/v1/responses/{made['id']}?cache_salt=salt", headers=own)
    assert kept.json() == made


def test_the_least_recently_used_go_first(serve):
    server = serve({"max_stored_responses": 2})
    first, second = answer(server, "One."), answer(server, "Two.")
    answer(server, "And?", previous_response_id=first["id"], store=False)
    third = answer(server, "Three.")
    kept = [server.get(f"/v1/responses/{one['id']}").status_code for one in (first, second, third)]
    assert kept == [200, 404, 200]


def test_what_a_response_needs_goes_after_it():
    store = ResponseStore(3, 1000)
    for name, previous in (("a", None), ("b", "a"), ("x", None)):
        store.put(("", ""), name, StoredResponse(b"{}", b"[]", previous))
    assert len(store.get_chain(("", ""), "b", "previous_response_id")) == 2
    store.put(("", ""), "y", StoredResponse(b"{}", b"[]", None))
    store.put(("", ""), "z", StoredResponse(b"{}", b"[]", None))
    store.get(("", ""), "a")
    with pytest.raises(NotFound):
        store.get(("", ""), "b")
    assert (len(store), store.num_bytes) == (3, 12)


def test_bytes_are_bounded(serve):
    server = serve({"stored_response_bytes": 6000})
    small = answer(server, "Hello.")
    for _ in range(5):
        answer(server, "x" * 800)
    assert server.get(f"/v1/responses/{small['id']}").status_code == 404
    store = ResponseStore(10, 100)
    for number in range(5):
        store.put(("", ""), str(number), StoredResponse(b"x" * 30, b"x" * 10, None))
        assert store.num_bytes <= 100
    store.put(("", ""), "big", StoredResponse(b"x" * 101, b"", None))
    assert (len(store), store.num_bytes) == (2, 80)
    store.delete(("", ""), "4")
    assert (len(store), store.num_bytes) == (1, 40)
    nothing = serve({"max_stored_responses": 0})
    assert answer(nothing)["store"] is False


# -- bad input ---------------------------------------------------------------------------------------------------------


def part(kind, **fields):
    return [{"role": "user", "content": [{"type": kind} | fields]}]


IMAGE = {"type": "input_image", "image_url": "data:image/png;base64,AAAA"}


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"input": None}, "input"),
        ({"input": []}, "input"),
        ({"input": ""}, "input"),
        ({"input": 5}, "input"),
        ({"input": [user("x"), {"type": "ghost_call", "id": "x"}]}, "input[1].type"),
        ({"input": [{"type": "web_search_call", "id": "x"}]}, "input"),
        ({"input": [user("x"), 5]}, "input[1]"),
        ({"input": [{"role": "narrator", "content": "x"}]}, "input[0].role"),
        ({"input": part("input_file", file_id="x")}, "input[0].content[0]"),
        ({"input": part("input_text")}, "input[0].content[0].text"),
        ({"input": part("refusal", refusal="no")}, "input[0].content[0]"),
        ({"input": [user([])]}, "input[0].content"),
        ({"input": [{"role": "assistant", "content": [IMAGE]}, user("x")]}, "input[0].content[0]"),
        ({"input": [{"role": "system", "content": [IMAGE]}, user("x")]}, "input[0].content[0]"),
        ({"input": [user("x"), user([{"type": "input_text", "text": "y"}, IMAGE])]}, "input[1].content[1]"),
        ({"input": [user("x"), CALLED, RESULT | {"output": [IMAGE]}]}, "input[2].output[0]"),
        ({"input": [RESULT]}, "input[0].call_id"),
        ({"input": [CALLED, RESULT, RESULT]}, "input[2].call_id"),
        ({"input": [user("x"), CALLED]}, "input"),
        ({"instructions": 5}, "instructions"),
        ({"tools": [{"type": ""}]}, "tools[0].type"),
        ({"tools": [{"name": "x"}]}, "tools[0].type"),
        ({"tools": [{"type": "custom"}]}, "tools[0].name"),
        ({"tools": [{"type": "custom", "name": "x", "format": {"type": "xml"}}]}, "tools[0].format.type"),
        ({"tools": [{"type": "namespace", "name": "x", "tools": [{"type": "function"}]}]}, "tools[0].tools[0].name"),
        (
            {"input": [user("x"), CALLED, RESULT | {"output": json.loads('{"a":' * 70 + "1" + "}" * 70)}]},
            "input[2].output",
        ),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "name": "other"}}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": ""}}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        (
            {
                "tools": [TOOL],
                "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [NAMED | {"name": "x"}]},
            },
            "tool_choice",
        ),
        ({"tools": [TOOL], "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": []}}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "allowed_tools", "tools": [NAMED]}}, "tool_choice"),
        ({"text": {"format": {"type": "json_schema", "schema": {"type": "nonsense"}}}}, "text.format"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
        ({"reasoning": {"effort": "enormous"}}, "reasoning.effort"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"max_output_tokens": 1 << 20}, "max_output_tokens"),
        ({"top_logprobs": 1000}, "top_logprobs"),
        ({"temperature": -1}, "temperature"),
        ({"cache_salt": ""}, "cache_salt"),
        ({"background": True, "store": False}, "background can only be used when `store` is true"),
        ({"background": True, "stream": True}, "stream"),
        ({"include": ["everything"]}, "include[0]"),
        ({"metadata": {str(i): "x" for i in range(17)}}, "metadata"),
        ({"truncation": "middle"}, "truncation"),
        ({"stream_options": {"include_obfuscation": 5}, "stream": True}, "stream_options"),
        *(({name: value}, name) for name, value in {"conversation": "x", "max_tokens": 5}.items()),
        *(({name: value}, name) for name, value in {"n": 2, "prompt": {"id": "x"}, "messages": []}.items()),
    ],
)
def test_bad_input_is_refused_by_its_field(server, monkeypatch, fields, named):
    monkeypatch.setattr(ResponseStore, "put", lambda *stored: pytest.fail("something is kept"))
    sent = {name: value for name, value in (body() | fields).items() if value is not None}
    response = server.post("/v1/responses", sent)
    error = response.json()["error"]
    assert response.status_code == 400 and error["code"] == 400, error
    assert named in error["message"], error
    assert error["param"] is not None and error["param"].startswith(re.split(r"[.[ ]", named)[0])
    server.assert_nothing_is_held()


@pytest.mark.parametrize("named", ["previous_response_id", "model"])
def test_what_is_not_there_is_not_found(server, named):
    response = server.post("/v1/responses", body() | {named: "other"})
    assert response.status_code == 404 and response.json()["error"]["param"] == named
    assert server.get("/v1/responses/other?stream=true").status_code == 400


def test_deep_content_is_refused(server):
    deep = '{"model": "echo", "input": ' + "[" * 500_000 + "]" * 500_000 + "}"
    response = server.post("/v1/responses", content=deep, headers={"content-type": "application/json"})
    assert response.status_code == 400 and response.json()["error"]["param"] == "input"


@pytest.mark.parametrize("fault", ["pause_after=2", "fail_at_step=3"])
def test_a_failure_on_the_way_ends_the_stream(serve, fault):
    server = serve({"request_timeout": 1.0}, model=f"echo:{fault}")
    found = events(server, "Hello, hello, hello.")
    assert [event["type"] for event in found][-2:] == ["error", "response.failed"]
    response = found[-1]["response"]
    assert response["status"] == "failed" and response["error"]["code"] == "server_error"
    assert response["output"][0]["status"] == "incomplete" and response["error"]["message"] == found[-2]["message"]


def test_what_is_wrong_with_a_message_is_told_of_the_item():
    sent = ResponsesRequest.model_validate(body([user("x"), CALLED | {"arguments": "{"}, RESULT]))
    chat = to_chat(sent, [], make_input_items(sent, "resp_1", None), ToolTable(None), lambda sealed: None)
    error = chat.rename_error(InvalidRequest("messages[1].tool_calls: are wrong", "messages"))
    assert (error.message, error.param) == ("input[1].tool_calls: are wrong", "input")


@pytest.mark.parametrize(
    "value", [r'"\ud800"', "1" * 30, "NaN", "1e999", "[" * 200 + "]" * 200, '"' + "x" * 1_000_000 + '"']
)
@pytest.mark.parametrize(
    "place",
    [
        '"tools": [{"type": "function", "name": "x", "parameters": {"a": %s}}]',
        '"tools": [{"type": "function", "name": "x", "unknown": %s}]',
        '"text": {"format": {"type": "json_schema", "schema": {"a": %s}}}',
        '"input": [{"role": "user", "content": "x", "id": %s}]',
        '"input": [{"role": "user", "content": "x", "unknown": %s}]',
        '"input": [{"role": "assistant", "content": [{"type": "output_text", "text": "x", "logprobs": %s}]}]',
        '"metadata": {"a": %s}',
        '"tool_choice": {"type": "function", "name": %s}',
        '"chat_template_kwargs": {"a": %s}',
        '"kv_transfer_params": {"a": %s}',
    ],
)
def test_no_value_is_too_odd_to_be_answered(server, place, value):
    sent = '{"model": "echo", "max_output_tokens": 1, "input": "x", ' + place.replace("%s", value) + "}"
    response = server._http.post(
        server.url + "/v1/responses", content=sent, headers={"content-type": "application/json"}
    )
    assert response.status_code in (200, 400, 413), response.text[:300]
    server.assert_nothing_is_held()
