"""Chats with tools, tool results, template settings and breakpoints, as clients and gateways send them."""

import json

import numpy as np
import pytest

PATH = "/v1/chat/completions"
USER = {"role": "user", "content": "x"}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
HOUR = {"type": "ephemeral", "ttl": "1h"}


def refused(response):
    """The error of a 400; the server must not have taken anything for it."""
    assert response.status_code == 400, response.text
    return response.json()["error"]


def text(part, **mark):
    return {"type": "text", "text": part, **mark}


@pytest.fixture
def server(serve):
    return serve()


@pytest.fixture(scope="module")
def never_asked(running_server):
    """A server for those alone whose requests do not reach the engine."""
    running = running_server()
    yield running
    running.drain()
    running.join()


def ask(server, messages, **fields):
    """The prompt that reached the engine as text, and its boundaries by the text that they end."""
    response = server.post(PATH, {"messages": messages, "max_tokens": 1, **fields})
    assert response.status_code == 200, response.text
    request = server.requests[-1]
    tokens = np.frombuffer(request.prompt, np.int64)
    prompt = "".join(chr(token) if token < 256 else "|" for token in tokens)
    return prompt, {prompt[: end.position]: (end.kind, end.retain_seconds) for end in request.boundaries}


def test_tools_calls_and_results_are_part_of_the_prompt(server):
    messages = [
        USER,
        {"role": "assistant", "content": None, "tool_calls": [CALL], "refusal": None},
        {"role": "tool", "tool_call_id": "c1", "content": [text("4"), text("2")]},
    ]
    for choice in ({}, {"tool_choice": "auto"}, {"tool_choice": "none"}, {"tool_choice": None}):
        prompt, ends = ask(server, messages, tools=[TOOL], **choice)
        assert prompt.startswith(f"|tools\n{json.dumps([TOOL], sort_keys=True)}|")
        assert '"arguments": "{\\"x\\": 1}"' in prompt and "|tool\n42|" in prompt
        assert [kind for kind, _ in ends.values()] == ["system_end"] + ["message_end"] * 3


def test_tokenize_renders_the_same_chat(server):
    fields = {"tools": [TOOL], "chat_template_kwargs": {"enable_thinking": True}}
    prompt, _ = ask(server, [USER], **fields)
    tokens = server.post("/tokenize", {"messages": [USER], **fields}).json()["tokens"]
    assert len(tokens) == len(prompt) and prompt.endswith("<think>")


def test_template_settings(server):
    assert ask(server, [USER], chat_template_kwargs={"enable_thinking": True})[0].endswith("assistant\n<think>")
    assert ask(server, [USER], chat_template_kwargs={"enable_thinking": False})[0].endswith("assistant\n")
    assert ask(server, [USER], chat_template_kwargs={"enable_thinking": None, "reasoning_effort": "low"})
    assert ask(server, [USER], chat_template_kwargs={}) == ask(server, [USER], chat_template_kwargs=None)
    anything = {"controls": {"length": ["short", 1.5, None]}, "messages_": nested(14)}
    assert ask(server, [USER], chat_template_kwargs=anything) == ask(server, [USER])


def test_reasoning_effort_reaches_the_template_and_switches_thinking(server):
    low, _ = ask(server, [USER], reasoning_effort="low")
    assert low.startswith('|reasoning_effort\n"low"|') and low.endswith("<think>")
    none, _ = ask(server, [USER], reasoning_effort="none")
    assert none.startswith('|reasoning_effort\n"none"|') and none.endswith("assistant\n")
    fields = {"reasoning_effort": "high", "chat_template_kwargs": {"enable_thinking": False, "reasoning_effort": "low"}}
    high, _ = ask(server, [USER], **fields)
    assert high.startswith('|reasoning_effort\n"high"|') and high.endswith("assistant\n")
    assert ask(server, [USER], reasoning_effort=None) == ask(server, [USER])
    tokens = server.post("/tokenize", {"messages": [USER], **fields}).json()["tokens"]
    assert len(tokens) == len(high)


def test_documents_reach_the_template(server):
    documents = [{"title": "Cairns", "text": "Heaps of stones."}]
    prompt, _ = ask(server, [USER], documents=documents)
    assert prompt.startswith(f"|documents\n{json.dumps(documents)}|")
    assert ask(server, [USER], documents=None) == ask(server, [USER])
    assert ask(server, [USER], chat_template_kwargs={"documents": documents})[0] == prompt


