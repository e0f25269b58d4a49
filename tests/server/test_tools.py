"""Tool calls and reasoning over HTTP. The engine echoes: what the last user says is what the model answers."""

import json

import pytest
from llguidance import LLMatcher

from cairn.engine.grammars.structure import grammar_of
from cairn.engine.grammars.worker import byte_tokenizer
from cairn.server.error_handlers import find_deep_field
from cairn.server.openai.chat_message import ChatMessage
from cairn.server.openai.response_format import _limit_calls
from cairn.server.parsers.json_tool_parser import JsonToolParser
from cairn.server.parsers.registry import ParserFactory
from cairn.server.parsers.xml_tool_parser import XmlToolParser
from doubles.byte_tokenizer import ByteTokenizer

XML = "<think> <tool_call> <function=...>"
HERMES = '<tool_call>{"name": ...}'
PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    "required": ["city"],
}
TOOL = {"type": "function", "function": {"name": "weather", "description": "Tells it.", "parameters": PARAMETERS}}
NOW = {"type": "function", "function": {"name": "now"}}
CALL = (
    "<tool_call>\n<function=weather>\n<parameter=city>\nOslo\n</parameter>\n"
    "<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>"
)
ARGUMENTS = {"city": "Oslo", "days": 3}


@pytest.fixture(scope="module")
def xml(running_server):
    """The chat template has a role's name in front of each text, which comes back as content."""
    running = running_server(tokenizer=ByteTokenizer(chat_template=XML))
    yield running
    running.drain()
    running.join()


@pytest.fixture
def serving(running_server):
    """Servers of other templates and options."""
    servers = []

    def start(template, **options):
        servers.append(running_server(options, ByteTokenizer(chat_template=template)))
        return servers[-1]

    yield start
    for server in servers:
        server.drain()
        server.join()


def ask(server, content, **fields):
    fields = {"tools": [TOOL], "model": "echo", "max_tokens": 900} | fields
    return server.client().chat.completions.create(messages=[{"role": "user", "content": content}], **fields)


def whole(server, content, **fields):
    return ask(server, content, **fields).choices[0]


def streamed(server, content, **fields):
    """Content, reasoning, calls by index, finish reason; as a client puts deltas together."""
    content_, reasoning, calls, finish = "", "", {}, None
    for chunk in ask(server, content, stream=True, **fields):
        for choice in chunk.choices:
            delta = choice.delta
            content_ += delta.content or ""
            said = (delta.model_extra or {}).get("reasoning_content") or ""
            assert said == ((delta.model_extra or {}).get("reasoning") or "")
            reasoning += said
            for part in delta.tool_calls or []:
                call = calls.setdefault(part.index, {"id": None, "name": None, "arguments": ""})
                if part.id is not None:
                    assert call["id"] is None and part.type == "function"
                    call.update(id=part.id, name=part.function.name)
                call["arguments"] += part.function.arguments or ""
            finish = choice.finish_reason or finish
    return content_, reasoning, calls, finish


def test_calls_come_as_tool_calls(xml):
    choice = whole(xml, "So be it.\n\n" + CALL)
    assert choice.finish_reason == "tool_calls"
    (call,) = choice.message.tool_calls
    assert (call.type, call.function.name, json.loads(call.function.arguments)) == ("function", "weather", ARGUMENTS)
    assert call.id.startswith("call_") and len(call.id) == 29
    assert CALL not in choice.message.content and "So be it." in choice.message.content


def test_calls_come_in_pieces(xml):
    long = CALL.replace("Oslo", "Oslo and all around it, as far as one can see")
    content, _, calls, finish = streamed(xml, "So.\n" + long + "\n" + CALL)
    assert finish == "tool_calls" and calls.keys() == {0, 1} and calls[0]["id"] != calls[1]["id"]
    assert json.loads(calls[0]["arguments"])["city"] == "Oslo and all around it, as far as one can see"
    assert json.loads(calls[1]["arguments"]) == ARGUMENTS
    assert "<tool_call>" not in content and "So." in content


