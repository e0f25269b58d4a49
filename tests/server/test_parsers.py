"""The parsers of answers: what they find, and that it does not matter how a text is cut into pieces."""

import itertools
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cairn.errors import ConfigError
from cairn.server.parsers.json_tool_parser import MAX_CALL, JsonToolParser
from cairn.server.parsers.output_parser import (
    Content,
    OutputParser,
    Reasoning,
    ToolCallArguments,
    ToolCallEnd,
    ToolCallStart,
)
from cairn.server.parsers.reasoning import ReasoningParser
from cairn.server.parsers.registry import ParserFactory, select_parsers
from cairn.server.parsers.values import convert_value, get_json_types
from cairn.server.parsers.xml_tool_parser import MAX_VALUE, XmlToolParser

SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "share": {"type": "number"},
        "exact": {"type": "boolean"},
        "places": {"type": "array", "items": {"type": "string"}},
        "where": {"type": "object"},
        "maybe": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
        "either": {"type": ["string", "integer"]},
        "named": {"$ref": "#/$defs/Named"},
        "listed": {"enum": [1, 2]},
    },
    "$defs": {"Named": {"type": "object", "properties": {"name": {"type": "string"}}}},
}
TOOLS = {"weather": SCHEMA, "now": {}}


def xml(name, **values):
    parameters = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items())
    return f"<tool_call>\n<function={name}>\n{parameters}</function>\n</tool_call>"


def hermes(name, arguments):
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


MAKE = {
    "plain": lambda: OutputParser(),
    "xml": lambda: XmlToolParser(TOOLS),
    "json": lambda: JsonToolParser(TOOLS),
    "think": lambda: ReasoningParser(OutputParser(), opened=False),
    "opened": lambda: ReasoningParser(OutputParser(), opened=True),
    "think+xml": lambda: ParserFactory(XmlToolParser, has_reasoning=True).make_parser(TOOLS, opened=False),
    "opened+xml": lambda: ParserFactory(XmlToolParser, has_reasoning=True).make_parser(TOOLS, opened=True),
    "opened+json": lambda: ParserFactory(JsonToolParser, has_reasoning=True).make_parser(TOOLS, opened=True),
}


def told(events):
    """Content, reasoning, and per call its name, its arguments and whether it has ended."""
    content, reasoning, calls = "", "", []
    for event in events:
        match event:
            case Content(text):
                assert text
                content += text
            case Reasoning(text):
                assert text
                reasoning += text
            case ToolCallStart(index, name):
                assert index == len(calls)
                calls.append([name, "", False])
            case ToolCallArguments(index, text):
                assert index == len(calls) - 1 and not calls[index][2]
                calls[index][1] += text
            case ToolCallEnd(index):
                assert index == len(calls) - 1 and not calls[index][2]
                calls[index][2] = True
    return content, reasoning, [tuple(call) for call in calls]


def parsed(kind, pieces, **how):
    parser = MAKE[kind]()
    events = [event for piece in pieces for event in parser.extract_streaming(piece)]
    return told([*events, *parser.finish(**how)])


