"""A random call of every function of the contract, and how a backend makes it.

Operands are float64 numbers rounded to the dtype that they have in a model of some dtype, so that the truth can be
computed from the same numbers in float64.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, Literal

import torch
from hypothesis import strategies as st
from torch import Tensor

from cairn.kernels.attention_rule import FULL, AttentionRule
from cairn.kernels.contract import Kernels
from cairn.kernels.fp8 import Fp8Weight
from cairn.kernels.quantized import QuantizedWeight
from cairn.kernels.weight_rows import WeightRows
from kernels.backends import DEVICES
from kernels.random_batches import (
    HAVE_VERIFIES,
    OUT_OF_RANGE,
    PAGE_SIZES,
    RandomBatch,
    SequenceRows,
    batches,
    folds,
    garbage,
)

CPU = torch.device("cpu")

Kind = Literal["model", "once", "product", "wide", "copied", "chosen"]
"""What comes out: a number of the model's dtype; one that was computed in float32 and rounded to it once; a float32
number that may have been one of the model's dtype; one that is float32 throughout; one that is moved, not computed; an
expert's number."""


@dataclass(frozen=True)
class Operation:
    """One function of the contract. `rows`: operands with one entry a row of the batch. `packed`: weights. `changed`:
    operands that are written, and with what. `group`: the operand `group` has its block table in the batch."""

    rows: tuple[str, ...]
    results: tuple[Kind, ...]
    packed: tuple[str, ...] = ()
    changed: Mapping[str, Kind] = field(default_factory=dict)
    takes_batch: bool = False


OPERATIONS: Mapping[str, Operation] = MappingProxyType(
    {
        "embed": Operation(("tokens",), ("copied",)),
        "linear": Operation(("x",), ("model",), ("weight",), takes_batch=True),
        "lm_head": Operation(("hidden",), ("product",), ("weight",)),
        "experts": Operation(("x", "topk_ids", "topk_weights"), ("model",), ("up", "down"), takes_batch=True),
        "gated_experts": Operation(
            ("x", "topk_ids", "topk_weights"), ("model",), ("gate_up", "down"), takes_batch=True
        ),
        "gelu_experts": Operation(("x", "topk_ids", "topk_weights"), ("model",), ("gate_up", "down"), takes_batch=True),
        "clamped_experts": Operation(
            ("x", "topk_ids", "topk_weights"), ("model",), ("gate_up", "down"), takes_batch=True
        ),
        "rms_norm": Operation(("x",), ("once",)),
        "add_rms_norm": Operation(("residual", "x"), ("model",), changed={"residual": "model"}),
        "gated_rms_norm": Operation(("x", "gate"), ("once",)),
        "rms_norm_then_gate": Operation(("x", "gate"), ("once",)),
        "silu_mul": Operation(("gate", "x"), ("once",)),
        "gelu_mul": Operation(("gate", "x"), ("once",)),
        "sigmoid_mul": Operation(("x", "gate"), ("once",)),
        "softcap": Operation(("x",), ("wide",)),
        "squared_relu": Operation(("x",), ("once",)),
        "rope": Operation(("x", "cos", "sin"), ("once",)),
        "softmax_router": Operation(("logits",), ("chosen", "wide")),
        "sigmoid_router": Operation(("logits",), ("chosen", "wide")),
        "conv": Operation(("x",), ("wide", "copied"), changed={"states": "copied"}, takes_batch=True),
        "ssd": Operation(("x", "dt", "b", "c"), ("wide", "wide"), changed={"states": "wide"}, takes_batch=True),
        "gdn": Operation(("q", "k", "v", "beta", "dt"), ("wide", "wide"), changed={"states": "wide"}, takes_batch=True),
        "write_kv": Operation(("k", "v"), (), changed={"keys": "copied", "values": "copied"}, takes_batch=True),
        "attention": Operation(("q",), ("model",), takes_batch=True),
    }
)

CONTIGUOUS = frozenset({"tokens", "topk_ids", "topk_weights", "residual", "cos", "sin", "logits"})
"""Operands by row that no layer hands over as a part of something wider."""


