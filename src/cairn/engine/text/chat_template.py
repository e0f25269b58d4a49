"""A chat template applied, and where in the text the messages have come to stand.

Templates are programs: they join tool results into one turn, leave out the reasoning of earlier turns, and write a
suffix that the next turn does not have. So nothing is assumed of them. One rendering of a marked copy shows where each
text stands; what a template writes after the last message of each role is learnt from a rendering that ends there.
Where the marks change the rest of the text, only the system segment and the last messages are looked for, by rendering
the chat that ends there. At most `MAX_RENDERINGS` in all, however long the chat is.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from types import MappingProxyType
from typing import Any

from jinja2 import Environment, TemplateError, nodes
from jinja2.ext import Extension
from jinja2.meta import find_undeclared_variables
from jinja2.parser import Parser

from cairn.engine.contract import Breakpoint
from cairn.engine.text.chat import Chat, Mark, Message, behind_last_mark, first_turn, marked, plain, text_of, unmarked
from cairn.engine.text.template_traits import TemplateTraits
from cairn.errors import InvalidRequest
from cairn.types import Boundary, BoundaryKind

MAX_RENDERINGS = 12
"""Most renderings of one chat: itself, its marked copy, its beginnings."""

_TAIL = 24
"""Characters at the end of a rendering by which the same place is found in another."""

_CLOSING = 64
"""Most characters that are taken for what is written after a message's text."""

# What a template can run into when messages have the wrong form; TemplateError includes its own raise_exception.
_TEMPLATE_ERRORS = (TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError)

Apply = Callable[..., Any]
"""`PreTrainedTokenizerFast.apply_chat_template`."""

_RANK: Mapping[BoundaryKind, int] = MappingProxyType(
    {"system_end": 0, "message_end": 1, "image_end": 2, "breakpoint": 3}
)
"""Of two at one place, the lower one says what it is."""

_MAX_MISFITS = 4
"""How many places in a row may be no token's end before only the last one is still tried: each is looked for in all
the text since the one before it."""


@dataclass(slots=True)
class TextEnds:
    """Places in a rendered chat, as characters from its start. `system`: 0 for none; `messages`: by index, without
    those of the system segment; `parts`: by (message, part), ends of parts that are not their message's last."""

    system: int = 0
    messages: dict[int, int] = field(default_factory=dict)
    parts: dict[tuple[int, int], int] = field(default_factory=dict)


class _GenerationTag(Extension):
    """transformers' `{% generation %}`, which encloses an assistant's answer; here only what it encloses counts."""

    tags = {"generation"}  # noqa: RUF012 - as jinja2 declares it

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


@lru_cache(maxsize=16)
def find_variables(template: str) -> frozenset[str]:
    """The variables that a template reads and does not set itself. Raises TemplateError for what is no template."""
    environment = Environment(extensions=["jinja2.ext.loopcontrols", _GenerationTag])
    return frozenset(find_undeclared_variables(environment.parse(template)))


