"""What one chat template does with messages, found out by trying it: never by its name or its text.

Each question is one rendering of a few words, asked when a chat first depends on the answer.
"""

from collections.abc import Callable
from typing import Any

from cairn.engine.contract import SYSTEM_ROLES
from cairn.engine.text.chat import Chat, Message
from cairn.errors import InvalidRequest

_BEFORE, _PROBED, _MORE, _AFTER = "probebefore", "probeprobed", "probemore", "probeafter"
_UNKNOWN_ROLE = "visitor"


def kind_of(message: Message) -> str:
    """What a message is to its neighbours: its role, or `call` for an assistant's with tool calls."""
    return "call" if message.get("tool_calls") else str(message["role"])


def _chat_of(kind: str, text: str) -> tuple[Message, ...]:
    """A conversation that ends with a message of this kind."""
    match kind:
        case "":
            return ()
        case "user":
            return (_user(text),)
        case "call":
            return (_user("question"), _call(text))
        case "tool":
            result = {"role": "tool", "tool_call_id": "call_1", "name": "probe", "content": text}
            return (_user("question"), _call(""), result)
        case _ if kind in SYSTEM_ROLES:
            return ({"role": kind, "content": text},)
    return (_user("question"), {"role": kind, "content": text})


def _user(text: str) -> Message:
    return {"role": "user", "content": text}


def _call(text: str) -> Message:
    called = {"id": "call_1", "type": "function", "function": {"name": "probe", "arguments": {"a": "b"}}}
    return {"role": "assistant", "content": text, "tool_calls": [called]}


class TemplateTraits:
    """The answers of one template. `render`: raises InvalidRequest where the template refuses a chat."""

    def __init__(self, render: Callable[[Chat], str]) -> None:
        self._render = render
        self._answers: dict[tuple[Any, ...], bool] = {}

    @property
    def knows_developer(self) -> bool:
        """Whether `developer` is a role to it, not just any word that it writes down."""

        def ask() -> bool:
            chats = [({"role": role, "content": _PROBED}, _user("question")) for role in ("developer", _UNKNOWN_ROLE)]
            known, unknown = map(self._try, chats)
            return _PROBED in known and unknown.replace(_UNKNOWN_ROLE, "developer") != known

        return self._answer(("developer",), ask)

    def takes_several_systems(self, first: str, second: str) -> bool:
        """Whether a conversation may begin with two messages of these system roles."""
        chat = ({"role": first, "content": _BEFORE}, {"role": second, "content": _PROBED}, _user(_AFTER))
        return self._answer(("several", first, second), lambda: self._writes(chat, _BEFORE, _PROBED, _AFTER))

    def takes(self, role: str, before: str, after: str) -> bool:
        """Whether a message of this role may stand, and is written, between messages of these kinds, as `kind_of`
        has them, empty for none."""
        first = _chat_of(before, _BEFORE)
        last: tuple[Message, ...] = () if not after else _chat_of(after, _AFTER)[-1:]
        chat = (*first, {"role": role, "content": _PROBED}, *last)
        # of a chat's call, templates may leave out the text
        wanted = [*([_BEFORE] if before not in ("", "call") else []), _PROBED, *([_AFTER] if last else [])]
        answered = (*first, {"role": "assistant", "content": _PROBED}, *last)

        def ask() -> bool:
            # a template that tells users from all others would have the model say it
            return self._writes(chat, *wanted) and self._try(chat) != self._try(answered)

        return self._answer(("takes", role, before, after), ask)

    def takes_parts(self, role: str) -> bool:
        """Whether content of this role may be a list of texts."""
        *before, last = _chat_of(role, "")
        content = [{"type": "text", "text": _PROBED}, {"type": "text", "text": _MORE}]
        chat = (*before, last | {"content": content}, *([_user("question")] if role in SYSTEM_ROLES else []))

        def ask() -> bool:
            text = self._try(chat)
            # a list that is written as it is has the keys of its parts in it
            return _in_order(text, _PROBED, _MORE) and "type" not in text.partition(_PROBED)[2].partition(_MORE)[0]

        return self._answer(("parts", role), ask)

    def takes_reasoning_of_call(self) -> bool:
        """Whether a message with calls may have reasoning and a text at once. gpt-oss's template refuses that."""
        question, call, result = (*_chat_of("call", _MORE), _chat_of("tool", "")[-1])
        chats = [(question, call | extra, result) for extra in ({}, {"reasoning_content": _PROBED})]

        def ask() -> bool:
            plain, reasoned = map(self._try, chats)
            return bool(reasoned) or not plain

        return self._answer(("reasoning",), ask)

    def _answer(self, question: tuple[Any, ...], ask: Callable[[], bool]) -> bool:
        if question not in self._answers:
            self._answers[question] = ask()
        return self._answers[question]

    def _writes(self, messages: tuple[Message, ...], *wanted: str) -> bool:
        return _in_order(self._try(messages), *wanted)

    def _try(self, messages: tuple[Message, ...]) -> str:
        """Empty where the template refuses."""
        try:
            return self._render(Chat(messages=messages, add_generation_prompt=False))
        except InvalidRequest:
            return ""


def _in_order(text: str, *wanted: str) -> bool:
    places = [text.find(part) for part in wanted]
    return -1 not in places and places == sorted(places)
