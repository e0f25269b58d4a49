"""The tools of a body of /v1/responses: as functions that a chat's model can call, and what items their calls are.

A custom tool is a function with one text, `input`; the local shell one with a command; a namespace's tools are called
by their own names, or with the namespace's in front where another tool has the same. Those that OpenAI runs are
left out.
"""

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from cairn.server.chat_translation import mark_of

CallKind: TypeAlias = Literal["function", "custom", "local_shell"]

_FIELDS = ("name", "description", "parameters", "strict")
_SHELL = "local_shell"
_SHELL_FIELDS = ("command", "working_directory", "timeout_ms")
"""Of a command that the model may say; `user` and `env` are the client's own."""


@dataclass(frozen=True, slots=True)
class CalledTool:
    """What the client knows a tool as."""

    kind: CallKind
    name: str
    namespace: str | None = None


class ToolTable:
    """`functions`: a chat's tools; `described`: the tools as a response says them again, without those left out;
    `left_out`: by place in the body, the types of these."""

    def __init__(self, tools: Sequence[Any] | None) -> None:
        self.functions: list[dict[str, Any]] = []
        self.described: list[dict[str, Any]] = []
        self.left_out: dict[str, str] = {}
        self._tools: dict[str, CalledTool] = {}
        self._names: dict[tuple[str | None, str], str] = {}
        counts = Counter(map(_name, _callable(tools or ())))
        for number, tool in enumerate(tools or ()):
            match tool["type"]:
                case "namespace":
                    inner = [
                        member
                        for place, member in enumerate(tool["tools"])
                        if self._can_run(member, f"tools[{number}].tools[{place}]")
                    ]
                    for member in inner:
                        name = _name(member)
                        self._add(member, tool["name"], _qualified(tool["name"], name) if counts[name] > 1 else name)
                    fields = {name: tool.get(name) for name in ("type", "name", "description")}
                    self.described.append(fields | {"tools": [*map(_described, inner)]})
                case _ if self._can_run(tool, f"tools[{number}]"):
                    self._add(tool, None, _name(tool))
                    self.described.append(_described(tool))

    def _can_run(self, tool: Mapping[str, Any], place: str) -> bool:
        if tool["type"] in ("function", "custom", _SHELL):
            return True
        self.left_out[place] = tool["type"]
        return False

    def _add(self, tool: Mapping[str, Any], namespace: str | None, called: str) -> None:
        name = _name(tool)
        self.functions.append({"type": "function", "function": _function(tool, called)} | mark_of(tool))
        self._tools[called] = CalledTool(tool["type"], name, namespace)
        self._names[namespace, name] = called

    def find(self, called: str) -> CalledTool:
        """The tool that the model calls so; a function of that name where there is none."""
        return self._tools.get(called) or CalledTool("function", called)

    def name_of(self, name: str, namespace: str | None = None) -> str:
        """What the model calls a tool, also one that is not among these."""
        return self._names.get((namespace, name), name)

    def translate_choice(self, choice: Any) -> Any:
        """A `tool_choice` as a chat has it. One that wants a tool that is left out leaves the choice to the model."""
        if choice == "required" and self.left_out and not self.functions:
            return None
        if not isinstance(choice, dict):
            return choice
        if choice["type"] != "allowed_tools":
            return None if (name := self._chosen(choice)) is None else _named(name)
        names = [name for tool in choice["tools"] if (name := self._chosen(tool)) is not None]
        if not names:
            return "none" if choice["mode"] == "auto" else None
        return {"type": "allowed_tools", "allowed_tools": {"mode": choice["mode"], "tools": [*map(_named, names)]}}

    def _chosen(self, choice: Mapping[str, Any]) -> str | None:
        """What the model calls a tool that is named; None for one that nobody here can run."""
        if choice["type"] == _SHELL:
            return self.name_of(_SHELL)
        if choice["type"] not in ("function", "custom"):
            self.left_out.setdefault("tool_choice", choice["type"])
            return None
        name, within = choice["name"], choice.get("namespace")
        matches = [
            called
            for (space, tool_name), called in self._names.items()
            if tool_name == name and within in (None, space)
        ]
        return matches[0] if matches else str(name)

    def read_call(self, item: Mapping[str, Any]) -> dict[str, Any]:
        """The function and the arguments of a call that is sent back."""
        match item["type"]:
            case "custom_tool_call":
                arguments: Any = {"input": item["input"]}
            case "local_shell_call":
                action = item["action"]
                arguments = {name: action[name] for name in _SHELL_FIELDS if action.get(name) is not None}
            case _:
                arguments = item.get("arguments")
        return {"name": self.name_of(_name(item), item.get("namespace")), "arguments": arguments}


def read_shell_action(arguments: str) -> dict[str, Any]:
    """What a call of the local shell does. One that is no JSON, as it was cut off, has no command: half of one could do
    anything."""
    try:
        sent = json.loads(arguments)
    except (ValueError, RecursionError):
        sent = None
    action = {name: sent[name] for name in _SHELL_FIELDS if name in sent} if isinstance(sent, dict) else {}
    command = action.get("command")
    if isinstance(command, str):
        command = ["bash", "-lc", command]
    words = [str(word) for word in command] if isinstance(command, list) else []
    timeout, folder = action.get("timeout_ms"), action.get("working_directory")
    return {
        "type": "exec",
        "command": words,
        "env": {},
        "timeout_ms": timeout if isinstance(timeout, int) else None,
        "user": None,
        "working_directory": folder if isinstance(folder, str) else None,
    }


def _name(tool: Mapping[str, Any]) -> str:
    return str(tool.get("name", _SHELL))


def _callable(tools: Sequence[Any]) -> Iterator[Any]:
    for tool in tools:
        yield from _callable(tool["tools"]) if tool["type"] == "namespace" else (tool,)


def _qualified(namespace: str, name: str) -> str:
    return f"{namespace}{name}" if namespace.endswith("__") else f"{namespace}__{name}"


def _named(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


def _function(tool: Mapping[str, Any], called: str) -> dict[str, Any]:
    """A function's fields in the client's order: templates write them."""
    if tool["type"] == "function":
        fields = {name: value for name, value in tool.items() if name in _FIELDS and value is not None}
        return fields | {"name": called}
    if tool["type"] == _SHELL:
        command = {"type": "array", "items": {"type": "string"}, "description": "The program and its arguments."}
        more = {"working_directory": {"type": "string"}, "timeout_ms": {"type": "integer"}}
        parameters: dict[str, Any] = {"type": "object", "properties": {"command": command, **more}}
        about = {"name": called, "description": "Runs a command on the user's machine."}
        return {**about, "parameters": parameters | {"required": ["command"]}}
    said = {} if tool.get("description") is None else {"description": tool["description"]}
    form = tool.get("format") or {"type": "text"}
    field = {"type": "string"}
    if form["type"] == "grammar":
        field["description"] = f"Text by this grammar ({form['syntax']}):\n{form['definition']}"
    return {
        "name": called,
        **said,
        "parameters": {"type": "object", "properties": {"input": field}, "required": ["input"]},
    }


def _described(tool: Mapping[str, Any]) -> dict[str, Any]:
    match tool["type"]:
        case "function":
            return {"type": "function"} | {name: tool.get(name) for name in _FIELDS}
        case "custom":
            form = tool.get("format") or {"type": "text"}
            return {"type": "custom", "name": tool["name"], "description": tool.get("description"), "format": form}
    return {"type": tool["type"]}