def test_deltas_add_up_to_the_message():
    def message():
        return ChatMessage(
            ParserFactory(XmlToolParser, has_reasoning=True).make_parser({"weather": PARAMETERS}, opened=True),
            lambda: "0" * 32,
        )

    text = "a thought\n</think>\n\nSo be it.\n\n" + CALL.replace("Oslo", "Oslo, " * 20) + "\n" + CALL + "\nDone."
    whole, grown, pieces = message(), message(), []
    whole.add(text, last=True)
    for character in text:
        pieces.append(grown.add(character, last=False))
    pieces.append(grown.add("", last=True))
    assert (
        grown.message() == whole.message()
        and grown.finish_reason("stop") == whole.finish_reason("stop") == "tool_calls"
    )
    assert whole.finish_reason("length") == "length" and whole.finish_reason(None) is None
    assert "".join(piece.get("content", "") for piece in pieces) == whole.message()["content"] == "So be it.Done."
    assert "".join(piece.get("reasoning", "") for piece in pieces) == "a thought"
    for index, call in enumerate(whole.message()["tool_calls"]):
        parts = [part for piece in pieces for part in piece.get("tool_calls", []) if part["index"] == index]
        assert parts[0]["id"] == call["id"] and parts[0]["function"]["name"] == "weather"
        assert all(part.keys() == {"index", "function"} for part in parts[1:])
        assert "".join(part["function"]["arguments"] for part in parts) == call["function"]["arguments"]
    assert sum("tool_calls" in piece for piece in pieces) > 40 and pieces.count({}) > 40


def test_hermes_calls(serving):
    server = serving(HERMES)
    text = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo", "days": 3}}\n</tool_call>'
    (call,) = whole(server, text).message.tool_calls
    assert json.loads(call.function.arguments) == ARGUMENTS
    _, _, calls, finish = streamed(server, text)
    assert finish == "tool_calls" and json.loads(calls[0]["arguments"]) == ARGUMENTS


@pytest.mark.parametrize(
    "fields", [{"tool_choice": "none"}, {"tools": [], "tool_choice": "none"}, {"tools": None}, {"tools": []}]
)
def test_without_tools_to_call_everything_is_content(xml, fields):
    choice = whole(xml, CALL, **fields)
    assert CALL in choice.message.content and choice.message.tool_calls is None and choice.finish_reason == "stop"
    content, _, calls, finish = streamed(xml, CALL, **fields)
    assert content == choice.message.content and not calls and finish == "stop"


def test_options_choose_the_parsers(serving):
    plain = serving(XML, enable_auto_tool_choice=False)
    assert CALL in whole(plain, CALL).message.content
    named = serving("", tool_call_parser="qwen3_coder", reasoning_parser="qwen3")
    assert named.core is not None and whole(named, CALL).message.tool_calls
    none = serving(XML, tool_call_parser="none", reasoning_parser="none")
    assert CALL in whole(none, CALL).message.content


def test_one_call_where_one_is_wanted(xml):
    choice = whole(xml, CALL + "\n" + CALL, parallel_tool_calls=False)
    assert len(choice.message.tool_calls) == 1
    _, _, calls, _ = streamed(xml, CALL + "\n" + CALL, parallel_tool_calls=False)
    assert calls.keys() == {0}
    assert len(whole(xml, CALL + "\n" + CALL).message.tool_calls) == 2


def test_a_call_that_is_cut_off_is_incomplete(xml):
    choice = whole(xml, CALL, max_tokens=len(f"tools\n{json.dumps([TOOL], sort_keys=True)}user\n{CALL}") - 40)
    assert choice.finish_reason == "length"
    with pytest.raises(ValueError):
        json.loads(choice.message.tool_calls[0].function.arguments)