EXAMPLES = [
    ("plain", "a <tool_call> b", ("a <tool_call> b", "", [])),
    ("xml", "Hello, world.\n", ("Hello, world.\n", "", [])),
    ("xml", xml("now"), ("", "", [("now", "{}", True)])),
    (
        "xml",
        "Let me look.\n\n" + xml("weather", city="Paris", days="3") + "\n" + xml("now") + "\nDone.",
        ("Let me look.Done.", "", [("weather", '{"city": "Paris", "days": 3}', True), ("now", "{}", True)]),
    ),
    (
        "xml",
        xml("weather", share="0.25", exact="True", places='["a", "b"]', where="{'a': True}", maybe="null", either="7"),
        (
            "",
            "",
            [
                (
                    "weather",
                    '{"share": 0.25, "exact": true, "places": ["a", "b"], "where": {"a": true}, "maybe": null, '
                    '"either": 7}',
                    True,
                )
            ],
        ),
    ),
    (
        "xml",
        xml("weather", city='line one\n  "two" \\ \u00e9 \u4e2d </p> <parameter\n' + "x" * 40, days="a few"),
        (
            "",
            "",
            [
                (
                    "weather",
                    json.dumps(
                        {"city": 'line one\n  "two" \\ \u00e9 \u4e2d </p> <parameter\n' + "x" * 40, "days": "a few"},
                        ensure_ascii=False,
                    ),
                    True,
                )
            ],
        ),
    ),
    ("xml", xml("weather", city=""), ("", "", [("weather", '{"city": ""}', True)])),
    ("xml", xml("weather", other="5", city="null"), ("", "", [("weather", '{"other": "5", "city": null}', True)])),
    # what may be missing
    ("xml", "<function=now>\n</function>", ("", "", [("now", "{}", True)])),
    (
        "xml",
        "<tool_call><function=weather><parameter=city>Rome<parameter=days>2</function></tool_call>!",
        ("!", "", [("weather", '{"city": "Rome", "days": 2}', True)]),
    ),
    ("xml", "<tool_call>\n<function=now>\n</tool_call>", ("", "", [("now", "{}", True)])),
    (
        "xml",
        "<tool_call><function=now></function><function=now></function></tool_call>",
        ("", "", [("now", "{}", True), ("now", "{}", True)]),
    ),
    ("xml", "<tool_call><function=fetch></function></tool_call>", ("", "", [("fetch", "{}", True)])),
    # what is no call
    ("xml", "see <function=fetch> and <tool_call> here", ("see <function=fetch> and <tool_call> here", "", [])),
    ("xml", "\n\n<tool_call>\n<fun", ("\n\n<tool_call>\n<fun", "", [])),
    ("xml", "<tool_call><function=a\nb></function>", ("<tool_call><function=a\nb></function>", "", [])),
    ("xml", "<tool_call><function=></function>", ("<tool_call><function=></function>", "", [])),
    ("xml", "<tool_call>" + " " * 90 + "<function=fetch>", ("<tool_call>" + " " * 90 + "<function=fetch>", "", [])),
    (
        "xml",
        "<tool_call><function=now></function>" + " " * 90 + "</tool_call>x",
        (" " * 90 + "</tool_call>x", "", [("now", "{}", True)]),
    ),
    # what is wrong within a call
    (
        "xml",
        "<tool_call><function=weather>\n so be it <b>\n<parameter=days>\n1\n</parameter></function> and on",
        ("so be it <b>\n and on", "", [("weather", '{"days": 1}', True)]),
    ),
    ("xml", "<tool_call><function=now><parameter=a\nb>", ("<parameter=a\nb>", "", [("now", "{", False)])),
    # what is cut off
    ("xml", "<tool_call><function=weather><parameter=city>\nPar", ("", "", [("weather", '{"city": "Par', False)])),
    ("xml", "<tool_call><function=weather><parameter=days>\n12", ("", "", [("weather", '{"days": 12', False)])),
    ("xml", "<tool_call><function=weather><para", ("<para", "", [("weather", "{", False)])),
    ("json", hermes("now", "{}"), ("", "", [("now", "{}", True)])),
    (
        "json",
        'So:\n\n<tool_call>{"name": "weather", "arguments": {"a": "}</tool_call>\\"{", "b": [{}]}}</tool_call>\nyes\n',
        ("So:yes\n", "", [("weather", '{"a": "}</tool_call>\\"{", "b": [{}]}', True)]),
    ),
    (
        "json",
        '<tool_call>{"arguments": {"a": 1}, "name": "now"}</tool_call>' + hermes("now", '{"b": "\\\\"}'),
        ("", "", [("now", '{"a": 1}', True), ("now", '{"b": "\\\\"}', True)]),
    ),
    ("json", '<tool_call>{"name": "now"}</tool_call>', ("", "", [("now", "{}", True)])),
    (
        "json",
        '<tool_call>{"name": "now", "parameters": "{\\"a\\":1}"}</tool_call>',
        ("", "", [("now", '{"a": 1}', True)]),
    ),
    ("json", hermes("now", "{}").removesuffix("</tool_call>") + "and on", ("and on", "", [("now", "{}", True)])),
    # what is no call
    ("json", "<tool_call>\nnot JSON</tool_call>", ("<tool_call>\nnot JSON</tool_call>", "", [])),
    ("json", '<tool_call>["name"]</tool_call>', ('<tool_call>["name"]</tool_call>', "", [])),
    ("json", "x\n\n<tool_call>{", ("x\n\n<tool_call>{", "", [])),
    ("json", "a <tool_call>" + hermes("now", "{}"), ("a <tool_call>", "", [("now", "{}", True)])),
    # what is cut off
    (
        "json",
        '<tool_call>{"name": "now", "arguments": {"a": "b',
        ("", "", [("now", '{"a": "b', False)]),
    ),
    ("json", '<tool_call>{"name": "now", "arguments": {}, "id": 3}', (', "id": 3}', "", [("now", "{}", True)])),
    # what is cut off in the mark that closes a complete call, and what only looks like it
    *(("json", hermes("now", "{}")[:-cut], ("", "", [("now", "{}", True)])) for cut in range(1, 14)),
    *(("xml", xml("now")[:-cut], ("", "", [("now", "{}", True)])) for cut in range(1, 14)),
    *(
        ("xml", xml("now").removesuffix("</tool_call>") + end, (end, "", [("now", "{}", True)]))
        for end in ("</x", "a<")
    ),
    ("json", hermes("now", "{}") + "<", ("<", "", [("now", "{}", True)])),
    ("xml", xml("now") + "<", ("<", "", [("now", "{}", True)])),
    ("json", hermes("now", "{}").removesuffix("</tool_call>") + "</x", ("</x", "", [("now", "{}", True)])),
    ("think", "<think>\nhm\n\n</think>\n\nyes", ("yes", "hm", [])),
    ("think", "\n<think>hm</think>", ("", "hm", [])),
    ("think", "no <think>hm</think>", ("no <think>hm</think>", "", [])),
    ("think", "<thin", ("<thin", "", [])),
    ("think", "\n\nyes", ("\n\nyes", "", [])),
    ("think", "\n" * 70 + "<think>a", ("\n" * 70 + "<think>a", "", [])),
    ("opened", "hm\nhm </thin \n</think>\n\nyes</think>", ("yes</think>", "hm\nhm </thin ", [])),
    ("opened", "\n\nhm\n", ("", "hm\n", [])),
    ("opened", "</think>yes", ("yes", "", [])),
    (
        "think+xml",
        "<think>\nno <tool_call> here\n</think>\n\nyes\n" + xml("now"),
        ("yes", "no <tool_call> here", [("now", "{}", True)]),
    ),
    ("opened+xml", "so\n</think>\n\n" + xml("now"), ("", "so", [("now", "{}", True)])),
    ("opened+json", "so\n</think>\n\n" + hermes("now", '{"a": 1}'), ("", "so", [("now", '{"a": 1}', True)])),
]


