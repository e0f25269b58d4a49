"""Rotary position embeddings (arXiv 2104.09864), whole or partial, by one position or by three (mRoPE, interleaved).

Angles are computed in float64 and rounded once: at position 100,000 a float32 product is already wrong by 0.004 rad.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import Tensor

_VECTOR = 64
"""Rows are padded to whole vectors: torch's vector body and scalar tail round cos and sin differently."""


@dataclass(frozen=True, slots=True)
class Rotary:
    """`frequencies` float32 [pairs]: radians a position; `axes` int64 [pairs]: which of the three positions (time,
    height, width) turns a pair, or None for always the first; `scaling` multiplies cos and sin."""

    frequencies: Tensor
    axes: Tensor | None = None
    scaling: float = 1.0

    def to(self, device: torch.device) -> "Rotary":
        return replace(
            self, frequencies=self.frequencies.to(device), axes=None if self.axes is None else self.axes.to(device)
        )

    def at(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """positions int64 [3, rows] -> cos and sin, float32 [rows, pairs]; a row's do not depend on the other rows."""
        rows = positions.shape[1]
        padded = F.pad(positions, (0, -rows % _VECTOR))
        place = padded[0, :, None] if self.axes is None else padded[self.axes].t().contiguous()
        angles = place.double() * self.frequencies.double()
        return (angles.cos().mul_(self.scaling)[:rows].float(), angles.sin().mul_(self.scaling)[:rows].float())


@dataclass(frozen=True, slots=True)
class Temperature:
    """What attention without positions is scaled by where a sequence is long (arXiv 2501.19399, as Llama 4 has it): a
    query by 1 + strength * log(1 + floor((position + 1) / floor_scale)), in the form of a rotation by no angle."""

    pairs: int
    floor_scale: int
    strength: float

    def to(self, device: torch.device) -> "Temperature":
        return self

    def at(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """positions int64 [3, rows] -> that for cos and zeros for sin, float32 [rows, pairs]."""
        rows = positions.shape[1]
        floors = F.pad(positions[0] + 1, (0, -rows % _VECTOR)).div(self.floor_scale, rounding_mode="floor").double()
        scales = floors.log1p().mul_(self.strength).add_(1.0)[:rows, None].float().expand(-1, self.pairs).contiguous()
        return scales, torch.zeros_like(scales)


def make_rotary(
    dim: int, theta: float, sections: tuple[int, int, int] | None = None, scaling: Mapping[str, object] | None = None
) -> Rotary:
    """The published frequencies theta^(-2i / dim) of the first `dim` (even) elements of a head.

    `sections`: how many pairs time, height and width turn. They are interleaved as in Qwen3-VL and Qwen3.5: of the
    pairs 3i + 1 the first sections[1] turn by height, of 3i + 2 the first sections[2] by width, all others by time.
    `scaling`: transformers' `rope_parameters` of one of its types whose frequencies do not depend on the sequence.
    Raises ValueError where the sections do not add up to dim / 2.
    """
    if dim < 2 or dim % 2:
        raise ValueError(f"a rotated part has an even number of elements, not {dim}")
    # In float32 like the published code, which rounds them before they meet a position.
    frequencies, factor = 1.0 / (theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)), 1.0
    if scaling:
        frequencies, factor = _scaled(dim, theta, scaling)
    if sections is None:
        return Rotary(frequencies, None, factor)
    if sum(sections) != dim // 2:
        raise ValueError(f"mrope_section {list(sections)} must add up to {dim // 2}, half of the rotated elements")
    axes = torch.zeros(dim // 2, dtype=torch.int64)
    for axis in (1, 2):
        axes[axis : 3 * sections[axis] : 3] = axis
    return Rotary(frequencies, axes, factor)


def _scaled(dim: int, theta: float, scaling: Mapping[str, object]) -> tuple[Tensor, float]:
    """transformers' own frequencies float32 [dim / 2], and what cos and sin are multiplied with."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    # As much of a config as these functions read, whose only head is the rotated part.
    config = SimpleNamespace(
        rope_parameters={"rope_theta": theta, **scaling},
        standardize_rope_params=lambda: None,
        hidden_size=dim,
        num_attention_heads=1,
        head_dim=dim,
    )
    frequencies, factor = ROPE_INIT_FUNCTIONS[str(scaling["rope_type"])](config, torch.device("cpu"))
    return frequencies, float(factor)
