"""From what a model's layers remember to the bytes of a page and of a checkpoint."""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cairn.cache.layout import AttentionGroup, CacheLayout
from cairn.layers.memory import AttentionSpec, MemorySpec, RecurrentSpec
from cairn.models.sharding import Units

if TYPE_CHECKING:
    import torch

STATE_BYTES = 4
"""Of one number of the recurrent state, which is served in float32 whatever the serving dtype."""

PAGE_BYTES_WITHOUT_ATTENTION = 65536


@dataclass(frozen=True, slots=True)
class Remembered:
    """All that one rank of a model remembers: None for a kind of layer that the model does not have."""

    hidden_size: int
    recurrent: RecurrentSpec | None
    attention: AttentionSpec | None

    def spec(self, dtype: "torch.dtype", device: "torch.device") -> MemorySpec:
        return MemorySpec(dtype, device, self.hidden_size, self.recurrent, self.attention)

    def layout(self, block_size: int, dtype_bytes: int, state_bytes: int = STATE_BYTES) -> CacheLayout:
        """Bytes of pages and checkpoints; a number of recurrent state takes `state_bytes`, one of keys, values,
        convolution and hidden state `dtype_bytes`.

        page        [kv head][attention layer][k|v][block_size][head_dim]
        checkpoint  header: final hidden state, and of each recurrent layer the convolution's shared channels
                    unit:   of each recurrent layer the convolution's last inputs and the state
        """
        page_bytes, kv_heads = PAGE_BYTES_WITHOUT_ATTENTION, 1
        if self.attention is not None:
            kv_heads = self.attention.num_kv_heads
            page_bytes = kv_heads * self.attention.num_layers * 2 * self.attention.head_dim * dtype_bytes * block_size
        shared, own, units = self._recurrent_bytes(dtype_bytes, state_bytes)
        return CacheLayout(
            block_size=block_size,
            page_bytes=page_bytes,
            page_units=kv_heads,
            groups=() if self.attention is None else (AttentionGroup("full", block_size),),
            header_bytes=self.hidden_size * dtype_bytes + shared,
            state_bytes=own,
            state_units=units,
        )

    def units(self) -> Units:
        """What tensor parallelism shares out, if this is the only rank."""
        kv_heads = attention_layers = 0
        if self.attention is not None:
            kv_heads, attention_layers = self.attention.num_kv_heads, self.attention.num_layers
        return Units(kv_heads, attention_layers, 0 if self.recurrent is None else self.recurrent.units)

    def _recurrent_bytes(self, dtype_bytes: int, state_bytes: int) -> tuple[int, int, int]:
        """Of all layers: bytes that every rank keeps, bytes that are cut, and among how many units."""
        if self.recurrent is None:
            return 0, 0, 0
        column = self.recurrent.num_layers * self.recurrent.columns * dtype_bytes
        shared = sum(part.channels for part in self.recurrent.parts if part.shared)
        state = self.recurrent.num_layers * math.prod(self.recurrent.state) * state_bytes
        own = column * (self.recurrent.channels - shared) + state
        return column * shared, own, self.recurrent.units
