"""Where requests go, how their bodies are written, and whether anybody is there."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal, Protocol

import httpx

from cairn.bench.work import Turn
from cairn.errors import CairnError
from cairn.types import Clock

_TRY_SECONDS = 10.0
_PAUSE_SECONDS = 0.5
_ROLES = MappingProxyType({"system": "System", "user": "User", "assistant": "Assistant"})


class WaitableClock(Clock, Protocol):
    """A clock that can be waited for."""

    async def until(self, moment: float) -> None:
        """Return at `moment`, or at once when it is past."""
        ...


@dataclass(frozen=True, slots=True)
class SentMessage:
    """One message of a conversation so far. `role`: system, user or assistant."""

    role: str
    text: str


@dataclass(frozen=True, slots=True)
class Endpoint:
    """`url`: the whole address of the endpoint; `base_url`: that of its server. `kind`: which of OpenAI's bodies it
    takes; `backend`: what the user calls that. `model` empty: the first one of the server. `fields`: sampling
    parameters and whatever else goes into every body. `headers` and `secrets` are never printed: `secrets` are taken
    out of messages of servers, too."""

    url: str
    kind: Literal["completions", "chat"]
    model: str
    ignore_eos: bool = False
    fields: Mapping[str, Any] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    secrets: tuple[str, ...] = field(default=(), repr=False)
    base_url: str = ""
    backend: str = "openai"

    def body(self, history: Sequence[SentMessage], turn: Turn) -> dict[str, Any]:
        """A streaming request for the turn's answer after `history`, with usage at the end."""
        body: dict[str, Any] = {"model": self.model, "stream": True, "stream_options": {"include_usage": True}}
        if self.kind == "chat":
            said = [*history, SentMessage("user", _as_text(turn))]
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


def _continued(history: Sequence[SentMessage], turn: Turn) -> str:
    """A conversation for an endpoint that knows no messages. What was sent before is a prefix of what is sent next."""
    lines = [f"{_ROLES[one.role]}: {one.text}\n" for one in history]
    return "".join(lines) + f"User: {_as_text(turn)}\nAssistant: "


async def until_ready(http: httpx.AsyncClient, endpoint: Endpoint, pace: WaitableClock, seconds: float) -> None:
    """Return once the server answers /v1/models, with whatever but 5xx. Raises CairnError after `seconds`."""
    deadline = pace.now() + seconds
    while True:
        try:
            response = await _list_models(http, endpoint)
            if response.status_code < 500:
                return
            said = f"HTTP {response.status_code}"
        except httpx.HTTPError as error:
            said = str(error) or type(error).__name__
        if pace.now() + _PAUSE_SECONDS > deadline:
            raise CairnError(f"{endpoint.base_url} was not ready within {seconds:g} s: {said}")
        await pace.until(pace.now() + _PAUSE_SECONDS)


async def first_model(http: httpx.AsyncClient, endpoint: Endpoint) -> str:
    """The first model of /v1/models. Raises CairnError that says what to do."""
    try:
        response = await _list_models(http, endpoint)
        name = _first_name(response.json()) if response.status_code == 200 else None
        said = f"HTTP {response.status_code}"
    except (httpx.HTTPError, ValueError) as error:
        name, said = None, str(error) or type(error).__name__
    if name is None:
        url = f"{endpoint.base_url}/v1/models"
        raise CairnError(f"{url} names no model ({said}): is the server there? Name its model with --model")
    return name


async def _list_models(http: httpx.AsyncClient, endpoint: Endpoint) -> httpx.Response:
    return await http.get(f"{endpoint.base_url}/v1/models", headers=dict(endpoint.headers), timeout=_TRY_SECONDS)


def _first_name(listed: Any) -> str | None:
    models = listed.get("data") if isinstance(listed, dict) else None
    if not isinstance(models, list) or not models or not isinstance(models[0], dict):
        return None
    name = models[0].get("id")
    return name if isinstance(name, str) else None
