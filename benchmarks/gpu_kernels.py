"""What the CUDA backend's kernels take on a GPU, each beside its floor and, where one is installed, beside another one.

    python benchmarks/gpu_kernels.py [--only NAME ...] [--models NAME ...] [--repeats 20] [--out build/gpu-kernels]

Shapes are those of Nemotron-3-Nano-30B-A3B and Qwen3.5-35B-A3B in bfloat16. Decode: 1, 32 and 128 sequences. Prefill:
one prompt of 2k to 128k tokens, without snapshots and with those of `auto` (every 1,024 tokens here).

First every operation is held against the reference in float64, on a batch that mixes decodes and prefills: the error is
the length of the difference over the length of the truth. Then it is timed: inputs of several seeds, each call captured
in a CUDA graph, the second-level cache overwritten before every replay, medians of CUDA events. The floor is the larger
of two: the bytes that have to move, each operand read once and each result written once, at the speed of a copy or a
sum; and the products, at the speed of one of 8,192 x 8,192 x 8,192 in bfloat16; both speeds measured in the same run.
`of floor` is floor / time. Writes FILE.json and plots beside it.
"""

import argparse
import importlib.util
import json
import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
import torch.nn.functional as F
import triton
from torch import Tensor

from cairn.kernels import checkpoint_files, cuda, reference
from cairn.kernels.batch import CHUNK, Batch, HostBatch
from cairn.kernels.contract import Kernels
from cairn.kernels.fp8 import BLOCK, Fp8Weight
from cairn.kernels.quantized import QuantizedWeight
from cairn.kernels.staging import Staging
from cairn.layers.memory import AttentionSpec, ConvPart, MemorySpec, RecurrentSpec
from cairn.runner.checkpoint import LayerBytes, live_spans
from cairn.runner.memory import LiveStates

PAGE_SIZE = 64
SNAPSHOT_EVERY = 1024
GIB = 2**30
BF16, F32, E4M3 = torch.bfloat16, torch.float32, torch.float8_e4m3fn
DEVICE = torch.device("cuda")

Call = Callable[[], object]


@dataclass(frozen=True)
class Model:
    """A model's sizes, None where it has no such layer."""

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    experts: int
    experts_per_token: int
    expert_inner: int
    gated_experts: bool
    conv_parts: tuple[int, ...]
    """Channels, of which each unit of the states has its share."""
    recurrent_layers: int
    attention_layers: int
    state_units: int
    conv_width: int = 4
    gdn: tuple[int, int, int, int] | None = None
    """q/k heads, value heads, state size, head dim."""
    ssd: tuple[int, int, int, int] | None = None
    """heads, head dim, groups, state size."""

    @property
    def conv_channels(self) -> int:
        return sum(self.conv_parts)

    @property
    def memory(self) -> MemorySpec:
        """What a sequence has in its slot and its pages."""
        state = (self.ssd[0], self.ssd[1], self.ssd[3]) if self.ssd is not None else (self.gdn or ())[1:]
        parts = tuple(ConvPart(channels) for channels in self.conv_parts)
        recurrent = RecurrentSpec(self.recurrent_layers, self.conv_width - 1, parts, state, self.state_units)
        attention = AttentionSpec(self.attention_layers, self.kv_heads, self.head_dim)
        return MemorySpec(BF16, DEVICE, self.hidden, recurrent, (attention,))


MODELS = {
    "nemotron-3-nano-30b-a3b": Model(
        hidden=2688,
        heads=32,
        kv_heads=2,
        head_dim=128,
        experts=128,
        experts_per_token=6,
        expert_inner=1856,
        gated_experts=False,
        conv_parts=(4096, 1024, 1024),
        recurrent_layers=23,
        attention_layers=6,
        state_units=8,
        ssd=(64, 64, 8, 128),
    ),
    "qwen3.5-35b-a3b": Model(
        hidden=2048,
        heads=16,
        kv_heads=2,
        head_dim=256,
        experts=256,
        experts_per_token=8,
        expert_inner=512,
        gated_experts=True,
        conv_parts=(2048, 2048, 4096),
        recurrent_layers=30,
        attention_layers=10,
        state_units=16,
        gdn=(16, 32, 128, 128),
    ),
}


