"""The parsers of answers: what they find, and that it does not matter how a text is cut into pieces."""

import itertools
import json
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher

from cairn.engine.contract import Structure
from cairn.engine.grammars.structure import grammar_of
from cairn.engine.grammars.worker import byte_tokenizer
from cairn.engine.text.tokenizer import MARKS
from cairn.errors import ConfigError
from cairn.server.openai.chat_message import ChatMessage
from cairn.server.options import ServerOptions
from cairn.server.parsers.gemma4_tool_parser import Gemma4ToolParser
from cairn.server.parsers.harmony import MAX_HEADER, HarmonyParser, call_header
from cairn.server.parsers.json_mender import JsonMender
from cairn.server.parsers.json_tool_parser import MAX_CALL, JsonToolParser
from cairn.server.parsers.lfm2_tool_parser import Lfm2ToolParser
from cairn.server.parsers.nemotron_tool_parser import NemotronToolParser
from cairn.server.parsers.output_parser import (
    Content,
    OutputParser,
    Reasoning,
    ToolCallArguments,
    ToolCallBroken,
    ToolCallEnd,
    ToolCallStart,
)
from cairn.server.parsers.pythonic_tool_parser import PythonicToolParser
from cairn.server.parsers.reasoning import ReasoningParser
from cairn.server.parsers.registry import CHANNELS, TOOL_PARSERS, ParserFactory, select_parsers
from cairn.server.parsers.values import convert_value, get_json_types
from cairn.server.parsers.whole_values import MAX_VALUE as MAX_WHOLE_VALUE
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


def gemma(name, arguments=""):
    return f"<|tool_call>call:{name}{{{arguments}}}<tool_call|>"


def harmony(channel, text, end="<|end|>", to="", kind=""):
    return f"<|channel|>{channel}{to}{kind}<|message|>{text}{end}"


NEXT = "<|start|>assistant"


MAKE = {
    "plain": lambda: OutputParser(),
    "xml": lambda: XmlToolParser(TOOLS),
    "json": lambda: JsonToolParser(TOOLS),
    "nemotron": lambda: NemotronToolParser(TOOLS),
    "lfm2": lambda: Lfm2ToolParser(TOOLS),
    "pythonic": lambda: PythonicToolParser(TOOLS),
    "gemma4": lambda: Gemma4ToolParser(TOOLS),
    "channels+gemma4": lambda: ParserFactory(Gemma4ToolParser, has_reasoning=True, marks=CHANNELS).make_parser(
        TOOLS, opened=False
    ),
    "opened channels+gemma4": lambda: ParserFactory(Gemma4ToolParser, has_reasoning=True, marks=CHANNELS).make_parser(
        TOOLS, opened=True
    ),
    "harmony": lambda: ParserFactory(HarmonyParser, has_reasoning=True).make_parser(TOOLS, opened=False),
    "opened+harmony": lambda: ParserFactory(HarmonyParser, has_reasoning=True).make_parser(TOOLS, opened=True),
    "harmony without tools": lambda: ParserFactory(HarmonyParser, has_reasoning=True).make_parser(None, opened=False),
    "harmony without reasoning": lambda: ParserFactory(HarmonyParser, has_reasoning=False).make_parser(
        TOOLS, opened=False
    ),
    "think": lambda: ReasoningParser(OutputParser(), opened=False),
    "opened": lambda: ReasoningParser(OutputParser(), opened=True),
    "think+xml": lambda: ParserFactory(XmlToolParser, has_reasoning=True).make_parser(TOOLS, opened=False),
    "opened+xml": lambda: ParserFactory(XmlToolParser, has_reasoning=True).make_parser(TOOLS, opened=True),
    "opened+json": lambda: ParserFactory(JsonToolParser, has_reasoning=True).make_parser(TOOLS, opened=True),
    "opened+lfm2": lambda: ParserFactory(Lfm2ToolParser, has_reasoning=True).make_parser(TOOLS, opened=True),
    "think+pythonic": lambda: ParserFactory(PythonicToolParser, has_reasoning=True).make_parser(TOOLS, opened=False),
    "opened+form": lambda: ParserFactory(XmlToolParser, has_reasoning=True).make_parser(
        TOOLS, opened=True, calls_end_reasoning=False
    ),
}


def told(events):
    """Content, reasoning, and per call its name, its arguments and whether it has ended; of a broken one its text."""
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
                json.loads(calls[index][1])
            case ToolCallBroken(index, text):
                assert index == len(calls) - 1 and not calls[index][2] and text
                calls[index][2] = text
    return content, reasoning, [tuple(call) for call in calls]


def parsed(kind, pieces, **how):
    parser = MAKE[kind]()
    events = [event for piece in pieces for event in parser.extract_streaming(piece)]
    return told([*events, *parser.finish(**how)])