@pytest.mark.parametrize("behind", [0, len("<tool_call>"), len("<tool_call>\n<function=wea")])
def test_a_call_that_is_cut_off_before_its_name_is_not_shown(xml, behind):
    """By `max_tokens` and by a stop string; where the answer ends by itself its text is what it says."""
    told = f"tools\n{json.dumps([TOOL], sort_keys=True)}user\nSo.\n"
    for fields, finish in (
        ({"max_tokens": len(told) + behind}, "length"),
        ({"stop": [CALL[behind:][:15]]}, "stop"),
    ):
        choice = whole(xml, "So.\n" + CALL, **fields)
        assert (choice.finish_reason, choice.message.tool_calls) == (finish, None)
        assert choice.message.content.endswith("user\nSo." if behind else "user\nSo.\n")
        content, _, calls, ended = streamed(xml, "So.\n" + CALL, **fields)
        assert (content, calls, ended) == (choice.message.content, {}, finish)
    assert "So.\n<tool_call>\n<function=wea" in whole(xml, "So.\n<tool_call>\n<function=wea").message.content


def test_reasoning_has_a_field_of_its_own(xml):
    """The prompt has opened it: the answer begins within."""
    fields = {"tools": None, "extra_body": {"chat_template_kwargs": {"enable_thinking": True}}}
    message = whole(xml, "hm\n</think>\n\nyes", **fields).message
    assert message.reasoning_content == message.reasoning == "user\nhm"
    assert message.content.startswith("yes") and "</think>" not in message.content
    content, reasoning, _, finish = streamed(xml, "hm\n</think>\n\nyes", **fields)
    assert (content, reasoning, finish) == (message.content, "user\nhm", "stop")
    message = whole(xml, "hm", **fields).message
    assert message.content is None and message.reasoning_content.startswith("user\nhm")


def test_without_an_opening_there_is_no_reasoning(xml):
    message = whole(xml, "hm</think>yes", tools=None).message
    assert "hm</think>yes" in message.content and message.reasoning_content is None


def test_several_answers_have_calls_of_their_own(xml):
    choices = ask(xml, CALL, n=3).choices
    ids = [call.id for choice in choices for call in choice.message.tool_calls]
    assert len(set(ids)) == 3 and [choice.finish_reason for choice in choices] == ["tool_calls"] * 3


def test_a_turn_goes_back_as_it_came(xml):
    first = ask(xml, CALL)
    call = first.choices[0].message.tool_calls[0]
    history = [
        {"role": "user", "content": "hi"},
        first.choices[0].message.model_dump(exclude_none=True),
        {"role": "tool", "tool_call_id": call.id, "content": "rain"},
    ]
    xml.client().chat.completions.create(model="echo", messages=history, tools=[TOOL], max_tokens=2)
    prompt = bytes(b for b in xml.requests[-1].prompt[::8] if b).decode(errors="replace")
    assert "weather" in prompt and "rain" in prompt


def allow(*names, mode="auto"):
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


def test_some_of_the_tools_may_be_allowed(xml, serving):
    """The prompt has all of them, so its prefix stays cached; the answer is held to those that are allowed."""
    both = {"tools": [TOOL, NOW], "temperature": 0}
    whole(xml, CALL, **both)
    prompt = xml.requests[-1].prompt
    (call,) = whole(xml, "So. " + CALL, **both, tool_choice=allow("weather")).message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == ("weather", ARGUMENTS)
    whole(xml, CALL, **both, tool_choice=allow("now"))
    structure = xml.requests[-1].structure
    assert (structure.kind, structure.field, structure.reasoning) == ("structural_tag", "tool_choice", "possible")
    assert xml.requests[-1].prompt == prompt
    assert whole(xml, "So be it.", **both, tool_choice=allow("now")).message.tool_calls is None
    hermes = serving(HERMES)
    json_call = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo", "days": 3}}\n</tool_call>'
    (call,) = whole(hermes, json_call, **both, tool_choice=allow("weather")).message.tool_calls
    assert json.loads(call.function.arguments) == ARGUMENTS
    # all of them are no restriction, and an answer of a form has no calls
    for fields in ({"tool_choice": allow("now", "weather")}, {"tool_choice": allow("now"), "stop": ["zzz"]}):
        whole(xml, "x", **both, **fields)
        assert (xml.requests[-1].structure is None) == ("stop" not in fields)
    whole(xml, "x", **both, tool_choice=allow("now"), response_format={"type": "json_object"})
    assert xml.requests[-1].structure.kind == "json"
    # one at least
    whole(xml, "x", **both, tool_choice=allow("now", "weather", mode="required"))
    asked = json.loads(xml.requests[-1].structure.text)
    assert [tool["name"] for tool in asked["tools"]] == ["weather", "now"] and asked["parallel"]
    whole(xml, "x", **both, tool_choice=allow("now", mode="required"), parallel_tool_calls=False)
    asked = json.loads(xml.requests[-1].structure.text)
    assert [(tool["name"], tool["place"]) for tool in asked["tools"]] == [("now", 1)] and not asked["parallel"]


