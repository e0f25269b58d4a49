"""Anthropic's Messages API. The engine echoes: what the last user says is what the model answers."""

import json

import pytest

from cairn.errors import InvalidRequest
from cairn.server.anthropic.requests import MessagesRequest
from cairn.server.anthropic.translation import to_chat
from server.asking import CALL, SCHEMA

TOOL = {"name": "weather", "description": "Tells it.", "input_schema": SCHEMA}
MARK = {"type": "ephemeral"}
PIXEL = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR4nGNgYGBgAAAABQABh6FO1AAAAABJRU5ErkJggg=="


def body(content="Hello.", **fields):
    messages = [{"role": "user", "content": content}]
    return {"model": "echo", "max_tokens": 900, "messages": messages} | fields


def answer(server, content="Hello.", **fields):
    response = server.post("/v1/messages", body(content, **fields))
    assert response.status_code == 200, response.text
    return response.json()


def events(server, content="Hello.", **fields):
    """The events of a stream: names and data."""
    response = server.post("/v1/messages", body(content, stream=True, **fields))
    assert response.headers["content-type"].startswith("text/event-stream")
    found = []
    for event in response.text.split("\n\n")[:-1]:
        name, data = event.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found


def joined(found):
    """The message that a stream's events add up to, as Anthropic's clients put it together."""
    message = found[0]["message"]
    for event in found[1:]:
        match event["type"]:
            case "content_block_start":
                assert event["index"] == len(message["content"])
                message["content"].append(dict(event["content_block"]))
                pieces = []
            case "content_block_delta":
                block, delta = message["content"][event["index"]], event["delta"]
                match delta["type"]:
                    case "text_delta":
                        block["text"] += delta["text"]
                    case "thinking_delta":
                        block["thinking"] += delta["thinking"]
                    case "signature_delta":
                        block["signature"] = delta["signature"]
                    case "input_json_delta":
                        pieces.append(delta["partial_json"])
            case "content_block_stop":
                block = message["content"][event["index"]]
                if block["type"] == "tool_use":
                    block["input"] = json.loads("".join(pieces) or "{}")
            case "message_delta":
                message |= event["delta"] | {"usage": event["usage"]}
    assert found[-1]["type"] == "message_stop"
    return message


def prompt_of(server):
    """What the engine was asked last, as text."""
    ids = server.requests[-1].prompt
    tokens = [int.from_bytes(ids[i : i + 8], "little") for i in range(0, len(ids), 8)]
    return server._tokenizer.decode(tokens)


def without_ids(message):
    """Signatures are others each time, too."""
    replaced = ("id", "signature")
    content = [block | {name: name for name in replaced if block.get(name)} for block in message["content"]]
    return message | {"id": "id", "content": content}


def test_an_answer(server):
    found = answer(server, "What is a lease?")
    assert found["type"] == "message" and found["role"] == "assistant" and found["id"].startswith("msg_")
    assert [block["type"] for block in found["content"]] == ["text"]
    assert "What is a lease?" in found["content"][0]["text"]
    assert (found["stop_reason"], found["stop_sequence"]) == ("end_turn", None)


def test_thinking_and_calls_are_blocks(xml):
    found = answer(xml, f"A thought.</think>So be it.\n{CALL}\n{CALL}", tools=[TOOL], thinking={"type": "adaptive"})
    # the echo goes on behind the calls
    assert [block["type"] for block in found["content"]] == ["thinking", "text", "tool_use", "tool_use", "text"]
    first, second = found["content"][2:4]
    assert found["content"][0]["thinking"].endswith("A thought.")
    assert first["input"] == {"city": "Oslo"} and first["name"] == "weather" and first["id"] != second["id"]
    assert found["stop_reason"] == "tool_use"


