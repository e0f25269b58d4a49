"""Variants of the CUDA backend's kernels that models of usual sizes ask for, and scans of the tests' small models, of
which ptxas makes wrong code more easily: what `test_cuda_compiles` compiles."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import import_module
from itertools import chain, product
from types import MappingProxyType, ModuleType
from typing import Any, NamedTuple

import torch

from cairn.kernels.attention_rule import FULL, AttentionRule
from cairn.kernels.cuda.device import power_of_2
from cairn.kernels.quantized import QuantizedWeight

Configuration = tuple[Any, dict[str, str], dict[str, object], dict[str, int]]
"""A kernel, the types of its arguments, its constants, and how it is launched."""

DTYPES = ((torch.bfloat16, "*bf16"), (torch.float32, "*fp32"))

SCANS = (("bf16", "*bf16"), ("tf32x3", "*fp32"), ("ieee", "*fp32"))

TENSORS = frozenset((
    "q", "k", "v", "x", "y", "b", "c", "w", "u", "beta", "dt", "gate", "residual", "weight", "bias", "inner",
    "terms", "out", "keys", "values", "sinks", "parts", "part_weights", "states", "snapshots", "chunk_states",
))  # fmt: skip
"""Of the model's dtype, unless a call of `signature` says otherwise."""

FLOAT32 = frozenset((
    "a", "d", "dt_bias", "totals", "scales", "steps", "logits", "correction", "topk_weights", "cos", "sin",
    "zeros", "minimums", "factors", "minimum_factors", "fifths",
))  # fmt: skip

TABLES = frozenset((
    "table", "slots", "seq_starts", "seq_lens", "cu_seqlens", "kv_write_from", "row_seqs", "chunk_seqs",
    "chunk_rows", "seq_chunks", "seq_snapshots", "snapshot_seqs", "snapshot_offsets", "order", "starts",
    "page_indptr", "page_indices",
))  # fmt: skip


def signature(kernel: Any, model: str, **others: str) -> dict[str, str]:
    """Types of a kernel's arguments: `model` that of tensors, `others` by name those that are different."""

    def type_of(name: str) -> str:
        if name in TENSORS:
            return model
        return "*fp32" if name in FLOAT32 else "*i32" if name in TABLES else "*i64" if name == "topk_ids" else "i32"

    return {name: others.get(name) or type_of(name) for name in kernel.arg_names if name.islower()}


def split(tile: dict[str, Any]) -> tuple[dict[str, object], dict[str, int]]:
    """Constants and options of a tile."""
    return {k: v for k, v in tile.items() if k.isupper()}, {k: v for k, v in tile.items() if not k.isupper()}


RULES: tuple[tuple[AttentionRule, bool, tuple[tuple[int, int, int], ...]], ...] = (
    (FULL, False, ((32, 8, 64), (14, 2, 64), (32, 8, 128), (32, 2, 128), (16, 2, 256), (16, 4, 256))),
    (AttentionRule(window=128), True, ((64, 8, 64),)),
    (AttentionRule(window=1024, scale=1.0), False, ((16, 8, 256),)),
    (AttentionRule(scale=1.0), False, ((32, 4, 512), (16, 1, 512))),
    (AttentionRule(chunk=8192), False, ((40, 8, 128),)),
    (AttentionRule(softcap=50.0, scale=0.0625), False, ((8, 4, 256),)),
)
"""What attention does, whether with sinks, and in models of which heads: gpt-oss's, Gemma's and Llama 4's besides."""


def attention(module: Any) -> Iterator[Configuration]:
    parts = {"parts": "*fp32", "part_weights": "*fp32"}
    for dtype, model in DTYPES:
        for rule, has_sinks, shapes in RULES:
            sinks = {"sinks": "*fp32"} if has_sinks else {}
            for shape, page_size in product(shapes, (16,) if rule.chunk or rule.softcap else (16, 64)):
                tile = module.prefill_tile(dtype, *shape, page_size, rule, has_sinks)
                yield module._prefill_kernel, signature(module._prefill_kernel, model, **sinks), *tile
                for is_split in (False, True):
                    tile = module.decode_tile(dtype, *shape, page_size, is_split, rule, has_sinks)
                    others = sinks | (parts if is_split else {})
                    yield module._decode_kernel, signature(module._decode_kernel, model, **others), *tile
            for shape, block in product(shapes, module._COMBINED):
                constants, _ = module.decode_tile(dtype, *shape, 16, True, rule)
                constants = {name: constants[name] for name in ("WINDOW", "CHUNK", "DIM", "DIM_BLOCK", "LEAST")} | {
                    "KEY_BLOCK": constants["BLOCK"],
                    "BLOCK": block,
                }
                types = signature(module._combine_kernel, model, **parts)
                yield module._combine_kernel, types, constants, {"num_warps": 4}


