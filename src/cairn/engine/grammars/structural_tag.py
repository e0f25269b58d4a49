"""Structural tags, as xgrammar defines them and vLLM takes them: answers of which some parts, known by what they begin
with, have a form. Read with their types, and written as Lark for llguidance.

A part that can be any text ends where the tag around it does, so each rule is written with the texts that end it. What
depends on single tokens, or on a parser's own way of writing values, has no form here and is refused.
"""

import json
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Literal, TypeAlias

import msgspec
from llguidance import LLMatcher
from llguidance.gbnf_to_lark import any_to_lark

MAX_FORMATS = 1024
"""Formats in one structural tag, each tag and each element counted."""

_MAX_COUNT = 1024

_Text: TypeAlias = Annotated[str, msgspec.Meta(min_length=1)]
_Count: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=_MAX_COUNT)]
_Ends: TypeAlias = Sequence[str] | None
"""The texts of which one comes after a part; None for the answer's end, or whatever the rule around it has."""

# -- what is sent ------------------------------------------------------------------------------------------------------


class _Typed(msgspec.Struct, forbid_unknown_fields=True):
    pass


class _ConstString(_Typed, tag="const_string"):
    value: _Text


class _Schema(_Typed, tag="json_schema"):
    json_schema: bool | dict[str, Any]
    style: Literal["json"] = "json"


class _AnyText(_Typed, tag="any_text"):
    excludes: list[_Text] = []
    max_chars: _Count | None = None


class _Regex(_Typed, tag="regex"):
    pattern: _Text


class _Grammar(_Typed, tag="grammar"):
    grammar: _Text


class _Sequence(_Typed, tag="sequence"):
    elements: Annotated[list["_Format"], msgspec.Meta(min_length=1)]


class _Or(_Typed, tag="or"):
    elements: Annotated[list["_Format"], msgspec.Meta(min_length=1)]


class _Optional(_Typed, tag="optional"):
    content: "_Format"


class _Plus(_Typed, tag="plus"):
    content: "_Format"


class _Star(_Typed, tag="star"):
    content: "_Format"


class _Repeat(_Typed, tag="repeat"):
    """`max` -1: without a bound."""

    min: _Count
    max: Annotated[int, msgspec.Meta(ge=-1, le=_MAX_COUNT)]
    content: "_Format"


class _Tag(_Typed, tag="tag"):
    begin: str
    content: "_Format"
    end: str | list[str]


class _Tags(_Typed):
    tags: Annotated[list[_Tag], msgspec.Meta(min_length=1)]
    at_least_one: bool = False
    stop_after_first: bool = False


class _TriggeredTags(_Tags, tag="triggered_tags", kw_only=True):
    """Any text, in which one of the tags that begin with a trigger comes wherever the trigger does."""

    triggers: Annotated[list[_Text], msgspec.Meta(min_length=1)]
    excludes: list[_Text] = []


class _TagsWithSeparator(_Tags, tag="tags_with_separator", kw_only=True):
    separator: str


_Format: TypeAlias = (
    _ConstString | _Schema | _AnyText | _Regex | _Grammar | _Sequence | _Or | _Optional | _Plus | _Star | _Repeat | _Tag
    | _TriggeredTags | _TagsWithSeparator
)  # fmt: skip


class _StructuralTag(msgspec.Struct):
    format: _Format
    type: Literal["structural_tag"] = "structural_tag"


class _Structure(msgspec.Struct):
    begin: _Text
    schema: bool | dict[str, Any]
    end: str


class _LegacyTag(msgspec.Struct):
    """The older form: tags of JSON alone."""

    structures: Annotated[list[_Structure], msgspec.Meta(min_length=1)]
    triggers: Annotated[list[_Text], msgspec.Meta(min_length=1)]
    type: Literal["structural_tag"] = "structural_tag"