@dataclass(frozen=True, repr=False)
class Call:
    """A function with its operands. `block_tables`: of the batch's attention groups."""

    name: str
    batch: RandomBatch
    operands: Mapping[str, Any]
    block_tables: tuple[Tensor, ...] = ()

    def __repr__(self) -> str:
        """Without the numbers, which a seed of the batch has made."""
        shapes = {
            name: f"{str(value.dtype)[6:]} {list(value.shape)}" if isinstance(value, Tensor) else value
            for name, value in self.operands.items()
        }
        return f"Call({self.name!r}, {self.batch}, {shapes})"

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        printer.text(repr(self))

    @property
    def operation(self) -> Operation:
        return OPERATIONS[self.name]

    def converted(self, change: Callable[[str, Tensor], Tensor]) -> "Call":
        """With every tensor changed."""
        return replace(
            self,
            operands={
                name: change(name, value) if isinstance(value, Tensor) else value
                for name, value in self.operands.items()
            },
        )

    def in_float64(self) -> "Call":
        """The same numbers, in memory of their own."""
        wide = self.converted(lambda _, x: x.to(torch.float64, copy=True) if x.is_floating_point() else x.clone())
        kept = {name: value for name, value in self.operands.items() if isinstance(value, Fp8Weight)}
        wide_kept = {name: replace(value, dtype=torch.float64) for name, value in kept.items()}
        # What codes stand for has been rounded to the model's dtype.
        codes = {name: value for name, value in self.operands.items() if isinstance(value, QuantizedWeight)}
        plain = {name: value.dequantize().double() for name, value in codes.items()}
        return replace(wide, operands={**wide.operands, **wide_kept, **plain})

    def copied(self) -> "Call":
        """In memory of its own, laid out as the layers do it: operands by row and states are parts of wider ones."""

        def laid_out(name: str, value: Tensor) -> Tensor:
            if name == "states":
                return part_of_wider(value, dim=1)
            if name in ("keys", "values"):
                return part_of_wider(value, dim=2)
            if name in self.operation.rows and name not in CONTIGUOUS:
                # A head's norm sees every other head of the product that has queries and gates.
                return part_of_wider(value, dim=2 if self.name == "rms_norm" and value.dim() == 3 else 1)
            return value.clone()

        return self.converted(laid_out)

    def of_sequence(self, index: int) -> "Call":
        """The same with nothing but sequence `index` in the batch."""
        return self.of_rows(self.batch.rows_of(index), self.batch.alone(index))

    def of_rows(self, rows: slice, batch: RandomBatch) -> "Call":
        """The same with some of the rows, which are all that `batch` has."""
        part = self.converted(lambda name, value: value[rows] if name in self.operation.rows else value)
        return replace(part, batch=batch)

    def without_reach(self) -> "Call":
        """As it is once the pages before the reach of the sequences have been let go of: their entries in the block
        table are no pages at all, and NaN stands in them, in the call's own memory."""
        rule, group = self.operands.get("rule", FULL), self.operands["group"]
        table = self.block_tables[group].clone()
        for sequence in self.batch.sequences:
            count = rule.first_key(sequence.start) // self.operands["keys"].shape[2]
            pages = table[sequence.slot, :count].long()
            for name in ("keys", "values"):
                self.operands[name][pages[pages.abs() < OUT_OF_RANGE]] = torch.nan
            table[sequence.slot, :count] = OUT_OF_RANGE * (-1) ** sequence.slot
        return replace(self, block_tables=(*self.block_tables[:group], table, *self.block_tables[group + 1 :]))

    def run(self, kernels: Kernels) -> tuple[Tensor, ...]:
        """What a backend gives for it; changes the operands that it changes."""
        device = DEVICES.get(kernels, CPU)
        moved = {
            name: moved_to(device, value) if isinstance(value, Tensor) else value
            for name, value in self.operands.items()
        }
        weights = {name: packed(kernels, moved[name], device) for name in self.operation.packed}
        arguments = {**moved, **weights}
        if self.operation.takes_batch:
            tables = [table.to(device) for table in self.block_tables]
            arguments["batch"] = self.batch.batch(kernels, tables, device)
        found = getattr(kernels, self.name)(**arguments)
        for name, value in self.operands.items():
            if moved[name] is not value:
                whole_memory(value).copy_(whole_memory(moved[name]))
        if found is None:
            return ()
        return tuple(each.to(CPU) for each in (found if isinstance(found, tuple) else (found,)))


def packed(kernels: Kernels, weight: WeightRows, device: torch.device) -> Any:
    if not isinstance(weight, Tensor):
        return kernels.pack_stored([weight.to(device)])
    return kernels.pack(weight)