NOW = ("now", "{}", True)
OSLO = ("weather", '{"city": "Oslo"}', True)
A1 = ("now", '{"a": 1}', True)
HEAD = '<tool_call>{"name": "now", "arguments": '
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
    *(("xml", f"```{line}" + xml("now") + "\n```", ("``````", "", [NOW])) for line in ("", "\n")),
    ("xml", "`" + xml("now") + "\n\n" + xml("now"), ("`" + xml("now"), "", [NOW])),
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
        "<tool_call><function=weather><parameter=city>Oslo</parameter>\n so be it <b>\n"
        "<parameter=days>\n1\n</parameter></function> and on",
        ("so be it <b>\n and on", "", [("weather", '{"city": "Oslo", "days": 1}', True)]),
    ),
    (
        "xml",
        "<tool_call><function=now><parameter=b>x</parameter><parameter=a\nb>",
        ("<parameter=a\nb>", "", [("now", '{"b": "x"}', True)]),
    ),
    # what only speaks of calls
    *(
        ("xml", text, (text, "", []))
        for text in (
            "Write `<tool_call>` and `<function=now>` then.",
            f"Write `{xml('now')}` or `<function=now></function>` then.",
            "<tool_call><function=weather>\n so be it <b>\n<parameter=days>\n1\n</parameter></function> and on",
            "<tool_call><function=now><parameter=a\nb>",
            "<tool_call><function=weather><para",
            "<tool_call>\n<function=now>\n",
        )
    ),
    # an answer that ends by itself within a call: behind a value it is complete
    *(
        ("xml", f"<tool_call><function=weather><parameter=city>\nOslo\n</parameter>{end}", ("", "", [OSLO]))
        for end in ("", "\n", "\n</func", "</tool_c", "\n</function>\n</tool", "<")
    ),
    *(
        ("xml", "So.\n" + head + rest, ("So." + rest, "", [("weather", arguments, "\n" + head)]))
        for head, arguments, rest in (
            ("<tool_call><function=weather><parameter=city>", '{"city": ', "Par"),
            ("<tool_call><function=weather><parameter=days>\n", '{"days": ', "12"),
            ("<tool_call><function=weather><parameter=days>12</parameter>", '{"days": 12', "<para"),
            ("<tool_call><function=weather><parameter=days>12</parameter><parameter=", '{"days": 12', "ci"),
        )
    ),
    (
        "xml",
        "<tool_call><function=weather><parameter=city>" + "word " * 20,
        (
            "",
            "",
            [("weather", '{"city": "' + "word " * 20, "<tool_call><function=weather><parameter=city>" + "word " * 20)],
        ),
    ),
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
    # lists, and what is mended
    ("json", '<tool_call>\n[{"name": "now", "arguments": {"a": 1}}]\n</tool_call>!', ("!", "", [A1])),
    (
        "json",
        '<tool_call>[{"name": "now", "arguments": {"a": 1}}, {"arguments": {"a": 1}, "name": "now"}]',
        ("", "", [A1, A1]),
    ),
    (
        "json",
        '<tool_call>[{"name": "now", "arguments": {"a": 1}},\n{"name": "now", "parameters": {}}]',
        ("", "", [A1, NOW]),
    ),
    ("json", '<tool_call>[{"name": "now", "arguments": {}}, or so', (", or so", "", [NOW])),
    *(
        ("json", f"{HEAD}{written}}}</tool_call>", ("", "", [("now", mended, True)]))
        for written, mended in (
            ('{"a": "one\ntwo\t"}', '{"a": "one\\ntwo\\t"}'),
            (r'{"a": "C:\dir"}', r'{"a": "C:\\dir"}'),
            (r'{"a": "\u00e9\u12\uXY"}', r'{"a": "\u00e9\\u12\\uXY"}'),
            ('{"a": [1, 2, ], "b": {"c": True,}, }', '{"a": [1, 2 ], "b": {"c": true} }'),
            ('{"a": None, "b": False}', '{"a": null, "b": false}'),
            ("{ }", "{ }"),
        )
    ),
    ("json", "<tool_call>{'name': 'now', 'arguments': {'a': 1}}</tool_call>", ("", "", [A1])),
    ("json", "<tool_call>{'name': 'now', 'arguments': {'a': f()}}</tool_call>", None),
    ("json", '<tool_call>{"arguments": {"a": 1,}, "name": "now"}</tool_call>', ("", "", [A1])),
    ("json", '<tool_call>{"name": "now", "arguments": "{\'a\': 1}"}</tool_call>', ("", "", [A1])),
    # brackets that are missing, where an answer ends by itself or the call is closed
    *(("json", f'{HEAD}{{"a": 1{end}', ("", "", [A1])) for end in ("", "}", "</tool_call>", "</tool", "}</tool_call>")),
    ("json", f'{HEAD}{{"a": [{{"b": "c"', ("", "", [("now", '{"a": [{"b": "c"}]}', True)])),
    # what cannot be mended
    *(
        ("json", f"a {HEAD}{whole}{rest}", (f"a {rest}", "", [("now", written, HEAD + whole)]))
        for whole, written, rest in (
            ('{"a": ', '{"a": ', "foo}}</tool_call> and on"),
            ('{"a": ', '{"a": ', "'b'}}</tool_call>"),
            ('{"a": "b" ', '{"a": "b" ', "c}}</tool_call>"),
            ('{"a": "b', '{"a": "b', ""),
            ('{"a": 1, ', '{"a": 1, ', ""),
            ('{"a": 1, "b"', '{"a": 1, "b"', ""),
            ('{"a": ', '{"a": ', "012}}</tool_call>"),
            ("{", "{", ""),
            ('{"a": [', '{"a": [', "</tool_call>"),
        )
    ),
    ("json", '<tool_call> tags, {"name": 1}', ('<tool_call> tags, {"name": 1}', "", [])),
    ("json", '<tool_call>{"name": 1}</tool_call>', ('<tool_call>{"name": 1}</tool_call>', "", [])),
    ("json", '<tool_call>{"name": "\\ud800", "arguments": {}}</tool_call>', ("", "", [("\ufffd", "{}", True)])),
    # Nemotron Nano v2
    ("nemotron", 'So.\n<TOOLCALL>[{"name": "now", "arguments": {"a": 1}}]</TOOLCALL>\n', ("So.", "", [A1])),
    (
        "nemotron",
        '<TOOLCALL>[{"name": "now", "arguments": {"a": 1}}, {"name": "now", "arguments": {"a": 1}}]</TOOLCALL>',
        ("", "", [A1, A1]),
    ),
    ("nemotron", hermes("now", "{}"), (hermes("now", "{}"), "", [])),
    # LFM2
    ("lfm2", '<|tool_call_start|>[weather(city="Oslo")]<|tool_call_end|>It rains.', ("It rains.", "", [OSLO])),
    ("lfm2", "<|tool_call_start|>[now(), weather(city='Oslo', ), ]<|tool_call_end|>", ("", "", [NOW, OSLO])),
    ("lfm2", "<|tool_call_start|>[now(), or so]<|tool_call_end|>", (", or so]<|tool_call_end|>", "", [NOW])),
    ("lfm2", "<|tool_call_start|>[now(a=1]", ("]", "", [("now", '{"a": 1', "<|tool_call_start|>[now(a=1")])),
    (
        "lfm2",
        "a\n<|tool_call_start|>[now(), weather(\n  city='Oslo',\n)]<|tool_call_end|>\nb",
        ("ab", "", [NOW, OSLO]),
    ),
    (
        "lfm2",
        "<|tool_call_start|>[now(a=1, b=-2.5, c=True, d=None, e=false, "
        'f=["x", (1, 2)], g={"k": \'v)],("\'})]<|tool_call_end|>',
        (
            "",
            "",
            [
                (
                    "now",
                    '{"a": 1, "b": -2.5, "c": true, "d": null, "e": false, "f": ["x", [1, 2]], "g": {"k": "v)],(\\""}}',
                    True,
                )
            ],
        ),
    ),
    (
        "lfm2",
        '<|tool_call_start|>[now(a="one\ntwo", b="C:\\dir", c="""x"y\nz""", d=\'it\\\'s\', e="", f="\\\\")]',
        (
            "",
            "",
            [
                (
                    "now",
                    json.dumps({"a": "one\ntwo", "b": "C:\\dir", "c": 'x"y\nz', "d": "it's", "e": "", "f": "\\"}),
                    True,
                )
            ],
        ),
    ),
    ("lfm2", '<|tool_call_start|>[{"name": "now", "arguments": {"a": 1}}]<|tool_call_end|>', ("", "", [A1])),
    ("lfm2", "<|tool_call_start|>now(a=1)<|tool_call_end|>", ("", "", [A1])),
    *(("lfm2", f"<|tool_call_start|>[now(a=1{end}", ("", "", [A1])) for end in ("", ")", ")]", ")]<|tool_call")),
    # what is no call of that form
    *(
        ("lfm2", text, (text, "", []))
        for text in (
            "<|tool_call_start|> and so on",
            "<|tool_call_start|>[now",
            "<|tool_call_start|>[now(1)]<|tool_call_end|>",
            "<|tool_call_start|>[1, 2]<|tool_call_end|>",
            "[now(a=1)]",
        )
    ),
    *(
        ("lfm2", f"<|tool_call_start|>[now(a={rest}", (rest, "", [("now", '{"a": ', "<|tool_call_start|>[now(a=")]))
        for rest in ("Oslo)]<|tool_call_end|>", "f(1))]", "'b", "", "[1", "__import__('os'))", "1.__class__)")
    ),
    # a list that is the whole answer
    ("pythonic", "[now(), weather(city='Oslo')]", ("", "", [NOW, OSLO])),
    ("pythonic", "\n[now(a=1)]", ("", "", [A1])),
    ("pythonic", "[fetch(a=1)]", ("[fetch(a=1)]", "", [])),
    ("pythonic", "so [now(a=1)]", ("so [now(a=1)]", "", [])),
    ("pythonic", "[1] says: [now(a=1)]", ("[1] says: [now(a=1)]", "", [])),
    ("think+pythonic", "<think>\n[1] hm</think>\n\n[now(a=1)]", ("", "[1] hm", [A1])),
    ("json", '<tool_call>["name"]</tool_call>', ('<tool_call>["name"]</tool_call>', "", [])),
    ("json", "x\n\n<tool_call>{", ("x\n\n<tool_call>{", "", [])),
    ("json", "a <tool_call>" + hermes("now", "{}"), ("a <tool_call>", "", [("now", "{}", True)])),
    # what is cut off
    ("json", HEAD + '{}, "id": 3}</tool_call>', ("", "", [NOW])),
    (
        "json",
        HEAD.replace("{", "[{", 1) + '{}, "id": "}", "type": "x"}, {"name": "now", "arguments": {}}]',
        ("", "", [NOW, NOW]),
    ),
    ("json", HEAD + '{}, "W1W": 3}</tool_call>', (', "W1W": 3}</tool_call>', "", [NOW])),
    ("json", HEAD + "{}, and on", (", and on", "", [NOW])),
    (
        "json",
        HEAD + '{"a": "\\ud83e\\udea8\\ud800\\udc0\\udc00"}}',
        ("", "", [("now", '{"a": "\\ud83e\\udea8\\ufffd\\\\udc0\\ufffd"}', True)]),
    ),
    ("json", HEAD + '{"a": 1e999}}', ("1e999}}", "", [("now", '{"a": ', HEAD + '{"a": ')])),
    ("lfm2", "<|tool_call_start|>[now(a='\\ud800')]", ("", "", [("now", '{"a": "\ufffd"}', True)])),
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
    # tags that open or close nothing
    ("opened", "hm\nhm </thin \n</think>\n\nyes</think>", ("yes", "hm\nhm </thin ", [])),
    ("opened", "\n<think>\nhm\n<think>hm\n</think>\n</think>\nyes\n\n</think>\nyes\n", ("yesyes\n", "hmhm", [])),
    ("think", "<think><think>hm</think>yes <think> yes", ("yes  yes", "hm", [])),
    (
        "think",
        "<think>a `<think>` b</think>a `</think>` and '<think>' b</thin",
        ("a `</think>` and '<think>' b</thin", "a `<think>` b", []),
    ),
    ("think", "<think>hm</think>`yes`</think>", ("`yes`", "hm", [])),
    ("think", "<think>hm</think>`</think>", ("`", "hm", [])),
    ("opened+xml", "hm</think>" + xml("now") + "\n</think>\n\nyes", ("yes", "hm", [NOW])),
    ("think+xml", xml("now") + "\n</think>\n", ("", "", [NOW])),
    ("think+xml", "yes</think>", ("yes</think>", "", [])),
    (
        "opened+xml",
        "hm</think>" + xml("weather", city="</think>"),
        ("", "hm", [("weather", '{"city": "</think>"}', True)]),
    ),
    # calls that end the reasoning
    ("opened+xml", "hm\n\n" + xml("now"), ("", "hm", [NOW])),
    ("opened+xml", "hm\n" + xml("now") + "\n</think>\n\nyes", ("yes", "hm", [NOW])),
    ("opened+xml", "hm\n<function=now>\n</function>\n" + xml("now") + "</think>", ("", "hm", [NOW, NOW])),
    (
        "think+xml",
        "\n<think>\n" + xml("weather", city="</think>") + "</think>",
        ("", "", [("weather", '{"city": "</think>"}', True)]),
    ),
    ("opened+json", "hm\n" + hermes("now", '{"a": 1}') + "\n</think>", ("", "hm", [A1])),
    ("opened+json", 'hm <tool_call>{"arguments": {"a": 1}, "name": "now"}', ("", "hm ", [A1])),
    ("opened+lfm2", 'hm\n<|tool_call_start|>[weather(city="Oslo")]<|tool_call_end|></think>yes', ("yes", "hm", [OSLO])),
    (
        "opened+xml",
        "hm <tool_call><function=weather><parameter=city>Os",
        ("Os", "hm ", [("weather", '{"city": ', "<tool_call><function=weather><parameter=city>")]),
    ),
    # and what only speaks of them
    *(
        (kind, f"hm\n{text}\n</think>yes", ("yes", f"hm\n{text}", []))
        for kind, text in (
            ("opened+xml", "I should use <tool_call> tags, <function=now> first"),
            ("opened+xml", xml("fetch", url="x")),
            ("opened+xml", f"Calls look like `{xml('weather', city='Oslo')}`."),
            ("opened+xml", "<tool_call>\n<function=no"),
            ("opened+json", "I should use <tool_call> tags"),
            ("opened+json", hermes("fetch", "{}")),
            ("opened+json", '<tool_call>{"arguments": {"a": 1}'),
            ("opened+json", "<tool_call>{'name': 'now'"),
            ("opened+lfm2", "<|tool_call_start|>[fetch(a=1)]<|tool_call_end|>"),
            ("opened+lfm2", "<|tool_call_start|>[now(a"),
            ("opened+form", xml("now")),
        )
    ),
    # harmony: the token that ends an answer is no text, but may be one where special tokens are asked for
    *(("harmony", harmony("final", "It rains.\n", end), ("It rains.\n", "", [])) for end in ("", "<|return|>")),
    *(
        ("harmony", harmony("analysis", "hm") + NEXT + harmony("final", "yes", end), ("yes", "hm", []))
        for end in ("", "<|return|>")
    ),
    ("harmony", harmony("analysis", "hm"), ("", "hm", [])),
    *(
        ("harmony", harmony("analysis", "hm") + NEXT + head + '{"city": "Oslo"}' + end, ("", "hm", [OSLO]))
        for end in ("", "<|call|>", " <|call|>", "\n")
        for head in (
            call_header("weather"),
            "<|channel|>commentary to=functions.weather<|constrain|>json<|message|>",
            "<|channel|>commentary to=functions.weather json<|message|>",
            "<|channel|>analysis to=functions.weather code<|message|>",
            " to=functions.weather<|channel|>commentary <|constrain|>json<|message|>",
            "<|channel|>commentary to=weather<|message|>",
        )
    ),
    # several messages in one answer: two of a kind are lines of their own
    (
        "harmony",
        harmony("analysis", "one")
        + NEXT
        + harmony("analysis", "two")
        + NEXT
        + harmony("commentary", "I will look.")
        + NEXT
        + call_header("now")
        + "{}<|call|>"
        + NEXT
        + call_header("weather")
        + '{"city": "Oslo"}<|call|>'
        + NEXT
        + harmony("final", "so", "<|return|>"),
        ("I will look.\nso", "one\ntwo", [NOW, OSLO]),
    ),
    ("harmony", harmony("analysis", "hm", "") + harmony("final", "yes", ""), ("yes", "hm", [])),
    # what may be missing, and what is mended
    *(("harmony", call_header("now") + rest, ("", "", [NOW])) for rest in ("", "  ", "<|call|>", "{}", " {}<|end|>")),
    ("harmony", call_header("now") + '{"a": 1<|call|>', ("", "", [A1])),
    ("harmony", call_header("now") + "{'a': 1}", ("'a': 1}", "", [("now", "{", call_header("now") + "{")])),
    ("harmony", call_header("now") + "[1]<|call|>", ("[1]", "", [("now", "", call_header("now"))])),
    ("harmony", call_header("fetch") + '{"a": 1}', ("", "", [("fetch", '{"a": 1}', True)])),
    ("harmony", call_header("now") + '{"a": 1} and on<|end|>', (" and on", "", [A1])),
    ("harmony", call_header("now") + '{"a": "<|call|>"}', ("", "", [("now", '{"a": "<|call|>"}', True)])),
    # a prompt that has opened a message
    ("opened+harmony", "hm<|end|>" + NEXT + harmony("final", "yes"), ("yes", "hm", [])),
    ("opened+harmony", "hm" + harmony("commentary", "{}", "", " to=functions.now"), ("", "hm", [NOW])),
    ("harmony", "a plain < text <| of a final message", None),
    ("harmony", "", ("", "", [])),
    # what is no header
    ("harmony", "<|channel|>thoughts<|message|>hm", None),
    ("harmony", "<|start|>user<|message|>hm", None),
    ("harmony", "see <|channel|> here", None),
    ("harmony", "<|channel|>" + "a" * MAX_HEADER + "<|message|>hm", None),
    ("harmony", "<|channel|>final", None),
    ("harmony", " " * 90 + harmony("final", "yes", ""), (" " * 90 + "\nyes", "", [])),
    # tools that are nobody's function, and what is not parsed
    (
        "harmony",
        harmony("analysis", "hm") + NEXT + harmony("analysis", "x = 1", "", " to=python", " code"),
        ("", f"hm\n{NEXT}<|channel|>analysis to=python code<|message|>x = 1", []),
    ),
    ("harmony without tools", call_header("now") + "{}", None),
    ("harmony without reasoning", harmony("analysis", "hm") + NEXT + harmony("final", "yes"), ("hm\nyes", "", [])),
    ("opened", "\n\nhm\n", ("", "hm\n", [])),
    ("opened", "</think>yes", ("yes", "", [])),
    (
        "think+xml",
        "<think>\nno <tool_call> here\n</think>\n\nyes\n" + xml("now"),
        ("yes", "no <tool_call> here", [("now", "{}", True)]),
    ),
    ("opened+xml", "so\n</think>\n\n" + xml("now"), ("", "so", [("now", "{}", True)])),
    ("opened+json", "so\n</think>\n\n" + hermes("now", '{"a": 1}'), ("", "so", [("now", '{"a": 1}', True)])),
    # Gemma 4's
    ("gemma4", gemma("now"), ("", "", [NOW])),
    ("gemma4", f"So.\n{gemma('now')}", ("So.", "", [NOW])),
    ("gemma4", gemma("now", " ") + gemma("now", "a:1"), ("", "", [NOW, A1])),
    ("gemma4", gemma("now", 'a:<|"|>x, "y"} \\n<|"|>'), ("", "", [("now", '{"a": "x, \\"y\\"} \\\\n"}', True)])),
    (
        "gemma4",
        gemma("now", 'b:true,c:null,d:-1.5,e:[1,<|"|>]<|"|>,{f:{}}],<|"|>g h<|"|>:{i:<|"|>}<|"|>}'),
        ("", "", [("now", '{"b": true, "c": null, "d": -1.5, "e": [1, "]", {"f": {}}], "g h": {"i": "}"}}', True)]),
    ),
    (
        "gemma4",
        gemma("now", 'a:"x\\"}",b:["]"],"c":2'),
        ("", "", [("now", '{"a": "x\\"}", "b": ["]"], "c": 2}', True)]),
    ),
    ("gemma4", gemma("now", "a:celsius, b: NaN"), ("", "", [("now", '{"a": "celsius", "b": "NaN"}', True)])),
    ("gemma4", "<|tool_call>call:now{a:1<tool_call|>", ("", "", [A1])),
    ("gemma4", "<|tool_call>call:now{<tool_call|>So", ("So", "", [NOW])),
    ("gemma4", f"{gemma('now')}\nSo", ("So", "", [NOW])),
    ("gemma4", "<|tool_call>call:now{a:1}", ("", "", [A1])),
    ("gemma4", "<|tool_call>call:now{a:1", ("", "", [A1])),
    (
        "gemma4",
        "<|tool_call>call:now{a:}<tool_call|>",
        ("}<tool_call|>", "", [("now", '{"a": ', "<|tool_call>call:now{a:")]),
    ),
    ("gemma4", "<|tool_call>call now{}<tool_call|>", None),
    ("gemma4", "see `<|tool_call>call:now{}` there", None),
    ("gemma4", "<|channel>thought\nhm\n<channel|>", None),
    ("channels+gemma4", "<|channel>thought\nhm\n<channel|>So.", ("So.", "hm", [])),
    ("channels+gemma4", "<|channel>thought\n<channel|>So.", ("So.", "", [])),
    ("channels+gemma4", f"<|channel>thought\nhm<channel|>{gemma('now')}", ("", "hm", [NOW])),
    ("channels+gemma4", f"<|channel>thought\nhm{gemma('now')}", ("", "hm", [NOW])),
    ("channels+gemma4", "<think>hm</think>", None),
    ("opened channels+gemma4", "hm\n<channel|>So.", ("So.", "hm", [])),
]