def _read(text: str) -> _Format:
    sent = msgspec.json.decode(text)
    if not (isinstance(sent, dict) and "structures" in sent):
        return msgspec.convert(sent, _StructuralTag).format
    legacy = msgspec.convert(sent, _LegacyTag)
    tags = [
        _Tag(begin=structure.begin, content=_Schema(json_schema=structure.schema), end=structure.end)
        for structure in legacy.structures
    ]
    return _TriggeredTags(triggers=legacy.triggers, tags=tags)


# -- what is written ---------------------------------------------------------------------------------------------------


def write_structural_tag(text: str, write_schema: Callable[[Any], dict[str, Any]]) -> tuple[str, list[dict[str, str]]]:
    """The Lark of a structural tag, and the grammars that it names. `write_schema`: a JSON schema as llguidance takes
    it.

    Raises ValueError that names the place and what is wrong there.
    """
    try:
        form = _read(text)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"it is no structural tag: {error}") from None
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    writer = _Writer(write_schema)
    start = writer.write(form, None)
    return "\n".join([f"start: {start}", *writer.lines]), writer.grammars


def _is_unlimited(form: _Format) -> bool:
    """Whether it can go on with any text until something else ends it."""
    match form:
        case _AnyText():
            return True
        case _TriggeredTags():
            return not (form.at_least_one and form.stop_after_first)
        case _Sequence() | _Or():
            return any(map(_is_unlimited, form.elements))
        case _Optional() | _Plus() | _Star() | _Repeat():
            return _is_unlimited(form.content)
    return False