@pytest.mark.parametrize(("kind", "text", "expected"), EXAMPLES)
def test_an_answer_says_the_same_however_it_is_cut(kind, text, expected):
    assert parsed(kind, [text]) == expected
    assert parsed(kind, list(text)) == expected
    for place in range(len(text) + 1):
        assert parsed(kind, [text[:place], text[place:]]) == expected
        assert parsed(kind, [text[:place], text[place : place + 3], text[place + 3 :]]) == expected


NOW = ("now", "{}", True)
CUT_OFF = [
    # the beginning of a mark may be anything
    *(("xml", f"So {'<tool_call>'[:end]}", (f"So {'<tool_call>'[:end]}", "", [])) for end in range(1, 11)),
    *(("json", f"So {'<tool_call>'[:end]}", (f"So {'<tool_call>'[:end]}", "", [])) for end in range(1, 11)),
    *(("think", "<think>"[:end], ("<think>"[:end], "", [])) for end in range(1, 7)),
    ("xml", "<function", ("<function", "", [])),
    ("opened", "hm</thin", ("", "hm</thin", [])),
    # behind the mark a call was to come
    *(("xml", "So\n<tool_call>\n<function=now"[:end], ("So", "", [])) for end in range(14, 28)),
    *(("json", 'So\n<tool_call>\n{"name": "now", "arg'[:end], ("So", "", [])) for end in range(14, 36)),
    ("json", '<tool_call>{"arguments": {"a": 1}, "na', ("", "", [])),
    ("xml", "So <function=wea", ("So ", "", [])),
    ("opened+xml", "hm</think>So\n<tool_call>", ("So", "hm", [])),
    ("xml", xml("now").removesuffix("</tool_call>") + "<func", ("", "", [NOW])),
    ("xml", xml("now") + "\n<tool_call>\n<function=no", ("", "", [NOW])),
    ("xml", "<tool_call><function=weather><para", ("", "", [("weather", "{", False)])),
    ("xml", "<tool_call><function=weather><parameter=da", ("", "", [("weather", "{", False)])),
    # what is no call is none
    ("xml", "see <tool_call> here", ("see <tool_call> here", "", [])),
    ("xml", "see <function=fet", ("see <function=fet", "", [])),
    ("json", "see <tool_call> here", ("see <tool_call> here", "", [])),
    ("json", "see <tool_call>{} </tool_call>", ("see <tool_call>{} </tool_call>", "", [])),
]


