"""What the CPU backend's operations take, each beside plain torch: decode steps and prompts, in microseconds. Products
with weights also beside oneDNN's over its own layout, and int8 ones beside bfloat16's.

    python -m benchmarks.cpu_kernels [--shapes tiny 333m] [--dtype bfloat16] [--threads N] [--repeats 15]
                                     [--only NAME ...] [--json FILE]

Shapes are those of a tiny Qwen3.5 and of one with 333 million parameters. Decode: 1, 4, 8 and 16 sequences with
contexts of 1,000 tokens, and one with 32,768. Prefill: prompts of 1,200 and 4,800 tokens, and 512 behind 4,288.
Both ways of an operation take turns, each run begins with caches that the other one has filled, and what is shown is
the median; `x` is how many times as long torch takes. Meant for a machine that has nothing else to do.
"""

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor

from cairn.errors import ConfigError
from cairn.kernels import cpu
from cairn.kernels.batch import Batch, HostBatch
from cairn.kernels.cpu import onednn
from cairn.kernels.cpu.warm_up import warm_up
from cairn.kernels.staging import Staging

CONTEXT, LONG_CONTEXT, PAGE_SIZE = 1000, 32_768, 16
BUDGET_SECONDS = 2.0
"""For one operation at one size, both ways together: slow ones are repeated less often."""


@dataclass(frozen=True)
class Shape:
    """A model's sizes."""

    hidden: int
    inner: int
    heads: int
    kv_heads: int
    head_dim: int
    linear_heads: int
    linear_dim: int
    vocab: int


SHAPES = {
    "tiny": Shape(256, 512, 4, 2, 64, 4, 64, 4096),
    "333m": Shape(1024, 2816, 8, 2, 128, 8, 128, 4096),
}


@dataclass(frozen=True)
class Load:
    """Sequences of a pass: (tokens before it, tokens with it)."""

    name: str
    sequences: tuple[tuple[int, int], ...]
    decode: bool


LOADS = (
    *(Load(f"decode {count}", ((CONTEXT - 1, CONTEXT),) * count, True) for count in (1, 4, 8, 16)),
    Load("decode 1 x 32k", ((LONG_CONTEXT - 1, LONG_CONTEXT),), True),
    Load("prefill 1200", ((0, 1200),), False),
    Load("prefill 4800", ((0, 4800),), False),
    Load("prefill 4288+512", ((4288, 4800),), False),
)


@dataclass(frozen=True)
class Timing:
    """Medians of one operation at one size."""

    shape: str
    load: str
    operation: str
    baseline: str
    cairn_us: float
    torch_us: float


@dataclass(frozen=True)
class Pair:
    """One operation in both ways. `baseline`: what torch does."""

    operation: str
    baseline: str
    cairn: Callable[[], object]
    torch: Callable[[], object]