def part_of_sequence(whole: Call, slot: int, start: int, end: int, decode: bool = False) -> Call:
    """Positions [start, end) of the one sequence of a call, in `slot`; it shares the states and the pages."""
    first = whole.batch.sequences[0].start
    rows = (SequenceRows(slot, start, end - start, snapshots=(end - start,)),)
    batch = RandomBatch(rows, ()) if decode else RandomBatch((), rows)
    return whole.of_rows(slice(start - first, end - first), batch)


def whole_memory(x: Tensor) -> Tensor:
    """All that x is a part of."""
    return torch.empty(0, dtype=x.dtype, device=x.device).set_(x.untyped_storage())


def moved_to(device: torch.device, x: Tensor) -> Tensor:
    """x with all that it is a part of, in the same layout; x itself if it is there."""
    if x.device == device:
        return x
    return whole_memory(x).to(device).as_strided(x.shape, x.stride(), x.storage_offset())


def part_of_wider(x: Tensor, dim: int) -> Tensor:
    """A copy of x [a, b, ...] that lies in a wider tensor full of NaN: its entries of dimension `dim` and all behind
    lie together, those before it do not. The last one of a vector's numbers is not the last of its memory, either."""
    inner = x[(0,) * dim].numel() if x.numel() else 0
    outer = x.shape[:dim]
    wide = torch.full((*outer, inner + 5), torch.nan, dtype=x.dtype)
    part = wide[..., 2 : 2 + inner]
    part.copy_(x.reshape(*outer, inner))
    return part.unflatten(-1, x.shape[dim:]) if x.dim() > dim + 1 and inner else part.view(x.shape)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _weight(batch: RandomBatch, *shape: int, salt: int) -> Tensor:
    """A weight [..., out, in] whose products are about as large as what they are made of."""
    return batch.numbers(*shape, salt=salt).mul(shape[-1] ** -0.5)


WIDTHS = st.sampled_from([1, 7, 16, 33, 64, 96])
HEADS = st.tuples(st.integers(1, 3), st.integers(1, 3))


@st.composite
def calls(draw: st.DrawFn, name: str, dtype: torch.dtype, batch: RandomBatch | None = None) -> Call:
    """A call of `name` in a model of `dtype`."""
    if batch is None:
        with_states = "states" in OPERATIONS[name].changed
        batch = draw(st.one_of(batches(), folds()) if with_states and HAVE_VERIFIES else batches())
    if name in PAGED:
        return PAGED[name](draw, name, batch, dtype)
    return Call(name, batch, OPERANDS[name](draw, batch, dtype))


Operands = dict[str, Any]


def _embed(draw: st.DrawFn, batch: RandomBatch, dtype: torch.dtype) -> Operands:
    tokens = (batch.numbers(batch.num_tokens).abs() * 20).long().clamp(max=49)
    return {"tokens": tokens, "weight": batch.numbers(50, draw(WIDTHS), salt=1).to(dtype)}


def _linear(draw: st.DrawFn, batch: RandomBatch, dtype: torch.dtype) -> Operands:
    inputs, outputs = draw(WIDTHS), draw(WIDTHS)
    return {
        "x": batch.numbers(batch.num_tokens, inputs).to(dtype),
        "weight": _weight(batch, outputs, inputs, salt=1).to(dtype),
        "bias": batch.numbers(outputs, salt=2).to(dtype) if draw(st.booleans()) else None,
    }


def _lm_head(draw: st.DrawFn, batch: RandomBatch, dtype: torch.dtype) -> Operands:
    inputs = draw(WIDTHS)
    return {
        "hidden": batch.numbers(batch.num_tokens, inputs).to(dtype),
        "weight": _weight(batch, 70, inputs, salt=1).to(dtype),
    }


def _routed(draw: st.DrawFn, batch: RandomBatch, dtype: torch.dtype, width: int) -> tuple[int, Operands]:
    """How many experts there are, and which rows go to them."""
    experts = draw(st.integers(1, 9))
    chosen = draw(st.integers(1, min(4, experts)))
    return experts, {
        "x": batch.numbers(batch.num_tokens, width).to(dtype),
        "topk_ids": batch.numbers(batch.num_tokens, experts, salt=1).topk(chosen, dim=-1).indices,
        "topk_weights": batch.numbers(batch.num_tokens, chosen, salt=2).to(_wide(dtype)),
    }


