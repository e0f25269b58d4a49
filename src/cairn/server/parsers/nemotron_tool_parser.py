"""Tool calls as Nemotron Nano v2 writes them: <TOOLCALL>[{"name": "f", "arguments": {"p": 1}}]</TOOLCALL>"""

from collections.abc import Sequence
from typing import Any

from cairn.server.parsers.json_tool_parser import JsonToolParser


class NemotronToolParser(JsonToolParser):
    """A list of calls in JSON between tags of its own."""

    opening_tags = ("<TOOLCALL>",)
    closing_tag = "</TOOLCALL>"

    @classmethod
    def describe_calls(cls, names: Sequence[str]) -> list[dict[str, Any]]:
        call = {
            "type": "object",
            "properties": {"name": {"enum": list(names)}, "arguments": {"type": "object"}},
            "required": ["name", "arguments"],
            "additionalProperties": False,
        }
        calls = {"type": "json_schema", "json_schema": {"type": "array", "items": call, "minItems": 1}}
        return [{"type": "tag", "begin": cls.opening_tags[0], "content": calls, "end": cls.closing_tag}]
