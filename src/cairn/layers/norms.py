"""Root mean square norms with their weights."""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from cairn.kernels.contract import Kernels
from cairn.layers.communicator import Communicator


@dataclass(frozen=True, slots=True)
class RMSNorm:
    """x / rms(x) * weight over each row (arXiv 1910.07467)."""

    kernels: Kernels
    weight: Tensor
    eps: float

    def __call__(self, x: Tensor) -> Tensor:
        """[rows, width], or [rows, heads, width] for the norm of each head; a new tensor of the same shape."""
        return self.kernels.rms_norm(x, self.weight, self.eps)

    def add_norm(self, residual: Tensor, x: Tensor) -> Tensor:
        """residual += x, in place; returns the norm of the sum."""
        return self.kernels.add_rms_norm(residual, x, self.weight, self.eps)

    def norm_result(self, x: Tensor) -> Tensor:
        """What a mixer that was given normed hidden states has added to them: what it gives."""
        return x


@dataclass(frozen=True, slots=True)
class NormOfSum:
    """norm(sum of norm_i(x_i)), where several parts of a layer lie one after the other."""

    norms: tuple[RMSNorm, ...]
    norm: RMSNorm

    def __call__(self, x: Tensor) -> Tensor:
        """[parts, rows, width] -> [rows, width], a new tensor."""
        first, *others = (norm(part) for norm, part in zip(self.norms, x, strict=True))
        for other in others:
            first.add_(other)
        return self.norm(first)


@dataclass(frozen=True, slots=True)
class PostNorm:
    """In the place of an `RMSNorm` before a mixer: the norm of what the mixer gives, which gets hidden states as they
    are."""

    norm: RMSNorm | NormOfSum

    def __call__(self, x: Tensor) -> Tensor:
        """x itself."""
        return x

    def add_norm(self, residual: Tensor, x: Tensor) -> Tensor:
        """residual += x, in place; returns it."""
        return residual.add_(x)

    def norm_result(self, x: Tensor) -> Tensor:
        """All ranks' sum of what the mixer gives -> what is added to hidden states."""
        return self.norm(x)


@dataclass(frozen=True, slots=True)
class SandwichNorm:
    """A norm `before` a mixer, and another one of what it gives, `after` it."""

    before: RMSNorm
    after: RMSNorm

    def __call__(self, x: Tensor) -> Tensor:
        """What the mixer gets, a new tensor."""
        return self.before(x)

    def add_norm(self, residual: Tensor, x: Tensor) -> Tensor:
        """residual += x, in place; returns what the mixer gets of the sum."""
        return self.before.add_norm(residual, x)

    def norm_result(self, x: Tensor) -> Tensor:
        """All ranks' sum of what the mixer gives -> what is added to hidden states."""
        return self.after(x)


@dataclass(frozen=True, slots=True)
class ScaledSum:
    """In the place of a `norm` where hidden states, with what the layer before has added, are multiplied by `scale` and
    stay so."""

    norm: RMSNorm | PostNorm | SandwichNorm
    scale: float

    def __call__(self, x: Tensor) -> Tensor:
        """What the mixer gets of hidden states that nothing was added to."""
        return self.norm(x)

    def add_norm(self, residual: Tensor, x: Tensor) -> Tensor:
        """residual = scale * (residual + x), in place; returns what the mixer gets of it."""
        residual.add_(x).mul_(self.scale)
        return self.norm(residual)

    def norm_result(self, x: Tensor) -> Tensor:
        """All ranks' sum of what the mixer gives -> what is added to hidden states."""
        return self.norm.norm_result(x)


@dataclass(frozen=True, slots=True)
class ShardedRMSNorm:
    """x / rms(x) * weight over rows whose `width` channels are sharded over ranks, which add their sums of squares.

    `weight`: of the rank's channels. `counts`: whether they are in the sum; of several ranks that have the same ones it
    is one.
    """

    weight: Tensor
    width: int
    eps: float
    communicator: Communicator
    counts: bool

    def __call__(self, x: Tensor) -> Tensor:
        """[rows, the rank's channels]; a new tensor of the same shape."""
        wide = x.float()
        squares = wide.square().sum(-1, keepdim=True)
        squares = self.communicator.all_reduce(squares if self.counts else torch.zeros_like(squares))
        scale = squares.div(self.width).add_(self.eps).rsqrt_()
        return (wide * scale).mul_(self.weight).to(x.dtype)


class GatedNorm(Protocol):
    """The norm after Mamba2's scan: the gate is applied first."""

    def __call__(self, x: Tensor, gate: Tensor) -> Tensor:
        """x (float32) and gate, both [rows, width] -> in the gate's dtype [rows, width], or the output slice of it
        where other ranks have the same channels."""


@dataclass(frozen=True, slots=True)
class GatedRMSNorm:
    """Each of `groups` parts is normed by itself. `output_slice`: the channels that are
    returned, None for all."""

    kernels: Kernels
    weight: Tensor
    groups: int
    eps: float
    output_slice: slice | None = None

    def __call__(self, x: Tensor, gate: Tensor) -> Tensor:
        """See `GatedNorm`."""
        normed = self.kernels.gated_rms_norm(x, gate, self.weight, self.groups, self.eps)
        return normed if self.output_slice is None else normed[:, self.output_slice].contiguous()


@dataclass(frozen=True, slots=True)
class ShardedGatedRMSNorm:
    """One group whose `width` channels are sharded over ranks, which add their sums of squares.

    `weight`: of the channels that this rank contributes, which are `output_slice` of its channels (None: all of them).
    """

    kernels: Kernels
    weight: Tensor
    width: int
    eps: float
    communicator: Communicator
    output_slice: slice | None = None

    def __call__(self, x: Tensor, gate: Tensor) -> Tensor:
        """See `GatedNorm`."""
        if self.output_slice is not None:
            x, gate = x[:, self.output_slice], gate[:, self.output_slice]
        gated = self.kernels.silu_mul(gate.to(x.dtype), x)
        squares = self.communicator.all_reduce(gated.square().sum(-1, keepdim=True))
        scale = squares.div(self.width).add_(self.eps).rsqrt_()
        return gated.mul_(scale).to(gate.dtype).mul_(self.weight)


@dataclass(frozen=True, slots=True)
class SiluGate:
    """x * silu(gate), without a norm. `output_slice`: the channels that are
    returned, None for all."""

    kernels: Kernels
    output_slice: slice | None = None

    def __call__(self, x: Tensor, gate: Tensor) -> Tensor:
        """See `GatedNorm`."""
        if self.output_slice is not None:
            x, gate = x[:, self.output_slice], gate[:, self.output_slice]
        return self.kernels.silu_mul(gate, x)
