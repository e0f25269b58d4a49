"""Calls at given shapes, on batches of given sequences: for tests whose cases are written down, not drawn."""

from dataclasses import replace
from typing import Any

import torch

from cairn.kernels.attention_rule import FULL, AttentionRule
from cairn.kernels.fp8 import BLOCK, Fp8Weight
from cairn.kernels.quantized import QuantizedWeight
from cairn.kernels.weight_rows import stack_experts
from kernels.kernel_calls import Call
from kernels.random_batches import RandomBatch, SequenceRows
from kernels.test_quantized import FORMS, drawn_weight

F32 = torch.float32

Heads = tuple[int, int, int]
"""Query heads, key heads, head dim."""


def fresh_sequence(num_tokens: int, snapshots: tuple[int, ...] = ()) -> RandomBatch:
    return RandomBatch((), (SequenceRows(2, 0, num_tokens, snapshots=snapshots),), seed=9)


MIXED = RandomBatch(
    (SequenceRows(3, 77, 1, snapshots=(1,)), SequenceRows(7, 0, 1), SequenceRows(1, 64, 1)),
    (
        SequenceRows(0, 0, 130, snapshots=(64, 100, 128, 130)),
        SequenceRows(5, 61, 3, snapshots=(2, 3)),
        SequenceRows(4, 100, 95, snapshots=(28, 92)),
        SequenceRows(6, 1, 1, snapshots=(1,)),
    ),
    seed=4,
)


def conv_call(batch: RandomBatch, shape: tuple[int, int], model: torch.dtype = F32) -> Call:
    """`shape`: width and channels."""
    width, channels = shape
    operands = {
        "x": batch.numbers(batch.num_tokens, channels).to(model),
        "weight": batch.numbers(width, channels, salt=1).float(),
        "bias": batch.numbers(channels, salt=2).float(),
        "states": batch.states(width - 1, channels, salt=3).to(model),
    }
    return Call("conv", batch, operands)


def ssd_call(batch: RandomBatch, shape: tuple[int, int, int, int], model: torch.dtype = F32) -> Call:
    """`shape`: groups, heads of a group, head dim, state size."""
    groups, per_group, dim, size = shape
    heads, rows = groups * per_group, batch.num_tokens
    operands: dict[str, Any] = {
        "x": batch.numbers(rows, heads, dim).float(),
        "dt": batch.numbers(rows, heads, salt=1).to(model),
        "b": batch.numbers(rows, groups, size, salt=2).float(),
        "c": batch.numbers(rows, groups, size, salt=3).float(),
        "a": batch.numbers(heads, salt=4).exp().neg().float(),
        "d": batch.numbers(heads, salt=5).float(),
        "dt_bias": batch.numbers(heads, salt=6).sub(2).float(),
        "dt_limit": (0.0, float("inf")),
        "states": batch.states(heads, dim, size, salt=7).float(),
    }
    return Call("ssd", batch, operands)


def gdn_call(batch: RandomBatch, shape: tuple[int, int, int, int], model: torch.dtype = F32) -> Call:
    """`shape`: key heads, value heads of each, head dim, state size."""
    key_heads, per_key, dim, size = shape
    heads, rows = key_heads * per_key, batch.num_tokens
    operands = {
        "q": batch.numbers(rows, key_heads, size).float(),
        "k": batch.numbers(rows, key_heads, size, salt=1).float(),
        "v": batch.numbers(rows, heads, dim, salt=2).float(),
        "beta": batch.numbers(rows, heads, salt=3).to(model),
        "dt": batch.numbers(rows, heads, salt=4).to(model),
        "a": batch.numbers(heads, salt=5).exp().neg().float(),
        "dt_bias": batch.numbers(heads, salt=6).sub(2).float(),
        "states": batch.states(heads, size, dim, salt=7).float(),
    }
    return Call("gdn", batch, operands)


def small_call(name: str, batch: RandomBatch) -> Call:
    if name == "conv":
        return conv_call(batch, (4, 40))
    return ssd_call(batch, (2, 2, 24, 16)) if name == "ssd" else gdn_call(batch, (2, 2, 24, 16))


def paged_call(
    name: str,
    batch: RandomBatch,
    heads: Heads,
    page_size: int,
    dtype: torch.dtype,
    garbage: int | None = None,
    rule: AttentionRule = FULL,
    sinks: bool = False,
) -> Call:
    """Pages before the reach are let go of. `sinks`: a head's is about as large as a score."""
    num_heads, kv_heads, dim = heads
    pages = batch.pages(page_size, garbage)
    keys, values = (pages.filled(kv_heads, dim, salt=salt).to(dtype) for salt in (3, 4))
    rows: dict[str, Any] = {}
    if name == "attention":
        rows = {"q": batch.numbers(batch.num_tokens, num_heads, dim).mul(2).to(dtype)}
        if rule != FULL:
            rows["rule"] = rule
        if sinks:
            rows["sinks"] = batch.numbers(num_heads, salt=5).mul(4).float()
    else:
        rows = {part: batch.numbers(batch.num_tokens, kv_heads, dim, salt=len(part)).to(dtype) for part in ("k", "v")}
    return Call(name, batch, {**rows, "keys": keys, "values": values, "group": 0}, (pages.table,)).without_reach()


