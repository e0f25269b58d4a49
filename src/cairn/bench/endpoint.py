"""Where requests go, and how their bodies are written."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal

from cairn.bench.work import Turn

_ROLES = MappingProxyType({"system": "System", "user": "User", "assistant": "Assistant"})


@dataclass(frozen=True, slots=True)
class Said:
    """One message of a conversation so far. `role`: system, user or assistant."""

    role: str
    text: str


@dataclass(frozen=True, slots=True)
class Endpoint:
    """`url`: the whole address of the endpoint. `kind`: which of OpenAI's bodies it takes. `fields`: sampling
    parameters and whatever else goes into every body. `headers` and `secrets` are never printed: `secrets` are taken
    out of messages of servers, too."""

    url: str
    kind: Literal["completions", "chat"]
    model: str
    ignore_eos: bool = False
    fields: Mapping[str, Any] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    secrets: tuple[str, ...] = field(default=(), repr=False)

    def body(self, history: Sequence[Said], turn: Turn) -> dict[str, Any]:
        """A streaming request for the turn's answer after `history`, with usage at the end."""
        body: dict[str, Any] = {"model": self.model, "stream": True, "stream_options": {"include_usage": True}}
        if self.kind == "chat":
            said = [*history, Said("user", _as_text(turn))]
            body["messages"] = [{"role": one.role, "content": one.text} for one in said]
            body["max_completion_tokens"] = turn.max_tokens
        else:
            body["prompt"] = _continued(history, turn) if history else turn.prompt
            body["max_tokens"] = turn.max_tokens
        if self.ignore_eos:
            body["ignore_eos"] = True
        return body | dict(self.fields)

    def without_secrets(self, text: str) -> str:
        """`text` fit to be printed."""
        for secret in self.secrets:
            text = text.replace(secret, "***")
        return text


def _as_text(turn: Turn) -> str:
    assert isinstance(turn.prompt, str), "chats are made of text: spell token ids first"
    return turn.prompt


def _continued(history: Sequence[Said], turn: Turn) -> str:
    """A conversation for an endpoint that knows no messages. What was sent before is a prefix of what is sent next."""
    lines = [f"{_ROLES[one.role]}: {one.text}\n" for one in history]
    return "".join(lines) + f"User: {_as_text(turn)}\nAssistant: "