class _Writer:
    """Writes a rule for each format."""

    def __init__(self, write_schema: Callable[[Any], dict[str, Any]]) -> None:
        self.lines: list[str] = []
        self.grammars: list[dict[str, str]] = []
        self._write_schema = write_schema
        self._num_names = 0

    def write(self, form: _Format, ends: _Ends) -> str:
        """The name of the rule for `form` and one of `ends` after it."""
        if len(self.lines) > 4 * MAX_FORMATS:
            raise ValueError(f"it has more than {MAX_FORMATS} formats")
        match form:
            case _AnyText():
                return self._write_text(form.excludes, ends, form.max_chars)
            case _Regex():
                # one terminal with its end: a lexer that takes all it can would take the end for more of the text
                lark = json.loads(LLMatcher.grammar_from_regex(form.pattern))["grammars"][0]["lark_grammar"]
                return self._add(f"{lark.removeprefix('start: ')} {_choice(ends)}", "TERMINAL")
            case _Or():
                return self._add(" | ".join(self.write(element, ends) for element in form.elements))
            case _Optional():
                return self._add(f"{self.write(form.content, ends)} | {_choice(ends)}")
            case _Sequence():
                *firsts, last = form.elements
                return self._add(
                    " ".join([*(self._write_limited(element) for element in firsts), self.write(last, ends)])
                )
            case _TriggeredTags():
                return self._write_triggered(form, ends)
        return self._add(f"{self._write_body(form)} {_choice(ends)}")

    def _write_body(self, form: _Format) -> str:
        """Of a format that ends by itself."""
        match form:
            case _ConstString():
                return literal(form.value)
            case _Schema():
                return f"%json {json.dumps(self._write_schema(form.json_schema), ensure_ascii=False)}"
            case _Grammar():
                self.grammars.append({"name": f"grammar{len(self.grammars)}", "lark_grammar": _lark_of(form.grammar)})
                return f"@{self.grammars[-1]['name']}"
            case _Plus():
                return f"{self._write_limited(form.content)}+"
            case _Star():
                return f"{self._write_limited(form.content)}*"
            case _Repeat():
                if form.max not in (-1, *range(form.min, _MAX_COUNT + 1)):
                    raise ValueError(f"a repeat's max is {form.max}: it must be -1, or at least its min of {form.min}")
                return f"{self._write_limited(form.content)}{{{form.min},{'' if form.max == -1 else form.max}}}"
            case _Tag():
                return f"{literal(form.begin)} {self._write_rest(form)}"
            case _TagsWithSeparator():
                tag = self._write_tags(form.tags)
                more = "" if form.stop_after_first else f" ({literal(form.separator)} {tag})*"
                return f"({tag}{more})" if form.at_least_one else f"({tag}{more})?"
        raise AssertionError(f"{type(form).__name__} has a rule of its own")

    def _write_limited(self, form: _Format) -> str:
        if _is_unlimited(form):
            raise ValueError("any text, or triggered tags, may only come last, within a tag that ends it or at the end")
        return self.write(form, None)

    def _write_rest(self, tag: _Tag) -> str:
        """What follows a tag's beginning."""
        ends = [tag.end] if isinstance(tag.end, str) else tag.end
        if not ends:
            raise ValueError("a tag's end must be a text, or a list with one at least")
        if _is_unlimited(tag.content) and not all(ends):
            raise ValueError("a tag with any text, or with triggered tags, needs an end that is not empty")
        return self.write(tag.content, ends)

    def _write_tags(self, tags: Sequence[_Tag]) -> str:
        return self._add(" | ".join(f"{literal(tag.begin)} {self._write_rest(tag)}" for tag in tags))

    def _write_triggered(self, form: _TriggeredTags, ends: _Ends) -> str:
        rests: dict[str, list[str]] = {}
        for tag in form.tags:
            triggers = [trigger for trigger in form.triggers if tag.begin.startswith(trigger)]
            if len(triggers) != 1:
                raise ValueError(f"the tag that begins with {tag.begin[:64]!r} must begin with one trigger")
            rests.setdefault(triggers[0], []).append(
                f"{literal(tag.begin.removeprefix(triggers[0]))} {self._write_rest(tag)}"
            )
        heads = [self._add(f"{_any_text(form.excludes)} {literal(trigger)}", "lazy") for trigger in rests]
        tags = [
            f"{head} ({' | '.join(trigger_rests)})" for head, trigger_rests in zip(heads, rests.values(), strict=True)
        ]
        any_tag = self._add(" | ".join(tags))
        first = self._write_tags(form.tags) if form.at_least_one else ""
        if form.stop_after_first and form.at_least_one:
            return self._add(f"{first} {_choice(ends)}")
        tail = self._write_text(form.excludes, ends)
        if form.stop_after_first:
            return self._add(f"{any_tag} {_choice(ends)} | {tail}")
        return self._add(f"{first} {any_tag}* {tail}")

    def _write_text(self, excludes: Sequence[str], ends: _Ends, max_chars: int | None = None) -> str:
        text = _any_text(excludes, max_chars)
        return self._add(text, "TERMINAL") if ends is None else self._add(f"{text} {_choice(ends)}", "lazy")

    def _add(self, body: str, kind: Literal["rule", "lazy", "TERMINAL"] = "rule") -> str:
        name = f"{'PART' if kind == 'TERMINAL' else 'part'}{self._num_names}"
        self._num_names += 1
        self.lines.append(f"{name}{'[lazy]' if kind == 'lazy' else ''}: {body}")
        return name


def _any_text(excludes: Sequence[str], max_chars: int | None = None) -> str:
    text = f"/(?s:.{'*' if max_chars is None else f'{{0,{max_chars}}}'})/"
    if not excludes:
        return text
    without = "|".join("".join(f"\\x{{{ord(character):x}}}" for character in excluded) for excluded in excludes)
    return f"({text} & ~/(?s:.*)({without})(?s:.*)/)"


def _choice(ends: _Ends) -> str:
    return '""' if ends is None else f"({' | '.join(map(literal, ends))})"


def _lark_of(grammar: str) -> str:
    try:
        lark: str = any_to_lark(grammar)
    except Exception as error:  # whatever the conversion of foreign text runs into
        raise ValueError(f"a grammar cannot be read: {error}") from None
    return lark


def literal(text: str) -> str:
    """A text in Lark."""
    return json.dumps(text, ensure_ascii=False)
