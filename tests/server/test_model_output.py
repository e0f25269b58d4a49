"""Answers as models write them, well or badly, over HTTP: what is reasoning, content and a call, and how they end.

The engine echoes: what the last user says is what the model answers, with its role before and `assistant` behind it.
"""

import json
import logging

import pytest

from doubles.byte_tokenizer import ByteTokenizer
from server.asking import CALL, SCHEMA, XML
from tiers import more

CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
FUNCTION = {"name": "weather", "parameters": SCHEMA}
TOOL = {"type": "function", "function": FUNCTION}
THINKING = {"chat_template_kwargs": {"enable_thinking": True}}
OSLO = {"city": "Oslo"}
HERMES = '<tool_call>{"name": ...}'
TOLD = f"tools\n{json.dumps([TOOL], sort_keys=True)}user\n"
"""What is echoed before the user's text."""


@pytest.fixture(scope="module")
def serving(running_server):
    """A server for each chat template."""
    servers = {}

    def start(template, **options):
        key = template, *options.items()
        if key not in servers:
            servers[key] = running_server(options, ByteTokenizer(chat_template=template))
        return servers[key]

    yield start
    for server in servers.values():
        server.drain()
        server.join()


def post(server, path, body):
    response = server.post(path, {"model": "echo"} | body)
    assert response.status_code == 200, response.text
    return response


def without_prompt(text):
    """What the user's text has become; a line break next to a mark is none of it."""
    return text.removeprefix(TOLD.rstrip("\n")).removeprefix("\n")