@pytest.mark.parametrize("thinking", [{"type": "adaptive"}, {"type": "enabled", "budget_tokens": 500}])
def test_thinking_may_be_omitted(xml, thinking):
    """Its signature has it."""
    text, thinking = "A thought.</think>So be it.", thinking | {"display": "omitted"}
    found = events(xml, text, thinking=thinking)
    deltas = [event["delta"]["type"] for event in found if event["type"] == "content_block_delta"]
    assert deltas[0] == "signature_delta" and set(deltas[1:]) == {"text_delta"}
    for message in (joined(found), answer(xml, text, thinking=thinking)):
        first, second = message["content"]
        assert (first["type"], first["thinking"], second["type"]) == ("thinking", "", "text") and first["signature"]
    shown = answer(xml, text, thinking=thinking | {"display": "summarized"})["content"]
    assert shown[0]["thinking"].endswith("A thought.") and shown[0]["signature"] and shown[1:] == message["content"][1:]


@pytest.mark.parametrize("text", ["Hello.", f"So.\n{CALL}\n{CALL}", f"{CALL}", "<think>I think</think>So."])
def test_a_stream_adds_up_to_the_answer(xml, text):
    found = joined(events(xml, text, tools=[TOOL]))
    whole = answer(xml, text, tools=[TOOL])
    del whole["cairn"], whole["kv_transfer_params"]
    # sent for the second time: what was cached is other
    assert without_ids(found) | {"usage": None} == without_ids(whole) | {"usage": None}


def test_events_come_in_their_order(xml):
    names = [event["type"] for event in events(xml, f"So.\n{CALL}", tools=[TOOL])]
    assert names[:3] == ["message_start", "ping", "content_block_start"]
    assert names[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    # the echo goes on behind the call
    assert names.count("content_block_start") == names.count("content_block_stop") == 3


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("fields", "ending"),
    [
        ({"max_tokens": 3}, {"stop_reason": "max_tokens", "stop_sequence": None}),
        ({"stop_sequences": ["llo"]}, {"stop_reason": "stop_sequence", "stop_sequence": "llo"}),
        ({}, {"stop_reason": "end_turn", "stop_sequence": None}),
    ],
)
def test_why_it_ended(server, stream, fields, ending):
    found = joined(events(server, **fields)) if stream else answer(server, **fields)
    assert found | ending == found


def test_the_prompt_is_that_of_the_same_chat(xml):
    """System, tools, calls, results and thinking are where a chat has them."""
    said = [
        {"role": "user", "content": [{"type": "text", "text": "How is the weather?"}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "I should ask.", "signature": "x"},
                {"type": "text", "text": "Let me see."},
                {"type": "tool_use", "id": "toolu_1", "name": "weather", "input": {"city": "Oslo"}},
                {"type": "tool_use", "id": "toolu_2", "name": "weather", "input": {"city": "Rome"}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "toolu_1", "content": "rain"},
                {
                    "type": "tool_result",
                    "tool_use_id": "toolu_2",
                    "content": [{"type": "text", "text": "no such city"}],
                    "is_error": True,
                },
                {"type": "text", "text": "Go on."},
            ],
        },
    ]
    fields = {"tools": [TOOL], "system": [{"type": "text", "text": "Be brief."}]}
    assert xml.post("/v1/messages", body(**fields) | {"messages": said}).status_code == 200
    prompt = prompt_of(xml)
    function = {"name": "weather", "description": "Tells it.", "parameters": SCHEMA}
    calls = [
        {"id": f"toolu_{i}", "type": "function", "function": {"name": "weather", "arguments": {"city": city}}}
        for i, city in ((1, "Oslo"), (2, "Rome"))
    ]
    chat = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "How is the weather?"},
        {"role": "assistant", "content": "Let me see.", "tool_calls": calls, "reasoning_content": "I should ask."},
        {"role": "tool", "tool_call_id": "toolu_1", "content": "rain"},
        {"role": "tool", "tool_call_id": "toolu_2", "content": "Error: no such city"},
        {"role": "user", "content": "Go on."},
    ]
    same = {"model": "echo", "messages": chat, "tools": [{"type": "function", "function": function}], "max_tokens": 9}
    assert xml.post("/v1/chat/completions", same).status_code == 200
    assert prompt_of(xml) == prompt
    assert prompt.index("Be brief.") < prompt.index("rain") < prompt.index("Error: no such city")


