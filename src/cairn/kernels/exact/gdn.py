"""The gated delta rule: 64-token chunks for prefill, token by token in place for decode.

The chunked form is that of arXiv 2406.06484 with the decay of arXiv 2412.06464: what the tokens of a chunk write is
the solution of one triangular system, everything else are products. Each chunk is computed before the next one is
touched, so its temporaries stay in the cache.

All products have one shape, and operands that lie in memory of their own: BLAS may round otherwise where they lie
otherwise. Rows of a chunk that are no tokens have no decay and write nothing.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from cairn.kernels.batch import CHUNK, Batch
from cairn.kernels.exact.elementwise import sigmoid, softplus, widen
from cairn.kernels.exact.metadata import Decode, Prefill, aligned_state, decodes_by_state, metadata_of, round_state

NORM_EPS = 1e-6


def gdn(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, dt: Tensor, a: Tensor, dt_bias: Tensor, states: Tensor, batch: Batch,
    beta_scale: float = 1.0,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """See `Kernels.gdn`."""
    metadata = metadata_of(batch)
    log_decay = softplus(widen(dt) + dt_bias).mul_(a)
    written = sigmoid(widen(beta)).mul_(beta_scale)
    y = torch.empty(v.shape, dtype=v.dtype)
    snapshots = states.new_empty(metadata.num_snapshots, *states.shape[1:])
    if decodes := decodes_by_state(batch):
        _decode(q, k, v, written, log_decay, states, decodes, y, snapshots)
    for prefill in metadata.prefills:
        _prefill(q, k, v, written, log_decay, states, prefill, y, snapshots)
    return y, snapshots


def _unit(x: Tensor, scale: float, per_key: int) -> Tensor:
    """x [rows, Hk, S] -> scale * x / |x| for every value head, [H, rows, S], a tensor of its own."""
    norm = x.square().sum(-1, keepdim=True).add_(NORM_EPS).rsqrt_()
    return (x * norm).mul_(scale).transpose(0, 1).repeat_interleave(per_key, dim=0)


def _prefill(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, log_decay: Tensor, states: Tensor, prefill: Prefill, y: Tensor,
    snapshots: Tensor,
) -> None:  # fmt: skip
    q, k, v, beta, log_decay = (prefill.lay_out(part) for part in (q, k, v, beta, log_decay))
    state = widen(prefill.state_before(states))
    for index, points in enumerate(prefill.snapshots_by_chunk()):
        chunk = slice(index * CHUNK, (index + 1) * CHUNK)
        _run_chunk(q[chunk], k[chunk], v[chunk], beta[chunk], log_decay[chunk], state, points, snapshots)
        round_state(state, states.dtype)
    y[prefill.rows] = v[prefill.on_grid]
    states[prefill.slot] = state


def _run_chunk(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, log_decay: Tensor, state: Tensor,
    points: Sequence[tuple[int, int]], snapshots: Tensor,
) -> None:  # fmt: skip
    """One chunk: v becomes y, the state moves on. `points`: pairs (snapshot, rows of the chunk before it)."""
    length, heads, _ = v.shape
    per_key = heads // q.shape[1]
    q, k = _unit(q, q.shape[-1] ** -0.5, per_key), _unit(k, 1.0, per_key)
    # [H, L], the log of the decay since the chunk's start. Behind a strong decay its differences are small beside it,
    # and in float32 they would lose what they are needed for.
    cum = log_decay.t().double().cumsum(-1)
    beta, grown = beta.t().contiguous()[..., None], cum.exp().to(v.dtype)[..., None]
    future = torch.ones(length, length, dtype=torch.bool).triu_(1)
    decay = (cum[:, :, None] - cum[:, None, :]).to(v.dtype).masked_fill_(future, -torch.inf).exp_()
    # Row i of the system: what token i writes, less what it would have read of the tokens before it in the chunk.
    system = torch.bmm(k, k.transpose(1, 2)).mul_(decay).mul_(beta)
    change = v.transpose(0, 1) - torch.bmm(k, state).mul_(grown)
    written = torch.linalg.solve_triangular(system, change.mul_(beta), upper=False, unitriangular=True)
    # The solver's result lies column by column; products take operands of one form.
    written = written.contiguous()
    y = torch.bmm(q, state).mul_(grown)
    y.add_(torch.bmm(torch.bmm(q, k.transpose(1, 2)).mul_(decay), written))
    for number, rows in points:
        snapshots[number] = _advance(state.clone(), cum, k, written, rows)
    _advance(state, cum, k, written, length)
    v.copy_(y.transpose(0, 1))


def _advance(state: Tensor, cum: Tensor, k: Tensor, written: Tensor, rows: int) -> Tensor:
    """state [H, S, P], as it was at the chunk's start, becomes the state after the chunk's first `rows` rows.

    The rows after them get the weight 0 in products of the same shape, so the bits are those of a pass that ended
    there, whose rows from there on are no tokens.
    """
    last = cum[:, rows - 1 : rows]
    weight = (last - cum).to(k.dtype).exp_()
    if rows < cum.shape[1]:
        weight[:, rows:] = 0.0
    state.mul_(last.exp().to(k.dtype)[..., None])
    state.baddbmm_((k * weight[..., None]).transpose(1, 2), written)
    return state


def _decode(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, log_decay: Tensor, states: Tensor, decodes: Sequence[Decode],
    y: Tensor, snapshots: Tensor,
) -> None:  # fmt: skip
    """Slot by slot on the live array: gathering the states would cost more than the step. The vectors are rows, since
    a batched product with one column is far slower than one with one row."""
    count = decodes[-1].rows.stop
    per_key = v.shape[1] // q.shape[1]
    # [rows, H, 1, S]
    q = _unit(q[:count], q.shape[-1] ** -0.5, per_key).transpose(0, 1)[:, :, None]
    k = _unit(k[:count], 1.0, per_key).transpose(0, 1)[:, :, None]
    decay, beta = log_decay[:count].exp()[..., None, None], beta[:count, :, None]
    for decode in decodes:
        with aligned_state(states, decode) as state:
            for row in decode.rows:
                state.mul_(decay[row])
                # Copies, because where a row begins depends on its place in the batch, and BLAS may round accordingly.
                key, query = (part[row].clone(memory_format=torch.contiguous_format) for part in (k, q))
                written = (v[row] - torch.bmm(key, state)[:, 0]).mul_(beta[row])
                state.addcmul_(key.transpose(1, 2), written[:, None])
                y[row] = torch.bmm(query, state)[:, 0]
                round_state(state, states.dtype)
                decode.store_snapshots(row, state, snapshots)
