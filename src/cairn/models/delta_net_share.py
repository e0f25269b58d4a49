"""A gated delta net's part of a model: its sizes, what a rank has of it, and what is remembered of it.

Key heads are dealt to ranks in order, with their value heads.
"""

from dataclasses import dataclass

from cairn.layers.memory import ConvPart, RecurrentSpec
from cairn.models.layer_sizes import LayerSizes
from cairn.models.sharding import Run, Share, deal


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaNetSizes(LayerSizes):
    """`eps`: of the norm over one value head; `packed`: the projections are stored head by head in two tensors."""

    hidden_size: int
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    conv_kernel: int
    eps: float
    packed: bool

    @property
    def keys(self) -> int:
        """Channels of q, and of k."""
        return self.key_heads * self.key_dim

    @property
    def values(self) -> int:
        """Channels of v, and of the gate."""
        return self.value_heads * self.value_dim

    @property
    def conv_dim(self) -> int:
        """Channels of the convolution: q | k | v."""
        return 2 * self.keys + self.values

    @property
    def active_weights(self) -> int:
        return self.hidden_size * (self.conv_dim + 2 * self.values + 2 * self.value_heads)

    def share(self, rank: int, size: int) -> "DeltaNetShare":
        """Raises ConfigError naming --tensor-parallel-size and the field that does not divide."""
        heads = self.value_heads // self.key_heads
        width = heads * self.value_dim
        return DeltaNetShare(
            self, deal("linear_num_key_heads", self.key_heads, "channels", width, rank, size), heads, width
        )

    def recurrent_spec(self, num_layers: int, rank: int, size: int) -> RecurrentSpec:
        """See `LayerSizes`."""
        share = self.share(rank, size)
        heads = share.key_heads.count
        keys = ConvPart(heads * self.key_dim)
        return RecurrentSpec(
            num_layers=num_layers,
            columns=self.conv_kernel - 1,
            parts=(keys, keys, ConvPart(heads * share.unit_values)),
            state=(heads * share.unit_heads, self.key_dim, self.value_dim),
            units=heads,
        )


@dataclass(frozen=True, slots=True)
class DeltaNetShare:
    """One rank's key heads. A key head has `unit_heads` value heads with `unit_values` channels together."""

    sizes: DeltaNetSizes
    key_heads: Share
    unit_heads: int
    unit_values: int

    @property
    def own_values(self) -> slice | None:
        """The rank's own value channels among those it holds; None for all of them."""
        if self.key_heads.parts == 1:
            return None
        begin, end = self.key_heads.own(self.unit_values)
        first = self.key_heads.begin * self.unit_values
        return slice(begin - first, end - first)

    def conv_runs(self) -> tuple[Run, Run, Run]:
        """The convolution's channels q | k | v, which are also the rows of in_proj_qkv."""
        dim, keys, held = self.sizes.key_dim, self.sizes.keys, self.key_heads.held
        return held(dim), held(dim, keys), held(self.unit_values, 2 * keys)

    def packed_runs(self) -> tuple[list[Run], list[Run]]:
        """Rows of in_proj_qkvz and in_proj_ba, which are stored head by head, in the order q | k | v | gate and beta |
        time step of all heads."""
        dim, values, heads = self.sizes.key_dim, self.unit_values, self.unit_heads
        return self._by_part((dim, dim, values, values)), self._by_part((heads, heads))

    def _by_part(self, widths: tuple[int, ...]) -> list[Run]:
        runs, offset = [], 0
        for width in widths:
            starts = [head * sum(widths) + offset for head in range(self.key_heads.begin, self.key_heads.end)]
            runs += [(start, start + width) for start in starts]
            offset += width
        return runs