def _experts(draw: st.DrawFn, batch: RandomBatch, dtype: torch.dtype) -> Operands:
    width, inner = draw(WIDTHS), draw(WIDTHS)
    experts, operands = _routed(draw, batch, dtype, width)
    up = _weight(batch, experts, inner, width, salt=3).to(dtype)
    return {**operands, "up": up, "down": _weight(batch, experts, width, inner, salt=4).to(dtype)}


def _gated_experts(draw: st.DrawFn, batch: RandomBatch, dtype: torch.dtype) -> Operands:
    width, inner = draw(WIDTHS), draw(WIDTHS)
    experts, operands = _routed(draw, batch, dtype, width)
    gate_up = _weight(batch, experts, 2 * inner, width, salt=3).to(dtype)
    return {**operands, "gate_up": gate_up, "down": _weight(batch, experts, width, inner, salt=4).to(dtype)}


def _clamped_experts(draw: st.DrawFn, batch: RandomBatch, dtype: torch.dtype) -> Operands:
    """Some numbers are beyond the limit, which is one that any dtype has."""
    operands = _gated_experts(draw, batch, dtype)
    gate_up_bias, down_bias = (
        batch.numbers(*operands[name].shape[:2], salt=salt).to(dtype) for name, salt in (("gate_up", 5), ("down", 6))
    )
    return {
        **operands,
        "gate_up_bias": gate_up_bias,
        "down_bias": down_bias if draw(st.booleans()) else None,
        "alpha": 1.5,
        "limit": 1.25,
    }


def _rms_norm(draw: st.DrawFn, batch: RandomBatch, dtype: torch.dtype) -> Operands:
    width = draw(WIDTHS)
    heads = [draw(st.integers(1, 3))] if draw(st.booleans()) else []
    return {
        "x": batch.numbers(batch.num_tokens, *heads, width).to(dtype),
        "weight": batch.numbers(width, salt=1).to(draw(st.sampled_from([dtype, _wide(dtype)]))),
        "eps": 1e-5,
    }


def _add_rms_norm(draw: st.DrawFn, batch: RandomBatch, dtype: torch.dtype) -> Operands:
    width = draw(WIDTHS)
    residual = batch.numbers(batch.num_tokens, width, salt=2).to(dtype)
    x, weight = batch.numbers(batch.num_tokens, width).to(dtype), batch.numbers(width, salt=1)
    weight = weight.to(draw(st.sampled_from([dtype, _wide(dtype)])))
    return {"residual": residual, "x": x, "weight": weight, "eps": 1e-5}


def _gated_rms_norm(draw: st.DrawFn, batch: RandomBatch, dtype: torch.dtype) -> Operands:
    groups = draw(st.integers(1, 4))
    width = groups * draw(WIDTHS)
    return {
        "x": batch.numbers(batch.num_tokens, width).to(_wide(dtype)),
        "gate": batch.numbers(batch.num_tokens, width, salt=1).mul(3).to(dtype),
        "weight": batch.numbers(width, salt=2).to(draw(st.sampled_from([dtype, _wide(dtype)]))),
        "groups": groups,
        "eps": 1e-5,
    }


def _rms_norm_then_gate(draw: st.DrawFn, batch: RandomBatch, dtype: torch.dtype) -> Operands:
    heads, dim = draw(st.integers(1, 4)), draw(WIDTHS)
    return {
        "x": batch.numbers(batch.num_tokens, heads, dim).to(_wide(dtype)),
        "gate": batch.numbers(batch.num_tokens, heads * dim, salt=1).mul(3).to(dtype),
        "weight": batch.numbers(dim, salt=2).to(_wide(dtype)),
        "eps": 1e-5,
    }


def _silu_mul(draw: st.DrawFn, batch: RandomBatch, dtype: torch.dtype) -> Operands:
    width = draw(WIDTHS)
    gate = batch.numbers(batch.num_tokens, width).mul(5).to(dtype)
    x = batch.numbers(batch.num_tokens, width, salt=1).to(draw(st.sampled_from([dtype, _wide(dtype)])))
    return {"gate": gate, "x": x}


def _gelu_mul(draw: st.DrawFn, batch: RandomBatch, dtype: torch.dtype) -> Operands:
    width = draw(WIDTHS)
    gate = batch.numbers(batch.num_tokens, width).mul(3).to(dtype)
    return {"gate": gate, "x": batch.numbers(batch.num_tokens, width, salt=1).to(dtype)}