@pytest.mark.parametrize(("kind", "text", "expected"), EXAMPLES)
def test_an_answer_says_the_same_however_it_is_cut(kind, text, expected):
    """Without an expectation all of it is content."""
    expected = expected or (text, "", [])
    assert parsed(kind, [text]) == expected
    assert parsed(kind, list(text)) == expected
    for place in range(len(text) + 1):
        assert parsed(kind, [text[:place], text[place:]]) == expected
        assert parsed(kind, [text[:place], text[place : place + 3], text[place + 3 :]]) == expected


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
    *(("xml", f"<tool_call><function=weather>{end}", ("", "", [])) for end in ("", "\n", "<para", "<parameter=da")),
    *(
        ("xml", f"<tool_call><function=weather><parameter=days>12{end}", ("", "", [("weather", arguments, False)]))
        for end, arguments in (
            ("", '{"days": 12'),
            ("</parameter>", '{"days": 12'),
            ("</parameter><para", '{"days": 12'),
        )
    ),
    ("xml", "<tool_call><function=weather><parameter=city>\nPar", ("", "", [("weather", '{"city": "Par', False)])),
    ("json", f'{HEAD}{{"a": "b', ("", "", [("now", '{"a": "b', False)])),
    ("json", f'{HEAD}{{"a": 12', ("", "", [("now", '{"a": ', False)])),
    ("json", f'{HEAD}{{"a": 1, ', ("", "", [("now", '{"a": 1', False)])),
    ("json", f'{HEAD}{{"a": {{}}', ("", "", [("now", '{"a": {}', False)])),
    ("json", f'{HEAD}{{"a": 1}}', ("", "", [A1])),
    ("json", '<tool_call>[{"name": "now", "arguments": {}}, {"na', ("", "", [NOW])),
    ("lfm2", "<|tool_call_start|>[now(", ("", "", [])),
    ("lfm2", "<|tool_call_start|>[now(a='b", ("", "", [("now", '{"a": ', False)])),
    ("lfm2", "<|tool_call_start|>[now(a=1, b", ("", "", [("now", '{"a": 1', False)])),
    *(("gemma4", "So <|tool_call>call:now"[:end], ("So ", "", [])) for end in range(15, 24)),
    ("gemma4", "<|tool_call>call:now{a:1", ("", "", [("now", '{"a": ', False)])),
    ("gemma4", '<|tool_call>call:now{a:<|"|>x<|"', ("", "", [("now", '{"a": ', False)])),
    ("gemma4", "<|tool_call>call:now{a:1, b", ("", "", [("now", '{"a": 1', False)])),
    ("opened+xml", "hm\n<tool_call>\n<function=now", ("", "hm", [])),
    *(("harmony", "So<|end|>" + call_header("now")[:end], ("So", "", [])) for end in range(11, 40)),
    ("harmony", call_header("now") + '{"a": 12', ("", "", [("now", '{"a": ', False)])),
    ("harmony", call_header("now"), ("", "", [("now", "", False)])),
    ("harmony", harmony("analysis", "hm<|en", ""), ("", "hm<|en", [])),
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