def flashinfer_attention(module: Any) -> Iterator[Configuration]:
    kernel = module._page_indices_kernel
    yield kernel, signature(kernel, ""), {"BLOCK": module._INDICES}, {"num_warps": 4}


def write_kv(module: Any) -> Iterator[Configuration]:
    for dtype, dim, page_size in ((x, d, p) for _, x in DTYPES for d in (64, 128, 256, 512) for p in (16, 64)):
        types, options = signature(module._write_kv_kernel, dtype), {"num_warps": module.NUM_WARPS}
        yield module._write_kv_kernel, types, dict(module._constants(dim, page_size)), options


def checkpoint_files(module: Any) -> Iterator[Configuration]:
    """Of files and pages that begin at multiples of 16 bytes; of fewer, which no usual model has, some. A layer
    whose states are convolution windows alone may have spans as short as a tile's rows are then."""
    files, pages, options = module._files_kernel, module._pages_kernel, {"num_warps": module._NUM_WARPS}
    numbers = dict.fromkeys(("files", "entries", "targets", "sources"), "*i64")
    tables = {"tile_tensors": "*i32", "pieces": "*i32"}
    ways = ((False, True), (True, True), (True, False))
    for alignment, word in ((16, "*i64"), (8, "*i64"), (4, "*i32"), (2, "*i16"), (1, "*u8")):
        words = dict.fromkeys(("pool", "first", "second", "third"), word)
        types, aligned = {**numbers, **tables, **words}, {"ALIGNED": alignment == 16}
        for store, chosen in ways if alignment == 16 else ways[:1]:
            variant = {"STORE": store, "CHOSEN": chosen, **aligned, **module._tile(1 << 20, alignment)}
            yield files, signature(files, "", **types), variant, options
        for span_bytes in (128, 256) if alignment == 16 else ():
            variant = {"STORE": True, "CHOSEN": False, **aligned, **module._tile(span_bytes, alignment)}
            yield files, signature(files, "", **types), variant, options
        tile = module._pages_tile(98_304 + alignment % 16)
        yield pages, signature(pages, "", **types), {**aligned, **tile}, options
    heads, states = module._heads_kernel, {"tensor": "*fp32", "heads": "*i32", "pool_halves": "*i16"}
    for half, head in ((True, (1, 64 * 128)), (False, (64, 128)), (False, (128, 256))):
        types = {**numbers, **states, "pool": "*i16" if half else "*i8"}
        for store, chosen in ways:
            variant = {"STORE": store, "CHOSEN": chosen, "HALF": half, **module._heads_tile(*head)}
            yield heads, signature(heads, "", **types), variant, options


def conv(module: Any) -> Iterator[Configuration]:
    for _, model in DTYPES:
        for width in (3, 4):
            taps = {"W": width, "TAPS": power_of_2(width - 1), "CHANNELS": module._DECODE_CHANNELS}
            tile = {"W": width, "ROWS": module._ROWS, "CHANNELS": module._CHANNELS}
            wide = {"weight": "*fp32", "bias": "*fp32"}
            for has_bias in (False, True):
                variant = {"HAS_BIAS": has_bias, "SILU": width == 4}
                types = signature(module._decode_kernel, model, **wide)
                yield module._decode_kernel, types, {**variant, **taps}, {"num_warps": 2}
                types = signature(module._tokens_kernel, model, **wide)
                yield module._tokens_kernel, types, {**variant, **taps}, {"num_warps": 2}
                types = signature(module._prefill_kernel, model, **wide)
                yield module._prefill_kernel, types, {**variant, **tile}, {"num_warps": 4}
            yield module._update_states_kernel, signature(module._update_states_kernel, model), taps, {"num_warps": 2}


