"""What agents really send to /v1/responses: tools of other types, the items that their calls are, and histories that
other servers have made."""

import json

import pytest

from cairn.proxy.app import create_app
from cairn.proxy.options import ProxyOptions
from cairn.proxy.service import ProxyService
from cairn.server.openai_responses.output_items import OutputCustomCall
from cairn.server.sealed_reasoning import ReasoningSeal
from doubles.byte_tokenizer import ByteTokenizer
from server.asking import SCHEMA, XML

PATCH = "*** Begin Patch\n*** Add File: a.py\n+print(\"ä\", '\\u00e4')\n*** End Patch"
GRAMMAR = {"type": "grammar", "syntax": "lark", "definition": "start: /.+/"}
APPLY_PATCH = {"type": "custom", "name": "apply_patch", "description": "Edits files.", "format": GRAMMAR}
SHELL = {"type": "local_shell"}
WEATHER = {"type": "function", "name": "weather", "parameters": SCHEMA}
SPACE = {"type": "namespace", "name": "mcp__maps", "description": "Maps.", "tools": [WEATHER]}
HOSTED = [
    {"type": "web_search", "external_web_access": False},
    *(
        {"type": kind}
        for kind in ("web_search_preview", "image_generation", "code_interpreter", "computer_use_preview")
    ),
    {"type": "tool_search", "execution": "client", "description": "x", "parameters": {"type": "object"}},
    {"type": "mcp", "server_label": "x", "server_url": "https://a.example"},
    {"type": "file_search", "vector_store_ids": ["x"]},
]


def called(name, **arguments):
    """A call as the model writes it."""
    parameters = "".join(
        f"<parameter={key}>\n{value if isinstance(value, str) else json.dumps(value)}\n</parameter>\n"
        for key, value in arguments.items()
    )
    return f"<tool_call>\n<function={name}>\n{parameters}</function>\n</tool_call>"


def user(text="Hello."):
    return {"role": "user", "content": text}


def body(given, **fields):
    return {"model": "echo", "max_output_tokens": 3000, "input": given} | fields


def answer(server, given, **fields):
    response = server.post("/v1/responses", body(given, **fields))
    assert response.status_code == 200, response.text
    return response.json()


def events(server, given, **fields):
    response = server.post("/v1/responses", body(given, stream=True, **fields))
    assert response.status_code == 200, response.text
    return [json.loads(event.partition("data: ")[2]) for event in response.text.split("\n\n")[:-1]]


def prompt_of(server):
    ids = server.requests[-1].prompt
    return server._tokenizer.decode([int.from_bytes(ids[i : i + 8], "little") for i in range(0, len(ids), 8)])


def prompt(server, given, **fields):
    answer(server, given, **{"max_output_tokens": 2} | fields)
    return prompt_of(server)


def calls(response):
    return [item for item in response["output"] if item["type"].endswith("_call")]


# -- tools -------------------------------------------------------------------------------------------------------------


def test_a_custom_tool_is_called_with_its_text(xml):
    """The model sees a function with one text, and what it says is the item's input."""
    given = called("apply_patch", input=PATCH)
    found = answer(xml, given, tools=[APPLY_PATCH])
    (item,) = calls(found)
    assert (item["type"], item["name"], item["input"]) == ("custom_tool_call", "apply_patch", PATCH)
    assert item["id"].startswith("ctc_") and item["call_id"] and item["status"] == "completed"
    assert found["tools"] == [APPLY_PATCH]
    (function,) = json.loads(prompt_of(xml).partition("tools\n")[2].partition("user\n")[0])
    assert function["function"]["parameters"]["required"] == ["input"]
    assert GRAMMAR["definition"] in function["function"]["parameters"]["properties"]["input"]["description"]


def test_the_events_of_a_custom_tools_call(xml):
    found = events(xml, called("apply_patch", input=PATCH), tools=[APPLY_PATCH])
    (item,) = calls(found[-1]["response"])
    own = [event for event in found if event.get("item_id") == item["id"]]
    name = "response.custom_tool_call_input"
    assert {event["type"] for event in own} == {f"{name}.delta", f"{name}.done"}
    assert "".join(event["delta"] for event in own[:-1]) == own[-1]["input"] == item["input"] == PATCH
    added, done = (event for event in found if event.get("item", {}).get("id") == item["id"])
    assert (added["type"], added["item"]["input"]) == ("response.output_item.added", "")
    assert (done["type"], done["item"]) == ("response.output_item.done", item)


@pytest.mark.parametrize("choice", ["required", {"type": "custom", "name": "apply_patch"}])
def test_a_custom_tool_may_be_required(server, choice):
    answer(server, "Hello.", tools=[APPLY_PATCH, WEATHER], tool_choice=choice)
    (tool, *others) = json.loads(server.requests[-1].structure.text)["tools"]
    assert tool["name"] == "apply_patch" and len(others) == (choice == "required")