def chat(server, text, **fields):
    """Content, reasoning, calls and the finish reason, and the usage."""
    fields = {"tools": [TOOL], "max_tokens": 900, "add_generation_prompt": False} | fields
    found = post(server, CHAT, {"messages": [{"role": "user", "content": text}], **fields}).json()
    (choice,), message = found["choices"], found["choices"][0]["message"]
    calls = [(call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls") or ()]
    content, reasoning = without_prompt(message["content"] or ""), without_prompt(message["reasoning"] or "")
    return content, reasoning, calls, choice["finish_reason"], found["usage"]


def streamed(server, text, **fields):
    """The same of a stream, without the usage."""
    fields = {"tools": [TOOL], "max_tokens": 900, "add_generation_prompt": False} | fields
    body = {"messages": [{"role": "user", "content": text}], "stream": True, **fields}
    content, reasoning, calls, finish = "", "", [], None
    for line in post(server, CHAT, body).text.split("\n\n")[:-2]:
        for choice in json.loads(line.removeprefix("data: "))["choices"]:
            content += choice["delta"].get("content") or ""
            reasoning += choice["delta"].get("reasoning") or ""
            for part in choice["delta"].get("tool_calls", ()):
                if "id" in part:
                    assert part["index"] == len(calls)
                    calls.append([part["function"]["name"], ""])
                calls[part["index"]][1] += part["function"]["arguments"]
            finish = choice["finish_reason"] or finish
    return without_prompt(content), without_prompt(reasoning), [tuple(call) for call in calls], finish


def responses(server, text, **fields):
    body = {"input": text, "tools": [{"type": "function", **FUNCTION}], "max_output_tokens": 900} | fields
    return post(server, RESPONSES, body).json()


def response_events(server, text, **fields):
    body = {
        "input": text,
        "tools": [{"type": "function", **FUNCTION}],
        "max_output_tokens": 900,
        "stream": True,
    } | fields
    found = [event.partition("data: ")[2] for event in post(server, RESPONSES, body).text.split("\n\n")[:-1]]
    return [json.loads(event) for event in found]


def messages(server, text, **fields):
    tool = {"name": "weather", "input_schema": SCHEMA}
    body = {"messages": [{"role": "user", "content": text}], "tools": [tool], "max_tokens": 900} | fields
    return post(server, MESSAGES, body).json()


# -- calls within the reasoning ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("behind", ["", "\n</think>", "\n</think>\n\n"])
def test_a_call_ends_the_reasoning(serving, behind):
    """Not closed, or closed behind the call, as Qwen3.5 does; the reasoning's tokens are those before it."""
    server = serving(XML)
    fields = THINKING | {"add_generation_prompt": True}
    content, reasoning, calls, finish, usage = chat(server, f"I look.\n{CALL}{behind}", **fields)
    # the echo goes on
    assert (content, reasoning, finish) == ("assistant", "I look.", "tool_calls")
    assert [(name, json.loads(arguments)) for name, arguments in calls] == [("weather", OSLO)]
    assert usage["completion_tokens_details"]["reasoning_tokens"] == len(f"{TOLD}I look.\n")
    assert streamed(server, f"I look.\n{CALL}{behind}", **fields) == (content, reasoning, calls, finish)


@pytest.mark.parametrize("text", ["I should use <tool_call> tags.", CALL.replace("weather", "other"), CALL[:30]])
def test_what_only_mentions_a_call_is_reasoning(serving, text):
    server, fields = serving(XML), THINKING | {"add_generation_prompt": True}
    found = chat(server, f"{text}</think>Yes. ", **fields)
    assert found[:4] == ("Yes. assistant", text, [], "stop")
    assert streamed(server, f"{text}</think>Yes. ", **fields) == found[:4]


@pytest.mark.parametrize(
    "fields",
    [
        {"tool_choice": "none"},
        {"tool_choice": "required"},
        {"response_format": {"type": "json_object"}},
    ],
)
def test_reasoning_before_a_form_or_without_calls_has_none(serving, fields):
    found = chat(serving(XML), f"{CALL}</think>Yes. ", **fields, **THINKING, add_generation_prompt=True)
    assert found[1:3] == (CALL, []) and found[0].startswith("Yes. ")


def test_allowed_tools_are_called_within_the_reasoning_too(serving):
    other = {"type": "function", "function": {"name": "now"}}
    for allowed, num_calls in (("weather", 1), ("now", 0)):
        choice = {"mode": "auto", "tools": [{"type": "function", "function": {"name": allowed}}]}
        fields = {"tools": [TOOL, other], "tool_choice": {"type": "allowed_tools", "allowed_tools": choice}}
        found = chat(serving(XML), f"{CALL}</think>", **fields, **THINKING, add_generation_prompt=True)
        assert len(found[2]) == num_calls and found[3] == ("tool_calls" if num_calls else "stop")


def test_anthropics_and_responses_have_the_call_as_well(serving):
    server = serving(XML)
    found = messages(server, f"I look.\n{CALL}\n</think>", thinking={"type": "enabled", "budget_tokens": 1024})
    assert [block["type"] for block in found["content"]] == ["thinking", "tool_use", "text"]
    assert (found["content"][1]["input"], found["stop_reason"]) == (OSLO, "tool_use")
    found = responses(server, f"I look.\n{CALL}\n</think>", reasoning={"effort": "high"})
    assert [item["type"] for item in found["output"]] == ["reasoning", "function_call", "message"]
    assert json.loads(found["output"][1]["arguments"]) == OSLO


# -- the budget of the reasoning ---------------------------------------------------------------------------------------


def test_a_budget_leaves_no_piece_of_a_mark(serving):
    """A byte is a token: the budget ends within `</think>`, and within the mark of a call. The echo repeats what it
    was to write where something else was forced."""
    server = serving(XML)
    fields = {"messages": [{"role": "user", "content": "hm</think>yes"}], "max_tokens": 40, **THINKING}
    for budget in range(len("user\nhm") + 1, len("user\nhm</think>")):
        found = post(server, CHAT, fields | {"thinking_token_budget": budget}).json()
        assert found["choices"][0]["message"]["reasoning"] == "user\nhm"
        assert found["choices"][0]["message"]["content"].startswith("yes")
    for budget in range(len(f"{TOLD}hm\n") + 1, len(f"{TOLD}hm\n{CALL}"), 7):
        content, reasoning, calls, finish, usage = chat(
            server, f"hm\n{CALL}\n", thinking_token_budget=budget, **THINKING, add_generation_prompt=True
        )
        assert (reasoning, finish) == ("hm", "tool_calls") and "<" not in content
        assert [(name, json.loads(arguments)) for name, arguments in calls] == [("weather", OSLO)]
        assert usage["completion_tokens_details"]["reasoning_tokens"] == len(f"{TOLD}hm\n")


# -- tags that open or close nothing -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "content", "reasoning"),
    [
        ("<think>\nhm</think>yes", "yes", "hm"),
        ("hm\n</think>\n</think>\n\nyes", "yes", "hm"),
        ("hm</think>yes\n</think>", "yes", "hm"),
        (f"hm</think>yes\n{CALL}\n</think>\n", "yes", "hm"),
        ("hm</think>It ends at `</think>`.", "It ends at `</think>`.", "hm"),
    ],
)
def test_stray_tags_are_left_out(serving, text, content, reasoning):
    server = serving(XML)
    # a chat that has opened the reasoning, and does not open it again behind the echo
    fields = {"max_tokens": len((TOLD + text).encode()), **THINKING, "add_generation_prompt": True}
    found = chat(server, text, **fields)
    assert found[:2] == (content, reasoning)
    assert streamed(server, text, **fields)[:2] == (content, reasoning)


# -- calls that are not closed, or no JSON -----------------------------------------------------------------------------

OPEN = "<tool_call>\n<function=weather>\n<parameter=city>\nOslo"


def test_an_unclosed_call_is_complete_if_its_values_are(serving):
    server = serving(XML)
    for end in ("\n</parameter>", "\n</parameter>\n</function>", "\n</parameter>\n</func"):
        content, _, calls, finish, _ = chat(server, f"So.\n{OPEN}{end}")
        assert (content, finish) == ("So.", "tool_calls") and json.loads(calls[0][1]) == OSLO
        assert streamed(server, f"So.\n{OPEN}{end}") == (content, "", calls, finish)
    # else it is what the model has written; of a stream its beginning has been sent
    assert chat(server, f"So.\n{OPEN}")[:4] == (f"So.\n{OPEN}", "", [], "stop")
    assert streamed(server, f"So.\n{OPEN}") == ("So.Oslo", "", [("weather", '{"city": ')], "stop")


def test_text_about_calls_is_text(serving):
    text = "Calls are `<tool_call>` and `<function=weather>`, with <parameter=city> in it."
    server = serving(XML)
    assert chat(server, text)[:4] == (text, "", [], "stop")
    assert streamed(server, text) == (text, "", [], "stop")


def test_a_broken_call_is_never_called_complete(serving):
    """An answer to OpenAI's and Anthropic's clients has it as text, a stream as an item that is incomplete; behind
    `max_tokens` it is incomplete as well, and a complete one before it is not."""
    server = serving(HERMES)
    broken = '<tool_call>{"name": "weather", "arguments": {"city": Oslo}}</tool_call>'
    whole = '<tool_call>{"name": "weather", "arguments": {"city": "Oslo"}}</tool_call>'
    found = responses(server, broken)
    (item,) = found["output"]
    assert (item["type"], found["status"]) == ("message", "completed") and broken in item["content"][0]["text"]
    found = messages(server, broken)
    assert found["stop_reason"] == "end_turn" and broken in found["content"][0]["text"]
    *_, last = response_events(server, broken)
    output = [(item["type"], item["status"]) for item in last["response"]["output"]]
    assert output == [("message", "completed"), ("function_call", "incomplete"), ("message", "completed")]
    *events, last = response_events(server, f"{whole}\n{broken}")
    statuses = [item["status"] for item in last["response"]["output"] if item["type"] == "function_call"]
    assert statuses == ["completed", "incomplete"]
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert [item["status"] for item in done if item["type"] == "function_call"] == statuses

    for read in (responses, lambda *args, **fields: response_events(*args, **fields)[-1]["response"]):
        for text, num_cut, expected in ((whole, 20, ["incomplete"]), (whole + whole, 20, ["completed", "incomplete"])):
            found = read(server, text, max_output_tokens=len(TOLD + text) - num_cut)
            calls = [item["status"] for item in found["output"] if item["type"] == "function_call"]
            assert (found["status"], calls) == ("incomplete", expected)
    cut = chat(server, whole + whole, max_tokens=len(TOLD + whole + whole) - 20)
    assert (len(cut[2]), cut[3]) == (2, "length")


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ('{"city": "Oslo\nand around"}', {"city": "Oslo\nand around"}),
        (r'{"city": "C:\dir"}', {"city": r"C:\dir"}),
        ('{"city": "Oslo",}', OSLO),
        ('{"city": "Oslo", "days": [1, 2,], "sure": True}', {"city": "Oslo", "days": [1, 2], "sure": True}),
    ],
)
def test_arguments_are_mended_where_they_can_be(serving, arguments, expected):
    server = serving(HERMES)
    text = f'<tool_call>\n{{"name": "weather", "arguments": {arguments}}}\n</tool_call>'
    for content, _, calls, finish, *_ in (chat(server, text), streamed(server, text)):
        assert (content, finish) == ("", "tool_calls") and json.loads(calls[0][1]) == expected
    found = messages(server, text)
    assert [block.get("input") for block in found["content"] if block["type"] == "tool_use"] == [expected]