STATES = {"states": "*fp32", "snapshots": "*fp32", "limit_low": "fp32", "limit_high": "fp32", "beta_scale": "fp32"}
SMALL_STATES = tuple({**STATES, "states": states, "snapshots": states} for states in ("*fp16", "*bf16"))
"""Those that run in fewer bits, of bfloat16 models."""

SSD_MODELS = ((64, 8, 64, 128), (48, 48, 64, 128), (24, 24, 64, 256), (128, 16, 64, 64))
"""Heads, heads of a group, head dim and state size."""

GDN_MODELS = ((32, 2, 128, 128), (16, 1, 64, 64), (30, 1, 96, 192))
"""Value heads, value heads of a key head, state size and head dim."""


def ssd(module: Any) -> Iterator[Configuration]:
    for precision, model in SCANS:
        small = ((4, 2, 8, 32), (4, 2, 16, 16)) if precision == "bf16" else ()
        for heads, per_group, dim, size in (*SSD_MODELS[:: 2 if precision == "ieee" else 1], *small):
            shape: dict[str, object] = {"H": heads, "PER_GROUP": per_group, "P": dim, "S": size}
            for kernel, sizes, tile in (
                (module._steps_kernel, {"H": heads}, module._steps_tile(heads)),
                (module._states_kernel, shape, module._states_tile(dim, size, precision)),
                (module._snapshots_kernel, shape, module._snapshots_tile(dim, size, precision)),
                (module._outputs_kernel, shape, module._outputs_tile(dim, size, per_group, precision)),
            ):
                constants, options = split(tile)
                yield kernel, signature(kernel, model, **STATES), {**sizes, **constants}, options
                for states in SMALL_STATES if precision == "bf16" and "snapshots" in kernel.arg_names else ():
                    yield kernel, signature(kernel, model, **states), {**sizes, **constants}, options


def ssd_decode(module: Any) -> Iterator[Configuration]:
    for kernel in (module._decode_kernel, module._tokens_kernel):
        for _, model in DTYPES:
            for heads, per_group, dim, size in SSD_MODELS:
                constants, options = split(module.decode_tile(dim, size))
                shape = {"H": heads, "PER_GROUP": per_group, "P": dim, "S": size}
                yield kernel, signature(kernel, model, **STATES), {**shape, **constants}, options
                for states in SMALL_STATES if model == "*bf16" else ():
                    yield kernel, signature(kernel, model, **states), {**shape, **constants}, options


def gdn_decode(module: Any) -> Iterator[Configuration]:
    for kernel in (module._decode_kernel, module._tokens_kernel):
        for _, model in DTYPES:
            for heads, per_key, size, dim in GDN_MODELS:
                constants, options = split(module.decode_tile(size, dim))
                shape = {"H": heads, "PER_KEY": per_key, "S": size, "P": dim}
                yield kernel, signature(kernel, model, **STATES), {**shape, **constants}, options
                for states in SMALL_STATES if model == "*bf16" else ():
                    yield kernel, signature(kernel, model, **states), {**shape, **constants}, options


def gdn(module: Any) -> Iterator[Configuration]:
    for precision, model in SCANS:
        small = ((4, 2, 32, 8), (4, 2, 16, 16)) if precision == "bf16" else ()
        for heads, per_key, size, dim in (*GDN_MODELS[: 1 if precision == "ieee" else None], *small):
            shape: dict[str, object] = {"H": heads, "PER_KEY": per_key, "S": size, "P": dim}
            for kernel, tile in (
                (module._chunks_kernel, module._chunks_tile(size, dim, precision)),
                (module._states_kernel, module._states_tile(size, dim, precision)),
                (module._snapshots_kernel, module._snapshots_tile(size, dim, precision)),
                (module._outputs_kernel, module._outputs_tile(size, dim, precision)),
            ):
                constants, options = split(tile)
                yield kernel, signature(kernel, model, **STATES), {**shape, **constants}, options
                for states in SMALL_STATES if precision == "bf16" and "snapshots" in kernel.arg_names else ():
                    yield kernel, signature(kernel, model, **states), {**shape, **constants}, options


