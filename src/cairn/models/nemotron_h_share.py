"""Nemotron-H among tensor-parallel ranks: which heads, channels and rows one of them has.

attention    kv heads dealt in order, query heads with theirs
Mamba2       groups of heads dealt in order, with their B and C; with one group heads, while B and C are everybody's
MLP, experts, shared expert    an equal run of the intermediate size; every rank runs every expert
embedding, output              an equal run of the vocabulary
norms, router, latent projections    whole on every rank
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from cairn.models.cut import Run, Share, check_rank, deal, even, rows_of
from cairn.models.mamba2_share import StateShare
from cairn.models.nemotron_h_fields import ATTENTION, MAMBA, MLP, MOE

if TYPE_CHECKING:
    from cairn.models.nemotron_h_config import NemotronHConfig

__all__ = ["NemotronHShare", "share_of"]

_NOTHING = (0, 0)


@dataclass(frozen=True, slots=True)
class NemotronHShare:
    """What one rank has of each kind of layer; empty where the model has none. `vocab_rows`: rows of a full share of
    the vocabulary, which the last ones are padded to."""

    kv_heads: Share
    query_heads: Run
    state: StateShare
    intermediate: Run
    expert_intermediate: Run
    shared_intermediate: Run
    vocab: Run
    vocab_rows: int


def share_of(config: "NemotronHConfig", rank: int, size: int) -> NemotronHShare:
    """Raises ConfigError naming --tensor-parallel-size and the field that does not divide."""
    check_rank(rank, size)
    kv_heads, queries = Share(0, 0), _NOTHING
    if ATTENTION in config.pattern:
        per_kv = config.num_attention_heads // config.num_key_value_heads
        kv_heads = deal("num_key_value_heads", config.num_key_value_heads, "query heads", per_kv, rank, size)
        queries = kv_heads.own(per_kv)
    dense = even("intermediate_size", config.intermediate_size, rank, size) if MLP in config.pattern else _NOTHING
    experts = shared = _NOTHING
    if MOE in config.pattern:
        experts = even("moe_intermediate_size", config.moe_intermediate_size, rank, size)
        width = config.moe_shared_expert_intermediate_size
        shared = even("moe_shared_expert_intermediate_size", width, rank, size)
    vocab, vocab_rows = rows_of(config.vocab_size, rank, size)
    state = config.mamba2.share(rank, size) if MAMBA in config.pattern else StateShare(Share(0, 0), 0, 0, 0, 0, False)
    return NemotronHShare(kv_heads, queries, state, dense, experts, shared, vocab, vocab_rows)