@pytest.mark.parametrize(
    ("sent", "text"),
    [
        ('{"input": "a\\n\\"b\\"\\\\ \\ud83d\\ude00 \\u00e4"}', 'a\n"b"\\ 😀 ä'),
        ('{ "input" :"\\\\ud83d"}', "\\ud83d"),
        ('{"input": "cut off\\u00', "cut off"),
        ('{"input": "half \\ud83d"}', "half ?"),
        ('{"other": 1, "input": "x"}', "x"),
        ('{"patch": "x"}', '{"patch": "x"}'),
        ('{"input": 5}', '{"input": 5}'),
        ("no JSON", "no JSON"),
        ('{"inp', ""),
        ("{}", ""),
        ('{"input": "\\uZZZZ bad"}', "\\uZZZZ bad"),
        ('{"input": ""}', ""),
    ],
)
@pytest.mark.parametrize("size", [1, 2, 7, 1000])
def test_an_input_is_read_from_pieces_of_any_size(sent, text, size):
    item = OutputCustomCall({"type": "custom_tool_call"}, 0)
    told = [item.add(sent[at : at + size]) for at in range(0, len(sent), size)]
    assert "".join([*told, item.finish()]) == item.done()["input"] == text


def test_the_local_shell_is_called_with_a_command(xml):
    given = called("local_shell", command=["ls", "-l"], working_directory="/tmp", timeout_ms=5)
    (item,) = calls(answer(xml, given, tools=[SHELL]))
    action = {"type": "exec", "command": ["ls", "-l"], "env": {}, "timeout_ms": 5, "user": None}
    assert item["type"] == "local_shell_call" and item["action"] == action | {"working_directory": "/tmp"}
    found = events(xml, given, tools=[SHELL])
    (item,) = calls(found[-1]["response"])
    own = [event for event in found if event.get("item", {}).get("id") == item["id"]]
    assert own[0]["item"]["action"]["command"] == [] and own[1]["item"] == item
    assert not [event for event in found if event.get("item_id") == item["id"]]


def test_a_namespaces_tools_have_their_own_names(xml):
    (item,) = calls(answer(xml, called("weather", city="Oslo"), tools=[SPACE]))
    assert (item["name"], item["namespace"], item["type"]) == ("weather", "mcp__maps", "function_call")
    found = answer(xml, called("mcp__maps__weather", city="Oslo"), tools=[WEATHER, SPACE])
    (item,) = calls(found)
    assert (item["name"], item["namespace"]) == ("weather", "mcp__maps")
    assert [tool["type"] for tool in found["tools"]] == ["function", "namespace"]
    (item,) = calls(answer(xml, called("weather", city="Oslo"), tools=[WEATHER, SPACE]))
    assert item["name"] == "weather" and "namespace" not in item


def test_it_runs_without_hosted_tools(xml, caplog):
    wanted = prompt(xml, "Hello.", tools=[WEATHER])
    with caplog.at_level("INFO", "cairn.server.notices"):
        for tools in ([*HOSTED, WEATHER], [WEATHER, *HOSTED]):
            found = answer(xml, "Hello.", tools=tools, max_output_tokens=2)
            assert prompt_of(xml) == wanted and [tool["type"] for tool in found["tools"]] == ["function"]
    assert len(caplog.messages) == len(HOSTED)
    bare = prompt(xml, "Hello.")
    for choice in ("required", {"type": "web_search"}, {"type": "allowed_tools", "mode": "auto", "tools": HOSTED[:1]}):
        assert prompt(xml, "Hello.", tools=HOSTED, tool_choice=choice) == bare
    some = {"type": "allowed_tools", "mode": "required", "tools": [HOSTED[0], {"type": "function", "name": "weather"}]}
    assert prompt(xml, "Hello.", tools=[*HOSTED, WEATHER], tool_choice=some) == wanted
    assert xml.requests[-1].structure.kind == "calls"


@pytest.mark.parametrize("tool", HOSTED)
def test_a_strict_server_refuses_hosted_tools(running_server, tool):
    server = running_server({"strict_tools": True})
    try:
        error = server.post("/v1/responses", body("Hello.", tools=[WEATHER, tool])).json()["error"]
        assert error["code"] == 400 and error["param"] == "tools" and "tools[1].type" in error["message"]
    finally:
        server.drain()
        server.join()