WEATHER = {
    "gemma4": gemma("weather", 'city:<|"|>Oslo<|"|>'),
    "granite4": hermes("weather", '{"city": "Oslo"}'),
    "lfm2": '<|tool_call_start|>[weather(city="Oslo")]<|tool_call_end|>',
    "openai": call_header("weather") + '{"city": "Oslo"}',
    "nemotron_json": '<TOOLCALL>[{"name": "weather", "arguments": {"city": "Oslo"}}]</TOOLCALL>',
    "pythonic": '[weather(city="Oslo")]',
    "qwen3_coder": xml("weather", city="Oslo"),
}
WEATHER |= {"hermes": WEATHER["granite4"], "json": WEATHER["granite4"]}
WEATHER |= {"xml": WEATHER["qwen3_coder"], "qwen3_xml": WEATHER["qwen3_coder"]}
EACH_PARSER = pytest.mark.parametrize("name", sorted({*TOOL_PARSERS} - {"none"}))


def test_options_name_the_parsers():
    for name in TOOL_PARSERS:
        assert ServerOptions(model="m", port=0, tool_call_parser=name).tool_call_parser == name
    with pytest.raises(ValueError, match=", ".join(f"'{name}'" for name in sorted(TOOL_PARSERS)[:-1])):
        ServerOptions(model="m", port=0, tool_call_parser="x")