@pytest.mark.parametrize(("kind", "text", "expected"), CUT_OFF)
def test_a_call_that_is_truncated_before_its_name_is_nothing(kind, text, expected):
    assert parsed(kind, [text], truncated=True) == parsed(kind, list(text), truncated=True) == expected


@pytest.mark.parametrize(
    "text", ["So\n<tool_call>", "So\n<tool_call>\n<function=no", "So <function=wea", 'So <tool_call>{"name": "now", "a']
)
def test_an_answer_that_ends_by_itself_says_what_it_means(text):
    for kind in ("xml", "json"):
        assert parsed(kind, [text]) == (text, "", [])


FRAGMENTS = st.sampled_from(
    [
        *("<tool_call>", "</tool_call>", "<function=", "<function=weather>", "</function>", "<parameter=city>"),
        *("<parameter=days>", "</parameter>", "<think>", "</think>", "{", "}", '"', "\\", "[", ",", ":", "\n", " "),
        *('"name"', '"arguments"', ': "now"', "null", "<", ">", "=", '{"name": "now", "arguments": {', "</tool_"),
    ]
)
WORDS = st.integers(0, 999).map(lambda number: f"W{number}W")


@given(st.sampled_from(sorted(MAKE)), st.lists(FRAGMENTS | WORDS, max_size=24), st.data())
@settings(max_examples=400, deadline=None)
def test_no_text_raises_or_is_lost(kind, parts, data):
    text = "".join(parts)
    whole = parsed(kind, [text])
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    assert parsed(kind, [text[i:j] for i, j in zip([0, *cuts], [*cuts, len(text)], strict=True)]) == whole
    assert parsed(kind, [text[i:j] for i, j in itertools.pairwise([0, *cuts, len(text)])], truncated=True) == parsed(
        kind, [text], truncated=True
    )
    content, reasoning, calls = whole
    said = content + reasoning + "".join(name + arguments for name, arguments, _ in calls)
    assert sorted(word for word in parts if word.startswith("W")) == sorted(
        word for word in parts if word.startswith("W") and word in said
    )
    assert sum(said.count("W") for _ in [0]) == text.count("W")