def test_what_the_answer_begins_with(server):
    said = [{"role": "user", "content": "Count."}, {"role": "assistant", "content": "One, two,"}]
    assert server.post("/v1/messages", body() | {"messages": said}).status_code == 200
    assert prompt_of(server).endswith("One, two,")


@pytest.mark.parametrize(
    ("choice", "sent"),
    [
        ({"type": "auto"}, {"tool_choice": "auto"}),
        ({"type": "any", "disable_parallel_tool_use": True}, {"tool_choice": "required", "parallel_tool_calls": False}),
        (
            {"type": "tool", "name": "weather"},
            {"tool_choice": {"type": "function", "function": {"name": "weather"}}},
        ),
    ],
)
def test_tool_choice_is_a_chats(xml, choice, sent):
    found = xml.post("/v1/messages", body(tools=[TOOL], tool_choice=choice, max_tokens=60))
    structure = xml.requests[-1].structure
    function = {"name": "weather", "description": "Tells it.", "parameters": SCHEMA}
    chat = {"model": "echo", "messages": [{"role": "user", "content": "Hello."}], "max_tokens": 60}
    same = xml.post("/v1/chat/completions", chat | {"tools": [{"type": "function", "function": function}]} | sent)
    assert (found.status_code, same.status_code) == (200, 200)
    assert structure == xml.requests[-1].structure
    assert (structure is None) == (choice["type"] == "auto")


def test_marks_are_held_and_counted(serve):
    """What a breakpoint marks is written to the cache by the first request and read from it by the second."""
    server = serve()
    system = [{"type": "text", "text": "Rules. " * 100, "cache_control": MARK}]
    first = answer(server, "Hello.", system=system)["usage"]
    second = answer(server, "Good-bye.", system=system)["usage"]
    assert first["cache_read_input_tokens"] == 0 and first["cache_creation_input_tokens"] >= 700
    assert second["cache_read_input_tokens"] >= 640
    for usage, text in ((first, "Hello."), (second, "Good-bye.")):
        counted = server.post(
            "/v1/messages/count_tokens", {k: v for k, v in body(text, system=system).items() if k != "max_tokens"}
        )
        parts = ("input_tokens", "cache_creation_input_tokens", "cache_read_input_tokens")
        assert sum(usage[part] for part in parts) == counted.json()["input_tokens"]
    assert server.core.stats().prefix_cache.held_checkpoints >= 1


def test_a_stream_says_at_once_what_was_cached(serve):
    server = serve()
    system = [{"type": "text", "text": "Rules. " * 100, "cache_control": MARK}]
    for _ in range(2):
        found = events(server, "Hello.", system=system)
        first, last = found[0]["message"]["usage"], found[-2]["usage"]
        assert first | {"output_tokens": last["output_tokens"]} == last and first["output_tokens"] == 0
    assert last["cache_read_input_tokens"] >= 640


def test_six_turns_hit_what_a_chat_hits(serve):
    """The same conversation, through both APIs, on a server each."""
    hits = []
    for api in ("messages", "chat/completions"):
        server, said, found = serve(), [], []
        for turn in range(6):
            said.append({"role": "user", "content": f"Turn {turn}. " + "And so on. " * 20})
            sent = {"model": "echo", "max_tokens": 100, "messages": [{"role": "system", "content": "Be kind."}, *said]}
            if api == "messages":
                sent |= {"system": "Be kind.", "messages": said}
            reply = server.post(f"/v1/{api}", sent).json()
            text = reply["content"][0]["text"] if api == "messages" else reply["choices"][0]["message"]["content"]
            said.append({"role": "assistant", "content": text})
            found.append(reply["cairn"]["cache"])
            server.assert_nothing_is_held()
        hits.append(found)
    assert hits[0] == hits[1]
    assert hits[0][-1]["cached_tokens"] > 500


# -- bad input ---------------------------------------------------------------------------------------------------------