@EACH_PARSER
def test_every_form_of_calls_is_parsed(name):
    """Alone, in reasoning, and twice; what calls begin with, and the tags that may be special tokens, are known."""
    parser, call = TOOL_PARSERS[name], WEATHER[name]
    for opened in (False, True):
        made = [ParserFactory(parser, has_reasoning=opened).make_parser(TOOLS, opened=opened) for _ in range(2)]
        for pieces, each in zip(([call], call), made, strict=True):
            events = [event for piece in pieces for event in each.extract_streaming(piece)] + each.finish()
            assert told(events) == ("", "", [OSLO])
            head = "".join(each.call_head.split()) if not opened else "".join(each.reasoning_end.split())
            assert head and call.startswith(each.call_head)
    assert any(spelled in "".join(call.split()) for spelled in parser.list_heads(["now", "weather"]))
    assert not any(spelled in "".join(call.split()) for spelled in parser.list_heads(["now", "eather", "weathe"]))
    tags = {*parser.opening_tags, getattr(parser, "closing_tag", "</tool_call>")} - {"<function=", "[", ""}
    assert tags <= MARKS


@EACH_PARSER
def test_every_form_of_calls_has_a_grammar(name):
    """Of the tools that are allowed, and of no others."""
    tags = TOOL_PARSERS[name].describe_calls(["now", "weather"])
    form = {"type": "triggered_tags", "triggers": [tag["begin"] for tag in tags], "tags": tags}
    text = json.dumps({"type": "structural_tag", "format": form})
    grammar = grammar_of(Structure(kind="structural_tag", text=text, field="tool_choice"))
    matcher = LLMatcher(byte_tokenizer(), grammar, log_level=0)

    def accepts(answer):
        matcher.reset()
        return matcher.try_consume_tokens(list(answer.encode())) == len(answer.encode()) and matcher.is_accepting()

    assert accepts(WEATHER[name]) and accepts(f"So. {WEATHER[name]} and on")
    other = f"So. {WEATHER[name].replace('weather', 'fetch')}"
    assert not accepts(other) or parsed(name, [other]) == (other, "", [])