@pytest.mark.parametrize(
    ("parser", "call"),
    [
        (XmlToolParser, "<tool_call>\n<function=%s>\n</function>\n</tool_call>"),
        (XmlToolParser, "<tool_call><function=%s><parameter=a>\n<b>\n</parameter></function></tool_call>"),
        (XmlToolParser, "<function=%s></function>"),
        (JsonToolParser, '<tool_call>\n{"name": "%s", "arguments": {}}\n</tool_call>'),
        (JsonToolParser, '<tool_call>{"name":"%s"}</tool_call>'),
    ],
)
def test_an_answer_calls_none_but_the_allowed_tools(parser, call):
    """Of any other call the name cannot be written."""
    matcher = LLMatcher(byte_tokenizer(), grammar_of(_limit_calls(parser, {"now": {}, 'a"[b': {}})), log_level=0)

    def longest(text):
        matcher.reset()
        return text.encode()[: matcher.try_consume_tokens(list(text.encode()))].decode()

    for text in ("So be it.", "a < b <tool", call % "now", f"So. {call % 'now'} and {call % 'now'}\nDone."):
        assert longest(text) == text and matcher.is_accepting()
    for other in ("weather", "no", "nowhere"):
        assert longest(f"So. {call % other}").endswith(("=", '"', *(other[:i] for i in range(1, len(other) + 1))))
        assert longest(f"So. {call % other}") != f"So. {call % other}"


def test_required_calls_are_held_to_the_tools(xml):
    for choice, names, parallel in (
        ("required", ["weather", "now"], True),
        ({"type": "function", "function": {"name": "now"}}, ["now"], False),
    ):
        whole(xml, "x", tools=[TOOL, NOW], tool_choice=choice)
        structure = xml.requests[-1].structure
        asked = json.loads(structure.text)
        assert (structure.kind, structure.field, structure.reasoning) == ("calls", "tools", "possible")
        assert [tool["name"] for tool in asked["tools"]] == names and asked["parallel"] == parallel
    assert json.loads(structure.text)["tools"][0]["parameters"] == {"type": "object"}
    # and are read in that form, whatever the model's own is
    (call,) = whole(
        xml, '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>', tool_choice="required"
    ).message.tool_calls
    assert (call.function.name, call.function.arguments) == ("now", "{}")
    # response_format is about content, of which such an answer has none
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "null"}}}
    whole(xml, "x", tools=[TOOL], tool_choice="required", response_format=form)
    structure = xml.requests[-1].structure
    assert (structure.kind, structure.field) == ("calls", "tools") and "null" not in structure.text


TAG = {"type": "structural_tag", "format": {"type": "const_string", "value": "a"}}
TAG_FIELD = "structured_outputs.structural_tag"
OLD_TAG = {
    "type": "structural_tag",
    "structures": [{"begin": "<f>", "schema": {}, "end": "</f>"}],
    "triggers": ["<f"],
}


