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
from cairn.models.nemotron_h_fields import ATTENTION, MAMBA, MLP, MOE

if TYPE_CHECKING:
    from cairn.models.nemotron_h_config import NemotronHConfig

__all__ = ["NemotronHShare", "StateShare", "share_of"]

_NOTHING = (0, 0)


@dataclass(frozen=True, slots=True)
class StateShare:
    """One rank's share of the Mamba2 layers. `total`: state units of the model; a unit has `unit_heads` heads and
    `unit_channels` channels of x and of the gate; `bc`: its channels of B, and of C, or all of them if `shared_bc`."""

    units: Share
    total: int
    unit_heads: int
    unit_channels: int
    bc: int
    shared_bc: bool

    @property
    def num_heads(self) -> int:
        return self.units.count * self.unit_heads

    @property
    def channels(self) -> int:
        """Channels of x, and of the gate."""
        return self.units.count * self.unit_channels

    @property
    def held_bc(self) -> int:
        """Channels of B, and of C."""
        return self.bc if self.shared_bc else self.units.count * self.bc

    @property
    def own(self) -> slice | None:
        """The rank's own channels among those it holds; None for all of them."""
        if self.units.parts == 1:
            return None
        begin, end = self.units.own(self.unit_channels)
        first = self.units.begin * self.unit_channels
        return slice(begin - first, end - first)

    def conv_runs(self, offset: int = 0) -> tuple[Run, ...]:
        """The convolution's channels x | B | C, which begin at `offset`."""
        inner = self.total * self.unit_channels
        bc = self.bc if self.shared_bc else self.total * self.bc
        x = self.units.held(self.unit_channels, offset)
        if self.shared_bc:
            return x, (offset + inner, offset + inner + 2 * bc)
        return x, self.units.held(self.bc, offset + inner), self.units.held(self.bc, offset + inner + bc)

    def projection_runs(self) -> tuple[Run, ...]:
        """Rows of in_proj: gate | x | B | C | dt."""
        inner = self.total * self.unit_channels
        conv = inner + 2 * (self.bc if self.shared_bc else self.total * self.bc)
        steps = self.units.held(self.unit_heads, inner + conv)
        return self.units.held(self.unit_channels), *self.conv_runs(inner), steps


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
    return NemotronHShare(
        kv_heads, queries, _state_share(config, rank, size), dense, experts, shared, vocab, vocab_rows
    )


def _state_share(config: "NemotronHConfig", rank: int, size: int) -> StateShare:
    if MAMBA not in config.pattern:
        return StateShare(Share(0, 0), 0, 0, 0, 0, False)
    one_group = config.n_groups == 1
    field, total = ("mamba_num_heads", config.mamba_num_heads) if one_group else ("n_groups", config.n_groups)
    channels = config.mamba_intermediate_size // total
    return StateShare(
        units=deal(field, total, "channels", channels, rank, size),
        total=total,
        unit_heads=config.mamba_num_heads // total,
        unit_channels=channels,
        bc=config.ssm_state_size,
        shared_bc=one_group,
    )