def test_openais_client_reads_the_calls(xml):
    """As it types them, whole and as events; and takes them back."""
    given = "\n".join(
        (called("apply_patch", input=PATCH), called("local_shell", command=["ls"]), called("weather", city="A"))
    )
    client, fields = xml.client(), {"model": "echo", "tools": [APPLY_PATCH, SHELL, SPACE], "max_output_tokens": 2000}
    found = client.responses.create(input=given, **fields)
    patch, shell, weather = (item for item in found.output if item.type.endswith("_call"))
    assert (patch.input, shell.action.command, weather.namespace) == (PATCH, ["ls"], "mcp__maps")
    streamed = list(client.responses.create(input=given, stream=True, **fields))
    deltas = [event.delta for event in streamed if event.type == "response.custom_tool_call_input.delta"]
    assert "".join(deltas) == PATCH and type(streamed[-1].response.output[-1]) is type(found.output[-1])
    kept = [item.model_dump(exclude_none=True) for item in found.output]
    outputs = [{"type": "custom_tool_call_output", "call_id": patch.call_id, "output": "Done."}]
    outputs += [{"type": "function_call_output", "call_id": one.call_id, "output": "Ja."} for one in (shell, weather)]
    client.responses.create(input=[user(given), *kept, *outputs], **fields | {"max_output_tokens": 2})
    assert "Done." in prompt_of(xml) and prompt_of(xml).count("Ja.") == 2


# -- histories ---------------------------------------------------------------------------------------------------------

CALLED = {"type": "function_call", "call_id": "a", "name": "weather", "arguments": "{}"}
RESULT = {"type": "function_call_output", "call_id": "a", "output": "rain"}


def test_calls_of_all_kinds_are_read(xml):
    """As they were answered, and in the forms that agents keep them in."""
    patched = {"type": "custom_tool_call", "call_id": "b", "name": "apply_patch", "input": PATCH, "status": "completed"}
    action = {"type": "exec", "command": ["ls"], "env": {"A": "b"}, "timeout_ms": None, "working_directory": "/tmp"}
    listed = {"type": "local_shell_call", "id": "lsh_1", "call_id": "c", "action": action, "status": "completed"}
    other = {"type": "local_shell_call", "id": "lsh_2", "action": {"type": "exec", "command": ["pwd"]}}
    said = [
        *(user(), patched, {"type": "custom_tool_call_output", "call_id": "b", "output": "Done."}),
        *(listed, {"type": "function_call_output", "call_id": "c", "output": "a.py"}),
        *(other, {"type": "local_shell_call_output", "id": "lsh_2", "output": "/home"}),
        user("Well?"),
    ]
    found = prompt(xml, said, tools=[APPLY_PATCH, SHELL])
    history = found.partition("Hello.")[2]
    arguments = [
        {"input": PATCH},
        {"command": ["ls"], "working_directory": "/tmp"},
        {"command": ["pwd"]},
    ]
    for one, result in zip(arguments, ("Done.", "a.py", "/home"), strict=True):
        shown = f'"arguments": {json.dumps(one, sort_keys=True)}'
        assert shown in history and result in history.partition(shown)[2]


def test_calls_of_a_namespace_are_read(xml):
    said = [user(), CALLED | {"namespace": "mcp__maps"}, RESULT]
    assert '"name": "mcp__maps__weather"' in prompt(xml, said, tools=[WEATHER, SPACE]).partition("Hello.")[2]
    assert '"name": "weather"' in prompt(xml, said, tools=[SPACE]).partition("Hello.")[2]
    assert '"name": "weather"' in prompt(xml, said).partition("Hello.")[2]


def test_what_others_have_done_is_left_out(xml):
    search = {
        "type": "web_search_call",
        "id": "ws_1",
        "status": "completed",
        "action": {"type": "search", "query": "x"},
    }
    summary = {"type": "compaction", "encrypted_content": "gAAAAAB"}
    foreign = {"type": "reasoning", "id": "rs_x", "summary": [], "encrypted_content": "gAAAAABo"}
    bare = prompt(xml, [user("One."), {"role": "assistant", "content": "Two."}, user("Three.")])
    said = [summary, user("One."), foreign, search, {"role": "assistant", "content": "Two."}, user("Three.")]
    assert prompt(xml, said) == bare


@pytest.mark.parametrize(
    ("output", "shown"),
    [
        ({"content": "rain", "success": True}, '{"content": "rain", "success": true}'),
        ({}, "{}"),
        ([], ""),
        ("", ""),
        ([{"type": "input_text", "text": "ra"}, {"type": "input_text", "text": "in"}], "rain"),
    ],
)
def test_outputs_are_texts(server, output, shown):
    assert f"tool\n{shown}assistant\n" in prompt(server, [user(), CALLED, RESULT | {"output": output}])