def batch_of(load: Load) -> Batch:
    """A batch with pages in random order."""
    starts, ends = (np.array(column, dtype=np.int32) for column in zip(*load.sequences, strict=True))
    count = len(starts)
    cu_seqlens = np.concatenate([[0], np.cumsum(ends - starts)]).astype(np.int32)
    slots, zeros, none = np.arange(count, dtype=np.int32), np.zeros(count, np.int32), np.zeros(0, np.int32)
    host = HostBatch(count if load.decode else 0, cu_seqlens, slots, starts, ends, zeros, none, none)
    pages = -(-int(ends.max()) // PAGE_SIZE)
    table = torch.randperm((count + 1) * pages).view(count + 1, pages).int()
    tokens = torch.zeros(host.num_tokens, dtype=torch.int64)
    positions = torch.cat([torch.arange(start, end) for start, end in load.sequences]).expand(3, -1)
    arrays = [torch.from_numpy(array) for array in (cu_seqlens, slots, slots, starts, ends, zeros)]
    return Batch(tokens, positions, *arrays, [table], host, cpu.build_metadata(host, Staging()))


def products(shape: Shape, rows: int, dtype: torch.dtype, batch: Batch) -> Iterator[Pair]:
    sizes = {
        "linear q, k, v, gate": (2 * (shape.heads + shape.kv_heads) * shape.head_dim, shape.hidden),
        "linear gate and up": (2 * shape.inner, shape.hidden),
        "linear down": (shape.hidden, shape.inner),
    }
    for name, (columns, width) in sizes.items():
        x, weight = torch.randn(rows, width).to(dtype), torch.randn(columns, width).to(dtype)
        packed = cpu.pack(weight)
        yield Pair(
            name,
            "F.linear",
            lambda x=x, packed=packed: cpu.linear(x, packed, None, batch),
            lambda x=x, weight=weight: F.linear(x, weight),
        )
        if onednn.can_reorder(dtype):
            reordered = onednn.reorder(weight)
            yield Pair(
                f"{name}, panels",
                "oneDNN's layout",
                lambda x=x, packed=packed: cpu.linear(x, packed, None, batch),
                lambda x=x, reordered=reordered: onednn.reordered_product(x, reordered, None),
            )
        try:
            quantized = cpu.pack_int8(weight)
        except ConfigError:  # this processor's are wrong
            continue
        yield Pair(
            f"{name}, int8",
            f"{dtype}".removeprefix("torch."),
            lambda x=x, quantized=quantized: cpu.linear(x, quantized, None, batch),
            lambda x=x, packed=packed: cpu.linear(x, packed, None, batch),
        )
    last, head = torch.randn(min(rows, 16), shape.hidden).to(dtype), torch.randn(shape.vocab, shape.hidden).to(dtype)
    packed_head = cpu.pack(head)
    yield Pair("lm_head", "F.linear", lambda: cpu.lm_head(last, packed_head), lambda: F.linear(last, head).float())


def row_by_row(shape: Shape, rows: int, dtype: torch.dtype) -> Iterator[Pair]:
    def normal(*sizes: int, kind: torch.dtype = dtype) -> Tensor:
        return torch.randn(sizes).to(kind)

    def rms(x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x.float(), x.shape[-1:], weight, 1e-6).to(dtype)

    x, y, weight = normal(rows, shape.hidden), normal(rows, shape.hidden), normal(shape.hidden, kind=torch.float32)
    yield Pair("rms_norm", "F.rms_norm", lambda: cpu.rms_norm(x, weight, 1e-6), lambda: rms(x, weight))
    total, other = torch.zeros_like(x), torch.zeros_like(x)
    yield Pair(
        "add_rms_norm",
        "add_ and F.rms_norm",
        lambda: cpu.add_rms_norm(total, y, weight, 1e-6),
        lambda: rms(other.add_(y), weight),
    )
    both = normal(rows, 2 * shape.inner)
    gate, up = both.chunk(2, dim=-1)
    yield Pair("silu_mul", "F.silu and mul", lambda: cpu.silu_mul(gate, up), lambda: F.silu(gate) * up)
    width = shape.heads * shape.head_dim
    wide = normal(rows, 2 * width)
    out, gates = wide.chunk(2, dim=-1)
    yield Pair("sigmoid_mul", "sigmoid and mul", lambda: cpu.sigmoid_mul(out, gates), lambda: out * gates.sigmoid())
    heads, dim = shape.linear_heads, shape.linear_dim
    states, state_gate = normal(rows, heads, dim, kind=torch.float32), normal(rows, heads * dim)
    head_weight = normal(dim, kind=torch.float32)
    yield Pair(
        "rms_norm_then_gate",
        "F.rms_norm, F.silu and mul",
        lambda: cpu.rms_norm_then_gate(states, state_gate, head_weight, 1e-6),
        lambda: (F.rms_norm(states, (dim,), head_weight, 1e-6).flatten(1) * F.silu(state_gate.float())).to(dtype),
    )
    q, pairs = normal(rows, shape.heads, shape.head_dim), shape.head_dim // 8
    cos, sin = normal(rows, pairs, kind=torch.float32), normal(rows, pairs, kind=torch.float32)

    def turned() -> Tensor:
        first, second, rest = q[..., :pairs].float(), q[..., pairs : 2 * pairs].float(), q[..., 2 * pairs :]
        c, s = cos[:, None], sin[:, None]
        return torch.cat([(first * c - second * s).to(dtype), (second * c + first * s).to(dtype), rest], dim=-1)

    yield Pair("rope", "mul, add and cat", lambda: cpu.rope(q, cos, sin), turned)
    logits = normal(rows, 128, kind=torch.float32)

    def routed() -> Tensor:
        rates, _ = logits.softmax(-1).topk(8)
        return rates / rates.sum(-1, keepdim=True)

    yield Pair("softmax_router", "softmax and topk", lambda: cpu.softmax_router(logits, 8, True), routed)


def paged(shape: Shape, load: Load, dtype: torch.dtype, batch: Batch) -> Iterator[Pair]:
    table, rows = batch.block_tables[0], batch.host.num_tokens
    pages = torch.randn(table.numel(), 2, shape.kv_heads, PAGE_SIZE, shape.head_dim).to(dtype)
    keys, values = pages[:, 0], pages[:, 1]
    q = torch.randn(rows, shape.heads, shape.head_dim).to(dtype)
    k, v = (torch.randn(rows, shape.kv_heads, shape.head_dim).to(dtype) for _ in range(2))
    positions = batch.positions[0]
    slots = batch.slots.long().repeat_interleave(batch.cu_seqlens.diff())

    def written() -> None:
        page, offset = table[slots, positions // PAGE_SIZE].long(), positions % PAGE_SIZE
        keys[page, :, offset] = k
        values[page, :, offset] = v

    yield Pair("write_kv", "index_put_", lambda: cpu.write_kv(k, v, keys, values, 0, batch), written)

    def gathered(cache: Tensor, index: int, length: int) -> Tensor:
        own = cache[table[index, : -(-length // PAGE_SIZE)].long()].transpose(0, 1).flatten(1, 2)
        return own[None, :, :length]

    def attended() -> None:
        first = 0
        for index, (start, end) in enumerate(load.sequences):
            count = end - start
            mine, own_keys, own_values = (
                q[first : first + count],
                *(gathered(part, index, end) for part in (keys, values)),
            )
            first += count
            if count == 1:
                grouped = mine.view(1, shape.kv_heads, -1, shape.head_dim)
                F.scaled_dot_product_attention(grouped, own_keys, own_values)
                continue
            per_key = shape.heads // shape.kv_heads
            wide_keys, wide_values = (x.repeat_interleave(per_key, dim=1) for x in (own_keys, own_values))
            seen = torch.ones(count, end, dtype=torch.bool).tril_(start) if start else None
            F.scaled_dot_product_attention(
                mine.transpose(0, 1)[None], wide_keys, wide_values, attn_mask=seen, is_causal=seen is None
            )

    yield Pair("attention", "gather and SDPA", lambda: cpu.attention(q, keys, values, 0, batch), attended)
    yield Pair("metadata, once a step", "nothing", lambda: cpu.build_metadata(batch.host, Staging()), lambda: None)


def seconds(run: Callable[[], object]) -> float:
    begin = time.perf_counter()
    run()
    return time.perf_counter() - begin


def measured(pair: Pair, repeats: int) -> tuple[float, float]:
    """Medians in microseconds of both ways, which take turns."""
    once = seconds(pair.cairn) + seconds(pair.torch)
    count = max(3, min(repeats, int(BUDGET_SECONDS / max(once, 1e-9))))
    times = [(seconds(pair.cairn), seconds(pair.torch)) for _ in range(count)]
    return tuple(1e6 * statistics.median(column) for column in zip(*times, strict=True))


def timings(shapes: list[str], dtype: torch.dtype, repeats: int, only: list[str]) -> Iterator[Timing]:
    for name in shapes:
        shape = SHAPES[name]
        for load in LOADS:
            batch = batch_of(load)
            rows = batch.host.num_tokens
            pairs = [
                *products(shape, rows, dtype, batch),
                *row_by_row(shape, rows, dtype),
                *paged(shape, load, dtype, batch),
            ]
            for pair in pairs:
                if not only or any(pair.operation.startswith(wanted) for wanted in only):
                    mine, plain = measured(pair, repeats)
                    yield Timing(name, load.name, pair.operation, pair.baseline, round(mine, 1), round(plain, 1))


def shown(found: list[Timing]) -> Table:
    table = Table("shape", "load", "operation", "baseline")
    for title in ("cairn µs", "torch µs", "x"):
        table.add_column(title, justify="right")
    for timing in found:
        times = f"{timing.torch_us / timing.cairn_us:.1f}"
        cells = (timing.shape, timing.load, timing.operation, timing.baseline)
        table.add_row(*cells, f"{timing.cairn_us:,.1f}", f"{timing.torch_us:,.1f}", times)
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="operations whose names begin like this")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    dtype = getattr(torch, args.dtype)
    begin = time.perf_counter()
    num_kernels = warm_up(dtype)
    ready = time.perf_counter() - begin
    with torch.inference_mode():
        found = list(timings(args.shapes, dtype, args.repeats, args.only))
    console = Console(width=120)
    console.print(f"{num_kernels} kernels ready in {ready:.1f} s; {args.dtype}, {args.threads} threads")
    console.print(shown(found))
    if args.json:
        facts = {
            "machine": f"{platform.machine()}, {platform.processor() or 'unknown CPU'}",
            "torch": torch.__version__,
            "dtype": args.dtype,
            "threads": args.threads,
            "warm_up_seconds": round(ready, 2),
            "timings": [asdict(timing) for timing in found],
        }
        args.json.write_text(json.dumps(facts, indent=2) + "\n")


if __name__ == "__main__":
    main()
