"""What clients put at the front of a prompt and change with every request: after it nothing would ever be a hit."""

from typing import Any

VOLATILE_BEGINNINGS = ("x-anthropic-billing-header:",)
"""How such lines begin. Claude Code's says which request is whose, to Anthropic's servers alone; vLLM drops it, too."""


def drop_volatile(content: Any) -> Any:
    """The content of a system message, text or parts, without the lines that a text in it begins with and that are
    new in every request. What is no content is returned as it is, and so is one without such lines: the same object."""
    if isinstance(content, str):
        return _drop(content)
    if not isinstance(content, list) or not any(map(_is_volatile, content)):
        return content
    return [_without(part) if _is_volatile(part) else part for part in content]


def _is_volatile(part: Any) -> bool:
    text = part.get("text") if isinstance(part, dict) else None
    return isinstance(text, str) and text.startswith(VOLATILE_BEGINNINGS)


def _without(part: dict[str, Any]) -> dict[str, Any]:
    rest = part | {"text": _drop(part["text"])}
    # nothing of an empty text can be held
    return rest if rest["text"] else rest | {"cache_control": None}


def _drop(text: str) -> str:
    place = 0
    while text.startswith(VOLATILE_BEGINNINGS, place):
        place = text.find("\n", place) + 1 or len(text)
    return text[place:] if place else text