# -- forms of calls ----------------------------------------------------------------------------------------------------

FORMS = {
    "lfm2": '<|tool_call_start|>[weather(city="Oslo")]<|tool_call_end|>',
    "nemotron_json": '<TOOLCALL>[{"name": "weather", "arguments": {"city": "Oslo"}}]</TOOLCALL>',
    "hermes": '<tool_call>\n[{"name": "weather", "arguments": {"city": "Oslo"}}]\n</tool_call>',
    "granite4": '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>',
}
TEMPLATES = {
    "lfm2": "{% if tools %}List of tools: <|tool_list_start|>[",
    "nemotron_json": "{% if tools %}<AVAILABLE_TOOLS><TOOLCALL>[",
    "hermes": HERMES,
    "granite4": HERMES,
}


@pytest.mark.parametrize(
    ("form", "is_named"), [*((form, False) for form in FORMS), ("lfm2", True), more("granite4", True)]
)
def test_forms_of_calls_follow_from_the_template_or_the_flag(serving, form, is_named):
    server = serving("", tool_call_parser=form) if is_named else serving(TEMPLATES[form])
    text = f"So.\n{FORMS[form]}\n{FORMS[form]}"
    content, _, calls, finish, _ = chat(server, text)
    assert (content, finish) == ("So.", "tool_calls")
    assert [(name, json.loads(arguments)) for name, arguments in calls] == [("weather", OSLO)] * 2
    assert streamed(server, text) == (content, "", calls, finish)
    choice = {"mode": "auto", "tools": [{"type": "function", "function": {"name": "weather"}}]}
    other = {"type": "function", "function": {"name": "now"}}
    allowed = {"tools": [TOOL, other], "tool_choice": {"type": "allowed_tools", "allowed_tools": choice}}
    assert len(chat(server, text, **allowed)[2]) == 2


