"""What a layer's attention has of its own: how far back a token sees, and what becomes of a score. Without torch."""

from dataclasses import dataclass
from math import inf

from cairn.types import first_in_reach


@dataclass(frozen=True, slots=True)
class AttentionRule:
    """Which keys a token sees besides that none comes after it, and how scores are made.

    `window`: a token at position p sees positions (p - window, p], so many tokens with itself. `chunk`: it sees the
    positions from p // chunk * chunk on. At most one of the two; None: from 0 on. `scale`: what products of a query and
    a key are multiplied with, None for D^-0.5. `softcap`: a scaled score becomes softcap * tanh(score / softcap).

    Raises ValueError that names the field.
    """

    window: int | None = None
    chunk: int | None = None
    scale: float | None = None
    softcap: float | None = None

    def __post_init__(self) -> None:
        for name, value in (("window", self.window), ("chunk", self.chunk)):
            if value is not None and value < 1:
                raise ValueError(f"{name}: attention reaches over 1 token or more, not {value}; None for all of them")
        if self.window is not None and self.chunk is not None:
            raise ValueError(f"window and chunk: attention has one reach, not {self.window} and {self.chunk} tokens")
        for name, factor in (("scale", self.scale), ("softcap", self.softcap)):
            if factor is not None and not 0 < factor < inf:
                raise ValueError(f"{name}: wants a positive number, not {factor}; None to do without")

    @property
    def reach(self) -> int | None:
        """The most tokens that a token sees, itself among them; None for all."""
        return self.window or self.chunk

    def first_key(self, position: int) -> int:
        """The first position that a token at `position`, 0 or more, sees."""
        return first_in_reach(position, self.reach, self.chunk is not None)

    def num_pairs(self, start: int, end: int) -> int:
        """How many keys the tokens at positions [start, end) see, all together."""
        return self._num_pairs_before(end) - self._num_pairs_before(start)

    def _num_pairs_before(self, end: int) -> int:
        """Of all tokens before position `end`."""
        if self.chunk is not None:
            chunks, rest = divmod(end, self.chunk)
            return chunks * (self.chunk * (self.chunk + 1) // 2) + rest * (rest + 1) // 2
        growing = end if self.window is None else min(end, self.window)
        return growing * (growing + 1) // 2 + (end - growing) * growing


FULL = AttentionRule()
"""A token sees all before it, with the usual scale."""