@given(st.text(max_size=200), st.sampled_from(["city", "days", "share", "exact", "where", "either"]))
@settings(max_examples=300, deadline=None)
def test_a_value_comes_out_as_it_was_written(value, name):
    if any(mark in f"\n{value}" for mark in ("</parameter>", "<parameter=", "</function>")):
        return
    ((_, arguments, ended),) = parsed("xml", [xml("weather", **{name: value})])[2]
    read = json.loads(arguments)[name]
    assert ended
    if isinstance(read, str):
        assert read == value
    else:
        assert value.strip().lower() == "null" or type(read) in (bool, int, float, dict, list)


@pytest.mark.parametrize(
    ("text", "kinds", "value"),
    [
        ("12", {"integer"}, 12),
        ("1.0", {"number"}, 1),
        ("1.5", {"integer"}, "1.5"),
        ("1e400", {"number"}, "1e400"),
        ("nan", {"number"}, "nan"),
        ("9" * 5000, {"integer"}, "9" * 5000),
        ("yes", {"boolean"}, "yes"),
        ("FALSE", {"boolean"}, False),
        ("[1, {'a': None}]", {"array"}, [1, {"a": None}]),
        ("[" * 5000 + "]" * 5000, {"array"}, "[" * 5000 + "]" * 5000),
        ("{1, 2}", {"object"}, "{1, 2}"),
        ('{"a": NaN}', {"object"}, '{"a": NaN}'),
        ("__import__('os')", {"object"}, "__import__('os')"),
        ("3", {"string", "integer"}, 3),
        ("3", {"string"}, "3"),
        ("3", set(), "3"),
        ("Null", {"object"}, None),
    ],
)
def test_values_have_the_types_of_their_schema(text, kinds, value):
    assert convert_value(text, frozenset(kinds)) == value and type(convert_value(text, frozenset(kinds))) is type(value)


@pytest.mark.parametrize(
    ("name", "kinds"),
    [
        ("city", {"string"}),
        ("maybe", {"integer", "null"}),
        ("either", {"string", "integer"}),
        ("named", {"object"}),
        ("listed", {"integer"}),
        ("unknown", set()),
    ],
)
def test_types_are_found_in_the_schema(name, kinds):
    assert get_json_types(name, SCHEMA) == kinds


@pytest.mark.parametrize(
    "schema",
    [
        {"properties": []},
        {"properties": {"a": 3}},
        {"properties": {"a": {"type": 3, "anyOf": 4, "$ref": 5}}},
        {"properties": {"a": {"$ref": "#/properties/a"}}},
        {"properties": {"a": {"$ref": "#/$defs/missing"}}},
    ],
)
def test_a_strange_schema_says_nothing(schema):
    assert get_json_types("a", schema) <= {"string"}


def test_references_in_circles_do_not_multiply():
    again = [{"$ref": "#/properties/a"}, {"$ref": "#/properties/b"}] * 2000
    schema = {"properties": {"a": {"anyOf": again}, "b": {"oneOf": again, "type": "integer"}}}
    assert get_json_types("a", schema) == {"integer"}


