"""Messages as one template can take them: what it has no place for goes where it has one, and nothing moves forward.

A `developer` is the system where the template knows no such role. System messages that a chat begins with are one, if
the template takes no more. A later one that it takes no system message for is the user's, within `REMINDER`: in the
tool's result beside it where there is one, or else a message of its own. So every turn's prompt begins with the last
one's.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import msgspec

from cairn.engine.contract import SYSTEM_ROLES, Breakpoint
from cairn.engine.text.chat import Message, first_turn
from cairn.engine.text.template_traits import TemplateTraits, kind_of

REMINDER = ("<system-reminder>\n", "\n</system-reminder>")
"""What a system message stands in that the template takes for none."""

_BETWEEN = "\n\n"
"""Between what were messages of their own."""

_ANSWERED = ("", "assistant", "call")
"""What stands after a message that is answered: nothing yet, and in the next turn the answer, before which it has to
be the same."""

Parts = list[dict[str, Any]]


def fit(
    messages: Sequence[Message], breakpoints: Sequence[Breakpoint], traits: TemplateTraits
) -> tuple[list[Message], list[Breakpoint]]:
    """The messages as the template takes them, and the breakpoints at the same places in them."""
    system_messages = [message for message in messages if message["role"] in SYSTEM_ROLES]
    if not system_messages or (len(system_messages) == 1 and messages[0]["role"] == "system"):
        return list(messages), list(breakpoints)
    fitting = _Fitting(traits, messages)
    fitting.run()
    return fitting.messages, [fitting.moved(point) for point in breakpoints]


class _Fitting:
    """`messages`: so far. `_places`: by number of a message as it came, the number that it is part of now, and of its
    first part there."""

    def __init__(self, traits: TemplateTraits, messages: Sequence[Message]) -> None:
        self.messages: list[Message] = []
        self._traits = traits
        self._sent = [self._renamed(message) for message in messages]
        self._before = _neighbours(self._sent)
        self._after = _neighbours(self._sent[::-1])[::-1]
        self._places: dict[int, tuple[int, int]] = {}
        self._appended = 0
        """How many messages there were when something was last added to the last one."""
        self._pending: list[int] = []
        """Reminders that go into the tool's result after them."""

    def _renamed(self, message: Message) -> Message:
        is_new = message["role"] == "developer" and not self._traits.knows_developer
        return message | {"role": "system"} if is_new else message

    def run(self) -> None:
        turns = first_turn(self._sent)
        self._add_leading(turns)
        for number in range(turns, len(self._sent)):
            message = self._sent[number]
            if message["role"] in SYSTEM_ROLES:
                self._add_later(number)
            elif self._pending:
                self._add(number, message["role"], _joined([*map(self._reminder, self._pending), _parts(message)]))
                at = 0
                for pending in self._pending:
                    self._places[pending] = (len(self.messages) - 1, at)
                    at += len(self._reminder(pending))
                self._places[number] = (len(self.messages) - 1, at)
                self._pending = []
            else:
                self._places[number] = (len(self.messages), 0)
                self.messages.append(message)

    def moved(self, point: Breakpoint) -> Breakpoint:
        """The breakpoint where what it marks is now."""
        if point.message is None:
            return point
        message, first = self._places[point.message]
        num_parts = len(_parts(self._sent[point.message]))
        part = first + (max(0, num_parts - 1) if point.part is None else point.part)
        is_last = part + 1 >= len(_parts(self.messages[message]))
        return msgspec.structs.replace(point, message=message, part=None if is_last else part)

    def _add_leading(self, turns: int) -> None:
        """Empty ones are left out where there are others."""
        leading = list(range(turns))
        if not leading:
            return
        full = [number for number in leading if any(part.get("text") for part in _parts(self._sent[number]))]
        kept = full or leading[:1]
        self._places |= dict.fromkeys(leading, (0, 0))
        roles = [str(self._sent[number]["role"]) for number in kept]
        if all(self._traits.takes_several_systems(*pair) for pair in pairwise(roles)):
            for number in kept:
                self._places[number] = (len(self.messages), 0)
                self.messages.append(self._sent[number])
            return
        self._add(kept[0], "system", _joined([_parts(self._sent[number]) for number in kept]))
        at = 0
        for number in kept:
            self._places[number] = (0, at)
            at += len(_parts(self._sent[number]))

    def _add_later(self, number: int) -> None:
        message, before, after = self._sent[number], self._before[number], self._after[number]
        kinds = _ANSWERED if after in _ANSWERED else (after,)
        if all(self._traits.takes(message["role"], before, kind) for kind in kinds):
            self._places[number] = (len(self.messages), 0)
            self.messages.append(message)
        elif before == "tool" or (before == "user" and not self._takes_two_users()):
            self._append(number)
        elif after == "tool" or (after == "user" and not self._takes_two_users()):
            self._pending.append(number)
        else:
            self._add(number, "user", self._reminder(number))

    def _takes_two_users(self) -> bool:
        return self._traits.takes("user", "user", "")

    def _append(self, number: int) -> None:
        """A reminder to the message before it."""
        if self._appended != len(self.messages):  # a message that is the client's yet
            self.messages[-1] = self.messages[-1] | {"content": [*_parts(self.messages[-1])]}
            self._appended = len(self.messages)
        content = self.messages[-1]["content"]
        self._places[number] = (len(self.messages) - 1, len(content))
        _extend(content, self._reminder(number))

    def _reminder(self, number: int) -> Parts:
        parts = [dict(part) for part in _parts(self._sent[number])] or [{"type": "text", "text": ""}]
        parts[0]["text"] = REMINDER[0] + parts[0]["text"]
        parts[-1]["text"] += REMINDER[1]
        return parts

    def _add(self, number: int, role: str, content: Parts) -> None:
        self._places[number] = (len(self.messages), 0)
        self.messages.append(self._sent[number] | {"role": role, "content": content})


def _parts(message: Message) -> Parts:
    content = message.get("content") or []
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def _joined(contents: Sequence[Parts]) -> Parts:
    """Several contents as one. What stands between them belongs to the text before it: the two may be one token."""
    joined: Parts = []
    for content in contents:
        _extend(joined, content)
    return joined


def _extend(joined: Parts, content: Parts) -> None:
    if joined and content:
        last = joined[-1]
        if last["type"] == "text":
            joined[-1] = last | {"text": last["text"] + _BETWEEN}
        elif content[0]["type"] == "text":
            content = [content[0] | {"text": _BETWEEN + content[0]["text"]}, *content[1:]]
    joined += content


def _neighbours(messages: Sequence[Message]) -> list[str]:
    """For each message the kind of the one before it that is no system message."""
    kinds, last = [], ""
    for message in messages:
        kinds.append(last)
        last = last if message["role"] in SYSTEM_ROLES else kind_of(message)
    return kinds
