"""What layers' sizes decide besides their tensors, without torch: the cost of a token, and what is cached of it."""

from dataclasses import dataclass
from math import gcd, lcm
from typing import TYPE_CHECKING, Annotated, ClassVar

from msgspec import Meta

from cairn.cache.layout import AttentionGroup, CacheLayout, reach_name
from cairn.kernels.attention_rule import FULL, AttentionRule
from cairn.kernels.state_encoding import FLOAT32, StateEncoding, plain_encoding
from cairn.layers.memory import AttentionSpec, MemorySpec, RecurrentSpec

if TYPE_CHECKING:
    import torch

PAGE_BYTES_WITHOUT_ATTENTION = 65536


class LayerSizes:
    """A kind of layer. Counts are of one layer of the whole model. `check_order`: of several kinds that do not divide
    among ranks the one with the lowest is named."""

    __slots__ = ()

    check_order: ClassVar[int] = 2

    @property
    def active_weights(self) -> int:
        """Elements of the matrices that a token is multiplied with."""
        raise NotImplementedError

    @property
    def score_numbers(self) -> int:
        """Elements of a token's queries."""
        return 0

    def recurrent_spec(self, num_layers: int, rank: int, size: int) -> RecurrentSpec | None:
        """The recurrent states of a rank. Raises ConfigError as `check_size`."""
        return None

    def check_size(self, size: int) -> None:
        """Raises ConfigError naming --tensor-parallel-size and the field that does not divide."""
        self.recurrent_spec(1, 0, size)


@dataclass(frozen=True, slots=True)
class LimitedScores:
    """Of all attention layers of one reach, a window or a chunk of so many tokens, the elements of a token's queries:
    see `AttentionRule`, which raises ValueError for both at once."""

    score_numbers: Annotated[int, Meta(ge=1, le=1 << 50)]
    window: Annotated[int, Meta(ge=1, le=1 << 50)] | None = None
    chunk: Annotated[int, Meta(ge=1, le=1 << 50)] | None = None

    def __post_init__(self) -> None:
        AttentionRule(self.window, self.chunk)


@dataclass(frozen=True, slots=True)
class ForwardSizes:
    """What computing a prompt's token takes in the whole model, however many ranks it is sharded among.

    `active_weights`: elements of all matrices that one token is multiplied with: of a mixture the router, the shared
    expert and `experts per token` of the others; no embedding, and no output matrix, which only the last token of a
    prompt meets. `score_numbers`: of all attention layers that see all keys, the elements of a token's queries;
    `limited_scores`: of the others."""

    active_weights: Annotated[int, Meta(ge=1, le=1 << 50)]
    score_numbers: Annotated[int, Meta(ge=0, le=1 << 50)]
    limited_scores: tuple[LimitedScores, ...] = ()

    def forward_flops(self, start: int, end: int) -> int:
        """Floating-point operations of computing the prompt's tokens [start, end).

        A token at position p takes 2 for each active weight, and 2 for each element of its queries with each of the
        p + 1 keys, or those within the layer's reach, and once more with as many values (Kaplan et al.,
        arXiv 2001.08361, table 1). Norms, activations, convolutions and the recurrence itself, a few hundredths, are
        left out.
        """
        products = self.score_numbers * FULL.num_pairs(start, end)
        for each in self.limited_scores:
            products += each.score_numbers * AttentionRule(each.window, each.chunk).num_pairs(start, end)
        return 2 * self.active_weights * (end - start) + 4 * products


def _group(spec: AttentionSpec, tokens_per_page: int) -> AttentionGroup:
    return AttentionGroup(reach_name(spec.reach, spec.chunked), tokens_per_page, spec.reach, spec.chunked)


@dataclass(frozen=True, slots=True)
class CacheSpec:
    """All that one rank of a model keeps of a sequence. `recurrent`: None where the model has no such layers.
    `attention`: by reach, first of all what has none."""

    hidden_size: int
    recurrent: RecurrentSpec | None
    attention: tuple[AttentionSpec, ...]

    @property
    def num_state_units(self) -> int:
        """The smallest parts of the recurrent states that tensor parallelism may assign to a rank."""
        return 0 if self.recurrent is None else self.recurrent.units

    def memory_spec(self, dtype: "torch.dtype", device: "torch.device") -> MemorySpec:
        return MemorySpec(dtype, device, self.hidden_size, self.recurrent, self.attention)

    def layout(
        self, block_size: int, dtype_bytes: int, encoding: StateEncoding | None = None, tp_size: int = 1
    ) -> CacheLayout:
        """Bytes of pages and checkpoints; a number of keys, values, convolution and hidden state takes `dtype_bytes`,
        and checkpoints have the recurrent state as `encoding` says; None: as it is while it runs.

        page        [kv head][attention layer of one group][k|v][token][head_dim]
        checkpoint  header: final hidden state, and of each recurrent layer the convolution's shared channels
                    unit:   of each recurrent layer the convolution's last inputs and the state; see `UnitBytes`
        """
        page_bytes = PAGE_BYTES_WITHOUT_ATTENTION
        groups: tuple[AttentionGroup, ...] = ()
        if self.attention:
            # Pages of all groups have the same bytes: the others find room for as many more tokens, rounded down.
            heads = lcm(*(group.num_kv_heads for group in self.attention))
            most = max(group.token_numbers for group in self.attention) * block_size
            numbers = -(-most // heads) * heads
            page_bytes = numbers * dtype_bytes
            groups = tuple(_group(group, numbers // group.token_numbers) for group in self.attention)
        shared_bytes = state_bytes = 0
        checkpoint_dtype = state_dtype = FLOAT32.name
        if self.recurrent is not None:
            spec, encoding = self.recurrent, encoding or plain_encoding(self.recurrent.state_dtype)
            unit = spec.unit_bytes(dtype_bytes, encoding)
            shared_bytes = spec.num_layers * spec.columns * spec.shared_channels * dtype_bytes
            state_bytes = spec.units * unit.total
            # Without numbers there is nothing to be encoded, whatever was asked for.
            checkpoint_dtype, state_dtype = encoding.name if unit.values else FLOAT32.name, spec.state_dtype
        return CacheLayout(
            block_size=block_size,
            page_bytes=page_bytes,
            page_units=gcd(*(group.num_kv_heads for group in self.attention)) or 1,
            groups=groups,
            header_bytes=self.hidden_size * dtype_bytes + shared_bytes,
            state_bytes=state_bytes,
            state_units=self.num_state_units,
            checkpoint_dtype=checkpoint_dtype,
            state_dtype=state_dtype,
            tp_size=tp_size,
        )