def elementwise(module: Any) -> Iterator[Configuration]:
    kernel, rope, options = module._activation_kernel, module._rope_kernel, {"num_warps": 4}
    softcap = module._softcap_kernel
    for _, model in DTYPES:
        for width in (128, 1024, 4096):
            for function in ("silu", "gelu", "sigmoid", "sigmoid_of_one", "squared_relu"):
                for y in {model, "*fp32"} if function == "silu" else {model}:
                    constants = {"FUNCTION": function, **module._tile(width)}
                    yield kernel, signature(kernel, model, y=y), constants, options
            types = signature(softcap, model, x="*fp32", out="*fp32", cap="fp32")
            yield softcap, types, dict(module._tile(width)), options
        for pairs, width in ((32, 64), (16, 128), (64, 128), (32, 256), (128, 256)):
            yield rope, signature(rope, model), dict(module._rope_tile(pairs, width)), options


def norms(module: Any) -> Iterator[Configuration]:
    for _, model in DTYPES:
        for weight in {model, "*fp32"}:
            for width in (64, 128, 256, 512, 1024, 2048, 4096, 8192):
                tile, options = module._tile(width)
                others = {"weight": weight, "eps": "fp32", "parts": "i32"}
                for kernel in (module._rms_norm_kernel, module._add_rms_norm_kernel):
                    yield kernel, signature(kernel, model, **others), dict(tile), options
                types = signature(module._gated_norm_kernel, model, x="*fp32", **others)
                for first in (False, True):
                    yield module._gated_norm_kernel, types, {"GATE_FIRST": first, **tile}, options


def routers(module: Any) -> Iterator[Configuration]:
    softmax, sigmoid = module._softmax_kernel, module._sigmoid_kernel
    for experts, top_k in ((128, 6), (128, 8), (256, 8), (512, 10), (1024, 22)):
        options = {"num_warps": module._num_warps(experts)}
        for normalize in (False, True):
            constants: dict[str, object] = {"TOP_K": top_k, "NORMALIZE": normalize, "CHOSEN": power_of_2(top_k)}
            yield softmax, signature(softmax, ""), {**constants, "EXPERTS": power_of_2(experts, 32)}, options
            for groups, top_groups in ((1, 1), (8, 4)):
                sizes = {"GROUPS": groups, "PER_GROUP": experts // groups}
                constants |= {"TOP_GROUPS": top_groups, "GROUPED": groups > 1}
                yield sigmoid, signature(sigmoid, "", scale="fp32", epsilon="fp32"), {**constants, **sizes}, options


FP8 = {"weight": "*u8"}
"""Types of a kernel's arguments that are others where weights are in FP8."""


BF16, F16, U8 = torch.bfloat16, torch.float16, torch.uint8

FACTORS = {"factors": torch.float32}

K_QUANT = {"scales": U8, "minimums": U8, "minimum_factors": torch.float32, **FACTORS, "group": 32}

CODES: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "AWQ": {"scales": F16, "zeros": U8, "group": 128},
        "W4A16": {"scales": BF16, "zero": 8, "group": 32},
        "W8A8": {"bits": 8, "scales": BF16, "zero": 128, "group": 0},
        "GPTQ, 8 bits": {"bits": 8, "scales": F16, "zeros": U8, "group": 128},
        "NVFP4": {"numbers": "e2m1", "scales": torch.float8_e4m3fn, "group": 16, **FACTORS},
        "NVFP4, divided": {
            "numbers": "e2m1",
            "scales": torch.float8_e4m3fn,
            "group": 16,
            "divides": True,
            **FACTORS,
        },
        "MXFP4": {"numbers": "e2m1", "scales": torch.float8_e8m0fnu, "group": 32},
        "Q8_0": {"bits": 8, "scales": F16, "zero": 128, "group": 32},
        "Q4_K": K_QUANT,
        "Q5_K": {"bits": 5, **K_QUANT},
        "Q6_K": {"bits": 8, "scales": torch.int8, "zero": 32, "group": 16, **FACTORS},
    }
)
"""Published forms: dtypes of tensors, and other fields of a `QuantizedWeight`. `group`: 0 for a row."""


