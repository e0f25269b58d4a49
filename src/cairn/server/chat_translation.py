"""A chat that is made of another API's body, and errors about the one told as errors about the other."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pydantic import ValidationError

from cairn.errors import InvalidRequest, RequestError
from cairn.server.error_handlers import explain_validation_error
from cairn.server.notices import Notices
from cairn.server.openai.requests import ChatRequest
from cairn.server.sealed_reasoning import ReasoningSeal

_PLACE = re.compile(r"messages\[(\d+)\](?:\.content\[(\d+)\])?(?:\.image_url)?")


@dataclass(frozen=True, slots=True)
class TranslationRules:
    """What one server does with bodies that become chats: `seal` is for reasoning that clients keep, `strict_tools`
    refuses tools that nobody here can run, and `notices` says which are left out."""

    seal: ReasoningSeal
    strict_tools: bool
    notices: Notices


@dataclass(slots=True)
class ChatTranslation:
    """A chat and where its messages come from: one of the other API's may become several, or several become one.

    `renamed`: fields of chats and what they are called in the body, of two that fit the longer one first. `places`: by
    message, its path in the body; `blocks`: by message, the path of each part of its content. `left_out`: tools that
    nobody here can run, by the path of each its type.
    """

    renamed: Mapping[str, str]
    messages: list[dict[str, Any]] = field(default_factory=list)
    places: list[str] = field(default_factory=list)
    blocks: list[list[str]] = field(default_factory=list)
    left_out: dict[str, str] = field(default_factory=dict)
    request: ChatRequest = field(init=False)

    def add(self, message: dict[str, Any], place: str, blocks: list[str] | None = None) -> None:
        self.messages.append(message)
        self.places.append(place)
        self.blocks.append(blocks or [])

    def settle_left_out(self, rules: TranslationRules) -> None:
        """Say in the log which tools are left out. Raises InvalidRequest where a server is to refuse them."""
        for place, kind in self.left_out.items():
            if rules.strict_tools:
                text = f"{place}.type is {kind!r}: nobody here can run such a tool, and --strict-tools refuses it"
                raise InvalidRequest(text, place.partition("[")[0])
            rules.notices.say(f"tools of the type {kind!r} are left out of requests: nobody here can run them")

    def validate(self, fields: dict[str, Any]) -> None:
        """Make the request of these fields of a chat. Raises InvalidRequest that names the field of the body."""
        try:
            self.request = ChatRequest.model_validate(fields)
        except ValidationError as error:
            # Both schemas bound what they share alike; where they ever do not, it is the client's error still.
            first = error.errors()[0]
            request_error = explain_validation_error({**first, "loc": ("body", *first["loc"])}, fields)
            raise self.rename_error(request_error) from None

    def rename_error(self, error: RequestError) -> RequestError:
        """An error about the chat as one about the body that it is made of."""
        if not isinstance(error, InvalidRequest):
            return error
        message = _PLACE.sub(self._original_place, error.message)
        param = None if error.param is None else _PLACE.sub(self._original_place, error.param)
        for name, original in self.renamed.items():
            if param == name.partition(".")[0] and (name == param or name in message):
                return type(error)(message.replace(name, original, 1), original)
        return type(error)(message, param)

    def _original_place(self, match: re.Match[str]) -> str:
        number, part = int(match[1]), match[2]
        if number >= len(self.places):
            return match[0]
        if part is None or int(part) >= len(self.blocks[number]):
            return self.places[number]
        return self.blocks[number][int(part)]


def mark_of(part: Any) -> dict[str, Any]:
    """The client's `cache_control`, which a chat has under the same name; nothing without one."""
    return {} if part.get("cache_control") is None else {"cache_control": part["cache_control"]}