class ChatTemplate:
    """The template of one model."""

    def __init__(self, apply: Apply, templates: str | Mapping[str, str] | None) -> None:
        """`templates`: the checkpoint's template, or several by name; None: it has none."""
        self._apply = apply
        self._templates = [templates] if isinstance(templates, str) else list((templates or {}).values())
        self._traits = lru_cache(maxsize=16)(self._make_traits)

    def traits(self, chat_template: str | None = None) -> TemplateTraits:
        """What the template does with messages, or `chat_template` in its stead."""
        return self._traits(chat_template or None)

    def _make_traits(self, chat_template: str | None) -> TemplateTraits:
        return TemplateTraits(lambda chat: self.render(replace(chat, chat_template=chat_template)))

    def plain(self, messages: Sequence[Message], chat_template: str | None = None) -> tuple[Message, ...]:
        """See `chat.plain`; without the reasoning of calls where the template refuses it. Raises InvalidRequest."""
        traits = self.traits(chat_template)
        made = plain(messages, traits.takes_parts)
        if not any(map(_has_all, made)) or traits.takes_reasoning_of_call():
            return made
        return tuple(
            {name: value for name, value in message.items() if name != "reasoning_content"}
            if _has_all(message)
            else message
            for message in made
        )

    def render(self, chat: Chat) -> str:
        """Raises InvalidRequest when the template refuses the chat."""
        templates = [chat.chat_template] if chat.chat_template else self._templates
        if not any(templates):
            raise InvalidRequest("this model has no chat template; send a prompt to /v1/completions", "messages")
        try:
            read = frozenset[str]().union(*map(find_variables, templates))
            return str(
                self._apply(
                    list(chat.messages),
                    tools=list(chat.tools) or None,
                    add_generation_prompt=chat.add_generation_prompt,
                    continue_final_message=chat.continue_final_message,
                    tokenize=False,
                    chat_template=chat.chat_template or None,
                    **{name: value for name, value in chat.template_kwargs.items() if name in read},
                )
            )
        except _TEMPLATE_ERRORS as error:
            param = "chat_template" if chat.chat_template else "messages"
            raise InvalidRequest(f"the chat template refuses these messages: {error}", param) from error

    def ends(
        self, chat: Chat, text: str, messages: Sequence[Message], breakpoints: Sequence[Breakpoint] = ()
    ) -> TextEnds:
        """Where the messages of `chat` end in its rendering `text`; what cannot be found is left out. `messages`: those
        of `chat` before `plain`, whose parts are apart. `breakpoints`: which of their parts matter."""
        return _Search(self, chat, text).run(messages, breakpoints)


def _has_all(message: Message) -> bool:
    """Whether it has reasoning, a text and calls."""
    return all(message.get(name) for name in ("reasoning_content", "content", "tool_calls"))


