"""How a model is sharded among tensor-parallel ranks: pure arithmetic on heads, channels and rows.

Units (kv heads, groups of state heads) are assigned to ranks in order. With fewer units than ranks, neighbouring ranks
have the same unit whole, as replicas, and each *contributes* only its part of what comes out of it.
"""

from dataclasses import dataclass

from cairn.errors import ConfigError

Slice = tuple[int, int]
"""Entries [begin, end)."""


@dataclass(frozen=True, slots=True)
class TensorShard:
    """What one rank reads of a tensor: along dimension `dim` these slices, concatenated."""

    dim: int
    slices: tuple[Slice, ...]

    def shape(self, whole: tuple[int, ...]) -> tuple[int, ...]:
        """The shard's shape of a tensor of shape `whole`. Raises ValueError where a slice is not inside it."""
        for begin, end in self.slices:
            if not 0 <= begin <= end <= whole[self.dim]:
                raise ValueError(f"slice {begin}..{end} is not inside dimension {self.dim} of {list(whole)}")
        length = sum(end - begin for begin, end in self.slices)
        return (*whole[: self.dim], length, *whole[self.dim + 1 :])


@dataclass(frozen=True, slots=True)
class HeadShard:
    """Units [begin, end) of one rank, which is replica number `replica` of the `num_replicas` ranks that have them."""

    begin: int
    end: int
    replica: int = 0
    num_replicas: int = 1

    @property
    def count(self) -> int:
        return self.end - self.begin

    def slice_of(self, width: int, offset: int = 0) -> Slice:
        """The entries of the rank's units, `width` of them a unit, the model's first unit at `offset`."""
        return offset + self.begin * width, offset + self.end * width

    def output_slice(self, width: int) -> Slice:
        """The entries that this rank contributes to the sum over ranks; `num_replicas` divides `width`."""
        size = self.count * width // self.num_replicas
        begin = self.begin * width + self.replica * size
        return begin, begin + size

    def local_output(self, width: int) -> slice | None:
        """The output slice as a slice of the rank's own entries; None for all of them."""
        if self.num_replicas == 1:
            return None
        begin, end = self.output_slice(width)
        return slice(begin - self.begin * width, end - self.begin * width)


def check_rank(rank: int, size: int) -> None:
    """Raises ConfigError where there is no such rank."""
    if size < 1 or not 0 <= rank < size:
        raise ConfigError(f"--tensor-parallel-size {size} has no rank {rank}; it must be at least 1")


def shard_heads(field: str, total: int, width_field: str, width: int, rank: int, size: int) -> HeadShard:
    """The rank's share of `total` units of `width` entries each; the fields' names are for errors.

    Raises ConfigError where neither of `total` and `size` is a multiple of the other, or where a unit's entries do
    not divide among the ranks that replicate it.
    """
    if total % size and size % total:
        raise ConfigError(
            f"--tensor-parallel-size {size} and {field} {total}: one must be a multiple of the other; "
            "choose another size"
        )
    replicas = max(1, size // total)
    if width % replicas:
        raise ConfigError(
            f"--tensor-parallel-size {size}: {replicas} ranks share one of {field} {total}, among which its {width} "
            f"{width_field} do not divide; choose a smaller size"
        )
    begin = rank * total // size
    return HeadShard(begin, begin + max(1, total // size), rank % replicas, replicas)


def shard_even(field: str, total: int, rank: int, size: int) -> Slice:
    """The rank-th of `size` equal slices. Raises ConfigError naming the field."""
    if total % size:
        raise ConfigError(f"--tensor-parallel-size {size} does not divide {field} {total}; choose another size")
    return rank * total // size, (rank + 1) * total // size


def shard_vocabulary(total: int, rank: int, size: int) -> tuple[Slice, int]:
    """The rank's rows of a vocabulary, the last ranks' shorter or empty; and how many rows the first rank has."""
    rows = -(-total // size)
    return (min(rank * rows, total), min((rank + 1) * rows, total)), rows