def refused(server, sent, status=400, path="/v1/messages"):
    response = server.post(path, sent)
    assert response.status_code == status, response.text
    found = response.json()
    assert found["type"] == "error" and found["request_id"] == response.headers["x-request-id"]
    return found["error"]


CALLED = {"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "weather", "input": {}}]}
RESULT = {"type": "tool_result", "tool_use_id": "a", "content": "rain"}
IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": PIXEL}}


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "narrator", "content": "x"}]}, "messages[0]"),
        ({"messages": [{"role": "user", "content": [{"type": "video"}]}]}, "messages[0].content[0]"),
        ({"messages": [{"role": "user", "content": []}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [RESULT]}]}, "messages[0].content[0].tool_use_id"),
        (
            {"messages": [CALLED, {"role": "user", "content": [RESULT | {"tool_use_id": "b"}]}]},
            "messages[1].content[0]",
        ),
        ({"messages": [{"role": "assistant", "content": [IMAGE]}]}, "messages[0].content[0]"),
        ({"messages": [{"role": "user", "content": "x"}, CALLED]}, "messages[1]"),
        ({"system": [IMAGE]}, "system[0]"),
        ({"system": 5}, "system"),
        ({"tools": [{"type": "", "name": "bash"}]}, "tools[0].type"),
        ({"tools": [{"name": "x"}]}, "tools[0].input_schema"),
        ({"tool_choice": {"type": "tool"}, "tools": [TOOL]}, "tool_choice.name"),
        ({"tool_choice": {"type": "some"}, "tools": [TOOL]}, "tool_choice"),
        ({"stop_sequences": ["x"] * 17}, "stop_sequences"),
        ({"temperature": -1}, "temperature"),
        ({"cache_salt": ""}, "cache_salt"),
        ({"thinking": {"type": "enabled"}}, "thinking"),
        ({"messages": [{"role": "user", "content": [IMAGE]}]}, "messages[0].content[0]"),
        ({"output_config": {"format": {"type": "json_schema", "schema": {"type": "nonsense"}}}}, "output_config"),
    ],
)
def test_bad_input_is_refused_by_its_field(server, fields, named):
    sent = body() | fields
    error = refused(server, {name: value for name, value in sent.items() if value is not None})
    assert error["type"] == "invalid_request_error"
    assert named in error["message"], error
    server.assert_nothing_is_held()


def test_an_image_in_a_result_is_named_where_it_is(server):
    said = [CALLED, {"role": "user", "content": [{"type": "text", "text": "So:"}, RESULT | {"content": [IMAGE]}]}]
    error = refused(server, body() | {"messages": [{"role": "user", "content": "Go."}, *said]})
    assert "messages[2].content[1]" in error["message"], error


def test_other_models_are_not_found(server):
    assert refused(server, body(model="other"), 404)["type"] == "not_found_error"
    sent = {"model": "other", "messages": [{"role": "user", "content": "x"}]}
    assert refused(server, sent, 404, "/v1/messages/count_tokens")["type"] == "not_found_error"


def test_keys_come_as_anthropics_clients_send_them(serve):
    server = serve({"api_key": ("secret",)})
    assert refused(server, body(), 401)["type"] == "authentication_error"
    for headers in ({"x-api-key": "secret"}, {"Authorization": "Bearer secret"}):
        assert server.post("/v1/messages", body(), headers=headers).status_code == 200
    assert server.post("/v1/messages", body(), headers={"x-api-key": "wrong"}).status_code == 401


def test_deep_content_is_refused(server):
    deep = '{"model": "echo", "max_tokens": 5, "messages": ' + "[" * 100_000 + "]" * 100_000 + "}"
    response = server.post("/v1/messages", content=deep, headers={"content-type": "application/json"})
    assert response.status_code == 400 and response.json()["type"] == "error"


def test_what_only_the_chats_schema_refuses_is_the_clients_error():
    sent = MessagesRequest.model_validate(body()).model_copy(update={"cache_salt": "a\n"})
    with pytest.raises(InvalidRequest, match="cache_salt must match") as found:
        to_chat(sent, lambda sealed: None)
    assert found.value.param == "cache_salt"
