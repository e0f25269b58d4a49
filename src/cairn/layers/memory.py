"""What a model keeps between steps: keys and values in pages, recurrent states in slots.

A model declares a `MemorySpec`; the runner allocates pages and slots by it and passes them to the model as a `Memory`.
Only the model knows which kind of layer an entry belongs to.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

from cairn.kernels.state_encoding import StateEncoding, UnitBytes

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from cairn.kernels.batch import Batch


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """Layers with keys and values; all of them have the same heads and the same reach, which is None or as of an
    `AttentionGroup`."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    reach: int | None = None
    chunked: bool = False

    @property
    def token_numbers(self) -> int:
        """Numbers of one token's keys and values."""
        return self.num_layers * self.num_kv_heads * 2 * self.head_dim


@dataclass(frozen=True, slots=True)
class ConvPart:
    """Consecutive channels of the convolution: divided evenly among the units, or shared by all of them."""

    channels: int
    shared: bool = False


@dataclass(frozen=True, slots=True)
class RecurrentSpec:
    """Layers with a running state: per layer the convolution's last inputs [columns, channels], time-major in the
    model's dtype, and a state of shape `state` in `state_dtype`, a name of `STATE_DTYPES`, whose first dimension counts
    heads; another dimension is 0 where the convolution's inputs are all there is.

    `units`: into how many parts tensor parallelism may divide the states at most; it divides the heads and every
    unshared part.
    """

    num_layers: int
    columns: int
    parts: tuple[ConvPart, ...]
    state: tuple[int, ...]
    units: int
    state_dtype: str = "float32"

    @property
    def channels(self) -> int:
        return sum(part.channels for part in self.parts)

    @property
    def shared_channels(self) -> int:
        return sum(part.channels for part in self.parts if part.shared)

    def with_states_in(self, state_dtype: str) -> "RecurrentSpec":
        """The same with states in another dtype; itself where there are none."""
        return replace(self, state_dtype=state_dtype) if math.prod(self.state) else self

    def unit_bytes(self, number_bytes: int, encoding: StateEncoding) -> UnitBytes:
        """A unit in a checkpoint file, where a convolution's input takes `number_bytes`. Raises ValueError where
        channels or heads do not divide among the units."""
        for part in self.parts:
            if not part.shared and part.channels % self.units:
                raise ValueError(f"{part.channels} convolution channels do not divide among {self.units} units")
        if self.state[0] % self.units:
            raise ValueError(f"{self.state[0]} heads do not divide among {self.units} units")
        conv = self.columns * (self.channels - self.shared_channels) // self.units * number_bytes
        return encoding.unit_bytes(self.num_layers, conv, self.state[0] // self.units, self.state[1:])


@dataclass(frozen=True, slots=True)
class MemorySpec:
    """What a model keeps on one rank, and on which device. `recurrent`: None where the model has no such layers.
    `attention`: one for each attention group of the cache."""

    dtype: "torch.dtype"
    device: "torch.device"
    hidden_size: int
    recurrent: RecurrentSpec | None
    attention: tuple[AttentionSpec, ...]


@dataclass(frozen=True, slots=True)
class PagedLayer:
    """Keys and values of one attention layer, [page, kv head, token, dim]."""

    keys: "Tensor"
    values: "Tensor"


@dataclass(frozen=True, slots=True)
class RecurrentLayer:
    """Running states of one recurrent layer: conv [slots + 1, columns, channels], state [slots + 1, *spec.state]. The
    last slot is scratch."""

    conv: "Tensor"
    state: "Tensor"


FoldLayer = Callable[["Tensor", "Batch", "Memory"], object]
"""Takes the states of a recurrent layer on by the tokens of a fold batch: see `Memory.keep_inputs`. What it gives is of
no use."""


class Memory(Protocol):
    """What a forward pass reads and writes. Layer numbers count the layers of that kind from 0."""

    @property
    def paged(self) -> Sequence[PagedLayer]: ...

    @property
    def recurrent(self) -> Sequence[RecurrentLayer]: ...

    @property
    def hidden(self) -> "Tensor":
        """Final hidden states by slot as they were before the pass, [slots + 1, hidden]."""

    def write_snapshots(self, layer: int, conv: "Tensor", state: "Tensor") -> None:
        """Put recurrent layer `layer`'s states away as the batch's snapshots: conv [N, columns, channels] and state
        [N, *spec.state], in the batch's order; N may be 0."""

    def keep_inputs(self, inputs: "Tensor", fold: FoldLayer) -> None:
        """A recurrent layer's raw inputs [T, ...] of a batch that verifies drafts. Once it is known which drafts were
        right, `fold` is called with the inputs of these tokens and a fold batch of them."""