class _Search:
    """Finds the places of one rendering."""

    def __init__(self, template: ChatTemplate, chat: Chat, text: str) -> None:
        self._template = template
        self._chat = chat
        self._text = text
        self._left = MAX_RENDERINGS - 1
        self._ends = TextEnds()
        self._marks: dict[Mark, int] = {}
        self._starts: dict[int, int] = {}
        self._marked: Chat | None = None

    def run(self, messages: Sequence[Message], breakpoints: Sequence[Breakpoint]) -> TextEnds:
        turns, count = first_turn(self._chat.messages), len(self._chat.messages)
        self._find_marks(messages, breakpoints)
        self._ends.system = self._system_end(turns)
        last = self._last_end(count)
        if last is not None:
            self._ends.messages[count - 1] = last
        if self._marks:
            self._find_inner(turns, count - 1)
        else:
            self._try_beginnings(turns, count - 1)
        return self._ends

    def _render(self, chat: Chat) -> str | None:
        """None when the template refuses, or when it has been asked often enough."""
        if self._left == 0:
            return None
        self._left -= 1
        try:
            return self._template.render(chat)
        except InvalidRequest:
            return None

    # -- the system segment and the last message -----------------------------------------------------------------------

    def _system_end(self, turns: int) -> int:
        # Some templates write a system segment of their own; an empty system message brings it out.
        leading = self._chat.messages[:turns] or ({"role": "system", "content": ""},)
        alone = self._render(self._chat.of(leading))
        end = None if alone is None else self._end_of(alone, leading[-1])
        if end or not (turns or self._chat.tools) or turns not in self._starts:
            return end or 0
        # A template that refuses it alone, or writes it into the first turn: it ends where that turn begins.
        start = self._starts[turns]
        opening = self._opening_of_user(leading) if self._chat.messages[turns]["role"] == "user" else ""
        return start - len(opening) if self._text.endswith(opening, 0, start) else start

    def _opening_of_user(self, leading: tuple[Message, ...]) -> str:
        """What is written before a question that is not the first."""
        turns = ({"role": "user", "content": "first"}, {"role": "assistant", "content": "answer"})
        before = self._render(self._chat.of((*leading, *turns)))
        second = {"role": "user", "content": "second"}
        whole = self._render(self._chat.of((*leading, *turns, second)))
        if before is None or whole is None:
            return ""
        # only after the answer are both alike: a template may write more of the last one than of one before
        closing, opening = before.rpartition("answer")[2], whole.rpartition("second")[0].rpartition("answer")[2]
        return opening.removeprefix(closing) if opening.startswith(closing) else ""

    def _last_end(self, count: int) -> int | None:
        if not self._chat.add_generation_prompt:
            return len(self._text)
        part = self._render(self._chat.beginning(count))
        return None if part is None else self._end_of(part, self._chat.messages[-1])

    def _end_of(self, part: str, last: Message) -> int | None:
        """Where the text leaves a rendering that ends with message `last`: at its end, or where a chat is closed
        otherwise than it goes on. None where they part before."""
        if self._text.startswith(part):
            return len(part)
        shared = _cut_back(part, _num_shared(part, self._text))
        content = text_of(last["content"]).strip()
        return shared if content and content in part[max(0, shared - len(content) - _CLOSING) : shared] else None

    # -- the messages between ------------------------------------------------------------------------------------------

    def _find_marks(self, messages: Sequence[Message], breakpoints: Sequence[Breakpoint]) -> None:
        copies, names = marked(messages, breakpoints)
        if not names or unmarked(self._text)[1]:
            return
        self._marked = replace(self._chat, messages=self._template.plain(copies, self._chat.chat_template))
        rendered = self._render(self._marked)
        if rendered is None:
            return
        bare, marks = unmarked(rendered)
        if bare != self._text:
            return  # the template looks at what it writes: the marks have changed it
        places = {names[character]: at[0] for character, at in marks.items() if character in names and len(at) == 1}
        self._marks = places
        for mark, place in places.items():
            if mark.place == "start":
                self._starts[mark.message] = place
            elif mark.place == "part" and mark.part is not None:
                self._ends.parts[mark.message, mark.part] = place

    def _find_inner(self, first: int, last: int) -> None:
        """Messages [first, last), by what the template writes after them."""
        ends = {mark.message: (place, mark.space) for mark, place in self._marks.items() if mark.place == "end"}
        closings: dict[str, list[str]] = {}
        openings: dict[str, str] = {}
        messages = self._chat.messages
        for index in range(first, last):
            role = messages[index]["role"]
            if index in ends and not messages[index].get("tool_calls"):
                if role not in closings:
                    closings[role] = self._closings(index, ends[index][1])
                self._close(index, *ends[index], closings[role])
            elif index + 1 in self._starts:
                following = messages[index + 1]["role"]
                if following not in openings and (opening := self._opening(index)) is not None:
                    openings[following] = opening
                start = self._starts[index + 1]
                if following in openings and self._text.endswith(openings[following], 0, start):
                    self._ends.messages[index] = start - len(openings[following])

    def _closings(self, index: int, space: str) -> list[str]:
        """What is written after the text of message `index` when nothing follows it: with the white space that the
        text ends with, and without."""
        assert self._marked is not None
        rendered = self._render(self._marked.beginning(index + 1))
        closing = None if rendered is None else behind_last_mark(rendered)
        if closing is None:
            return []
        return [closing, closing.removeprefix(space)] if space else [closing]

    def _close(self, index: int, place: int, space: str, closings: list[str]) -> None:
        text = self._text
        best = None
        for closing in closings:
            for start in {place, place + len(space) if text.startswith(space, place) else place}:
                shared = _num_shared(closing, text[start : start + len(closing)])
                if shared < len(closing):
                    shared = _cut_back(closing, shared)
                if (shared or not closing) and (best is None or (shared, start) > best):
                    best = shared, start
        if best is not None:
            self._ends.messages[index] = sum(best)

    def _opening(self, index: int) -> str | None:
        """What is written between the end of message `index`, whose own end has no mark, and the text of the next."""
        rendered = self._render(self._chat.beginning(index + 1))
        if not rendered:
            return None
        start, tail = self._starts[index + 1], rendered[-_TAIL:]
        place = self._text.rfind(tail, max((at for at in self._starts.values() if at < start), default=0), start)
        return None if place < 0 else self._text[place + len(tail) : start]

    def _try_beginnings(self, first: int, last: int) -> None:
        """The last of the messages [first, last), by rendering the chat up to there."""
        for index in range(last - 1, first - 1, -1):
            if self._left == 0:
                return
            part = self._render(self._chat.beginning(index + 1))
            end = None if part is None else self._end_of(part, self._chat.messages[index])
            if end:
                self._ends.messages[index] = end