@dataclass(frozen=True)
class Load:
    """Sequences of a pass, (tokens before it, tokens with it); decodes first. `snapshots`: whether states are kept."""

    name: str
    sequences: tuple[tuple[int, int], ...]
    num_decodes: int
    snapshots: bool = False

    @property
    def num_tokens(self) -> int:
        return sum(end - start for start, end in self.sequences)

    def host(self) -> HostBatch:
        starts = np.array([start for start, _ in self.sequences], np.int32)
        ends = np.array([end for _, end in self.sequences], np.int32)
        kept = [
            (i, position - start)
            for i, (start, end) in enumerate(self.sequences)
            for position in range(start + 1, end + 1)
            if self.snapshots and (position % SNAPSHOT_EVERY == 0 or position == end)
        ]
        return HostBatch(
            num_decodes=self.num_decodes,
            cu_seqlens=np.concatenate([[0], np.cumsum(ends - starts)]).astype(np.int32),
            slots=np.random.default_rng(0).permutation(len(starts)).astype(np.int32),
            seq_starts=starts,
            seq_lens=ends,
            kv_write_from=np.zeros_like(starts),
            snapshot_seqs=np.array([row for row, _ in kept], np.int32),
            snapshot_offsets=np.array([offset for _, offset in kept], np.int32),
        )

    def batch(self, kernels: Kernels) -> Batch:
        host, staging = self.host(), Staging()
        metadata = kernels.build_metadata(host, staging)
        staging.send(DEVICE)
        pages = -(-host.seq_lens // PAGE_SIZE)
        order = np.random.default_rng(1).permutation(int(pages.sum())).astype(np.int32)
        table = np.zeros((len(host.slots) + 1, int(pages.max())), np.int32)
        first = 0
        for slot, count in zip(host.slots, pages, strict=True):
            table[slot, :count] = order[first : first + count]
            first += int(count)

        def moved(array: Any) -> Tensor:
            return torch.from_numpy(np.ascontiguousarray(array)).to(DEVICE)

        positions = np.concatenate([np.arange(start, end) for start, end in self.sequences])
        return Batch(
            tokens=torch.zeros(host.num_tokens, dtype=torch.int64, device=DEVICE),
            positions=moved(np.stack([positions] * 3)),
            cu_seqlens=moved(host.cu_seqlens),
            slots=moved(host.slots),
            state_slots=moved(host.slots),
            seq_starts=moved(host.seq_starts),
            seq_lens=moved(host.seq_lens),
            kv_write_from=moved(host.kv_write_from),
            block_tables=[moved(table)],
            host=host,
            metadata=metadata,
        )

    @property
    def num_pages(self) -> int:
        return sum(-(-end // PAGE_SIZE) for _, end in self.sequences)


CONTEXTS = {1: (2048, 32768, 131072), 32: (2048, 32768), 128: (2048, 8192)}
MIXED = Load("check", ((200, 201), (64, 65), (0, 130), (77, 177), (127, 129)), 2, snapshots=True)


def decode(count: int, context: int) -> Load:
    return Load(f"decode {count} x {context}", ((context - 1, context),) * count, count)


def prefill(tokens: int, snapshots: bool = False) -> Load:
    return Load(f"prefill {tokens}" + (" + snapshots" if snapshots else ""), ((0, tokens),), 0, snapshots)


@dataclass(frozen=True)
class Case:
    """One operation at one size. `operands`: seed -> arguments without the batch. `peers`: others that do the same,
    from the operands. `weights`: in what they are stored, "" where that is bfloat16."""

    operation: str
    model: str
    load: Load
    operands: Callable[[int], dict[str, Any]]
    num_bytes: float
    flops: float = 0.0
    takes_batch: bool = True
    weights: str = ""
    peers: dict[str, Callable[[dict[str, Any]], Call]] = field(default_factory=dict)

    @property
    def label(self) -> str:
        return f"{self.operation} {self.weights}" if self.weights else self.operation

    def call(self, kernels: Kernels, operands: dict[str, Any]) -> Call:
        function = getattr(kernels, self.operation)
        if "spans" in operands:
            operands = {**operands, "spans": kernels.pack_state_spans(*operands["spans"], operands["pool"])}
        if self.takes_batch:
            batch = self.load.batch(kernels)
            return lambda: function(**operands, batch=batch)
        return lambda: function(**operands)


def random(seed: int, *shape: int, dtype: torch.dtype = F32, scale: float = 1.0, shift: float = 0.0) -> Tensor:
    generator = torch.Generator(DEVICE).manual_seed(seed + 7919 * sum(shape))
    return (torch.randn(shape, generator=generator, device=DEVICE, dtype=F32) * scale + shift).to(dtype)


# -- the operations ---------------------------------------------------------------------------------------------------


def gdn_case(name: str, model: Model, load: Load) -> Case:
    assert model.gdn is not None
    key_heads, heads, size, dim = model.gdn
    rows, sequences = load.num_tokens, len(load.sequences)

    def operands(seed: int) -> dict[str, Any]:
        wide = random(seed, rows, 2 * key_heads * size + heads * dim, dtype=BF16)
        q, k, v = wide.split([key_heads * size, key_heads * size, heads * dim], dim=1)
        gates = random(seed + 1, rows, 2 * heads, dtype=BF16)
        return {
            "q": q.unflatten(1, (key_heads, size)),
            "k": k.unflatten(1, (key_heads, size)),
            "v": v.unflatten(1, (heads, dim)),
            "beta": gates[:, :heads],
            "dt": gates[:, heads:],
            "a": -random(seed + 2, heads, scale=0.5).exp(),
            "dt_bias": random(seed + 3, heads, shift=-3.0),
            "states": random(seed + 4, sequences + 1, heads, size, dim, scale=0.1),
        }

    def fla(given: dict[str, Any]) -> Call:
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule  # type: ignore[import-not-found]

        decay = given["a"] * F.softplus(given["dt"].float() + given["dt_bias"])
        low = {part: given[part].to(BF16).contiguous().unsqueeze(0) for part in ("q", "k", "v")}
        beta = given["beta"].float().sigmoid().to(BF16).unsqueeze(0)
        start = torch.zeros(sequences, heads, size, dim, device=DEVICE)
        # It takes what our gates have made already.
        return lambda: chunk_gated_delta_rule(
            **low, g=decay.unsqueeze(0), beta=beta, initial_state=start, output_final_state=True,
            use_qk_l2norm_in_kernel=True,
        )  # fmt: skip

    chunks = sum((end - 1) // CHUNK - start // CHUNK + 1 for start, end in load.sequences)
    state = heads * size * dim
    flops = 0.0 if load.num_decodes else chunks * heads * 2 * CHUNK * (CHUNK * 2 * (size + dim) + 3 * size * dim)
    kept = load.host().num_snapshots
    peers = {"fla": fla} if sequences == 1 and not load.num_decodes and importlib.util.find_spec("fla") else {}
    return Case(
        "gdn", name, load, operands, rows * (4 * key_heads * size + 4 * heads * dim + 4 * heads)
        + 4 * state * (2 * sequences + kept), flops, peers=peers,
    )  # fmt: skip


def ssd_case(name: str, model: Model, load: Load) -> Case:
    assert model.ssd is not None
    heads, dim, groups, size = model.ssd
    rows, sequences = load.num_tokens, len(load.sequences)

    def operands(seed: int) -> dict[str, Any]:
        wide = random(seed, rows, heads * dim + 2 * groups * size, dtype=BF16)
        x, b, c = wide.split([heads * dim, groups * size, groups * size], dim=1)
        return {
            "x": x.unflatten(1, (heads, dim)),
            "dt": random(seed + 1, rows, heads, dtype=BF16),
            "b": b.unflatten(1, (groups, size)),
            "c": c.unflatten(1, (groups, size)),
            "a": -random(seed + 2, heads).exp(),
            "d": random(seed + 3, heads),
            "dt_bias": random(seed + 4, heads, shift=-3.0),
            "dt_limit": (0.0, float("inf")),
            "states": random(seed + 5, sequences + 1, heads, dim, size, scale=0.1),
        }

    chunks = sum((end - 1) // CHUNK - start // CHUNK + 1 for start, end in load.sequences)
    state = heads * dim * size
    flops = 0.0 if load.num_decodes else chunks * heads * 2 * CHUNK * (CHUNK * (size + dim) + 2 * size * dim)
    kept = load.host().num_snapshots
    return Case(
        "ssd", name, load, operands, rows * (4 * heads * dim + 4 * groups * size + 2 * heads)
        + 4 * state * (2 * sequences + kept), flops,
    )  # fmt: skip


def conv_case(name: str, model: Model, load: Load) -> Case:
    channels, width = model.conv_channels, model.conv_width
    rows, sequences = load.num_tokens, len(load.sequences)

    def operands(seed: int) -> dict[str, Any]:
        return {
            "x": random(seed, rows, channels + 64, dtype=BF16)[:, :channels],
            "weight": random(seed + 1, width, channels),
            "bias": random(seed + 2, channels),
            "states": random(seed + 3, sequences + 1, width - 1, channels, dtype=BF16),
        }

    state = (width - 1) * channels
    moved = rows * channels * 4 + 2 * state * (2 * sequences + load.host().num_snapshots)
    return Case("conv", name, load, operands, moved)


def attention_case(name: str, model: Model, load: Load) -> Case:
    heads, kv_heads, dim = model.heads, model.kv_heads, model.head_dim
    rows = load.num_tokens

    def operands(seed: int) -> dict[str, Any]:
        shape = (load.num_pages, kv_heads, PAGE_SIZE, dim)
        return {
            "q": random(seed, rows, heads * dim + 64, dtype=BF16)[:, : heads * dim].unflatten(1, (heads, dim)),
            "keys": random(seed + 1, *shape, dtype=BF16),
            "values": random(seed + 2, *shape, dtype=BF16),
            "group": 0,
        }

    def sdpa(given: dict[str, Any]) -> Call:
        tokens = load.num_tokens
        q = given["q"].contiguous().transpose(0, 1).unsqueeze(0)
        k, v = (random(seed, 1, kv_heads, tokens, dim, dtype=BF16) for seed in (5, 6))
        return lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    seen = sum(end for _, end in load.sequences)
    pairs = sum((start + 1 + end) * (end - start) / 2 for start, end in load.sequences)
    peers = {"torch SDPA, no pages": sdpa} if load.num_decodes == 0 and load.sequences[0][0] == 0 else {}
    moved = 2 * (2 * rows * heads * dim + 2 * seen * kv_heads * dim)
    return Case("attention", name, load, operands, moved, 4 * pairs * heads * dim, peers=peers)


def write_kv_case(name: str, model: Model, load: Load) -> Case:
    rows, kv_heads, dim = load.num_tokens, model.kv_heads, model.head_dim

    def operands(seed: int) -> dict[str, Any]:
        shape = (load.num_pages, kv_heads, PAGE_SIZE, dim)
        return {
            "k": random(seed, rows, kv_heads, dim, dtype=BF16),
            "v": random(seed + 1, rows, kv_heads, dim, dtype=BF16),
            "keys": torch.zeros(shape, dtype=BF16, device=DEVICE),
            "values": torch.zeros(shape, dtype=BF16, device=DEVICE),
            "group": 0,
        }

    return Case("write_kv", name, load, operands, 8 * rows * kv_heads * dim)


def experts_case(name: str, model: Model, load: Load) -> Case:
    rows, experts, chosen = load.num_tokens, model.experts, model.experts_per_token
    hidden, inner = model.hidden, model.expert_inner
    halves = 2 if model.gated_experts else 1

    def operands(seed: int) -> dict[str, Any]:
        return {
            "x": random(seed, rows, hidden, dtype=BF16),
            "topk_ids": random(seed + 1, rows, experts).topk(chosen, dim=-1).indices,
            "topk_weights": random(seed + 2, rows, chosen).softmax(-1),
            "gate_up" if model.gated_experts else "up": random(
                3, experts, halves * inner, hidden, dtype=BF16, scale=hidden**-0.5
            ),
            "down": random(4, experts, hidden, inner, dtype=BF16, scale=inner**-0.5),
        }

    # How many experts random tokens choose, in expectation.
    used = experts * (1 - (1 - chosen / experts) ** rows)
    moved = 2 * used * (halves + 1) * inner * hidden + 2 * rows * hidden * 2
    operation = "gated_experts" if model.gated_experts else "experts"
    return Case(operation, name, load, operands, moved, 2 * rows * chosen * (halves + 1) * inner * hidden)


def fp8_weight(seed: int, *shape: int, blocked: bool) -> Fp8Weight:
    """As Qwen's checkpoints have it, or as ModelOpt's."""
    numbers = random(seed, *shape, dtype=E4M3).view(torch.uint8)
    num_scales = -(-shape[-1] // BLOCK) if blocked else 1
    scales = random(seed + 1, *shape[:-1], num_scales, scale=0.1 * shape[-1] ** -0.5, shift=shape[-1] ** -0.5)
    return Fp8Weight(numbers, scales, BF16)


CODES = {"nvfp4": 16, "awq": 128, "q4_k": 32, "q5_k": 32}
"""Forms of checkpoints in codes, and inputs of a group."""

K_BLOCK = 256
"""Inputs of a block of the last two."""


def code_forms(model: Model) -> list[str]:
    """Those that its layers' inputs can be stored in."""
    return [form for form in CODES if not form.endswith("_k") or model.hidden % K_BLOCK == 0]


def code_weight(form: str, seed: int, *shape: int) -> QuantizedWeight:
    """As ModelOpt's, AWQ's and llama.cpp's files have it."""
    *rows, inputs = shape
    groups = inputs // CODES[form]

    def numbers(offset: int, width: int, bits: int = 8) -> Tensor:
        drawn = random(seed + offset, *rows, width, dtype=E4M3).view(torch.uint8)
        return drawn if bits == 8 else drawn & (1 << bits) - 1

    def sizes(offset: int, width: int, scale: float) -> Tensor:
        return random(seed + offset, *rows, width, scale=0.1 * scale, shift=scale)

    fields: dict[str, Any] = {"codes": numbers(0, inputs // 2), "dtype": BF16}
    if form == "nvfp4":
        scales = sizes(1, groups, 1.0).to(E4M3)
        return QuantizedWeight(**fields, scales=scales, numbers="e2m1", factors=sizes(2, 1, 0.3 * inputs**-0.5))
    if form == "awq":
        zeros = numbers(2, groups, bits=4)
        return QuantizedWeight(**fields, scales=sizes(1, groups, 0.15 * inputs**-0.5).half(), zeros=zeros)
    if form == "q5_k":
        fields |= {"bits": 5, "fifths": numbers(5, inputs // 8)}
    scale = (0.01 if form == "q4_k" else 0.005) * inputs**-0.5
    return QuantizedWeight(
        **fields,
        scales=numbers(1, groups, bits=6),
        minimums=numbers(2, groups, bits=6),
        factors=sizes(3, inputs // K_BLOCK, scale),
        minimum_factors=sizes(4, inputs // K_BLOCK, -8 * scale),
    )


def code_linear_case(name: str, model: Model, load: Load, form: str) -> Case:
    """Into a recurrent layer."""
    plain = fp8_linear_case(name, model, load)
    rows, width, outputs = load.num_tokens, model.hidden, model.conv_channels + 4096
    stored = code_weight(form, 3, 1, width).nbytes * outputs

    def operands(seed: int) -> dict[str, Any]:
        return {**plain.operands(seed), "weight": code_weight(form, 3, outputs, width)}

    moved = stored + 2 * rows * (width + outputs)
    return replace(plain, operands=operands, num_bytes=moved, weights=form)


def code_experts_case(name: str, model: Model, load: Load, form: str) -> Case:
    plain, up = experts_case(name, model, load), "gate_up" if model.gated_experts else "up"
    outputs, activations = (2 if model.gated_experts else 1) * model.expert_inner, 4 * load.num_tokens * model.hidden
    stored = code_weight(form, 3, 1, model.hidden).nbytes / model.hidden

    def operands(seed: int) -> dict[str, Any]:
        return {
            **{part: value for part, value in plain.operands(seed).items() if part not in (up, "down")},
            up: code_weight(form, 3, model.experts, outputs, model.hidden),
            "down": code_weight(form, 4, model.experts, model.hidden, model.expert_inner),
        }

    moved = (plain.num_bytes - activations) / 2 * stored + activations
    return replace(plain, operands=operands, num_bytes=moved, weights=form)


def fp8_linear_case(name: str, model: Model, load: Load) -> Case:
    """Into a recurrent layer."""
    rows, width, outputs = load.num_tokens, model.hidden, model.conv_channels + 4096

    def operands(seed: int) -> dict[str, Any]:
        weight = fp8_weight(3, outputs, width, blocked=model.gated_experts)
        return {"x": random(seed, rows, width, dtype=BF16), "weight": weight, "bias": None}

    moved = outputs * width + 2 * rows * (width + outputs)
    return Case("linear", name, load, operands, moved, 2 * rows * outputs * width, weights="fp8")


def fp8_experts_case(name: str, model: Model, load: Load) -> Case:
    plain, up = experts_case(name, model, load), "gate_up" if model.gated_experts else "up"
    outputs = (2 if model.gated_experts else 1) * model.expert_inner

    def operands(seed: int) -> dict[str, Any]:
        blocked = model.gated_experts
        return {
            **{part: value for part, value in plain.operands(seed).items() if part not in (up, "down")},
            up: fp8_weight(3, model.experts, outputs, model.hidden, blocked=blocked),
            "down": fp8_weight(4, model.experts, model.hidden, model.expert_inner, blocked=blocked),
        }

    activations = 4 * load.num_tokens * model.hidden
    return replace(plain, operands=operands, num_bytes=(plain.num_bytes - activations) / 2 + activations, weights="fp8")


def router_case(name: str, model: Model, load: Load) -> Case:
    rows, experts = load.num_tokens, model.experts
    more: dict[str, Any] = {"top_k": model.experts_per_token, "normalize": True}
    if not model.gated_experts:
        more |= {"correction": random(1, experts), "num_groups": 1, "top_groups": 1, "scale": 2.5}
    operation = "softmax_router" if model.gated_experts else "sigmoid_router"
    moved = rows * (4 * experts + 12 * model.experts_per_token)
    return Case(
        operation, name, load, lambda seed: {"logits": random(seed, rows, experts), **more}, moved, takes_batch=False
    )


def row_cases(name: str, model: Model, load: Load) -> Iterator[Case]:
    """Norms and what stands beside them."""
    rows, hidden = load.num_tokens, model.hidden

    def case(operation: str, operands: Callable[[int], dict[str, Any]], num_bytes: float) -> Case:
        return Case(operation, name, load, operands, num_bytes, takes_batch=False)

    weight = random(1, hidden, dtype=BF16)
    yield case(
        "add_rms_norm",
        lambda seed: {
            "residual": random(seed, rows, hidden, dtype=BF16),
            "x": random(seed + 1, rows, hidden, dtype=BF16),
            "weight": weight,
            "eps": 1e-6,
        },
        8 * rows * hidden,
    )
    if model.gdn is not None:
        _, heads, _, dim = model.gdn
        yield case(
            "rms_norm_then_gate",
            lambda seed: {
                "x": random(seed, rows, heads, dim, dtype=BF16),
                "gate": random(seed + 1, rows, heads * dim, dtype=BF16),
                "weight": random(2, dim),
                "eps": 1e-6,
            },
            6 * rows * heads * dim,
        )
    if model.ssd is not None:
        heads, dim, groups, _ = model.ssd
        yield case(
            "gated_rms_norm",
            lambda seed: {
                "x": random(seed, rows, heads * dim, dtype=BF16),
                "gate": random(seed + 1, rows, heads * dim, dtype=BF16),
                "weight": random(2, heads * dim, dtype=BF16),
                "groups": groups,
                "eps": 1e-6,
            },
            6 * rows * heads * dim,
        )
    pairs = model.head_dim // 8
    yield case(
        "rope",
        lambda seed: {
            "x": random(seed, rows, model.heads, model.head_dim, dtype=BF16),
            "cos": random(seed + 1, rows, pairs),
            "sin": random(seed + 2, rows, pairs),
        },
        rows * (4 * model.heads * model.head_dim + 8 * pairs),
    )


def by_index(case: Case) -> Case:
    """Beside it torch's index operations, one gather and one scatter for each kind of bytes."""
    return replace(case, peers={"torch by index": lambda given: case.call(cast(Kernels, checkpoint_files), given)})


def files_case(name: str, model: Model, operation: str, load: Load, *, layer: bool) -> Case:
    """Checkpoint files of as many sequences as `load` has: of slots with all layers, or one layer's snapshots."""
    spec, count = model.memory, len(load.sequences)
    assert spec.recurrent is not None and spec.attention
    page_bytes = math.prod((model.kv_heads, model.attention_layers, 2, PAGE_SIZE, model.head_dim)) * BF16.itemsize
    sizes, hidden = LayerBytes(spec.recurrent, BF16), model.hidden * BF16.itemsize
    file_pages = -(-(hidden + sizes.unit.total * sizes.spec.units) // page_bytes)

    def operands(seed: int) -> dict[str, Any]:
        order = np.random.default_rng(seed).permutation(count * file_pages)
        entries = torch.from_numpy(np.random.default_rng(seed).permutation(count)).to(DEVICE)
        tensors: Sequence[Tensor]
        if layer:
            conv = torch.empty(count, sizes.spec.columns, model.conv_channels, dtype=BF16, device=DEVICE)
            tensors = conv, torch.empty(count, *sizes.spec.state, device=DEVICE)
            spans, distances = list(sizes.spans(0, hidden)), sizes.entry_bytes
        else:
            live = LiveStates(replace(spec, device=torch.device("meta")), count)
            spans, _ = live_spans(spec, live)
            tensors = [
                torch.empty_strided(part.shape, part.stride(), dtype=part.dtype, device=DEVICE) for part in live.tensors
            ]
            distances = [part.stride(0) * part.itemsize for part in tensors]
        return {
            "pool": torch.empty(count * file_pages, page_bytes, dtype=torch.uint8, device=DEVICE),
            "files": torch.from_numpy(order.reshape(count, file_pages)).to(DEVICE),
            "tensors": tensors,
            "entries": None if layer else entries,
            "spans": (spans, distances),
        }

    moved = sum(sizes.entry_bytes) if layer else hidden + spec.recurrent.num_layers * sum(sizes.entry_bytes)
    load = replace(load, name=f"{load.name}, {'a layer' if layer else 'all layers'}")
    return by_index(Case(operation, name, load, operands, 2 * moved * count, takes_batch=False))


def copy_cases(name: str, model: Model) -> Iterator[Case]:
    """Pages copied on write."""
    runs, row_bytes = model.kv_heads * model.attention_layers * 2, model.head_dim * BF16.itemsize

    def pool(num_pages: int, tokens: int) -> Tensor:
        return torch.empty(num_pages, runs, tokens, row_bytes, dtype=torch.uint8, device=DEVICE)

    def pages(seed: int, count: int) -> dict[str, Any]:
        targets, sources = torch.from_numpy(np.random.default_rng(seed).permutation(2 * count)).to(DEVICE).chunk(2)
        return {"pool": pool(2 * count, PAGE_SIZE).flatten(1), "targets": targets, "sources": sources}

    for count in (1, 32):
        moved = 2 * count * runs * PAGE_SIZE * row_bytes
        load = replace(decode(count, 1), name=f"{count} pages")
        yield by_index(Case("copy_pages", name, load, partial(pages, count=count), moved, takes_batch=False))


def moving_cases(name: str, model: Model) -> Iterator[Case]:
    """States and pages from one place to another."""
    for operation in ("load_states", "store_states"):
        for load in (MIXED, *(replace(decode(count, 1), name=f"{count} files") for count in (1, 8))):
            yield files_case(name, model, operation, load, layer=False)
    for count in (8, 128):
        load = replace(decode(count, 1), name=f"{count} snapshots")
        yield files_case(name, model, "store_states", load, layer=True)
    yield from copy_cases(name, model)


def cases(names: Sequence[str]) -> Iterator[Case]:
    """All of them, the checks first."""
    lengths = (2048, 8192, 32768, 131072)
    for name in names:
        model = MODELS[name]
        scan = gdn_case if model.gdn is not None else ssd_case
        for load in (
            MIXED,
            *(decode(count, 2048) for count in CONTEXTS),
            *(prefill(tokens) for tokens in lengths),
            *(prefill(tokens, snapshots=True) for tokens in (8192, 32768)),
        ):
            yield scan(name, model, load)
            yield conv_case(name, model, load)
        for load in (
            MIXED,
            *(decode(count, context) for count, contexts in CONTEXTS.items() for context in contexts),
            *(prefill(tokens) for tokens in lengths[:3]),
            Load("prefill 512 behind 32768", ((32768, 33280),), 0),
        ):
            yield attention_case(name, model, load)
        for load in (MIXED, *(decode(count, 1) for count in CONTEXTS), prefill(8192)):
            yield write_kv_case(name, model, load)
            yield experts_case(name, model, load)
            yield fp8_experts_case(name, model, load)
            yield fp8_linear_case(name, model, load)
            yield code_experts_case(name, model, load, "nvfp4")
            for form in code_forms(model):
                yield code_linear_case(name, model, load, form)
            yield router_case(name, model, load)
            yield from row_cases(name, model, load)
        yield from moving_cases(name, model)


# -- error ------------------------------------------------------------------------------------------------------------


def tensors_of(result: object) -> list[Tensor]:
    if result is None:
        return []
    return list(result) if isinstance(result, tuple) else [result]  # type: ignore[list-item]


def in_float64(value: Any) -> Any:
    if isinstance(value, Fp8Weight):
        return replace(value, dtype=torch.float64).dequantize()
    if isinstance(value, QuantizedWeight):
        return value.dequantize().double()
    return value.to(torch.float64, copy=True) if isinstance(value, Tensor) and value.is_floating_point() else value


def moved_wrongly(case: Case) -> float:
    """The share of bytes that are others than the reference's, of pool and states."""
    ends = []
    for kernels in (cast(Kernels, cuda), cast(Kernels, reference)):
        given = case.operands(0)
        memory = [
            torch.empty(0, dtype=torch.uint8, device=DEVICE).set_(each.untyped_storage())
            for each in (given["pool"], *given["tensors"])
        ]
        generator = torch.Generator(DEVICE).manual_seed(0)
        for each in memory:
            each.random_(generator=generator)
        case.call(kernels, given)()
        ends.append(torch.cat(memory))
    return (ends[0] != ends[1]).float().mean().item()


def error(case: Case) -> float:
    """The largest one of the results and of what is written in place."""
    if "states" in case.operation:
        return moved_wrongly(case)
    given = case.operands(0)
    exact = {name: in_float64(value) for name, value in case.operands(0).items()}
    torch.set_default_device(DEVICE)
    wanted = tensors_of(case.call(reference, exact)())
    torch.set_default_device("cpu")
    found = tensors_of(case.call(cuda, given)())
    places = [name for name in ("states", "keys", "values", "residual") if name in given]
    pairs = [*zip(found, wanted, strict=True), *((given[name], exact[name]) for name in places)]
    if "router" in case.operation:
        pairs = [(found[1].sort(-1).values, wanted[1].sort(-1).values)]
    return max(((one.double() - other).norm() / other.norm().clamp(min=1e-30)).item() for one, other in pairs)


# -- time -------------------------------------------------------------------------------------------------------------


class Timer:
    """Medians of CUDA events around replays of a graph, each behind a write of more than the second-level cache."""

    def __init__(self, repeats: int) -> None:
        self._repeats = repeats
        self._flush = torch.empty(GIB // 4, dtype=torch.int8, device=DEVICE)

    def milliseconds(self, calls: Sequence[Call]) -> float:
        graphs = [self._captured(call) for call in calls]
        times = []
        for turn in range(self._repeats):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            self._flush.zero_()
            begin.record()
            graphs[turn % len(graphs)].replay()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end))
        return statistics.median(times)

    def _captured(self, call: Call) -> torch.cuda.CUDAGraph:
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            call()
            call()
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            call()
        graph.replay()
        torch.cuda.synchronize()
        return graph


@dataclass(frozen=True)
class Peaks:
    """Of this GPU in this run: bytes a second, of a copy (read and written both counted) or of reading alone, whichever
    is more, and products a second."""

    bandwidth: float
    flops: float

    @staticmethod
    def measured(timer: Timer) -> "Peaks":
        one, other = (torch.zeros(4 * GIB, dtype=torch.int8, device=DEVICE) for _ in range(2))
        copy = timer.milliseconds([lambda: other.copy_(one)])
        numbers = one.view(torch.float32)
        read = timer.milliseconds([lambda: numbers.sum()])
        a, b = (random(seed, 8192, 8192, dtype=BF16) for seed in (1, 2))
        product = timer.milliseconds([lambda: a @ b])
        return Peaks(max(8 * GIB / copy, 4 * GIB / read) * 1e3, 2 * 8192**3 / product * 1e3)


@dataclass(frozen=True)
class Timing:
    """One case. `of_floor`: floor / time; `bound`: what makes the floor."""

    operation: str
    model: str
    load: str
    microseconds: float
    floor_microseconds: float
    of_floor: float
    bound: str
    peers: dict[str, float]


def timing(case: Case, timer: Timer, peaks: Peaks) -> Timing:
    seeds = range(1 if case.num_bytes > GIB else 3)
    given = [case.operands(seed) for seed in seeds]
    microseconds = 1e3 * timer.milliseconds([case.call(cuda, each) for each in given])
    peers = {name: 1e3 * timer.milliseconds([make(given[0])]) for name, make in case.peers.items()}
    by_bytes, by_flops = 1e6 * case.num_bytes / peaks.bandwidth, 1e6 * case.flops / peaks.flops
    floor = max(by_bytes, by_flops)
    return Timing(
        case.label, case.model, case.load.name, microseconds, floor, floor / microseconds,
        "bytes" if by_bytes >= by_flops else "products", peers,
    )  # fmt: skip


def plot(timings: Sequence[Timing], path: Path) -> None:
    """How near each kernel comes to its floor, a picture a model."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    for model in dict.fromkeys(each.model for each in timings):
        own = [each for each in timings if each.model == model]
        figure, axes = pyplot.subplots(figsize=(8, 1 + 0.2 * len(own)), layout="constrained")
        colours = ["tab:blue" if each.bound == "bytes" else "tab:orange" for each in own]
        axes.barh([f"{each.operation}, {each.load}" for each in own], [each.of_floor for each in own], color=colours)
        axes.axvline(1.0, color="black", linewidth=0.8)
        axes.invert_yaxis()
        axes.set_xlabel("floor / time (blue: memory is the floor, orange: products)")
        axes.set_title(model)
        figure.savefig(path.with_name(f"{path.name}-{model}.svg"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", help="operations")
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--out", type=Path, default=Path("build/gpu-kernels"))
    chosen = parser.parse_args()
    timer = Timer(chosen.repeats)
    peaks = Peaks.measured(timer)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, triton {triton.__version__}")
    print(f"memory {peaks.bandwidth / 1e12:.2f} TB/s, product {peaks.flops / 1e12:.0f} TFLOP/s", flush=True)
    errors: dict[str, float] = {}
    timings: list[Timing] = []
    for case in cases(chosen.models):
        if chosen.only and case.operation not in chosen.only:
            continue
        if case.load.sequences is MIXED.sequences:
            errors[f"{case.model} {case.label}"] = error(case)
            print(f"{case.label:17} error {errors[f'{case.model} {case.label}']:.1e} {case.model}", flush=True)
            continue
        timings.append(timing(case, timer, peaks))
        each = timings[-1]
        beside = "".join(f"  {name} {time / each.microseconds:.2f}x" for name, time in each.peers.items())
        print(
            f"{each.operation:17} {each.load:28} {each.microseconds:10.1f} us  {each.of_floor:5.0%} of floor"
            f" ({each.bound}){beside}", flush=True,
        )  # fmt: skip
        torch.cuda.empty_cache()
    machine = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "triton": triton.__version__}
    chosen.out.parent.mkdir(parents=True, exist_ok=True)
    results = {
        "machine": machine, "peaks": asdict(peaks), "errors": errors, "timings": [asdict(each) for each in timings]
    }  # fmt: skip
    chosen.out.with_name(f"{chosen.out.name}.json").write_text(json.dumps(results, indent=1))
    plot(timings, chosen.out)


if __name__ == "__main__":
    main()