def test_a_request_may_bring_its_template_where_the_server_says_so(serve):
    server = serve({"trust_request_chat_template": True})
    prompt, _ = ask(server, [USER], chat_template="{{ messages }}")
    assert prompt.startswith("|template\n{{ messages }}|")
    assert ask(server, [USER], chat_template="") == ask(server, [USER], chat_template=None)
    tokens = server.post("/tokenize", {"messages": [USER], "chat_template": "{{ messages }}"}).json()["tokens"]
    assert len(tokens) == len(prompt)
    long = refused(server.post(PATH, {"messages": [USER], "chat_template": "x" * ((1 << 16) + 1)}))
    assert long["param"] == "chat_template" and "at most 65536 characters" in long["message"]


def test_texts_under_other_names_are_texts(server):
    """The Responses API's, what an assistant has refused or thought, and plain strings: as vLLM takes them."""
    parts = [
        *({"type": kind, "text": kind} for kind in ("text", "input_text", "output_text")),
        {"type": "refusal", "refusal": "no", "cache_control": EPHEMERAL},
        {"type": "thinking", "thinking": "hm", "closed": True},
        "alone",
    ]
    prompt, ends = ask(server, [{"role": "user", "content": parts}, {"role": "assistant", "content": ["a", "b"]}])
    assert "|user\ntextinput_textoutput_textnohmalone||assistant\nab|" in prompt
    assert [text[-6:] for text, end in ends.items() if end == ("breakpoint", 300)] == ["textno"]
    same = [text(one) for one in ("text", "input_text", "output_text", "no", "hm", "alone")]
    same[3]["cache_control"] = EPHEMERAL
    messages = [{"role": "user", "content": same}, {"role": "assistant", "content": "ab"}]
    assert ask(server, messages) == (prompt, ends)


def test_breakpoints_on_tools_system_messages_and_parts(server):
    messages = [
        {"role": "system", "content": [text("fixed", cache_control=HOUR), text("today")]},
        {"role": "user", "content": [text("manual", cache_control={"type": "ephemeral"}), text("why?")]},
        {"role": "assistant", "content": "because", "cache_control": {"type": "ephemeral", "ttl": "5m"}},
        USER,
    ]
    marked = TOOL | {"cache_control": HOUR}
    prompt, ends = ask(server, messages, tools=[marked])
    assert {text.rpartition("|")[2] or text.split("|")[-2]: end for text, end in ends.items() if end[1]} == {
        f"tools\n{json.dumps([TOOL], sort_keys=True)}": ("system_end", 3600),
        "system\nfixed": ("breakpoint", 3600),
        "user\nmanual": ("breakpoint", 300),
        "assistant\nbecause": ("message_end", 300),
    }
    assert "cache_control" not in prompt and "ephemeral" not in prompt
    without = [{"role": message["role"], "content": message["content"]} for message in messages]
    for message in without[:2]:
        message["content"] = [text(part["text"]) for part in message["content"]]
    assert ask(server, without, tools=[TOOL])[0] == prompt


def test_a_mark_within_a_function_counts_too(server):
    marked = {"type": "function", "function": TOOL["function"] | {"cache_control": HOUR}}
    prompt, ends = ask(server, [USER], tools=[marked])
    assert ("system_end", 3600) in ends.values() and "cache_control" not in prompt


def test_a_mark_on_the_last_part_is_on_the_message(server):
    _, ends = ask(server, [{"role": "user", "content": [text("a"), text("b", cache_control=HOUR)]}])
    assert list(ends.values()) == [("message_end", 3600)]


def test_prompt_cache_key_changes_nothing(server):
    assert ask(server, [USER], prompt_cache_key="agent 7") == ask(server, [USER], prompt_cache_key=None)
    assert refused(server.post(PATH, {"messages": [USER], "prompt_cache_key": 5}))["param"] == "prompt_cache_key"
    for name in ("x" * 100_000, "Zoë 🪨", "\0"):
        assert ask(server, [USER], prompt_cache_key=name) == ask(server, [USER], prompt_cache_key=None)
    assert server.post("/v1/completions", {"prompt": "x", "prompt_cache_key": "k"}).status_code == 200


def marked(mark):
    return {"messages": [USER, {"role": "user", "content": [text("a"), text("b", cache_control=mark)]}]}


def tool(**fields):
    return {"tools": [TOOL, {"type": "function", "function": {"name": "g", **fields}}]}


def nested(depth):
    return [nested(depth - 1)] if depth else 1