def _num_shared(first: Sequence[object], second: Sequence[object]) -> int:
    """How many characters, or tokens, both begin with."""
    pairs = enumerate(zip(first, second, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(first), len(second)))


def _cut_back(text: str, place: int) -> int:
    """The last place up to `place` where something may end: after a bracket or a line's end, not within a word."""
    while place and text[place - 1] not in "\n>]}":
        place -= 1
    return place


def list_boundaries(ends: TextEnds, turns: int, breakpoints: Sequence[Breakpoint]) -> list[Boundary]:
    """The boundaries of a chat whose turns begin with message `turns`, with their positions in characters, ascending
    and distinct."""
    boundaries: dict[int, Boundary] = {}

    def add(place: int | None, kind: BoundaryKind, seconds: int = 0) -> None:
        if not place:
            return
        old = boundaries.get(place)
        if old is not None and _RANK[old.kind] <= _RANK[kind]:
            kind = old.kind
        boundaries[place] = Boundary(place, kind, max(seconds, 0 if old is None else old.retain_seconds))

    add(ends.system, "system_end")
    for place in ends.messages.values():
        add(place, "message_end")
    for point in breakpoints:
        message, part = point.message, point.part
        if message is not None and part is not None:
            add(ends.parts.get((message, part)), "breakpoint", point.seconds)
        elif message is None or message < turns:
            # tools stand somewhere in the system segment: where it ends all of them have come
            add(ends.system, "breakpoint", point.seconds)
        else:
            add(ends.messages.get(message), "breakpoint", point.seconds)
    return [boundaries[place] for place in sorted(boundaries)]


def place_boundaries(
    boundaries: Sequence[Boundary], text: str, token_ids: list[int], encode: Callable[[str], list[int]]
) -> list[Boundary]:
    """The same boundaries with their positions in tokens, without those before which the tokens would be others if
    nothing came after: `token_ids` is `encode(text)`. A breakpoint in a token, which a client's part may share with
    the next one, is where the tokens are the same up to.

    Each stretch of text between two of them is encoded once more, alone.
    """
    placed: list[Boundary] = []
    place = position = misfits = 0
    for boundary in boundaries:
        last = boundary is boundaries[-1]
        if misfits > _MAX_MISFITS and not last:
            continue
        part = encode(text[place : boundary.position])
        end = _fits(token_ids, position, part)
        if end is None and last and place:
            end = _fits(token_ids, 0, encode(text[: boundary.position]))
        if end is None:
            misfits += 1
            if boundary.kind == "breakpoint" and (same := position + _num_shared(part, token_ids[position:])):
                placed.append(replace(boundary, position=same))
            continue
        misfits = 0
        place, position = boundary.position, end
        if position:
            placed.append(replace(boundary, position=position))
    return placed


def _fits(token_ids: list[int], start: int, part: list[int]) -> int | None:
    """Where `part` ends in `token_ids` if it is there from `start` on."""
    end = start + len(part)
    return end if token_ids[start:end] == part else None
