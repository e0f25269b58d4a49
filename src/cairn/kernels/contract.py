"""What a kernel backend is: these functions, nothing else.

A backend is a package (`cpu`, `reference`, later `cuda`) whose functions have these signatures; a module is an
implementation of the protocol. `reference` is the slow readable truth, every other backend is tested against it.

Letters in shapes: T tokens (rows), C channels, W convolution width, H heads, P head dim, N state size, G groups of
heads that share B and C, Hq/Hk query/kv heads, D attention head dim, S live slots.

Tiles: prefill rows come in tiles of `TILE` rows on the absolute token grid (row index in the tile = position mod
`TILE`). The last tile is padded behind; the first is padded in front when the sequence continues off the grid.
"""

from collections.abc import Sequence
from typing import Final, Protocol

from torch import Tensor

TILE: Final = 64
"""Rows of a prefill tile and tokens of a chunk of the chunked scan."""

ROW_TILE: Final = 16
"""Rows of a GEMM tile where rows of unrelated sequences meet: decode rows, experts' tokens, logits."""

Tiles = Sequence[slice]
"""Row slices that cover a matrix; each is one GEMM of its own, so that a row's result does not depend on the rest."""


class Kernels(Protocol):
    """One backend. All states are updated in place; nothing is kept between calls."""

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None, tiles: Tiles | None) -> Tensor:
        """x [T, in], weight [out, in], bias [out] -> [T, out]; `tiles` None is one GEMM over all rows."""
        ...

    def softplus(self, x: Tensor) -> Tensor:
        """log(1 + exp(x)), elementwise; the result of an element does not depend on the others."""
        ...

    def sigmoid(self, x: Tensor) -> Tensor:
        """1 / (1 + exp(-x)), elementwise; the result of an element does not depend on the others."""
        ...

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Root mean square norm (arXiv 1910.07467) of each row, computed in float32 or wider, in x's dtype."""
        ...

    def gated_rms_norm(self, x: Tensor, gate: Tensor, weight: Tensor, groups: int, eps: float) -> Tensor:
        """Norm of x * silu(gate) over each of `groups` equal parts of a row (Mamba2, arXiv 2405.21060), in gate's
        dtype. x is float32 or wider."""
        ...

    def conv_prefill(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        state: Tensor,
        front: int,
        marks: Sequence[int],
        silu: bool = True,
    ) -> list[Tensor]:
        """Causal depthwise convolution of one sequence, then silu if wanted, in place on x [T, C] (its first row is a
        token).

        weight [W, C], taps oldest first; state [W-1, C]: the raw inputs before x, which is not updated. `front`: rows
        missing in the first tile. Returns the states after the first `marks[i]` tokens, each [W-1, C]. `marks` does not
        descend, 0 < mark <= T.
        """
        ...

    def conv_update(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, states: Tensor, slots: Tensor, silu: bool = True
    ) -> None:
        """One token of each of several sequences: x [T, C] in place, states [S, W-1, C] at slots [T] in place."""
        ...

    def ssd_prefill(
        self,
        x: Tensor,
        dt: Tensor,
        bc: tuple[Tensor, Tensor],
        ad: tuple[Tensor, Tensor],
        state: Tensor,
        marks: Sequence[int],
    ) -> list[Tensor]:
        """Mamba2's state space scan (arXiv 2405.21060) of one sequence: x [T, H, P] becomes y in place.

            state = exp(dt a) state + dt x b^T,    y = state c + d x        per head

        T is a multiple of TILE; dt [T, H] is 0 at padding; bc: b and c, [T, G, N]; ad: a (negative) and d, [H];
        state [H, P, N] in place. Returns the states after the first `marks[i]` rows, each [H, P, N]. `marks` does not
        descend, 0 < mark <= T.
        """
        ...

    def ssd_update(
        self,
        x: Tensor,
        dt: Tensor,
        bc: tuple[Tensor, Tensor],
        ad: tuple[Tensor, Tensor],
        states: Tensor,
        slots: Sequence[int],
    ) -> None:
        """One token of each of several sequences, as `ssd_prefill`: x [T, H, P] in place, states [S, H, P, N] at
        slots in place."""
        ...

    def gdn_prefill(
        self, v: Tensor, qk: tuple[Tensor, Tensor], gates: tuple[Tensor, Tensor], state: Tensor, marks: Sequence[int]
    ) -> list[Tensor]:
        """The gated delta rule (arXiv 2412.06464) of one sequence: v [T, Hv, V] becomes y in place.

            state = exp(g) state,    state = state + k (beta (v - k state))^T,    y = K^-0.5 q state        per head

        T is a multiple of TILE; qk: q and k, [T, Hk, K], each divided by its length here (eps 1e-6 under the root);
        a q/k head serves Hv / Hk consecutive value heads. gates: g (log of the decay, at most 0) and beta, [T, Hv],
        both 0 at padding, where v, q and k are finite. state [Hv, K, V] in place. Returns the states after the first
        `marks[i]` rows, each [Hv, K, V]. `marks` does not descend, 0 < mark <= T.
        """
        ...

    def gdn_update(
        self, v: Tensor, qk: tuple[Tensor, Tensor], gates: tuple[Tensor, Tensor], states: Tensor, slots: Sequence[int]
    ) -> None:
        """One token of each of several sequences, as `gdn_prefill`: v [T, Hv, V] in place, states [S, Hv, K, V] at
        slots in place."""
        ...

    def write_kv(self, keys: Tensor, values: Tensor, kv: tuple[Tensor, Tensor], pages: Tensor, offsets: Tensor) -> None:
        """k and v [T, Hk, D] into keys and values [page, Hk, token, D] at (pages[t], offsets[t])."""
        ...

    def attend_prefill(self, q: Tensor, keys: Tensor, values: Tensor, pages: Tensor, first: int, end: int) -> Tensor:
        """Causal attention of one sequence's tiles over its pages, scaled by D^-0.5: q [T, Hq, D] -> [T, Hq, D].

        Row i of q stands at position first + i, a multiple of TILE for i = 0; positions >= end are padding. `pages`
        lists the pages that hold [0, end), whatever lies behind.
        """
        ...

    def attend_decode(
        self, q: Tensor, keys: Tensor, values: Tensor, pages: Sequence[Tensor], lengths: Sequence[int]
    ) -> Tensor:
        """One query for each of several sequences, which have `lengths[i]` tokens in `pages[i]`: q [T, Hq, D]."""
        ...

    def experts(
        self,
        x: Tensor,
        choice: Tensor,
        share: Tensor,
        weights: tuple[Sequence[Tensor], Sequence[Tensor]],
        tile: int | None,
    ) -> Tensor:
        """Squared-ReLU experts: sum over k of share[t, k] * down[e] relu(up[e] x[t])^2 with e = choice[t, k].

        x [T, in], choice and share [T, K], a token's choices all different; weights: up [E][inner, in] and down
        [E][in, inner]. Returns float32 or wider [T, in]. `tile`: each expert runs in GEMMs of exactly that many rows.
        A token's terms are added in ascending order of e.
        """
        ...

    def gated_experts(
        self,
        x: Tensor,
        choice: Tensor,
        share: Tensor,
        weights: tuple[Sequence[Tensor], Sequence[Tensor]],
        tile: int | None,
    ) -> Tensor:
        """SwiGLU experts (arXiv 2002.05202), else as `experts`: down[e] (silu(gate) * up) with gate and up the halves
        of gate_up[e] x[t]; weights: gate_up [E][2 * inner, in], gate first, and down [E][in, inner]."""
        ...
