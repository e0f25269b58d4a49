"""From places in a chat's text to boundaries among its tokens."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

from cairn.engine.chat_template import TextEnds
from cairn.engine.contract import Breakpoint
from cairn.types import Boundary, BoundaryKind

_RANK: Mapping[BoundaryKind, int] = MappingProxyType(
    {"system_end": 0, "message_end": 1, "image_end": 2, "breakpoint": 3}
)
"""Of two at one place, the lower one says what it is."""

_MAX_MISFITS = 4
"""How many places in a row may be no token's end before only the last one is still tried: each is looked for in all
the text since the one before it."""


def list_boundaries(ends: TextEnds, turns: int, breakpoints: Sequence[Breakpoint]) -> list[Boundary]:
    """The boundaries of a chat whose turns begin with message `turns`, with their positions in characters, ascending
    and distinct."""
    found: dict[int, Boundary] = {}

    def add(place: int | None, kind: BoundaryKind, seconds: int = 0) -> None:
        if not place:
            return
        old = found.get(place)
        if old is not None and _RANK[old.kind] <= _RANK[kind]:
            kind = old.kind
        found[place] = Boundary(place, kind, max(seconds, 0 if old is None else old.hold_seconds))

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
    return [found[place] for place in sorted(found)]


def place_boundaries(
    boundaries: Sequence[Boundary], text: str, token_ids: list[int], encode: Callable[[str], list[int]]
) -> list[Boundary]:
    """The same boundaries with their positions in tokens, without those before which the tokens would be others if
    nothing came behind: `token_ids` is `encode(text)`.

    Each stretch of text between two of them is encoded once more, alone.
    """
    placed: list[Boundary] = []
    place = position = misfits = 0
    for boundary in boundaries:
        last = boundary is boundaries[-1]
        if misfits > _MAX_MISFITS and not last:
            continue
        end = _fits(token_ids, position, encode(text[place : boundary.position]))
        if end is None and last and place:
            end = _fits(token_ids, 0, encode(text[: boundary.position]))
        if end is None:
            misfits += 1
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