def fp8_weight(batch: RandomBatch, *shape: int, dtype: torch.dtype, blocked: bool, salt: int) -> Fp8Weight:
    """A weight [..., out, in] whose products are about as large as what they are made of. Scales, of rows or of their
    blocks, are far apart."""
    numbers = batch.numbers(*shape, salt=salt).to(torch.float8_e4m3fn).view(torch.uint8)
    num_scales = -(-shape[-1] // BLOCK) if blocked else 1
    scales = batch.numbers(*shape[:-1], num_scales, salt=salt + 100).exp().mul(shape[-1] ** -0.5)
    return Fp8Weight(numbers, scales.float(), dtype)


def fp8_linear_call(rows: int, shape: tuple[int, int], dtype: torch.dtype, *, blocked: bool, bias: bool) -> Call:
    """`shape`: out and in."""
    batch = RandomBatch((), (SequenceRows(2, 0, rows),), seed=rows)
    operands = {
        "x": batch.numbers(rows, shape[1]).to(dtype),
        "weight": fp8_weight(batch, *shape, dtype=dtype, blocked=blocked, salt=1),
        "bias": batch.numbers(shape[0], salt=2).to(dtype) if bias else None,
    }
    return Call("linear", batch, operands)


def fp8_experts_call(
    rows: int, sizes: tuple[int, int], dtype: torch.dtype, *, blocked: bool, gated: bool, top_k: int = 2
) -> Call:
    """Three experts. `sizes`: width and inner width."""
    width, inner = sizes
    batch = RandomBatch((), (SequenceRows(2, 0, rows),), seed=rows)

    def weight(*shape: int, salt: int) -> Fp8Weight:
        return fp8_weight(batch, 3, *shape, dtype=dtype, blocked=blocked, salt=salt)

    operands = {
        "x": batch.numbers(rows, width).to(dtype),
        "topk_ids": batch.numbers(rows, 3, salt=1).topk(top_k, dim=-1).indices,
        "topk_weights": batch.numbers(rows, top_k, salt=2).float(),
        "gate_up" if gated else "up": weight(inner * (1 + gated), width, salt=3),
        "down": weight(width, inner, salt=4),
    }
    return Call("gated_experts" if gated else "experts", batch, operands)


def code_weight(form: str, outputs: int, inputs: int, dtype: torch.dtype, seed: int = 0) -> QuantizedWeight:
    """In one of `FORMS`, with products about as large as what they are made of: scales are a few large ones."""
    weight = drawn_weight(outputs, inputs, dtype=dtype, seed=seed, **FORMS[form])
    size = weight.dequantize(F32).square().mean().sqrt().item() * inputs**0.5
    if weight.factors is not None:
        factors = weight.factors * size if weight.divides else weight.factors / size
        least = None if weight.minimum_factors is None else weight.minimum_factors / size
        return replace(weight, factors=factors, minimum_factors=least)
    if weight.scales.dtype == torch.float8_e8m0fnu:
        return weight
    return replace(weight, scales=(weight.scales / size).to(weight.scales.dtype))


def code_linear_call(form: str, rows: int, shape: tuple[int, int], dtype: torch.dtype, *, bias: bool) -> Call:
    """`shape`: out and in."""
    batch = RandomBatch((), (SequenceRows(2, 0, rows),), seed=rows)
    operands = {
        "x": batch.numbers(rows, shape[1]).to(dtype),
        "weight": code_weight(form, *shape, dtype, seed=rows),
        "bias": batch.numbers(shape[0], salt=2).to(dtype) if bias else None,
    }
    return Call("linear", batch, operands)


def code_experts_call(
    form: str, rows: int, sizes: tuple[int, int], dtype: torch.dtype, *, gated: bool, top_k: int = 2
) -> Call:
    """Three experts. `sizes`: width and inner width."""
    width, inner = sizes
    batch = RandomBatch((), (SequenceRows(2, 0, rows),), seed=rows)
    shapes = (inner * (1 + gated), width), (width, inner)
    up, down = (
        stack_experts([code_weight(form, *shape, dtype, seed=10 * salt + each) for each in range(3)])
        for salt, shape in enumerate(shapes)
    )
    operands = {
        "x": batch.numbers(rows, width).to(dtype),
        "topk_ids": batch.numbers(rows, 3, salt=1).topk(top_k, dim=-1).indices,
        "topk_weights": batch.numbers(rows, top_k, salt=2).float(),
        "gate_up" if gated else "up": up,
        "down": down,
    }
    return Call("gated_experts" if gated else "experts", batch, operands)