@pytest.mark.parametrize(
    ("kind", "opening", "piece", "bound"),
    [
        ("xml", "<tool_call><function=weather><parameter=city>", "word ", 64),
        ("xml", "<tool_call><function=weather><parameter=where>", "word " * 50, MAX_VALUE + 300),
        ("xml", "<tool_call><function=", "n" * 100, 512),
        ("xml", "<tool_call>", "\n" * 50, 256),
        ("json", '<tool_call>{"arguments": {', '"a": 1, ' * 40, MAX_CALL + 400),
        ("json", '<tool_call>{"name": "now", "arguments": {', '"a": 1, ', 64),
        ("opened", "", "\n" * 50, 128),
        ("think", "", "\n" * 50, 128),
        ("xml", "", "\n" * 50, 128),
    ],
)
def test_what_is_held_back_is_bounded(kind, opening, piece, bound):
    parser = MAKE[kind]()
    events = parser.extract_streaming(opening)
    most = 0
    for _ in range((bound * 2) // len(piece) + 20):
        events += parser.extract_streaming(piece)
        most = max(most, parser.num_pending)
    assert most <= bound
    told([*events, *parser.finish()])


def test_a_long_value_that_is_no_text_becomes_text():
    value = "[" + "1, " * (MAX_VALUE // 3) + "1]"
    for pieces in (
        [xml("weather", places=value)],
        [xml("weather", places=value)[i : i + 9999] for i in range(0, 2 * MAX_VALUE, 9999)],
    ):
        ((_, arguments, ended),) = parsed("xml", pieces)[2]
        assert ended and json.loads(arguments) == {"places": value}


@pytest.mark.parametrize("beyond", [-1, 0, 1])
def test_a_call_may_be_so_long_and_no_longer(beyond):
    """Its arguments come first, so it is read as a whole."""
    text = '{"arguments": {"a": "%s"}, "name": "now"}</tool_call>'
    text = "<tool_call>" + text % ("x" * (MAX_CALL + beyond - len(text) + 2))
    whole = parsed("json", [text])
    assert [name for name, _, _ in whole[2]] == (["now"] if beyond <= 0 else [])
    assert parsed("json", [text[:-5], *text[-5:]]) == parsed("json", [text[:99], text[99:-1], text[-1]]) == whole


def test_arguments_come_before_their_call_is_complete():
    parser = XmlToolParser(TOOLS)
    parser.extract_streaming("<tool_call><function=weather><parameter=city>\n")
    assert parser.extract_streaming("a long text that goes on " * 3 + "and on")[-1] == ToolCallArguments(
        0, "a long text that goes on " * 3 + "and on"
    )
    parser = JsonToolParser(TOOLS)
    parser.extract_streaming('<tool_call>{"name": "now", "arguments": {')
    assert parser.extract_streaming('"a": "b') == [ToolCallArguments(0, '"a": "b')]


@pytest.mark.parametrize(
    ("template", "calls", "reasoning"),
    [
        ("{{ messages }}", None, False),
        ("<tool_call>\n<function=...> <think>", XmlToolParser, True),
        ('<tool_call>{"name": ...}', JsonToolParser, False),
    ],
)
def test_parsers_follow_from_the_template(template, calls, reasoning):
    chosen = select_parsers(template, None, None)
    assert (chosen.tool_parser, chosen.has_reasoning) == (calls, reasoning)
    named = select_parsers(template, "qwen3_coder", "none")
    assert (named.tool_parser, named.has_reasoning) == (XmlToolParser, False)
    assert select_parsers(template, "none", "qwen3").has_reasoning


def test_an_unknown_parser_is_refused_by_its_flag():
    with pytest.raises(ConfigError, match="--tool-call-parser: there is no 'x'; one of hermes"):
        select_parsers("", "x", None)
    with pytest.raises(ConfigError, match="--reasoning-parser: there is no 'x'; one of deepseek_r1"):
        select_parsers("", None, "x")


@pytest.mark.parametrize(
    ("prompt", "opened"),
    [
        ("...<think>\n", True),
        ("<think>", True),
        ("<think>\n\n</think>\n\n", False),
        ("I like <think> more\nassistant\n", False),
        ("assistant\n", False),
    ],
)
def test_a_prompt_may_have_opened_the_reasoning(prompt, opened):
    assert ParserFactory(None, has_reasoning=True).opens_reasoning(prompt) == opened
    assert not ParserFactory(None, has_reasoning=False).opens_reasoning(prompt)


def test_an_answer_that_is_continued_may_be_within_its_reasoning():
    parsers = ParserFactory(None, has_reasoning=True)
    assert parsers.leaves_reasoning_open("<think>so") and not parsers.leaves_reasoning_open("<think>so</think>yes")
    assert not parsers.leaves_reasoning_open("yes") and not ParserFactory(
        None, has_reasoning=False
    ).leaves_reasoning_open("<think>")
