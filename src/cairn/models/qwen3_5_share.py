"""Qwen3.5 among tensor-parallel ranks: which heads, channels and rows one of them has.

attention          kv heads dealt in order, query heads with theirs, each with its gate
gated delta net    key heads dealt in order, with their value heads
MLP, experts, shared expert    an equal run of the intermediate size; every rank runs every expert
embedding, output              an equal run of the vocabulary
norms, router, the shared expert's gate    whole on every rank
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from cairn.models.cut import Run, Share, check_rank, deal, even, rows_of
from cairn.models.qwen3_5_fields import DELTA, FULL

if TYPE_CHECKING:
    from cairn.models.qwen3_5_config import Qwen35Config

__all__ = ["Qwen35Share", "share_of"]

_NOTHING = (0, 0)


@dataclass(frozen=True, slots=True)
class Qwen35Share:
    """What one rank has of each kind of layer; empty where the model has none.

    A key head has `unit_heads` value heads with `unit_values` channels together. `vocab_rows`: rows of a full share of
    the vocabulary, which the last ones are padded to.
    """

    kv_heads: Share
    query_heads: Run
    key_heads: Share
    unit_heads: int
    unit_values: int
    intermediate: Run
    expert_intermediate: Run
    shared_intermediate: Run
    vocab: Run
    vocab_rows: int

    @property
    def own_values(self) -> slice | None:
        """The rank's own value channels among those it holds; None for all of them."""
        if self.key_heads.parts == 1:
            return None
        begin, end = self.key_heads.own(self.unit_values)
        first = self.key_heads.begin * self.unit_values
        return slice(begin - first, end - first)

    def conv_runs(self, config: "Qwen35Config") -> tuple[Run, Run, Run]:
        """The convolution's channels q | k | v, which are also the rows of in_proj_qkv."""
        dim, keys = config.linear_key_head_dim, config.keys
        held = self.key_heads.held
        return held(dim), held(dim, keys), held(self.unit_values, 2 * keys)

    def packed_runs(self, config: "Qwen35Config") -> tuple[list[Run], list[Run]]:
        """Rows of in_proj_qkvz and in_proj_ba, which are stored head by head, in the order q | k | v | gate and beta |
        time step of all heads."""
        dim, values, heads = config.linear_key_head_dim, self.unit_values, self.unit_heads
        widths, gates = (dim, dim, values, values), (heads, heads)
        return self._by_part(widths), self._by_part(gates)

    def _by_part(self, widths: tuple[int, ...]) -> list[Run]:
        runs, offset = [], 0
        for width in widths:
            starts = [head * sum(widths) + offset for head in range(self.key_heads.begin, self.key_heads.end)]
            runs += [(start, start + width) for start in starts]
            offset += width
        return runs


def share_of(config: "Qwen35Config", rank: int, size: int) -> Qwen35Share:
    """Raises ConfigError naming --tensor-parallel-size and the field that does not divide."""
    check_rank(rank, size)
    kv_heads, queries = Share(0, 0), _NOTHING
    if FULL in config.layer_types:
        per_kv = config.num_attention_heads // config.num_key_value_heads
        kv_heads = deal("num_key_value_heads", config.num_key_value_heads, "query heads", per_kv, rank, size)
        queries = kv_heads.own(per_kv)
    key_heads, unit_heads, unit_values = Share(0, 0), 0, 0
    if DELTA in config.layer_types:
        unit_heads = config.linear_num_value_heads // config.linear_num_key_heads
        unit_values = unit_heads * config.linear_value_head_dim
        key_heads = deal("linear_num_key_heads", config.linear_num_key_heads, "channels", unit_values, rank, size)
    dense = experts = shared = _NOTHING
    if len(config.sparse_layers) < len(config.layer_types):
        dense = even("intermediate_size", config.intermediate_size, rank, size)
    if config.sparse_layers:
        experts = even("moe_intermediate_size", config.moe_intermediate_size, rank, size)
        width = config.shared_expert_intermediate_size
        shared = even("shared_expert_intermediate_size", width, rank, size)
    vocab, vocab_rows = rows_of(config.vocab_size, rank, size)
    return Qwen35Share(kv_heads, queries, key_heads, unit_heads, unit_values, dense, experts, shared, vocab, vocab_rows)
