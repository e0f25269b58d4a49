"""Published tensors as they are to be found in a GGUF file: whose rows, in which order, and what llama.cpp's converter
did to their numbers, which is undone."""

import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from cairn.errors import ModelError
from cairn.models.weights.gguf.header import GgufTensor

Change = Literal["plus one", "decay"]
"""Of numbers: the weight of a centred norm is stored with 1 added, `A_log` as what it stands for, -exp(A_log)."""

Order = NDArray[np.int64]
"""Where each published row, or column, is among the stored ones."""

Shape = tuple[int, ...]

_MAX_ROWS = 1 << 22

_BLOCK = re.compile(r"blk\.(\d+)\.(.+)")


@dataclass(frozen=True, slots=True)
class GgufRows:
    """Rows [begin, end) of a stored tensor, counted over all dimensions but the last one."""

    tensor: str
    begin: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufView:
    """A published tensor: its rows are those of `pieces`, one after the other, but for `row_order`.

    `row_order`, `column_order`: None where they are in order. `is_small`: a vector or taps, of few numbers, which may
    be stored in another shape; `change`: of such a one. `type_name`: ggml's, and of pieces of several types all, with
    `+` between them. `num_bytes`: as it is stored.
    """

    shape: Shape
    type_name: str
    file: str
    pieces: tuple[GgufRows, ...]
    num_bytes: int
    row_order: Order | None = None
    column_order: Order | None = None
    change: Change | None = None
    is_small: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """How a stored tensor becomes a published one. `name`: what follows the layer's name, or the whole name of a tensor
    that is in no layer; with `{expert}` each matrix of a stack becomes a tensor of its own.

    `shape`: from the stored to the published one, of a vector or of taps. `place`: which of several stored tensors that
    make up a published one, row after row in each matrix. `other`: the name of a second published tensor, which the
    second half of the rows of each matrix makes up.
    """

    name: str
    shape: Callable[[Shape], Shape] | None = None
    row_order: Order | None = None
    column_order: Order | None = None
    change: Change | None = None
    place: int = 0
    other: str | None = None


Rules = Mapping[str, Rule]
"""By what a stored tensor is called, in a layer after `blk.` and its number."""


def flat(shape: Shape) -> Shape:
    """A vector."""
    return (math.prod(shape),)


def taps(shape: Shape) -> Shape:
    """Of a depthwise convolution: [channels, W] -> [channels, 1, W]."""
    return (shape[0], 1, *shape[1:])


def single_row(shape: Shape) -> Shape:
    """A matrix of one row, which may be stored as a vector."""
    return (1, shape[-1])


def tiled_heads(groups: int, heads: int, head_dim: int, before: int = 0) -> Order | None:
    """Of heads that are published group by group, and stored as the first one of every group, then the second ones, and
    so on. `before`: rows that are stored before them. Raises ModelError."""
    if heads == groups:
        return None
    order = _rows_of(heads, head_dim, before).reshape(heads // groups, groups, head_dim).swapaxes(0, 1).reshape(-1)
    return np.concatenate([np.arange(before), before + order])


def paired_rotary(heads: int, head_dim: int) -> Order:
    """Of heads in which positions turn the first half against the second as published, and neighbours as stored. Raises
    ModelError."""
    return _rows_of(heads, head_dim).reshape(heads, head_dim // 2, 2).swapaxes(1, 2).reshape(-1)


def _rows_of(heads: int, head_dim: int, before: int = 0) -> Order:
    # A file that says so many would otherwise be believed before its tensors are looked at.
    if before + heads * head_dim > _MAX_ROWS:
        raise ModelError(f"{heads} heads of {head_dim} numbers each are more than any model has")
    return np.arange(heads * head_dim)


@dataclass(slots=True)
class _Draft:
    """A published tensor while its pieces are collected, by the number of the matrix and their place in it."""

    rule: Rule
    pieces: dict[tuple[int, int], GgufRows] = field(default_factory=dict)


def make_views(
    tensors: Mapping[str, GgufTensor], rules: Callable[[int | None], Rules], layer_name: Callable[[int], str]
) -> dict[str, GgufView]:
    """All published tensors by name; those that no rule is about under their stored names, as parts of no architecture.
    `rules`: of a layer, or for None of what is in none. Raises ModelError."""
    drafts: dict[str, _Draft] = {}
    for stored, tensor in tensors.items():
        block = _BLOCK.fullmatch(stored)
        number, short = (int(block[1]), block[2]) if block is not None else (None, stored)
        rule = rules(number).get(short)
        prefix = "" if number is None else f"{layer_name(number)}."
        if rule is None:
            rule, prefix = Rule(name=stored), ""
        for name, key, piece in _split(rule, stored, tensor.shape):
            drafts.setdefault(prefix + name, _Draft(rule)).pieces[key] = piece
    return {name: _view(draft, tensors) for name, draft in drafts.items()}


def _split(rule: Rule, stored: str, shape: Shape) -> Iterator[tuple[str, tuple[int, int], GgufRows]]:
    """A stored tensor's pieces, each with the name of the published tensor and the place there."""
    if len(shape) != 3:
        rows = math.prod(shape[:-1])
        yield rule.name, (0, rule.place), GgufRows(stored, 0, rows)
        return
    count, rows, _ = shape
    names = (rule.name,) if rule.other is None else (rule.name, rule.other)
    share = rows // len(names)
    for expert in range(count):
        for half, name in enumerate(names):
            begin = expert * rows + half * share
            matrix = 0 if "{expert}" in name else expert
            yield name.format(expert=expert), (matrix, rule.place), GgufRows(stored, begin, begin + share)


def _view(draft: _Draft, tensors: Mapping[str, GgufTensor]) -> GgufView:
    rule, pieces = draft.rule, tuple(draft.pieces[key] for key in sorted(draft.pieces))
    first = tensors[pieces[0].tensor]
    for piece in pieces:
        if (other := tensors[piece.tensor].shape)[-1] != first.shape[-1]:
            raise ModelError(
                f"{first.file}: {pieces[0].tensor} {list(first.shape)} and {piece.tensor} {list(other)} make up one "
                "tensor, and have rows of one length"
            )
    num_matrices, columns = 1 + max(matrix for matrix, _ in draft.pieces), first.shape[-1]
    num_rows = sum(piece.end - piece.begin for piece in pieces)
    if rule.shape is not None:
        shape = rule.shape(first.shape)
    elif len(first.shape) == 1 or len(first.shape) > 3:
        shape = first.shape
    else:
        matrix = (num_rows // num_matrices, columns)
        shape = (num_matrices, *matrix) if len(first.shape) == 3 and "{expert}" not in rule.name else matrix
    return GgufView(
        shape=shape,
        type_name="+".join(dict.fromkeys(tensors[piece.tensor].type_name for piece in pieces)),
        file=first.file,
        pieces=pieces,
        num_bytes=sum(tensors[piece.tensor].place(piece.begin, piece.end)[1] for piece in pieces),
        row_order=rule.row_order,
        column_order=rule.column_order,
        change=rule.change,
        is_small=rule.shape is not None or rule.change is not None or len(first.shape) in (1, 4),
    )