def encoded(value):
    return json.dumps(value, separators=(",", ":"))


@pytest.mark.parametrize(
    ("fields", "kind", "text", "field"),
    [
        ({"response_format": {"type": "json_object"}}, "json", '{"type":"object"}', "response_format"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "null"}}}},
            "json",
            '{"type":"null"}',
            "response_format.json_schema.schema",
        ),
        ({"structured_outputs": {"json": {"type": "null"}}}, "json", '{"type":"null"}', "structured_outputs.json"),
        ({"structured_outputs": {"json": '{"type":"null"}'}}, "json", '{"type":"null"}', "structured_outputs.json"),
        ({"structured_outputs": {"json_object": True}}, "json", '{"type":"object"}', "structured_outputs.json"),
        ({"structured_outputs": {"regex": "a+"}}, "regex", "a+", "structured_outputs.regex"),
        ({"structured_outputs": {"regex": "a+", "json": None}}, "regex", "a+", "structured_outputs.regex"),
        ({"structured_outputs": {"choice": ["a", "b"]}}, "choice", '["a","b"]', "structured_outputs.choice"),
        ({"structured_outputs": {"grammar": "start: A"}}, "grammar", "start: A", "structured_outputs.grammar"),
        ({"structured_outputs": {"structural_tag": json.dumps(TAG)}}, "structural_tag", json.dumps(TAG), TAG_FIELD),
        ({"structured_outputs": {"structural_tag": TAG}}, "structural_tag", encoded(TAG), TAG_FIELD),
        ({"response_format": TAG}, "structural_tag", encoded(TAG), "response_format"),
        ({"response_format": OLD_TAG | {"format": None}}, "structural_tag", encoded(OLD_TAG), "response_format"),
        ({"guided_json": {"type": "null"}}, "json", '{"type":"null"}', "guided_json"),
        ({"guided_regex": "a"}, "regex", "a", "guided_regex"),
        ({"guided_choice": ["a"]}, "choice", '["a"]', "guided_choice"),
        ({"guided_grammar": 'start: "a"'}, "grammar", 'start: "a"', "guided_grammar"),
    ],
)
def test_forms_reach_the_engine(server, fields, kind, text, field):
    if field == "structured_outputs.grammar":
        text, fields = 'start: "A"', {"structured_outputs": {"grammar": 'start: "A"'}}
    for path, body in (
        ("/v1/completions", {"prompt": "x"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}),
    ):
        assert server.post(path, body | fields).status_code == 200
        structure = server.requests[-1].structure
        assert (structure.kind, structure.text, structure.field) == (kind, text, field)
    assert structure.reasoning == "none"
    for nothing in ({"response_format": {"type": "text"}}, {"response_format": None}, {}):
        assert server.post("/v1/completions", {"prompt": "x"} | nothing).status_code == 200
        assert server.requests[-1].structure is None


