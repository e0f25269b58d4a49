"""Where messages end in chats of an agent, under templates of published forms: exact token prefixes, also of what the
next turn sends."""

import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from chat_templates import (
    DROPS_REASONING,
    HOLLOWS_REASONING,
    MELTS,
    RESISTS,
    ROLE_LINES,
    TEMPLATES,
    TOOLS,
    agent_messages,
    tokenizer_with,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from cairn.engine.contract import Breakpoint, RenderedPrompt
from cairn.engine.text.chat_template import MAX_RENDERINGS, place_boundaries
from cairn.engine.text.tokenizer import ModelTokenizer
from cairn.errors import InvalidRequest
from cairn.types import Boundary
from tiers import more

SYSTEM = {"role": "system", "content": "You answer briefly."}
FORMS = [(name, results) for name in TEMPLATES for results in (1, 3) if (name, results) != ("alternates", 3)]


@pytest.fixture(scope="module")
def tokenizers(plain_tokenizer: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, ModelTokenizer]:
    folder = tmp_path_factory.mktemp("templates")
    forms = TEMPLATES | {"resists": RESISTS, "melts": MELTS}
    return {name: tokenizer_with(plain_tokenizer, folder / name, template) for name, template in forms.items()}


def ends_of(rendered: RenderedPrompt) -> list[int]:
    return [end.position for end in rendered.boundaries]


def assert_exact(tokenizer: ModelTokenizer, rendered: RenderedPrompt) -> None:
    """What comes before a boundary has the same tokens when nothing comes behind."""
    ends = ends_of(rendered)
    assert ends == sorted(set(ends)) and all(0 < end <= len(rendered.token_ids) for end in ends)
    for end in ends:
        beginning = rendered.token_ids[:end]
        assert tokenizer.encode(tokenizer.decode(beginning), add_special_tokens=False) == beginning


def common(one: Any, other: Any) -> int:
    pairs = enumerate(zip(one, other, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(one), len(other)))


@pytest.mark.parametrize(
    ("name", "results", "thinking"),
    [*((*form, None) for form in FORMS), (*FORMS[0], False), *(more(*form, False) for form in FORMS[1:])],
)
def test_every_message_of_an_agent_has_its_end(
    tokenizers: dict[str, ModelTokenizer], name: str, results: int, thinking: bool | None
) -> None:
    tokenizer = tokenizers[name]
    kwargs = {} if thinking is None else {"enable_thinking": thinking}
    before: RenderedPrompt | None = None
    for messages in agent_messages(3, rounds=2, results=results):
        rendered = tokenizer.render_chat(messages, tools=TOOLS, template_kwargs=kwargs)
        assert_exact(tokenizer, rendered)
        # one for the system segment with its tools, and one for every other message
        assert [end.kind for end in rendered.boundaries] == ["system_end"] + ["message_end"] * (len(messages) - 1)
        if before is not None:
            shared = common(before.token_ids, rendered.token_ids)
            kept = [end for end in before.boundaries if end.position <= shared]
            assert kept == rendered.boundaries[: len(kept)]
            assert len(kept) > 1
        before = rendered


@pytest.mark.parametrize(("name", "results"), FORMS)
def test_the_end_is_behind_the_message_and_before_the_next(
    tokenizers: dict[str, ModelTokenizer], name: str, results: int
) -> None:
    tokenizer = tokenizers[name]
    messages = agent_messages(2, rounds=2, results=results)[-1]
    rendered = tokenizer.render_chat(messages, tools=TOOLS)
    ends = ends_of(rendered)
    for message, start, end in zip(messages[1:], ends, ends[1:], strict=False):
        text = tokenizer.decode(rendered.token_ids[start:end])
        content = (message["content"] or "").split("</think>")[-1].strip()
        assert content in text
        for call in message.get("tool_calls", []):
            assert call["function"]["name"] in text
        others = [other["content"] for other in messages if other is not message and other["content"]]
        assert not any(other.strip() in text for other in others if other.strip() not in content)
    lead = tokenizer.decode(rendered.token_ids[: ends[0]])
    assert messages[0]["content"] in lead and "run_tests" in lead and "Question" not in lead


def test_ends_of_known_texts(tokenizers: dict[str, ModelTokenizer]) -> None:
    tokenizer = tokenizers["drops_reasoning"]
    messages = [
        SYSTEM,
        {"role": "user", "content": "  Hi\n"},
        {"role": "assistant", "content": "<think>\nhm\n</think>\n\nHello"},
        {"role": "user", "content": "again"},
    ]
    rendered = tokenizer.render_chat(messages)
    places = [0, *ends_of(rendered), len(rendered.token_ids)]
    text = [tokenizer.decode(rendered.token_ids[start:end]) for start, end in pairwise(places)]
    assert text == [
        "<|im_start|>system\nYou answer briefly.<|im_end|>\n",
        "<|im_start|>user\nHi<|im_end|>\n",
        "<|im_start|>assistant\nHello<|im_end|>\n",
        "<|im_start|>user\nagain<|im_end|>\n",
        "<|im_start|>assistant\n<think>\n",
    ]


def test_no_system_message_and_no_tools(tokenizers: dict[str, ModelTokenizer]) -> None:
    kinds = {
        name: [end.kind for end in tokenizers[name].render_chat([{"role": "user", "content": "Hi"}]).boundaries]
        for name in TEMPLATES
    }
    assert kinds == {
        "drops_reasoning": ["message_end"],
        "hollows_reasoning": ["system_end", "message_end"],  # it writes an empty one
        "role_lines": ["message_end"],  # its own system text cannot be told from the first turn
        "alternates": ["message_end"],
    }


def test_a_template_that_resists_has_the_system_and_the_last_messages(tokenizers: dict[str, ModelTokenizer]) -> None:
    """It writes the length of each text, so that marks change it, and closes a chat that does not go on."""
    tokenizer = tokenizers["resists"]
    messages = [SYSTEM] + [
        {"role": ("user", "assistant")[i % 2], "content": f"Message {i} about stones."} for i in range(31)
    ]
    rendered = tokenizer.render_chat(messages)
    assert_exact(tokenizer, rendered)
    texts = [tokenizer.decode(rendered.token_ids[:end]) for end in ends_of(rendered)]
    assert texts[0].endswith("You answer briefly.<|im_end|>\n") and rendered.boundaries[0].kind == "system_end"
    last = [f"Message {i} about stones.<|im_end|>\n" for i in range(31 - len(texts) + 1, 31)]
    assert len(last) == MAX_RENDERINGS - 3  # but for the chat itself, its marked copy and its system segment
    assert all(text.endswith(end) for text, end in zip(texts[1:], last, strict=True))


class Counting:
    """Counts what a template is asked for, in messages."""

    def __init__(self, tokenizer: ModelTokenizer) -> None:
        self.sizes: list[int] = []
        self._apply = tokenizer._template._apply
        tokenizer._template._apply = self

    def __call__(self, messages: list[dict[str, Any]], **arguments: Any) -> object:
        self.sizes.append(len(messages))
        assert self._apply is not None
        return self._apply(messages, **arguments)


@pytest.mark.more
@pytest.mark.parametrize("name", [*TEMPLATES, "resists"])
def test_a_long_chat_costs_a_few_renderings(folder_of: Any, tokenizers: dict[str, ModelTokenizer], name: str) -> None:
    tokenizer = folder_of(name)
    counting = Counting(tokenizer)
    messages = agent_messages(100, rounds=2, results=1)[-1]
    assert len(messages) == 600
    rendered = tokenizer.render_chat(messages, tools=TOOLS)
    # and two short ones, once a template, for what it takes of a message with calls
    assert len(counting.sizes) <= MAX_RENDERINGS + 2
    if name != "resists":
        assert len(rendered.boundaries) == 600
        # all of it three times: the chat, its marked copy, and without its suffix; the rest is short
        assert sum(size > 10 for size in counting.sizes) == 3


@pytest.fixture
def folder_of(plain_tokenizer: Path, tmp_path: Path) -> Any:
    """A tokenizer that nobody else has."""

    def make(name: str) -> ModelTokenizer:
        return tokenizer_with(plain_tokenizer, tmp_path / name, (TEMPLATES | {"resists": RESISTS})[name])

    return make


WORDS = [*"ab \n<>|/{}\"'.é🪨", "<|im_end|>", "<think>", "</think>", "  ", "\n\n", "</tool_response>"]
TEXTS = st.lists(st.sampled_from(WORDS), max_size=10).map("".join)
TURNS = st.lists(st.tuples(st.sampled_from(["user", "assistant", "tool"]), TEXTS), min_size=1, max_size=6)


def test_places_that_are_no_tokens_end_are_left_out() -> None:
    """Tokens are words with the space before them: a place within one, or one that joins what comes behind, is none."""

    def encode(text: str) -> list[int]:
        return [hash(word) for word in re.findall(r" ?\w+|\W+", text)]

    text = "one two three-- four five six"
    wanted = [Boundary(place, "message_end", place) for place in (3, 5, 7, 14, 15, 16, 20, 29)]
    placed = place_boundaries(wanted, text, encode(text), encode)
    # 5 lies within a word, 14 and 15 within the one token of two dashes and a space
    assert [(end.retain_seconds, end.position) for end in placed] == [(3, 1), (7, 2), (16, 4), (20, 5), (29, 7)]
    for end in placed:
        assert encode(text[: end.retain_seconds]) == encode(text)[: end.position]


def test_where_no_stretch_stands_alone_the_last_end_is_still_found() -> None:
    """As of tokenizers that begin every text with a token of its own."""

    def encode(text: str) -> list[int]:
        return [-1, *map(ord, text)]

    text = "x" * 40
    placed = place_boundaries([Boundary(place) for place in range(5, 40, 5)], text, encode(text), encode)
    assert [end.position for end in placed] == [6, 36]


@settings(max_examples=150, deadline=None)
@given(name=st.sampled_from(["drops_reasoning", "hollows_reasoning", "role_lines", "melts"]), system=TEXTS, turns=TURNS)
def test_boundaries_are_exact_whatever_is_written(
    tokenizers: dict[str, ModelTokenizer], name: str, system: str, turns: list[tuple[str, str]]
) -> None:
    tokenizer = tokenizers[name]
    messages = [{"role": "system", "content": system}] + [{"role": role, "content": text} for role, text in turns]
    try:
        rendered = tokenizer.render_chat(messages)
    except InvalidRequest:
        return
    assert_exact(tokenizer, rendered)


# -- breakpoints -------------------------------------------------------------------------------------------------------


def held(rendered: RenderedPrompt) -> list[Boundary]:
    return [end for end in rendered.boundaries if end.retain_seconds]


@pytest.mark.parametrize("name", list(TEMPLATES))
def test_breakpoints_are_where_the_client_put_them(tokenizers: dict[str, ModelTokenizer], name: str) -> None:
    tokenizer = tokenizers[name]
    parts = [{"type": "text", "text": text} for text in ("Long manual.", "A short word.", "And a question?")]
    messages = [
        {"role": "system", "content": [{"type": "text", "text": "Fixed rules."}, {"type": "text", "text": "Today."}]},
        {"role": "user", "content": parts},
        {"role": "assistant", "content": "Yes."},
        {"role": "user", "content": "Go on."},
    ]
    points = [
        Breakpoint(message=0, part=0, seconds=3600),
        Breakpoint(message=1, part=0, seconds=300),
        Breakpoint(message=1, part=1, seconds=3600),
        Breakpoint(message=2, seconds=300),
    ]
    rendered = tokenizer.render_chat(messages, breakpoints=points)
    assert_exact(tokenizer, rendered)
    found = held(rendered)
    texts = [tokenizer.decode(rendered.token_ids[: end.position]) for end in found]
    assert [(end.kind, end.retain_seconds) for end in found] == [
        ("breakpoint", 3600),
        ("breakpoint", 300),
        ("breakpoint", 3600),
        ("message_end", 300),
    ]
    # a point may be one token with the next part's beginning
    assert texts[0].endswith("Fixed rules") and texts[1].endswith("Long manual")
    assert texts[2].endswith("A short word") and "Yes." in texts[3] and "Go on" not in texts[3]
    # nothing else has moved: the text is the same without them
    assert tokenizer.render_chat(messages).token_ids == rendered.token_ids


@pytest.mark.parametrize("name", list(TEMPLATES))
def test_a_breakpoint_on_tools_or_system_is_the_end_of_that_segment(
    tokenizers: dict[str, ModelTokenizer], name: str
) -> None:
    messages = [SYSTEM, {"role": "user", "content": "Hi"}]
    points = [Breakpoint(seconds=300), Breakpoint(message=0, seconds=3600)]
    rendered = tokenizers[name].render_chat(messages, tools=TOOLS, breakpoints=points)
    assert held(rendered) == [Boundary(rendered.boundaries[0].position, "system_end", 3600)]


@pytest.mark.parametrize("template", [DROPS_REASONING, HOLLOWS_REASONING, ROLE_LINES])
def test_marks_of_a_client_are_text_like_any_other(template: str, folder_of: Any, tmp_path: Path) -> None:
    """Text that holds the characters that mark places is served, with fewer boundaries."""
    tokenizer = folder_of(next(name for name, text in TEMPLATES.items() if text is template))
    messages = [SYSTEM, {"role": "user", "content": f"a{chr(0xF0001)}b"}, {"role": "assistant", "content": "c"}]
    messages.append({"role": "user", "content": "d"})
    rendered = tokenizer.render_chat(messages)
    assert chr(0xF0001) in tokenizer.decode(rendered.token_ids)
    assert_exact(tokenizer, rendered)
    assert rendered.boundaries[-1].kind == "message_end"
