"""What each step changes of the running requests, in columns by slot: plain decodes of all of them are one pass over
the columns."""

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

COLUMNS = (
    "num_computed",
    "num_scheduled",
    "num_in_flight",
    "plain_until",
    "last_token",
    "kv_write_from",
    "min_tokens_until",
)

Row = NDArray[np.int32]
"""The columns of one request, shape [len(COLUMNS)]."""


class SlotTable:
    """One column per field, int32 [num_slots]; `Request` says what the first four mean. `free`: nobody's slots, the
    last of which is taken next.

    `last_token`: the newest token that was sampled in the slot and has been applied. `kv_write_from`: as of a decode
    row. `min_tokens_until`: no stop token may be sampled at a position before this one.
    """

    def __init__(self, num_slots: int) -> None:
        self.free = list(range(num_slots - 1, -1, -1))
        self._columns = np.zeros((len(COLUMNS), num_slots), np.int32)
        (
            self.num_computed,
            self.num_scheduled,
            self.num_in_flight,
            self.plain_until,
            self.last_token,
            self.kv_write_from,
            self.min_tokens_until,
        ) = self._columns

    def row(self, slot: int) -> Row:
        """A view of one slot's fields."""
        return self._columns[:, slot]


class HasRow(Protocol):
    """A request."""

    row: Row


class Column:
    """A field of a request that is in its slot's row while it has one, else in a row of its own."""

    def __init__(self, name: str) -> None:
        self._place = COLUMNS.index(name)

    def __get__(self, request: HasRow, owner: type | None = None) -> int:
        value: int = request.row.item(self._place)
        return value

    def __set__(self, request: HasRow, value: int) -> None:
        request.row[self._place] = value


def empty_row() -> Row:
    """Of a request that begins."""
    return np.zeros(len(COLUMNS), np.int32)