HM = harmony("analysis", "hm") + NEXT


@pytest.mark.parametrize(
    ("kind", "reasoning", "taken", "refused"),
    [
        ("choice", "possible", [harmony("final", "yes", ""), HM + harmony("final", "yes", "")], ["yes", HM + "yes"]),
        ("choice", "none", [harmony("final", "yes", "", kind=" <|constrain|>json")], [harmony("final", "no", "")]),
        ("choice", "opened", [f"hm<|end|>{NEXT}" + harmony("final", "yes", "")], [harmony("final", "yes", "")]),
        (
            "calls",
            "possible",
            [HM + call_header("weather") + '{"city": "Oslo"}', call_header("weather") + "{}"],
            [call_header("now") + "{}", harmony("final", "yes"), call_header("weather") + '{"city": 1}'],
        ),
    ],
)
def test_forms_are_those_of_messages_in_harmony(kind, reasoning, taken, refused):
    """Of the last one, behind whatever reasoning there is."""
    tool = {"name": "weather", "parameters": {"properties": {"city": {"type": "string"}}}, "place": 0}
    text = json.dumps({"tools": [tool], "parallel": True} if kind == "calls" else ["yes", "maybe"])
    structure = Structure(kind=kind, text=text, field="tools", reasoning=reasoning, is_harmony=True)
    matcher = LLMatcher(byte_tokenizer(), grammar_of(structure), log_level=0)
    for answers, is_taken in ((taken, True), (refused, False)):
        for answer in answers:
            matcher.reset()
            count = matcher.try_consume_tokens(list(answer.encode()))
            assert (count == len(answer.encode()) and matcher.is_accepting()) == is_taken, answer


ALL = {name: (lambda name=name: TOOL_PARSERS[name](TOOLS)) for name in WEATHER}
SHAPES = {"": (False, False, True), "think+": (True, False, True), "opened+": (True, True, True)}
SHAPES["form+"] = (True, True, False)
MAKE |= {
    f"{shape}{name}": lambda name=name, reasons=reasons, opened=opened, ends=ends: ParserFactory(
        TOOL_PARSERS[name], has_reasoning=reasons
    ).make_parser(TOOLS, opened=opened, calls_end_reasoning=ends)
    for shape, (reasons, opened, ends) in SHAPES.items()
    for name in WEATHER
}
FRAGMENTS = st.sampled_from(
    [
        *("<tool_call>", "</tool_call>", "<function=", "<function=weather>", "</function>", "<parameter=city>"),
        *("<parameter=days>", "</parameter>", "<think>", "</think>", "{", "}", '"', "\\", "[", ",", ":", "\n", " "),
        *('"name"', '"arguments"', ': "now"', "null", "<", ">", "=", '{"name": "now", "arguments": {', "</tool_"),
        *("<TOOLCALL>", "</TOOLCALL>", "<|tool_call_start|>", "<|tool_call_end|>", "<|tool_call_", "[now(", "now(a="),
        *("<|start|>", "assistant", "<|channel|>", "analysis", "commentary", "final", " to=functions.now", "to=W1W"),
        *("<|constrain|>", "json", "<|message|>", "<|end|>", "<|call|>", "<|return|>", "<|ch", call_header("now")),
        *("city=", ")", "]", "'", '"""', "]}", '{"a": ', '", "b', "True", "12", "-1.5e", "`", "</parameter>\n", "</th"),
    ]
)
WORDS = st.integers(0, 999).map(lambda number: f"W{number}W")