def _softcap(draw: st.DrawFn, batch: RandomBatch, dtype: torch.dtype) -> Operands:
    cap, size = draw(st.sampled_from([0.5, 30.0])), draw(st.sampled_from([0.01, 3.0, 60.0]))
    return {"x": batch.numbers(batch.num_tokens, draw(WIDTHS)).mul(size).to(_wide(dtype)), "cap": cap}


def _sigmoid_mul(draw: st.DrawFn, batch: RandomBatch, dtype: torch.dtype) -> Operands:
    width = draw(WIDTHS)
    gates = draw(st.sampled_from([1, width]))
    x = batch.numbers(batch.num_tokens, width, salt=1).to(dtype)
    return {"x": x, "gate": batch.numbers(batch.num_tokens, gates).mul(5).to(dtype)}


def _squared_relu(draw: st.DrawFn, batch: RandomBatch, dtype: torch.dtype) -> Operands:
    return {"x": batch.numbers(batch.num_tokens, draw(WIDTHS)).to(dtype)}


def _rope(draw: st.DrawFn, batch: RandomBatch, dtype: torch.dtype) -> Operands:
    heads, pairs, rest = draw(st.integers(1, 3)), draw(st.integers(1, 20)), draw(st.integers(0, 9))
    angles = batch.numbers(batch.num_tokens, pairs, salt=1).mul(9)
    return {
        "x": batch.numbers(batch.num_tokens, heads, 2 * pairs + rest).to(dtype),
        "cos": angles.cos().to(_wide(dtype)),
        "sin": angles.sin().to(_wide(dtype)),
    }


def _softmax_router(draw: st.DrawFn, batch: RandomBatch, dtype: torch.dtype) -> Operands:
    experts = draw(st.integers(1, 40))
    return {
        "logits": batch.numbers(batch.num_tokens, experts).mul(3).to(_wide(dtype)),
        "top_k": draw(st.integers(1, min(8, experts))),
        "normalize": draw(st.booleans()),
    }


def _sigmoid_router(draw: st.DrawFn, batch: RandomBatch, dtype: torch.dtype) -> Operands:
    num_groups, per_group = draw(st.integers(1, 4)), draw(st.integers(2, 8))
    top_groups = draw(st.integers(1, num_groups))
    return {
        "logits": batch.numbers(batch.num_tokens, num_groups * per_group).mul(3).to(_wide(dtype)),
        "correction": batch.numbers(num_groups * per_group, salt=1).to(_wide(dtype)),
        "top_k": draw(st.integers(1, min(6, top_groups * per_group))),
        "num_groups": num_groups,
        "top_groups": top_groups,
        "normalize": draw(st.booleans()),
        "scale": draw(st.sampled_from([1.0, 2.5])),
        "epsilon": draw(st.sampled_from([1e-20, 0.25])),
    }


def _conv(draw: st.DrawFn, batch: RandomBatch, dtype: torch.dtype) -> Operands:
    channels, width = draw(WIDTHS), draw(st.integers(2, 5))
    return {
        "x": batch.numbers(batch.num_tokens, channels).to(dtype),
        "weight": batch.numbers(width, channels, salt=1).to(_wide(dtype)),
        "bias": batch.numbers(channels, salt=2).to(_wide(dtype)) if draw(st.booleans()) else None,
        "states": batch.states(width - 1, channels, salt=3).to(dtype),
        "silu": draw(st.booleans()),
    }


SIZES = st.sampled_from([(5, 6), (16, 16), (8, 32)])


def _ssd(draw: st.DrawFn, batch: RandomBatch, dtype: torch.dtype) -> Operands:
    """Decays from almost none to almost all."""
    groups, per_group = draw(HEADS)
    heads = groups * per_group
    dim, size = draw(SIZES)
    wide, rows = _wide(dtype), batch.num_tokens
    return {
        "x": batch.numbers(rows, heads, dim).to(wide),
        "dt": batch.numbers(rows, heads, salt=1).mul(3).to(dtype),
        "b": batch.numbers(rows, groups, size, salt=2).to(wide),
        "c": batch.numbers(rows, groups, size, salt=3).to(wide),
        "a": batch.numbers(heads, salt=4).mul(2).exp().neg().to(wide),
        "d": batch.numbers(heads, salt=5).to(wide),
        "dt_bias": batch.numbers(heads, salt=6).sub(2).to(wide),
        "dt_limit": draw(st.sampled_from([(0.0, float("inf")), (0.01, 2.0)])),
        "states": batch.states(heads, dim, size, salt=7).to(wide),
    }