DEEP = {"a": 1}
for _ in range(100):
    DEEP = {"a": DEEP}


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"response_format": 5}, "response_format", "response_format must be an object"),
        ({"response_format": {"type": "xml"}}, "response_format", "response_format.type must be"),
        ({"response_format": {"type": "json_schema"}}, "response_format", "response_format.json_schema is missing"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": 5}}},
            "response_format",
            "must be a JSON",
        ),
        ({"structured_outputs": []}, "structured_outputs", "must be an object"),
        ({"structured_outputs": {}}, "structured_outputs", "must have one of"),
        ({"structured_outputs": {"regex": "a", "json": {}}}, "structured_outputs", "must have one of"),
        ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs", "structural_tag is no JSON"),
        ({"structured_outputs": {"xml": "x"}}, "structured_outputs", "must have one of"),
        ({"structured_outputs": {"regex": 5}}, "structured_outputs", "structured_outputs.regex must be text"),
        ({"structured_outputs": {"regex": "\ud800"}}, "structured_outputs", "not valid Unicode"),
        ({"structured_outputs": {"json": {"a": "\ud800"}}}, "structured_outputs", "structured_outputs.json"),
        ({"structured_outputs": {"regex": "("}}, "structured_outputs", "unclosed group"),
        ({"structured_outputs": {"regex": "a" * 600_000}}, "structured_outputs", "at most 524288"),
        ({"structured_outputs": {"json": '{"a":' * 10_000 + "1" + "}" * 10_000}}, "structured_outputs", "too deeply"),
        ({"guided_json": DEEP}, "guided_json", "nested too deeply"),
        ({"guided_json": {"type": "foo"}}, "guided_json", "Invalid type: foo"),
        ({"guided_regex": "(?=a)"}, "guided_regex", "look-ahead"),
        ({"guided_choice": []}, "guided_choice", "must be a list of texts"),
        ({"guided_json": {}, "guided_regex": "a"}, "guided_regex", "cannot go together"),
        ({"tools": [TOOL], "tool_choice": "any"}, "tool_choice", "tool_choice must be"),
        ({"tools": [TOOL], "tool_choice": {"type": "function"}}, "tool_choice", "tool_choice.function is missing"),
        (
            {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "x"}}},
            "tool_choice",
            "none of the tools",
        ),
        ({"tools": [TOOL], "tool_choice": allow("weather", "x")}, "tool_choice", "names 'x', which is none of"),
        ({"tools": [TOOL], "tool_choice": allow()}, "tool_choice", "tool_choice.allowed_tools.tools must not be empty"),
        ({"tools": [TOOL], "tool_choice": allow("x", mode="none")}, "tool_choice", 'must be "auto" or "required"'),
        ({"tools": [TOOL], "tool_choice": {"type": "allowed_tools"}}, "tool_choice", "allowed_tools is missing"),
        ({"tool_choice": "required"}, "tool_choice", "there are no tools"),
        ({"tools": [TOOL], "tool_choice": "required", "guided_regex": "a"}, "tool_choice", "cannot go together"),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"properties": DEEP}}}]}
            | {"tool_choice": "required"},
            "tools",
            "nested too deeply",
        ),
        (
            {"tools": [TOOL, {"type": "function", "function": {"name": "f", "parameters": {"type": "bogus"}}}]}
            | {"tool_choice": {"type": "function", "function": {"name": "f"}}},
            "tools",
            'tools[1].function.parameters.type must be "object"',
        ),
    ],
)
def test_what_cannot_be_is_refused_by_its_field(server, fields, param, words):
    body = {"messages": [{"role": "user", "content": "x"}]} | fields
    response = server.post(
        "/v1/chat/completions", content=json.dumps(body), headers={"content-type": "application/json"}
    )
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, param) and words in error["message"], error
    assert server.get("/health").status_code == 200


@pytest.mark.parametrize("field", ["guided_json", "response_format", "structured_outputs", "tools"])
def test_a_body_that_is_nested_too_deeply_is_refused(server, field):
    nested = '{"a":' * 10_000 + "1" + "}" * 10_000
    body = f'{{"messages": [{{"role": "user", "content": "x"}}], "{field}": {nested}}}'
    response = server.post("/v1/chat/completions", content=body, headers={"content-type": "application/json"})
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, field) and "nested too deeply" in error["message"]
    assert server.get("/health").status_code == 200


@pytest.mark.parametrize(
    ("body", "field"),
    [
        (b"", None),
        (b"not json", None),
        (b'{"a": ' + b"[" * 255, None),
        (b'{"a": ' + b"[" * 256, "a"),
        (b'{"a": {"b": 1}, "c" : ' + b'{"d": ' * 300, "c"),
        (b'{"a": "c", "b": "[[\\"[[", "\\u00e9": ' + b"[" * 300, "\u00e9"),
        (b"[" * 300, None),
        (b'"' * 100_001, None),
        (b'"' + b"\\" * 300_000, None),
    ],
)
def test_the_field_that_is_nested_too_deeply_is_found(body, field):
    assert find_deep_field(body) == field