ANY_TEXT = given(st.sampled_from(sorted(MAKE)), st.lists(FRAGMENTS | WORDS, max_size=24), st.data())


@ANY_TEXT
@settings(max_examples=250, deadline=None, derandomize=True)
def test_no_text_raises_or_is_lost(kind, parts, data):
    check_text(kind, parts, data)


@pytest.mark.more
@ANY_TEXT
@settings(max_examples=1500, deadline=None, derandomize=True)
def test_none_of_more_texts_raises_or_is_lost(kind, parts, data):
    check_text(kind, parts, data)


def check_text(kind, parts, data):
    text = "".join(parts)
    whole = parsed(kind, [text])
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    assert parsed(kind, [text[i:j] for i, j in zip([0, *cuts], [*cuts, len(text)], strict=True)]) == whole
    assert parsed(kind, [text[i:j] for i, j in itertools.pairwise([0, *cuts, len(text)])], truncated=True) == parsed(
        kind, [text], truncated=True
    )
    assert parsed(kind, list(text)) == whole
    content, reasoning, calls = whole
    message = ChatMessage(MAKE[kind](), lambda: "0" * 32, joins_calls=True)
    message.add(text, last=True)
    joined = message.message()
    called = [call["function"] for call in joined.get("tool_calls", ())]
    # a broken call's text is content where nothing of it has been sent
    assert [(call["name"], call["arguments"], True) for call in called] == [call for call in calls if call[2] is True]
    for told_content, told_reasoning, told_calls in (
        (content, reasoning, [name + arguments for name, arguments, _ in calls]),
        (joined["content"] or "", joined["reasoning"] or "", [call["name"] + call["arguments"] for call in called]),
    ):
        said = told_content + told_reasoning + "".join(told_calls)
        assert all(word in said for word in parts if word.startswith("W"))
        assert said.count("W") == text.count("W")


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


@given(st.dictionaries(st.text(), JSON_VALUES, max_size=4), st.booleans(), st.data())
@settings(max_examples=100, deadline=None, derandomize=True)
def test_json_is_left_as_it_is(value, is_ascii, data):
    """Also in pieces; cut off behind a value, its brackets are closed."""
    text = json.dumps(value, ensure_ascii=is_ascii, indent=data.draw(st.sampled_from([None, 2])))
    mender, written, rest = JsonMender(), "", ""
    for character in text:
        piece, read = mender.read(rest + character)
        written, rest = written + piece, (rest + character)[read:]
    assert (written, rest, mender.status) == (text, "", "done")
    end = data.draw(st.integers(0, len(text) - 1))
    mender = JsonMender()
    piece, read = mender.read(text[:end], final=True)
    if (missing := mender.missing_end()) is not None:
        assert mender.status == "wrong" or (read == end and isinstance(json.loads(piece + missing), dict))
    mender = JsonMender()
    piece, read = mender.read(data.draw(st.text(alphabet='{}[]",:\\ab1. \n', max_size=40)))
    if mender.status == "done":
        json.loads(piece)


@given(st.dictionaries(st.from_regex(r"[a-z_]\w{0,9}", fullmatch=True), JSON_VALUES, max_size=4), st.data())
@settings(max_examples=100, deadline=None, derandomize=True)
def test_python_literals_are_read_as_they_are_meant(value, data):
    """However they are cut, also with line breaks in short quotes."""
    written = ", ".join(f"{key}={data.draw(st.sampled_from([repr, json.dumps]))(one)}" for key, one in value.items())
    text = f"<|tool_call_start|>[now({written})]<|tool_call_end|>"
    cut = data.draw(st.integers(0, len(text)))
    (call,) = parsed("lfm2", [text])[2]
    assert parsed("lfm2", [text[:cut], text[cut:]])[2] == parsed("lfm2", list(text))[2] == [call]
    assert call[2] is True and json.loads(call[1]) == value