def _gdn(draw: st.DrawFn, batch: RandomBatch, dtype: torch.dtype) -> Operands:
    """Decays from almost none to almost all."""
    key_heads, per_key = draw(HEADS)
    heads = key_heads * per_key
    dim, size = draw(SIZES)
    wide, rows = _wide(dtype), batch.num_tokens
    return {
        "q": batch.numbers(rows, key_heads, size).to(wide),
        "k": batch.numbers(rows, key_heads, size, salt=1).to(wide),
        "v": batch.numbers(rows, heads, dim, salt=2).to(wide),
        "beta": batch.numbers(rows, heads, salt=3).mul(2).to(dtype),
        "dt": batch.numbers(rows, heads, salt=4).mul(3).to(dtype),
        "a": batch.numbers(heads, salt=5).mul(2).exp().neg().to(wide),
        "dt_bias": batch.numbers(heads, salt=6).sub(2).to(wide),
        "states": batch.states(heads, size, dim, salt=7).to(wide),
        "beta_scale": draw(st.sampled_from([1.0, 2.0])),
    }


REACHES = st.one_of(st.sampled_from([1, 2, 5, 32, 63, 64, 65, 128]), st.integers(1, 250))


@st.composite
def attention_rules(draw: st.DrawFn) -> AttentionRule:
    """Some that no family has, too. Half of them are of unlimited reach."""
    window = chunk = None
    if draw(st.booleans()):
        window, chunk = draw(st.sampled_from([(reach := draw(REACHES), None), (None, reach)]))
    return AttentionRule(window, chunk, draw(st.sampled_from([None, 0.3])), draw(st.sampled_from([None, 1.5])))


def sinks_of(batch: RandomBatch, heads: int) -> Tensor:
    """Logits that weigh next to nothing, as much as some keys, and nearly all."""
    return batch.numbers(heads, salt=9).pow(3) * 4


def _paged(draw: st.DrawFn, name: str, batch: RandomBatch, dtype: torch.dtype) -> Call:
    """The group that is asked for is the second one; the first one's table is of no use for it."""
    pages = batch.pages(draw(st.sampled_from(PAGE_SIZES)), draw(garbage()))
    kv_heads, per_key = draw(HEADS)
    dim = draw(st.sampled_from([4, 8, 32]))
    keys, values = (pages.filled(kv_heads, dim, salt=salt).to(dtype) for salt in (3, 4))
    operands: Operands = {"keys": keys, "values": values, "group": 1}
    if name == "attention":
        q, rule = batch.numbers(batch.num_tokens, kv_heads * per_key, dim).to(dtype), draw(attention_rules())
        operands = {"q": q, **operands, "rule": rule}
        if draw(st.booleans()):
            operands["sinks"] = sinks_of(batch, kv_heads * per_key).to(draw(st.sampled_from([dtype, _wide(dtype)])))
    else:
        k, v = (batch.numbers(batch.num_tokens, kv_heads, dim, salt=salt).to(dtype) for salt in (1, 2))
        operands = {"k": k, "v": v, **operands}
    tables = torch.full_like(pages.table, pages.num_pages - 1), pages.table
    return Call(name, batch, operands, tables).without_reach()


OPERANDS: Mapping[str, Callable[[st.DrawFn, RandomBatch, torch.dtype], Operands]] = MappingProxyType(
    {
        "embed": _embed,
        "linear": _linear,
        "lm_head": _lm_head,
        "experts": _experts,
        "gated_experts": _gated_experts,
        "gelu_experts": _gated_experts,
        "clamped_experts": _clamped_experts,
        "rms_norm": _rms_norm,
        "add_rms_norm": _add_rms_norm,
        "gated_rms_norm": _gated_rms_norm,
        "rms_norm_then_gate": _rms_norm_then_gate,
        "silu_mul": _silu_mul,
        "gelu_mul": _gelu_mul,
        "sigmoid_mul": _sigmoid_mul,
        "softcap": _softcap,
        "squared_relu": _squared_relu,
        "rope": _rope,
        "softmax_router": _softmax_router,
        "sigmoid_router": _sigmoid_router,
        "conv": _conv,
        "ssd": _ssd,
        "gdn": _gdn,
    }
)
PAGED: Mapping[str, Callable[[st.DrawFn, str, RandomBatch, torch.dtype], Call]] = MappingProxyType(
    {"write_kv": _paged, "attention": _paged}
)
