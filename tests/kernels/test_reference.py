"""The slow truth against what torch and plain algebra say, in float64."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from cairn.kernels import reference
from kernels.comparison import FEW, close
from kernels.kernel_calls import Call, calls
from kernels.random_batches import RandomBatch, SequenceRows

F64 = torch.float64


@st.composite
def whole_sequences(draw: st.DrawFn, name: str, max_tokens: int = 130) -> Call:
    """Two fresh sequences, the first one a single decode row."""
    length = draw(st.integers(1, max_tokens))
    sequences = (SequenceRows(3, 0, length, snapshots=(length,)),)
    batch = RandomBatch((SequenceRows(1, 0, 1),), sequences, draw(st.integers(0, 2**31)))
    return draw(calls(name, F64, batch))


def one(found: object) -> Tensor:
    (tensor,) = found if isinstance(found, tuple) else (found,)
    return tensor


@FEW
@given(call=calls("linear", F64))
def test_linear(call: Call) -> None:
    o = call.operands
    close(one(call.run(reference)), F.linear(o["x"], o["weight"], o["bias"]))


@FEW
@given(call=calls("lm_head", F64))
def test_lm_head(call: Call) -> None:
    close(one(call.run(reference)), F.linear(call.operands["hidden"], call.operands["weight"]))


@FEW
@given(call=calls("embed", F64))
def test_embed(call: Call) -> None:
    assert torch.equal(one(call.run(reference)), F.embedding(call.operands["tokens"], call.operands["weight"]))


@FEW
@given(call=st.one_of(calls("experts", F64), calls("gated_experts", F64)))
def test_experts(call: Call) -> None:
    """Every expert for every token, most of them with a share of nothing."""
    o = call.operands
    first = o.get("up", o.get("gate_up"))
    assert first is not None
    inner = torch.einsum("ti,eoi->teo", o["x"], first)
    if call.name == "experts":
        inner = F.relu(inner).square()
    else:
        inner = F.silu(inner[..., : inner.shape[-1] // 2]) * inner[..., inner.shape[-1] // 2 :]
    shares = torch.zeros(len(o["x"]), len(first), dtype=F64).scatter_(1, o["topk_ids"], o["topk_weights"])
    close(one(call.run(reference)), torch.einsum("teo,eio,te->ti", inner, o["down"], shares))


@FEW
@given(call=calls("rms_norm", F64))
def test_rms_norm(call: Call) -> None:
    o = call.operands
    close(one(call.run(reference)), F.rms_norm(o["x"], o["weight"].shape, o["weight"], o["eps"]))


@FEW
@given(call=calls("add_rms_norm", F64))
def test_add_rms_norm(call: Call) -> None:
    o = call.operands
    total = o["residual"] + o["x"]
    close(one(call.run(reference)), F.rms_norm(total, o["weight"].shape, o["weight"], o["eps"]))
    assert torch.equal(o["residual"], total)


@FEW
@given(call=calls("gated_rms_norm", F64))
def test_gated_rms_norm(call: Call) -> None:
    o = call.operands
    parts = (o["x"] * F.silu(o["gate"])).unflatten(-1, (o["groups"], -1))
    normed = F.rms_norm(parts, parts.shape[-1:], None, o["eps"]).flatten(1)
    close(one(call.run(reference)), normed * o["weight"])


@FEW
@given(call=calls("rms_norm_then_gate", F64))
def test_rms_norm_then_gate(call: Call) -> None:
    o = call.operands
    normed = F.rms_norm(o["x"], o["weight"].shape, o["weight"], o["eps"])
    close(one(call.run(reference)), normed.flatten(1) * F.silu(o["gate"]))


@FEW
@given(
    call=st.one_of(
        *(calls(name, F64) for name in ("silu_mul", "gelu_mul", "sigmoid_mul", "squared_relu", "softcap")),
    )
)
def test_elementwise(call: Call) -> None:
    o = call.operands
    if call.name == "silu_mul":
        wanted = F.silu(o["gate"]) * o["x"]
    elif call.name == "gelu_mul":
        wanted = F.gelu(o["gate"], approximate="tanh") * o["x"]
    elif call.name == "softcap":
        wanted = o["cap"] * torch.tanh(o["x"] / o["cap"])
    elif call.name == "sigmoid_mul":
        wanted = o["x"] * torch.sigmoid(o["gate"])
    else:
        wanted = F.relu(o["x"]).square()
    close(one(call.run(reference)), wanted)


@FEW
@given(call=calls("rope", F64))
def test_rope_is_a_product_of_complex_numbers(call: Call) -> None:
    o = call.operands
    pairs = o["cos"].shape[1]
    turned = torch.complex(o["x"][..., :pairs], o["x"][..., pairs : 2 * pairs])
    turned = turned * torch.complex(o["cos"], o["sin"])[:, None]
    close(one(call.run(reference)), torch.cat([turned.real, turned.imag, o["x"][..., 2 * pairs :]], dim=-1))


@FEW
@given(call=calls("softmax_router", F64))
def test_softmax_router(call: Call) -> None:
    o = call.operands
    share, choice = o["logits"].softmax(-1).topk(o["top_k"])
    found_choice, found_share = call.run(reference)
    assert torch.equal(found_choice, choice)
    close(found_share, share / share.sum(-1, keepdim=True) if o["normalize"] else share)


def test_sigmoid_router_by_hand() -> None:
    """Group 0 has the best expert, group 1 the two best together, group 2 the best one before the correction."""
    rates = torch.tensor([[0.9, 0.1, 0.7, 0.6, 0.95, 0.2]], dtype=F64)
    correction = torch.tensor([0.3, 0.0, 0.2, 0.3, -0.9, 0.0], dtype=F64)
    choice, share = reference.sigmoid_router(rates.logit(), correction, 2, 3, 1, True, 2.0)
    # By corrected rate: 1.2 and 0.1, 0.9 and 0.9, 0.05 and 0.2.
    assert sorted(choice[0].tolist()) == [2, 3]
    by_expert = dict(zip(choice[0].tolist(), share[0].tolist(), strict=True))
    assert by_expert == pytest.approx({2: 2 * 0.7 / 1.3, 3: 2 * 0.6 / 1.3})
    _, share = reference.sigmoid_router(rates.logit(), correction, 2, 3, 1, True, 2.0, epsilon=0.5)
    assert sorted(share[0].tolist()) == pytest.approx([2 * 0.6 / 1.8, 2 * 0.7 / 1.8])
    choice, share = reference.sigmoid_router(rates.logit(), correction, 2, 3, 2, False, 1.0)
    assert choice.tolist()[0][0] == 0
    assert choice.tolist()[0][1] in (2, 3)
    choice, share = reference.sigmoid_router(rates.logit(), torch.zeros(6, dtype=F64), 1, 1, 1, False, 1.0)
    assert (choice.tolist(), share.tolist()) == ([[4]], [[pytest.approx(0.95)]])


@FEW
@given(call=whole_sequences("conv"))
def test_conv_is_torchs_over_the_whole_sequence(call: Call) -> None:
    o = call.operands
    width, channels = o["weight"].shape
    found, (snapshot,) = call.run(reference)
    for rows in (call.batch.rows_of(0), call.batch.rows_of(1)):
        inputs = F.pad(o["x"][rows].t(), (width - 1, 0))
        wanted = F.conv1d(inputs, o["weight"].t()[:, None], o["bias"], groups=channels).t()
        close(found[rows], F.silu(wanted) if o["silu"] else wanted)
        last = inputs.t()[-(width - 1) :]
    assert torch.equal(snapshot, last)
    assert torch.equal(o["states"][3], last)


@FEW
@given(call=whole_sequences("ssd"))
def test_ssd_is_attention_under_its_decay(call: Call) -> None:
    """y_t = sum over s <= t of (c_t . b_s) exp(a (step_{s+1} + ... + step_t)) step_s x_s, and d x_t: arXiv 2405.21060,
    section 3."""
    o = call.operands
    found, (snapshot,) = call.run(reference)
    rows = call.batch.rows_of(1)
    x, dt, b, c = (o[name][rows] for name in ("x", "dt", "b", "c"))
    b, c = (part.repeat_interleave(x.shape[1] // b.shape[1], dim=1) for part in (b, c))
    step = F.softplus(dt + o["dt_bias"]).clamp(*o["dt_limit"])
    cum = (step * o["a"]).cumsum(0)
    future = torch.ones(len(x), len(x), dtype=torch.bool).triu(1)[..., None]
    decay = (cum[:, None] - cum[None]).masked_fill(future, -torch.inf).exp()
    mixed = torch.einsum("tsh,thk,shk,sh,shp->thp", decay, c, b, step, x)
    close(found[rows], mixed + o["d"][:, None] * x)
    last = (cum[-1] - cum).exp()
    close(snapshot, torch.einsum("th,th,thp,ths->hps", last, step, x, b))
    close(o["states"][3], snapshot)


@FEW
@given(call=whole_sequences("gdn", max_tokens=70))
def test_gdn_is_a_product_of_matrices(call: Call) -> None:
    """state_t = exp(g_t) (1 - w_t k_t k_t^T) state_{t-1} + w_t k_t v_t^T: arXiv 2412.06464, equation 10."""
    o = call.operands
    found, (snapshot,) = call.run(reference)
    rows = call.batch.rows_of(1)
    q, k, v, beta, dt = (o[name][rows] for name in ("q", "k", "v", "beta", "dt"))
    q, k = (part / (part.square().sum(-1, keepdim=True) + 1e-6).sqrt() for part in (q, k))
    q, k = (part.repeat_interleave(v.shape[1] // k.shape[1], dim=1) for part in (q, k))
    g, w = o["a"] * F.softplus(dt + o["dt_bias"]), o["beta_scale"] * beta.sigmoid()
    size = k.shape[-1]
    erase = torch.eye(size, dtype=F64) - torch.einsum("th,thk,thl->thkl", w, k, k)
    moved = g.exp()[..., None, None] * erase
    added = torch.einsum("th,thk,thp->thkp", w, k, v)
    # As a sum over all that was written: each is moved on by the matrices of the tokens behind it.
    state = torch.zeros_like(added[0])
    behind = torch.eye(size, dtype=F64).expand(len(state), -1, -1)
    for token in reversed(range(len(v))):
        state = state + behind @ added[token]
        behind = behind @ moved[token]
    close(snapshot, state)
    close(o["states"][3], state)
    close(found[rows][-1], torch.einsum("hk,hkp->hp", q[-1], state) * size**-0.5)


@FEW
@given(call=calls("attention", F64))
def test_attention_is_torchs_softmax_of_the_keys_within_reach(call: Call) -> None:
    o, rule, sinks = call.operands, call.operands["rule"], call.operands.get("sinks")
    (found,) = call.run(reference)
    page_size, kv_heads, dim = o["keys"].shape[2], o["keys"].shape[1], o["keys"].shape[3]
    for index, sequence in enumerate(call.batch.sequences):
        first_page = rule.first_key(sequence.start) // page_size
        pages = call.block_tables[1][sequence.slot, first_page : -(-sequence.end // page_size)].long()
        positions = torch.arange(first_page * page_size, sequence.end)
        k, v = (
            o[name][pages].transpose(1, 2).flatten(0, 1)[: len(positions)].transpose(0, 1)
            for name in ("keys", "values")
        )
        q = o["q"][call.batch.rows_of(index)].transpose(0, 1)
        per_key = len(q) // kv_heads
        scores = q @ k.repeat_interleave(per_key, 0).mT * (dim**-0.5 if rule.scale is None else rule.scale)
        if rule.softcap is not None:
            scores = torch.tanh(scores / rule.softcap) * rule.softcap
        rows = torch.arange(sequence.start, sequence.end)[:, None]
        since = torch.tensor([rule.first_key(row) for row in range(sequence.start, sequence.end)])[:, None]
        seen = (positions <= rows) & (positions >= since)
        scores = scores.masked_fill(~seen, -torch.inf)
        if sinks is not None:
            scores = torch.cat([scores, sinks.double()[:, None, None].expand(-1, len(rows), 1)], dim=-1)
        weights = scores.softmax(-1)[..., : len(positions)]
        # What lies in pages before the reach may read as NaN.
        wanted = weights @ v.masked_fill(~seen.any(0)[None, :, None], 0).repeat_interleave(per_key, 0)
        close(found[call.batch.rows_of(index)], wanted.transpose(0, 1))


@FEW
@given(call=calls("write_kv", F64))
def test_write_kv_writes_each_position_from_its_own_row_and_nothing_else(call: Call) -> None:
    o = call.operands
    before = {name: o[name].clone() for name in ("keys", "values")}
    call.run(reference)
    page_size = o["keys"].shape[2]
    written = torch.zeros(len(o["keys"]) * page_size, dtype=torch.bool)
    for index, sequence in enumerate(call.batch.sequences):
        positions = torch.arange(max(sequence.start, sequence.kv_write_from), sequence.end)
        places = call.block_tables[1][sequence.slot].long()[positions // page_size] * page_size + positions % page_size
        written[places] = True
        rows = call.batch.rows_of(index).start + positions - sequence.start
        for name, given_rows in (("keys", o["k"]), ("values", o["v"])):
            assert torch.equal(o[name].transpose(1, 2).flatten(0, 1)[places], given_rows[rows])
    for name in ("keys", "values"):
        now, then = (each.transpose(1, 2).flatten(0, 1)[~written] for each in (o[name], before[name]))
        torch.testing.assert_close(now, then, rtol=0, atol=0, equal_nan=True)