@pytest.mark.parametrize("arguments", ['{"city": "Os', "null", None, ""])
def test_a_call_that_was_cut_off_is_gone_on_with(xml, arguments):
    cut = CALLED | {"arguments": arguments, "status": "incomplete"}
    for more in ([], [RESULT], [user("Go on.")]):
        assert prompt(xml, [user(), cut, *more]).endswith("assistant\n")
    refused = xml.post("/v1/responses", body([user(), CALLED]))
    assert refused.status_code == 400 and "'a'" in refused.json()["error"]["message"]


@pytest.mark.parametrize("tool", [WEATHER, APPLY_PATCH, SHELL])
def test_our_own_cut_answer_is_gone_on_with(xml, tool):
    """By its id, and with its items as they came."""
    given = called(
        tool.get("name", "local_shell"),
        **{"weather": {"city": "Oslo"}, "apply_patch": {"input": "Oslo"}}.get(
            tool.get("name"), {"command": ["echo", "Oslo"]}
        ),
    )
    num_tokens = prompt(xml, given, tools=[tool]).rindex("Oslo") + 2
    cut = answer(xml, given, tools=[tool], max_output_tokens=num_tokens)
    assert cut["status"] == "incomplete" and cut["output"][-1]["status"] == "incomplete"
    assert cut["output"][-1].get("action", {}).get("command", []) == []
    for more in ("Go on.", [user("Go on.")]):
        assert prompt(xml, more, previous_response_id=cut["id"], tools=[tool]).endswith("Go on.assistant\n")
    for more in ([], [user("Go on.")]):
        assert prompt(xml, [user(given), *cut["output"], *more], tools=[tool])


# -- reasoning that the client keeps -----------------------------------------------------------------------------------

THOUGHT = "A thought.</think>So be it."
SEALED = {"include": ["reasoning.encrypted_content"], "store": False, "reasoning": {"effort": "high"}}


class Spy(ByteTokenizer):
    """Writes down what was rendered, reasoning included, of which its chats show nothing."""

    def render_chat(self, messages, **more):
        self.rendered = messages
        return super().render_chat(messages, **more)


@pytest.fixture(scope="module")
def spied(running_server):
    running = running_server(tokenizer=Spy(chat_template=XML))
    yield running
    running.drain()
    running.join()


def reasoning_of(server, given, **fields):
    answer(server, given, max_output_tokens=2, **fields)
    return [
        message.get("reasoning_content") for message in server._tokenizer.rendered if message["role"] == "assistant"
    ]


@pytest.mark.parametrize("stream", [False, True])
def test_encrypted_reasoning_comes_back(spied, stream):
    found = events(spied, THOUGHT, **SEALED)[-1]["response"] if stream else answer(spied, THOUGHT, **SEALED)
    item = found["output"][0]
    assert item["encrypted_content"] and "thought" not in item["encrypted_content"]
    text = item["content"][0]["text"]
    kept = {"type": "reasoning", "id": item["id"], "summary": [], "encrypted_content": item["encrypted_content"]}
    said = [user(THOUGHT), kept, *found["output"][1:], user("And?")]
    assert reasoning_of(spied, said) == [text]
    for broken in ("gAAAAABo", item["encrypted_content"][:-6] + "AAAAA=", "cairn1.", "cairn1.ä"):
        said[1] = kept | {"encrypted_content": broken}
        assert reasoning_of(spied, said) == [None]
    assert reasoning_of(spied, [user(THOUGHT), kept, *found["output"][1:], user("And?")], cache_salt="b") == [None]
    plain = answer(spied, THOUGHT, reasoning={"effort": "high"})
    assert plain["output"][0]["encrypted_content"] is None


def test_who_shares_the_secret_reads_it():
    one, same, other = ReasoningSeal(b"x" * 16), ReasoningSeal(b"x" * 16), ReasoningSeal(b"y" * 16)
    sealed = one.close("ein Gedänke", ("key", ""))
    assert same.open(sealed, ("key", "")) == "ein Gedänke"
    assert other.open(sealed, ("key", "")) is same.open(sealed, ("other", "")) is None
    assert ReasoningSeal().open(sealed, ("key", "")) is None


def test_it_all_goes_through_the_proxy(serve, run_app):
    decode = [serve() for _ in range(2)]
    proxy = run_app(create_app(ProxyService(ProxyOptions(decode=[server.url for server in decode]))))
    sent = body([user(), CALLED, RESULT | {"output": {}}, user("Well?")], tools=[APPLY_PATCH, SHELL, SPACE, *HOSTED])
    first = proxy.http.post("/v1/responses", json=sent)
    assert first.status_code == 200, first.text
    again = proxy.http.post("/v1/responses", json=body("More.", previous_response_id=first.json()["id"]))
    assert again.status_code == 200, again.text
    assert sorted(len(server.requests) for server in decode) == [0, 2]