def code_weight(form: str, *shape: int) -> QuantizedWeight:
    """Without memory. K-quants have a factor for 256 inputs, NVFP4 for a row."""
    fields = dict(CODES[form])
    *rows, inputs = shape
    groups = 1 if not fields["group"] else inputs // fields["group"]
    del fields["group"]
    widths = {"factors": 1 if "numbers" in fields else inputs // 256, "minimum_factors": inputs // 256}
    tensors = {
        name: torch.empty(*rows, widths.get(name, groups), dtype=dtype, device="meta")
        for name, dtype in fields.items()
        if isinstance(dtype, torch.dtype)
    }
    if fields.get("bits") == 5:
        tensors["fifths"] = torch.empty(*rows, inputs // 8, dtype=U8, device="meta")
    codes = torch.empty(*rows, inputs if fields.get("bits") == 8 else inputs // 2, dtype=U8, device="meta")
    return QuantizedWeight(codes, dtype=BF16, **{**fields, **tensors})


def code_variant(form: str) -> tuple[dict[str, str], dict[str, Any], dict[str, int]]:
    """Types of a kernel's arguments, its constants, and how it is compiled."""
    weight = code_weight(form, 8, 2048)
    names = ("weight", "scales", "zeros", "minimums", "factors", "minimum_factors", "fifths")
    known = {F16: "*fp16", BF16: "*bf16", torch.float32: "*fp32", U8: "*u8", torch.int8: "*i8"}
    operands = import_module("cairn.kernels.cuda.codes").code_operands(weight)
    variant = import_module("cairn.kernels.cuda.fp8").form_of(weight)
    types = {name: known[each.dtype] for name, each in zip(names, operands, strict=True)}
    return types, *split(variant)


def fp8(module: Any) -> Iterator[Configuration]:
    few, many = module._few_rows_kernel, module._many_rows_kernel
    for form in CODES:
        types, constants, apart = code_variant(form)
        for dtype, model in DTYPES[: 2 if form in ("NVFP4", "Q5_K") else 1]:
            tile, options = module._few_rows_tile(2048)
            yield few, signature(few, model, **types), {**constants, **tile}, {**options, **apart}
            expansion = {"CODES": constants["CODES"], **module._expansion_tile(2048)}
            types_of_expansion = signature(module._expand_kernel, model, **types)
            yield module._expand_kernel, types_of_expansion, expansion, {"num_warps": 4, **apart}
            cores = {"TENSOR_CORES": dtype == torch.bfloat16}
            for rows, outputs in ((16, 4096), (16, 8192), (64, 4096), (128, 4096)):
                tile, options = module._many_rows_tile(rows, outputs, 2048, dtype)
                yield many, signature(many, model, **types), {**constants, **cores, **tile}, {**options, **apart}
    for dtype, model in DTYPES:
        for blocked in (False, True):
            form = fp8_form(blocked)
            for width in (512, 2048):
                tile, options = module._few_rows_tile(width)
                yield few, signature(few, model, **FP8), {**form, **tile}, options
            cores = {"TENSOR_CORES": dtype == torch.bfloat16}
            for rows, outputs in ((16, 4096), (16, 8192), (64, 4096), (128, 4096)):
                tile, options = module._many_rows_tile(rows, outputs, 2048, dtype)
                yield many, signature(many, model, **FP8), {**form, **cores, **tile}, options


def fp8_form(blocked: bool) -> dict[str, object]:
    """As of a weight in FP8, for the GPU that `limits` tells of."""
    module = import_module("cairn.kernels.cuda.fp8")
    return {"FP8": "native" if module.limits().has_fp8 else "bytes", "BLOCKED": blocked, "CODES": None}


def expert_order(module: Any) -> Iterator[Configuration]:
    kernel, tile = module._sort_kernel, {"ROWS": module._SORT_ROWS, "COLUMNS": module._SORT_COLUMNS}
    yield kernel, signature(kernel, ""), tile, {"num_warps": 4}


EXPERT_CODES = ("NVFP4", "Q4_K", "AWQ")


def experts(module: Any) -> Iterator[Configuration]:
    for (_, model), (_, top_k, width, _, _) in product(DTYPES, EXPERTS):
        token = {"TOP_K": top_k, "CHOSEN": power_of_2(top_k), "COLUMNS": module._sum_columns(width)}
        yield module._sum_kernel, signature(module._sum_kernel, model), token, {"num_warps": 4}
    yield from expert_products(module, block_products)


def expert_gemv(module: Any) -> Iterator[Configuration]:
    yield from expert_products(module, row_products)


EXPERTS = ((256, 8, 2048, 512, True), (128, 6, 2688, 1856, False))
"""How many there are, and of a token; their width and inner one, and whether they have gates."""

Products = Iterator[tuple[Any, dict[str, object], dict[str, int]]]


class Form(NamedTuple):
    """Of experts: whether they have gates, whose scales are of blocks, and which are gpt-oss's or Gemma 4's."""

    gated: bool = True
    blocked: bool = False
    clamped: bool = False
    gelu: bool = False

    @property
    def activation(self) -> dict[str, object]:
        return {"GATED": self.gated, "CLAMPED": self.clamped, "GELU": self.gelu}


def expert_products(module: Any, products: Callable[..., Products]) -> Iterator[Configuration]:
    plain = {"FP8": "none", "BLOCKED": False, "CODES": None}
    scalars = {"alpha": "fp32", "limit": "fp32"}
    for dtype, model in DTYPES:
        for *sizes, gated in EXPERTS:
            variants = [({}, plain, {}), (FP8, fp8_form(gated), {})]
            variants += [code_variant(form) for form in EXPERT_CODES] if dtype == torch.bfloat16 else []
            for types, weights, apart in variants:
                form = Form(gated, bool(weights["BLOCKED"]))
                for kernel, constants, options in products(module, dtype, sizes, form):
                    types = {**types, **scalars}
                    yield kernel, signature(kernel, model, **types), {**weights, **constants}, {**options, **apart}
        # gpt-oss's, and Gemma 4's.
        for kernel, constants, options in chain(
            products(module, dtype, (32, 4, 2880, 2880), Form(clamped=True)),
            products(module, dtype, (128, 8, 2816, 704), Form(gelu=True)),
        ):
            yield kernel, signature(kernel, model, **scalars), {**plain, **constants}, options


def block_products(module: Any, dtype: torch.dtype, sizes: Sequence[int], form: Form) -> Products:
    num_experts, _, width, inner_width = sizes
    cores = {"TENSOR_CORES": dtype == torch.bfloat16, "EXPERTS": power_of_2(num_experts)}
    for rows in (16, 32, 64, 128) if dtype == torch.bfloat16 else (16, 32):
        tile, options = module._tile(rows, inner_width, width, dtype, gated=form.gated)
        yield module._up_kernel, {**form.activation, **cores, **tile}, options
        tile, options = module._tile(rows, width, inner_width, dtype, gated=False)
        yield module._down_kernel, {"BIASED": form.clamped, **cores, **tile}, options


def row_products(module: Any, dtype: torch.dtype, sizes: Sequence[int], form: Form) -> Products:
    _, top_k, width, inner_width = sizes
    tile, options = module._up_tile(width, gated=form.gated, blocked=form.blocked)
    yield module._up_gemv_kernel, {**form.activation, **tile}, options
    tile, options = module._down_tile(inner_width, top_k, blocked=form.blocked)
    yield module._down_gemv_kernel, {"TOP_K": top_k, "BIASED": form.clamped, **tile}, options


VOCABULARIES = (32_000, 131_072, 151_936, 248_320, 262_144)
"""Llama 2's, Nemotron's, Qwen's, and Gemma's, which has tiles for each of 64 programs."""

SAMPLED = {
    **dict.fromkeys(("processed", "tile_maxima", "block_maxima", "thresholds", "temperatures", "least_logs"), "*fp32"),
    **dict.fromkeys(("repetition", "frequency", "presence", "biases"), "*fp32"),
    **dict.fromkeys(("top_ps", "uniforms"), "*fp64"),
    **dict.fromkeys(("tile_weights", "candidates", "histograms"), "*i64"),
    **dict.fromkeys(("sources", "kinds", "top_ks", "counts", "chosen", "tile_equals", "rows", "masks"), "*i32"),
    **dict.fromkeys(("mask_numbers", "live", "steps"), "*i32"),
}
"""Types of the sampler's arguments."""


def sample(module: Any) -> Iterator[Configuration]:
    for vocab_size in VOCABULARIES:
        tile = module.tile_sizes(vocab_size)
        options = {"num_warps": module.num_warps(tile["TILE"]), "enable_fp_fusion": False}
        for kernel, constants, num_warps in (
            *((module._summarize_kernel, {"COPIED": is_copied}, None) for is_copied in (False, True)),
            (module._weigh_kernel, {}, None),
            (module._best_kernel, {"CHOSEN": module.num_chosen(vocab_size)}, module.BEST_WARPS),
            *((module._histogram_kernel, {"LEVEL": level}, None) for level in range(3)),
            (module._filter_kernel, {}, None),
            *((module._pick_kernel, {"FILTERED": is_filtered}, 8) for is_filtered in (False, True)),
        ):
            types = signature(kernel, "", **SAMPLED, tokens="*i64")
            yield kernel, types, {**constants, **tile}, {**options, "num_warps": num_warps or options["num_warps"]}


def logprobs(module: Any) -> Iterator[Configuration]:
    more = {"rows": "*i64", "tokens": "*i64", "listed": "*i64", "tile_sums": "*fp32", "values": "*fp32"}
    types = {**SAMPLED, **more, **dict.fromkeys(("tile_ranks", "token_ids", "ranks"), "*i32")}
    for vocab_size in VOCABULARIES:
        tile, chosen = module.tile_sizes(vocab_size), {"CHOSEN": module.num_chosen(vocab_size)}
        for kernel, constants, num_warps in (
            (module._sum_tiles_kernel, tile, module.num_warps(tile["TILE"])),
            (module._report_kernel, {**chosen, **tile}, module.BEST_WARPS),
        ):
            yield kernel, signature(kernel, "", **types), constants, {"num_warps": num_warps}


def processors(module: Any) -> Iterator[Configuration]:
    sampling = import_module("cairn.kernels.cuda.sample")
    types = {**SAMPLED, "tokens": "*i32"}
    for kernel in (module._clear_counts_kernel, module._count_tokens_kernel):
        yield kernel, signature(kernel, "", **types), {"TILE": module.COUNT_TILE}, {"num_warps": 4}
    for vocab_size in VOCABULARIES:
        tile = sampling.tile_sizes(vocab_size)
        for kernel, constants in (
            (module._copy_kernel, tile),
            (module._edit_kernel, {"LIST": module.LIST_TILE, **tile}),
        ):
            yield kernel, signature(kernel, "", **types), constants, {"num_warps": sampling.num_warps(tile["TILE"])}


def exact_products(module: Any) -> Iterator[Configuration]:
    kernel = module._linear_kernel
    for out_width, width in ((4096, 2688), (64, 2048)):
        for has_bias in (False, True):
            tile, options = module._tile(out_width, width)
            yield kernel, signature(kernel, "*fp32"), {"HAS_BIAS": has_bias, **tile}, options


MODULES = (
    *(attention, checkpoint_files, conv, elementwise, exact_products, expert_gemv, expert_order, experts),
    *(flashinfer_attention, fp8, gdn, gdn_decode, logprobs, norms, processors, routers, sample),
    *(ssd, ssd_decode, write_kv),
)
CONFIGURATIONS: Mapping[str, Callable[[Any], Iterator[Configuration]]] = MappingProxyType(
    {each.__name__: each for each in MODULES}
)
"""By module of the backend, and of `cuda_exact` with that before its name."""


def module_of(name: str) -> ModuleType:
    """The package has a function under the name of some modules."""
    package, name = ("cuda_exact", name.removeprefix("exact_")) if name.startswith("exact_") else ("cuda", name)
    return import_module(f"cairn.kernels.{package}.{name}")


def configurations(name: str) -> Iterator[Configuration]:
    """A module's."""
    return CONFIGURATIONS[name](module_of(name))
