"""How a model is cut among tensor-parallel ranks: pure arithmetic on heads, channels and rows.

Units (kv heads, groups of state heads) are dealt to ranks in order. With fewer units than ranks, neighbouring ranks
hold the same unit whole, and each *contributes* only its part of what comes out of it.
"""

from dataclasses import dataclass

from cairn.errors import ConfigError

Run = tuple[int, int]
"""Entries [begin, end)."""


@dataclass(frozen=True, slots=True)
class Units:
    """What tensor parallelism shares out, counted over the whole model; 0 where the model has none."""

    kv_heads: int
    attention_layers: int
    state_units: int


@dataclass(frozen=True, slots=True)
class Cut:
    """What one rank reads of a tensor: along dimension `dim` these runs, one behind the other."""

    dim: int
    runs: tuple[Run, ...]

    def shape(self, whole: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of what is left of a tensor. Raises ValueError where a run is not inside it."""
        for begin, end in self.runs:
            if not 0 <= begin <= end <= whole[self.dim]:
                raise ValueError(f"run {begin}..{end} is not inside dimension {self.dim} of {list(whole)}")
        length = sum(end - begin for begin, end in self.runs)
        return (*whole[: self.dim], length, *whole[self.dim + 1 :])


@dataclass(frozen=True, slots=True)
class Share:
    """Units [begin, end) of one rank. It is the `part`-th of the `parts` ranks that hold them."""

    begin: int
    end: int
    part: int = 0
    parts: int = 1

    @property
    def count(self) -> int:
        return self.end - self.begin

    def held(self, width: int, offset: int = 0) -> Run:
        """The entries of the held units, `width` of them a unit, the first unit's at `offset`."""
        return offset + self.begin * width, offset + self.end * width

    def own(self, width: int) -> Run:
        """Those of the held entries that this rank alone contributes; `parts` divides `width`."""
        size = self.count * width // self.parts
        begin = self.begin * width + self.part * size
        return begin, begin + size


def check_rank(rank: int, size: int) -> None:
    """Raises ConfigError where there is no such rank."""
    if size < 1 or not 0 <= rank < size:
        raise ConfigError(f"--tensor-parallel-size {size} has no rank {rank}; it must be at least 1")


def deal(field: str, total: int, width_field: str, width: int, rank: int, size: int) -> Share:
    """The share of `rank` in `total` units that have `width` entries each; the fields are for the error's sake.

    Raises ConfigError where neither of `total` and `size` is a multiple of the other, or where a unit's entries do
    not divide among the ranks that share it.
    """
    if total % size and size % total:
        raise ConfigError(
            f"--tensor-parallel-size {size} and {field} {total}: one must be a multiple of the other; "
            "choose another size"
        )
    parts = max(1, size // total)
    if width % parts:
        raise ConfigError(
            f"--tensor-parallel-size {size}: {parts} ranks share one of {field} {total}, among which its {width} "
            f"{width_field} do not divide; choose a smaller size"
        )
    begin = rank * total // size
    return Share(begin, begin + max(1, total // size), rank % parts, parts)


def even(field: str, total: int, rank: int, size: int) -> Run:
    """The rank-th of `size` equal runs. Raises ConfigError naming the field."""
    if total % size:
        raise ConfigError(f"--tensor-parallel-size {size} does not divide {field} {total}; choose another size")
    return rank * total // size, (rank + 1) * total // size


def rows_of(total: int, rank: int, size: int) -> tuple[Run, int]:
    """The run of `rank` in rows dealt in equal runs, the last ones shorter or empty; and how long a full one is."""
    rows = -(-total // size)
    return (min(rank * rows, total), min((rank + 1) * rows, total)), rows