def test_hostile_text_is_read_in_linear_time():
    """Ten times the text takes no hundred times as long; each of these would, if any of it were read again."""
    texts = {
        "json": ['<tool_call>{"name": "now", "arguments": {"a": "' + "\\" * 200_000, "<tool_call>" + "[" * 200_000],
        "lfm2": ["<|tool_call_start|>[now(a='" + "\\'" * 100_000, "<|tool_call_start|>[now(a=" + "'" * 200_000],
        "xml": [xml("weather", where="'" + "\\'" * 100_000), "<function=" * 20_000, "<tool_call>\n" * 20_000],
        "opened+xml": ["<tool_call>" * 20_000, "</think" * 30_000, "<think>" * 30_000],
    }
    for kind, hostile in texts.items():
        for text in hostile:
            begun = time.process_time()
            assert parsed(kind, [text[i : i + 50] for i in range(0, len(text), 50)])
            assert parsed(kind, [text])
            assert time.process_time() - begun < 20


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
        ("harmony", "<|channel|>", "n" * 100, MAX_HEADER + 200),
        ("harmony", call_header("now") + "{", '"a": 1, ', 64),
        ("harmony", call_header("now") + "{}", "\n" * 50, 128),
        ("harmony", "", "\n" * 50, 128),
        ("lfm2", "<|tool_call_start|>[now(a='", "word " * 50, MAX_WHOLE_VALUE + 300),
        ("lfm2", "<|tool_call_start|>[", "n" * 100, 512),
        ("lfm2", "<|tool_call_start|>[now(a=1, ", "n" * 100, 512),
        ("json", "<tool_call>{'name': ", "word " * 50, MAX_CALL + 300),
        ("json", "<tool_call>", "tags " * 10, 64),
        ("json", '<tool_call>{"name": "now", "arguments": {"a": 1, ', " " * 50, 512),
        ("json", '<tool_call>{"name": "now", "arguments": {"a": ', "1" * 50, 640),
        ("pythonic", "", "\n" * 50, 128),
        ("opened+xml", "<tool_call>", "\n" * 50, 256),
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
    text = '{"arguments": {"a": "%s"}, "name": "now"}'
    text = "<tool_call>" + text % ("x" * (MAX_CALL + beyond - len(text) + 2)) + "</tool_call>"
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
        ("{{ 'List of tools: <|tool_list_start|>[' }}", Lfm2ToolParser, False),
        ("<|tool_call_start|>[f()]<|tool_call_end|>", Lfm2ToolParser, False),
        ("<TOOLCALL>[...]</TOOLCALL> <think>", NemotronToolParser, True),
        ("<|start|>assistant<|channel|>analysis<|message|>", HarmonyParser, True),
        ("<|channel>thought\n<channel|><|tool_call>call:f{}<tool_call|>", Gemma4ToolParser, True),
        ("List of tools: {{ content.split('</think>')[-1] }}", Lfm2ToolParser, True),
    ],
)
def test_parsers_follow_from_the_template(template, calls, reasoning, caplog):
    chosen = select_parsers("{% if tools %}" + template, None, None)
    assert (chosen.tool_parser, chosen.has_reasoning) == (calls, reasoning)
    assert ("name the form with --tool-call-parser (one of gemma4, granite4, hermes" in caplog.text) == (calls is None)
    caplog.clear()
    assert select_parsers(template, None, None).tool_parser == calls
    named = select_parsers("{% if tools %}" + template, "qwen3_coder", "none")
    assert (named.tool_parser, named.has_reasoning) == (XmlToolParser, False)
    assert select_parsers("{% if tools %}" + template, "none", "qwen3").has_reasoning
    assert not caplog.records


def test_an_unknown_parser_is_refused_by_its_flag():
    with pytest.raises(ConfigError, match="--tool-call-parser: there is no 'x'; one of gemma4, granite4, hermes"):
        select_parsers("", "x", None)
    with pytest.raises(ConfigError, match="--reasoning-parser: there is no 'x'; one of deepseek_r1"):
        select_parsers("", None, "x")


def test_answers_in_harmony_have_one_parser():
    for tools, reasoning in (("openai", "qwen3"), ("hermes", "openai_gptoss"), ("openai", "think")):
        with pytest.raises(ConfigError, match=r"--(tool-call|reasoning)-parser \w+: answers in harmony are parsed by"):
            select_parsers("", tools, reasoning)
    for tools, reasoning in (("openai", None), (None, "openai_gptoss"), ("openai", "none"), ("none", "openai_gptoss")):
        chosen = select_parsers("", tools, reasoning)
        assert chosen.is_harmony and chosen.has_reasoning == (reasoning != "none")
        assert chosen.tool_parser == (None if tools == "none" else HarmonyParser)
    harmony = ParserFactory(HarmonyParser, has_reasoning=True)
    assert harmony.opens_reasoning("<|start|>assistant<|channel|>analysis<|message|>")
    assert not harmony.opens_reasoning("<|end|><|start|>assistant")
    assert harmony.leaves_reasoning_open("<|channel|>analysis<|message|>hm")
    assert not harmony.leaves_reasoning_open("<|channel|>analysis<|message|>hm<|end|><|start|>assistant")
    # Another form that is named counts, whatever the template is like.
    assert not select_parsers("<|channel|>", "hermes", None).is_harmony


def test_gemma_4_reasons_in_a_channel():
    template = "<|channel>thought <|tool_call>"
    for tools, reasoning in ((None, None), (None, "gemma4"), ("gemma4", None), ("hermes", "gemma4")):
        assert select_parsers(template, tools, reasoning).reasoning_marks == CHANNELS
    # Another form that is named counts, whatever the template is like.
    assert select_parsers(template, None, "qwen3").reasoning_marks == ("<think>", "</think>")
    assert not select_parsers(template, None, "none").has_reasoning
    chosen = select_parsers(template, None, None)
    assert chosen.opens_reasoning("<|turn>model\n<|channel>thought\n")
    assert not chosen.opens_reasoning("<|turn>model\n<|channel>thought\n<channel|>")
    assert chosen.leaves_reasoning_open("<|channel>thought\nhm")
    assert not chosen.leaves_reasoning_open("<|channel>thought\nhm<channel|>So")


@pytest.mark.parametrize(
    ("reasoning", "taken", "refused"),
    [
        ("possible", ["yes", "<|channel>thought\nhm\n<channel|>yes"], ["no", "<think>hm</think>yes"]),
        ("opened", ["hm<channel|>yes"], ["yes", "<|channel>thought\nhm", "hm</think>yes"]),
    ],
)
def test_a_form_begins_after_the_channel(reasoning, taken, refused):
    structure = Structure(
        kind="choice", text='["yes"]', field="structured_outputs.choice", reasoning=reasoning, reasoning_marks=CHANNELS
    )
    matcher = LLMatcher(byte_tokenizer(), grammar_of(structure), log_level=0)
    for answer in (*taken, *refused):
        matcher.reset()
        text = list(answer.encode())
        is_taken = matcher.try_consume_tokens(text) == len(text) and matcher.is_accepting()
        assert is_taken == (answer in taken)


@pytest.mark.parametrize("beyond", [-1, 0, 1])
def test_a_value_of_gemma_4_may_be_long(beyond):
    value = '<|"|>' + "x" * (MAX_WHOLE_VALUE - 10 + beyond) + '<|"|>'
    text = gemma("now", f"a:{value}")
    whole = parsed("gemma4", [text])
    assert [ended for _, _, ended in whole[2]] == ([True] if beyond <= 0 else [text[: text.index(":", 20) + 1]])
    assert parsed("gemma4", [text[:-5], *text[-5:]]) == parsed("gemma4", [text[:99], text[99:-1], text[-1]]) == whole


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