EPHEMERAL = {"type": "ephemeral"}
WRONG = [
    ({"tools": [5]}, "tools", "tools[0]"),
    ({"tools": [TOOL, {"type": "function"}]}, "tools", "tools[1]"),
    ({"tools": [TOOL, TOOL | {"type": "retrieval"}]}, "tools", "tools[1]"),
    ({"tools": [{"type": "function", "function": {"name": 5}}]}, "tools", "tools[0].function.name"),
    ({"tools": [{"type": "function", "function": {"name": ""}}]}, "tools", "tools[0].function.name"),
    (tool(parameters=5), "tools", "tools[1].function.parameters must be an object"),
    (tool(parameters="x"), "tools", "tools[1].function.parameters must be an object"),
    (tool(parameters=[1]), "tools", "tools[1].function.parameters must be an object"),
    (tool(description=5), "tools", "tools[1].function.description must be text"),
    (tool(strict="x"), "tools", "tools[1].function.strict must be true or false"),
    ({"tools": [TOOL] * 1025}, "tools", "at most 1024"),
    ({"tools": TOOL}, "tools", "tools"),
    ({"messages": [{"role": "assistant", "tool_calls": [{"id": "1"}]}]}, "messages", "messages[0].tool_calls[0]"),
    ({"messages": [USER, {"role": "assistant", "tool_calls": [CALL, "f"]}]}, "messages", "messages[1].tool_calls[1]"),
    (
        {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": 5}}]}]},
        "messages",
        "messages[0].tool_calls[0].function.arguments",
    ),
    ({"messages": [{"role": "assistant", "tool_calls": [CALL] * 1025}]}, "messages[0].tool_calls", "at most 1024"),
    ({"messages": [{"role": "tool", "tool_call_id": 5, "content": "x"}]}, "messages[0].tool_call_id", "tool_call_id"),
    ({"chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs", "chat_template_kwargs.tokenize"),
    ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs", "chat_template_kwargs.messages"),
    ({"chat_template_kwargs": {"x": "x" * (256 << 10)}}, "chat_template_kwargs", "at most 262144 are taken"),
    ({"chat_template_kwargs": {"x": nested(16)}}, "chat_template_kwargs", "nested more than 16 levels deep"),
    ({"chat_template_kwargs": {"x": [float("nan")]}}, "chat_template_kwargs", "a number that is none"),
    ({"chat_template_kwargs": "x"}, "chat_template_kwargs", "chat_template_kwargs"),
    ({"chat_template_kwargs": {"\ud800": 1}}, "chat_template_kwargs", "is not valid Unicode"),
    ({"chat_template_kwargs": {"x": ["\ud800"]}}, "chat_template_kwargs", "is not valid Unicode"),
    ({"reasoning_effort": "some"}, "reasoning_effort", 'must be "none", "minimal", "low"'),
    ({"reasoning_effort": 1}, "reasoning_effort", 'must be "none", "minimal", "low"'),
    ({"documents": {"title": "t"}}, "documents", "documents must be a list"),
    ({"documents": ["text"]}, "documents", "documents[0] must be an object"),
    ({"documents": [{"title": 5}]}, "documents", "documents[0].title must be text"),
    ({"documents": [{"title": "\ud800"}]}, "documents", "documents[0].title is not valid Unicode"),
    ({"documents": [{}] * 1025}, "documents", "at most 1024"),
    ({"chat_template": "{{ 1 }}"}, "chat_template", "--trust-request-chat-template"),
    ({"chat_template": ""}, "chat_template", "--trust-request-chat-template"),
    ({"chat_template": 5}, "chat_template", "must be text"),
    (tool(description="\ud800"), "tools", "tools[1].function.description is not valid Unicode"),
    (tool(parameters={"properties": {"\ud800": {}}}), "tools", "tools[1] is not valid Unicode"),
    (
        {"messages": [{"role": "user", "content": ["x", 5]}]},
        "messages",
        "messages[0].content[1] must be text or a part",
    ),
    ({"messages": [{"role": "user", "content": [["x"]]}]}, "messages", "messages[0].content[0] must be text or a part"),
    ({"messages": [{"role": "user", "content": ["\ud800"]}]}, "messages", "content[0] is not valid Unicode"),
    (
        {"messages": [{"role": "user", "content": [{"type": "refusal", "text": "x"}]}]},
        "messages",
        ".refusal is missing",
    ),
    ({"messages": [{"role": "user", "content": [{"type": "thinking", "thinking": 1}]}]}, "messages", "must be text"),
    ({"messages": [{"role": "user", "content": [{"text": "x"}]}]}, "messages", "content[0].type is missing"),
    ({"messages": [{"role": "user", "content": [{"type": "audio"}]}]}, "messages", "content[0].type must be one of"),
    (marked("ephemeral"), "messages", "messages[1].content[1].cache_control must be"),
    (marked({}), "messages", "messages[1].content[1].cache_control.type is missing"),
    (marked({"type": "persistent"}), "messages", 'messages[1].content[1].cache_control.type must be "ephemeral"'),
    (marked(EPHEMERAL | {"ttl": "2h"}), "messages", 'messages[1].content[1].cache_control.ttl must be "5m" or "1h"'),
    (marked(EPHEMERAL | {"ttl": 300}), "messages", 'messages[1].content[1].cache_control.ttl must be "5m" or "1h"'),
    (marked(EPHEMERAL | {"ttl": 0}), "messages", 'messages[1].content[1].cache_control.ttl must be "5m" or "1h"'),
    (marked(EPHEMERAL | {"ttl": ["5m"]}), "messages", 'messages[1].content[1].cache_control.ttl must be "5m" or "1h"'),
    ({"messages": [USER | {"cache_control": 5}]}, "messages", "messages[0].cache_control must be"),
    ({"tools": [TOOL | {"cache_control": 5}]}, "tools", "tools[0].cache_control must be"),
    (
        {"messages": [{"role": "user", "content": [text("", cache_control=EPHEMERAL), text("b")]}]},
        "messages",
        "messages[0].content[0].cache_control: an empty text",
    ),
    ({"messages": [USER | {"cache_control": EPHEMERAL}] * 5}, "messages", "messages[4].cache_control is one too many"),
    (
        {"messages": [USER | {"cache_control": EPHEMERAL}] * 2, "tools": [TOOL | {"cache_control": HOUR}] * 3},
        "messages",
        "messages[1].cache_control is one too many: at most 4",
    ),
]


@pytest.mark.parametrize(
    ("fields", "param", "words"), WRONG, ids=[f"{i} {words}" for i, (_, _, words) in enumerate(WRONG)]
)
def test_what_is_wrong_is_named(never_asked, fields, param, words):
    body, headers = json.dumps({"messages": [USER]} | fields), {"Content-Type": "application/json"}
    error = refused(never_asked.post(PATH, content=body, headers=headers))
    assert error["param"] == param and words in error["message"]
    assert never_asked.requests == []


def answers(server, **fields):
    """The contents of the answers, whole and as a stream, which must say the same."""
    body = {"max_tokens": 4, **fields}
    whole = server.post(PATH, body)
    assert whole.status_code == 200, whole.text
    streamed = server.post(PATH, body | {"stream": True})
    contents = [""] * body.get("n", 1)
    for event in streamed.text.split("\n\n")[:-2]:
        for choice in json.loads(event.removeprefix("data: "))["choices"]:
            contents[choice["index"]] += choice["delta"].get("content") or ""
    assert contents == [choice["message"]["content"] for choice in whole.json()["choices"]]
    return contents


def test_echo_puts_the_last_message_before_the_answer(server):
    begun = [USER, {"role": "assistant", "content": [text("be"), "gun"]}]
    going_on = {"messages": begun, "continue_final_message": True, "n": 2}
    bare = answers(server, **going_on)
    assert answers(server, **going_on, echo=True) == [f"begun{content}" for content in bare]
    # vLLM's rule: also before another message of the assistant's, but not of the user's
    (bare,) = answers(server, messages=begun)
    assert answers(server, messages=begun, echo=True) == [f"begun{bare}"]
    assert answers(server, messages=[USER], echo=True) == answers(server, messages=[USER], echo=None)
    without = {"messages": [USER], "add_generation_prompt": False}
    (bare,) = answers(server, **without)
    assert answers(server, **without, echo=True) == [f"x{bare}"]


def test_echo_with_logprobs_tells_of_the_prompt(server):
    body = {"messages": [{"role": "assistant", "content": "begun"}], "continue_final_message": True, "echo": True}
    answer = server.post(PATH, body | {"max_tokens": 1, "logprobs": True, "top_logprobs": 2}).json()
    num_prompt = answer["usage"]["prompt_tokens"]
    assert len(answer["prompt_logprobs"]) == num_prompt and answer["prompt_logprobs"][0] is None
    assert len(answer["choices"][0]["logprobs"]["content"]) == 1
    server.post(PATH, body | {"max_tokens": 1, "logprobs": True, "stream": True})
    assert server.requests[-1].prompt_logprobs is None