HARMONY = "<|start|>assistant<|channel|>analysis<|message|>"
MESSAGES_OF_HARMONY = (
    "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>commentary<|message|>I look.<|end|>"
    "<|start|>assistant<|channel|>commentary to=functions.weather <|constrain|>json<|message|>"
    '{"city": "Oslo"}<|call|>'
)


@pytest.mark.parametrize(
    ("template", "options"),
    [
        (HARMONY, {}),
        more("", {"tool_call_parser": "openai"}),
        more("", {"reasoning_parser": "openai_gptoss"}),
        ("<think>", {"tool_call_parser": "openai", "reasoning_parser": "openai_gptoss"}),
    ],
)
def test_harmony(serving, template, options):
    """Reasoning, what is said before a call, and the call, whole and streamed, as all APIs have them. What is echoed
    before comes first, so what is said is a second text."""
    server = serving(template, **options)
    content, reasoning, calls, finish, usage = chat(server, MESSAGES_OF_HARMONY)
    assert (content, reasoning, calls) == ("\nI look.", "hm", [("weather", '{"city": "Oslo"}')])
    assert finish == "tool_calls"
    assert usage["completion_tokens_details"]["reasoning_tokens"] > 0
    assert streamed(server, MESSAGES_OF_HARMONY) == (content, reasoning, calls, finish)
    found = responses(server, MESSAGES_OF_HARMONY)
    # The role of the next turn is echoed behind it.
    assert [item["type"] for item in found["output"]][:4] == ["message", "reasoning", "message", "function_call"]
    types = [block["type"] for block in messages(server, MESSAGES_OF_HARMONY)["content"]]
    assert types[:4] == ["text", "thinking", "text", "tool_use"]
    hidden = chat(server, MESSAGES_OF_HARMONY, include_reasoning=False)
    assert hidden[:2] == ("\nI look.", "") and hidden[2] == calls


def test_a_list_may_be_the_whole_answer(serving):
    """Only at its beginning: the echo says the role first."""
    server = serving("", tool_call_parser="pythonic")
    text = '[weather(city="Oslo")]'
    assert chat(server, text)[2] == []
    server = serving("<think>", tool_call_parser="pythonic")
    found = chat(server, f"hm</think>\n{text}", **THINKING, add_generation_prompt=True)
    assert [(name, json.loads(arguments)) for name, arguments in found[2]] == [("weather", OSLO)]


def test_a_start_without_a_parser_for_the_tools_says_so(running_server, caplog):
    """Once, and not where the flag says what is wanted."""
    cases = (
        ({}, "{% if tools %}{{ tools }}", 1),
        ({"tool_call_parser": "none"}, "{% if tools %}", 0),
        ({"enable_auto_tool_choice": False}, "{% if tools %}", 0),
        ({}, "{{ messages }} about tools", 0),
        ({}, "{% if tools %}<tool_call>", 0),
    )
    for options, template, num_warnings in cases:
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            server = running_server(options, ByteTokenizer(chat_template=template))
        server.drain()
        server.join()
        assert caplog.text.count("--tool-call-parser") == num_warnings
