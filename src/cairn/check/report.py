"""`cairn check`: account for a checkpoint and say what serving it takes, from config.json and tensor headers alone."""

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType

import torch
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from cairn.cache.layout import CacheLayout
from cairn.engine.contract import EngineConfig
from cairn.engine.decode_capture import graph_sizes
from cairn.engine.memory_plan import (
    MOST_SEQS_ON_GPU,
    MemoryPlan,
    count_logits,
    count_slot,
    divide_memory,
    guess_graph_bytes,
    guess_process_bytes,
    least_pages,
)
from cairn.errors import ConfigError
from cairn.models.decoder_builder import load_kernels
from cairn.models.decoder_config import MADE_AT_LOAD, AskedQuantization
from cairn.models.qwen3_5_vision import PREFIX, read_vision, tensors, tower_bytes
from cairn.models.registry import Kept, OpenModel, open_model
from cairn.models.state_dtypes import AskedStateDtype
from cairn.models.weights.gguf.codes import CODED
from cairn.models.weights.loader import REMEDY, Accounting, DType, account
from cairn.models.weights.tensor_headers import TensorHeader, read_headers

MAX_PROBLEMS_SHOWN = 20

_TOKENS_IN_FLIGHT: int = 2 * EngineConfig.model_fields["max_num_batched_tokens"].default
"""Of two steps, which may be out at a time."""

_NUM_SEQS = 64
"""Unless asked for others."""

GPU_MEMORY: Mapping[str, int] = MappingProxyType(
    {
        "a10": 23028 << 20,
        "a100": 40960 << 20,
        "a100-80gb": 81920 << 20,
        "b200": 183359 << 20,
        "h100": 81559 << 20,
        "h200": 143771 << 20,
        "l4": 23034 << 20,
        "l40s": 46068 << 20,
        "rtx3090": 24576 << 20,
        "rtx4090": 24564 << 20,
    }
)
"""Bytes of memory by the name of the GPU, as nvidia-smi tells them: the driver keeps some hundred MiB to itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckSettings:
    """What the model would be served with. `min_cacheable_tokens` and `min_shared_tokens` are the placement policy's:
    the shortest prompt, and the shortest beginning shared by two prompts, that can be hit. `gpu_memory_bytes`: of the
    GPU that is to serve it, or of the GPU of each of `tensor_parallel_size` ranks, of which `gpu_memory_utilization`
    may be used; then the pool is what is left of that. `available_memory`: of this machine, where that is to serve it
    and tells. `max_num_seqs`: None for 64, and on a GPU for what the server
    would take. `mm_encoder_cache_bytes`: of encoded images, where the model reads any."""

    dtype: DType = "auto"
    quantization: AskedQuantization | None = None
    block_size: int = 16
    checkpoint_dtype: str = "auto"
    mamba_ssm_cache_dtype: AskedStateDtype = "auto"
    kv_cache_memory_bytes: int = 1 << 30
    max_model_len: int | None = None
    max_num_seqs: int | None = None
    min_cacheable_tokens: int = 1
    min_shared_tokens: int = 64
    gpu_memory_bytes: int | None = None
    gpu_memory_utilization: float = 0.9
    mm_encoder_cache_bytes: int = 256 << 20
    tensor_parallel_size: int = 1
    available_memory: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckReport:
    """The report. Sizes in bytes, on one rank; of `plan` the pool is at most 0 where a GPU has no room for one.
    `packed_dtype`: of the weights of products. `has_head`: whether the checkpoint's head is served, and drafts."""

    folder: Path
    model_type: str
    layers: dict[str, int]
    settings: CheckSettings
    accounting: Accounting
    num_tensors: int
    num_files: int
    stored_dtypes: dict[str, int]
    parameters: int
    packed_dtype: str
    plan: MemoryPlan
    dtype: str
    max_model_len: int
    layout: CacheLayout
    has_head: bool = False

    @property
    def ok(self) -> bool:
        """Whether every tensor is there, known and of the right shape and dtype, and the model fits the GPU."""
        return not self.accounting.problems and self.fits_gpu

    @property
    def weight_bytes(self) -> int:
        """As they are served, with the vision tower's."""
        return self.plan.weights

    @property
    def fits_gpu(self) -> bool:
        """Whether a sequence of `max_model_len` tokens has room in what the GPU has left, and the server takes so small
        a pool. True without a GPU."""
        return not self.plan.on_gpu or max(self.pages_for_longest, least_pages(self.layout)) <= self.num_pages

    @property
    def checkpoint_tokens(self) -> float:
        """How many tokens of keys and values one checkpoint costs; 0 for a model without attention."""
        per_token = self.layout.lasting_bytes_per_token
        return self.layout.pages_per_checkpoint * self.layout.page_bytes / per_token if per_token else 0.0

    @property
    def pages_for_longest(self) -> int:
        """Pages of one sequence of `max_model_len` tokens with one checkpoint."""
        pages = self.layout.running_pages_for(self.max_model_len, _TOKENS_IN_FLIGHT)
        return pages + self.layout.pages_per_checkpoint

    @property
    def num_pages(self) -> int:
        """Pages of the pool."""
        return max(0, self.plan.pool) // self.layout.page_bytes


def check(
    folder: Path, settings: CheckSettings | None = None, headers: Mapping[str, TensorHeader] | None = None
) -> CheckReport:
    """Read config.json and every tensor's header; compare names, shapes and dtypes with what the config calls for.

    `headers`: of a checkpoint whose tensors are not in the folder.
    Raises ModelError when the folder, the config or a file cannot be read at all; tensors that are missing, unknown,
    misshapen or of another dtype are listed in the report.
    """
    settings = settings or CheckSettings()
    keeps: Kept = "codes" if settings.gpu_memory_bytes is None else "gpu_codes"
    model = open_model(folder, settings.dtype, settings.quantization, keeps)
    model = model.with_states_in(settings.mamba_ssm_cache_dtype)
    settings = replace(settings, quantization=model.served_quantization)
    if headers is None:
        headers = read_headers(folder)
    # As --speculative-config auto has it.
    may_draft = settings.gpu_memory_bytes is None and model.has_small_head
    if may_draft and model.why_no_head(headers, settings.tensor_parallel_size) is None:
        model = model.with_head()
    stored = model.stored_names(headers)
    expected = model.tensors(stored)
    packed_dtype = load_kernels("cpu").packed_dtype if settings.gpu_memory_bytes is None else None
    weight_bytes = model.weight_bytes(headers, settings.tensor_parallel_size, packed_dtype)
    vision = read_vision(folder)
    if vision is not None:
        expected |= tensors(vision)
        weight_bytes += tower_bytes(vision, model.dtype)
    plan = _plan(model, settings, weight_bytes, 0 if vision is None else settings.mm_encoder_cache_bytes)
    # Where there is a vision model, nothing else may go by its name: the server accounts for all of it.
    ignored = tuple(prefix for prefix in model.ignored_tensors(stored) if not (vision and prefix == PREFIX))
    return CheckReport(
        folder=folder,
        model_type=model.family.model_type,
        layers=model.config.layer_counts(),
        settings=settings,
        accounting=replace(
            account(headers, expected, ignored, model.quantization),
            not_kept=model.dequantized_forms(headers, expected),
        ),
        num_tensors=len(headers),
        num_files=len({header.file for header in headers.values()}),
        stored_dtypes=dict(sorted(Counter(header.dtype for header in headers.values()).items())),
        parameters=sum(map(math.prod, expected.values())),
        packed_dtype=str(model.dtype if packed_dtype is None else packed_dtype(model.dtype)).removeprefix("torch."),
        plan=plan,
        dtype=str(model.dtype).removeprefix("torch."),
        max_model_len=settings.max_model_len or model.config.max_model_len,
        layout=_layout(model, settings),
        has_head=model.config.serves_mtp,
    )


def _layout(model: OpenModel, settings: CheckSettings) -> CacheLayout:
    return model.layout(settings.block_size, settings.tensor_parallel_size, settings.checkpoint_dtype)


def _plan(model: OpenModel, settings: CheckSettings, weight_bytes: int, image_bytes: int) -> MemoryPlan:
    """As the server makes it, but for what a step's layers take: a server finds that out by a step."""
    num_ranks, asked, layout = settings.tensor_parallel_size, settings.max_num_seqs, _layout(model, settings)
    spec = model.config.cache_spec(0, num_ranks).memory_spec(model.dtype, torch.device("cpu"))
    longest = settings.max_model_len or model.config.max_model_len
    if settings.gpu_memory_bytes is None:
        pool = settings.kv_cache_memory_bytes
        slot = count_slot(spec, layout, pool // layout.page_bytes, longest)
        kept = {"weights": weight_bytes, "images": image_bytes}
        return MemoryPlan(on_gpu=False, usable=None, slot=slot, num_slots=asked or _NUM_SEQS, pool=pool, **kept)
    most_seqs, config = asked or MOST_SEQS_ON_GPU, _config(model, kv_cache_memory_bytes=None, max_num_seqs=asked)
    num_graphs = len(graph_sizes(_config(model), most_seqs))
    plan = MemoryPlan(
        on_gpu=True,
        usable=int(settings.gpu_memory_utilization * settings.gpu_memory_bytes),
        weights=weight_bytes,
        process=guess_process_bytes(num_ranks),
        logits=count_logits(most_seqs, model.config.vocab_size, num_ranks),
        images=image_bytes,
        graphs=guess_graph_bytes(sum(model.config.layer_counts().values()), num_graphs),
    )
    plan = replace(plan, slot=count_slot(spec, layout, max(0, plan.left) // layout.page_bytes, longest, on_gpu=True))
    try:
        return divide_memory(plan, config, layout)
    except ConfigError:  # too little for the smallest pool: the report says how little
        plan = replace(plan, num_slots=asked or 1)
        return replace(plan, pool=plan.left - plan.states)


def _config(model: OpenModel, **settings: int | None) -> EngineConfig:
    return EngineConfig.model_validate({"model": str(model.folder)} | settings)


def render(report: CheckReport) -> RenderableType:
    """The report as a table, and below it the tensors that are wrong."""
    table = Table(title=str(report.folder), show_header=False, title_justify="left")
    table.add_column(style="bold")
    table.add_column()
    for name, value in _rows(report):
        table.add_row(name, value)
    problems = report.accounting.problems
    lines = [Text(problem, style="red") for problem in problems[:MAX_PROBLEMS_SHOWN]]
    if len(problems) > MAX_PROBLEMS_SHOWN:
        lines.append(Text(f"... and {len(problems) - MAX_PROBLEMS_SHOWN:,} more", style="red"))
    lines += [Text(REMEDY)] if problems else []
    return Group(table, *lines)


def _served_in(report: CheckReport) -> str:
    quantization, packed = report.settings.quantization, report.packed_dtype
    if quantization is None:
        return report.dtype if packed == report.dtype else f"{report.dtype}, those of products in {packed}"
    # Of the others only matrices of products are ever quantized.
    rest = "norms" if quantization == "gguf" else "embedding and norms"
    return f"{quantization}, {rest} in {report.dtype}"


def _token_row(layout: CacheLayout) -> str:
    limited = [group for group in layout.groups if group.reach is not None]
    lasting = layout.lasting_bytes_per_token
    rows = [f"{lasting:,.0f} bytes per token"] if lasting or not limited else []
    for group in limited:
        rows.append(f"{group.most_window_pages * layout.page_bytes:,} bytes for a {group.name} tokens")
    return ", ".join(rows)


def _page_tokens(layout: CacheLayout) -> str:
    sizes = {group.tokens_per_page for group in layout.groups} or {layout.block_size}
    if len(sizes) == 1:
        return f"{sizes.pop()} tokens"
    return ", ".join(f"{group.tokens_per_page} tokens ({group.name})" for group in layout.groups)


def _rows(report: CheckReport) -> list[tuple[str, str]]:
    layout, settings = report.layout, report.settings
    layers = ", ".join(f"{count} {kind}" for kind, count in report.layers.items())
    worth = f", as much as {report.checkpoint_tokens:,.0f} tokens" if report.checkpoint_tokens else ""
    form = "" if layout.checkpoint_dtype == "float32" else f", states in {layout.checkpoint_dtype}"
    pool = f"{_size(max(0, report.plan.pool))} = {report.num_pages:,} pages"
    if report.pages_for_longest > report.num_pages:
        more = "raise --kv-cache-memory-bytes or lower --max-model-len"
        if settings.gpu_memory_bytes is not None:
            more = "lower --max-model-len or --max-num-seqs, or take a larger GPU"
        fits = f"too small for that; {more}"
    else:
        checkpoints = report.num_pages // layout.pages_per_checkpoint
        fits = f"{report.num_pages / report.pages_for_longest:.1f} of those, or {checkpoints:,} checkpoints"
    return [
        ("model", f"{report.model_type}, {sum(report.layers.values())} layers: {layers}"),
        ("tensors", _tensor_row(report)),
        ("parameters", f"{report.parameters:,} ({report.parameters / 1e9:.2f} B)"),
        *_form_rows(report),
        *_rank_rows(report),
        *_head_rows(report),
        ("weights", f"{_size(report.weight_bytes)} in {_served_in(report)}"),
        ("keys and values", _token_row(layout)),
        ("page", f"{_page_tokens(layout)}, {layout.page_bytes:,} bytes"),
        ("checkpoint", f"{layout.checkpoint_bytes:,} bytes = {layout.pages_per_checkpoint:,} pages{form}{worth}"),
        (
            "running states",
            f"{_size(report.plan.states)} for {_count(report.plan.num_slots, 'sequence')}, with their block tables"
            + ("" if layout.state_dtype == "float32" else f", in {layout.state_dtype}"),
        ),
        (
            "longest sequence",
            f"{report.max_model_len:,} tokens and a checkpoint: {report.pages_for_longest:,} pages, "
            f"{_size(report.pages_for_longest * layout.page_bytes)}",
        ),
        *_gpu_rows(report),
        *_machine_rows(report),
        ("pool", f"{pool}: {fits}"),
        (
            "smallest hit",
            f"a repeated prompt of {_count(settings.min_cacheable_tokens, 'token')}, "
            f"or {_count(settings.min_shared_tokens, 'token')} shared with another prompt",
        ),
    ]


def _form_rows(report: CheckReport) -> list[tuple[str, str]]:
    """What is quantized, and what becomes of it."""
    forms, not_kept = report.accounting.forms, report.accounting.not_kept
    if not forms:
        return []
    stays = report.settings.quantization not in (None, *MADE_AT_LOAD)
    kept = [form for form in forms if stays and (report.settings.quantization != "gguf" or form in CODED)]
    made = report.settings.quantization if report.settings.quantization in MADE_AT_LOAD else None
    other = "dequantized" if made is None else f"brought to {made}"
    parts = [
        f"{count:,} of {form} {'kept as stored' if form in kept and form not in not_kept else other}"
        for form, count in forms.items()
    ]
    return [("quantized", "matrices: " + "; ".join(parts))]


def _head_rows(report: CheckReport) -> list[tuple[str, str]]:
    said = (
        "multi-token prediction, which drafts and has keys and values of its own: --speculative-config suffix does not"
    )
    return [("head", said)] if report.has_head else []


def _rank_rows(report: CheckReport) -> list[tuple[str, str]]:
    num_ranks = report.settings.tensor_parallel_size
    return [("ranks", f"{num_ranks}; what follows is on each of them")] if num_ranks > 1 else []


def _gpu_rows(report: CheckReport) -> list[tuple[str, str]]:
    settings, plan, left = report.settings, report.plan, report.plan.pool
    if not plan.on_gpu or settings.gpu_memory_bytes is None:
        return []
    usable = f"{settings.gpu_memory_utilization:.0%} of {_size(settings.gpu_memory_bytes)}"
    taken = (
        f"{_size(report.weight_bytes)} of weights, {_size(report.plan.states)} of running states, "
        f"{_size(plan.logits + plan.images)} of logits and encoded images, some {_size(plan.graphs)} of "
        f"CUDA graphs and some {_size(plan.process)} of CUDA itself"
    )
    if left <= 0:
        return [("GPU", f"{usable}: {_size(-left)} too little for {taken}")]
    return [("GPU", f"{usable}: {_size(left)} left beside {taken}, for the pool and for what a step's layers take")]


def _machine_rows(report: CheckReport) -> list[tuple[str, str]]:
    settings, plan = report.settings, report.plan
    if plan.on_gpu or settings.available_memory is None:
        return []
    taken = settings.tensor_parallel_size * (plan.weights + plan.states + plan.pool) + plan.images
    text = (
        f"{_size(settings.available_memory)} available; weights, running states and pool take {_size(taken)}, and a "
        "step's layers what a server measures"
    )
    if taken > settings.available_memory:
        text += (
            f": {_size(taken - settings.available_memory)} too little: lower --kv-cache-memory-bytes or "
            "--max-num-seqs, or ask for --quantization int8 or int4"
        )
    return [("this machine", text)]


def _tensor_row(report: CheckReport) -> str:
    stored = ", ".join(f"{count:,} {dtype}" for dtype, count in report.stored_dtypes.items())
    accounting = report.accounting
    ignored = f", {accounting.num_ignored:,} ignored" if accounting.num_ignored else ""
    problems = accounting.problems
    state = _count(len(problems), "problem") if problems else "every one accounted for"
    return f"{report.num_tensors:,} in {report.num_files} files ({stored}{ignored}): {state}"


def _count(count: int, word: str) -> str:
    return f"{count:,} {word}{'' if count == 1 else 's'}"


def _size(count: int) -> str:
    for unit, scale in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if count >= scale:
            return f"{count / scale:,.2f} {unit}"
    return f"{count} bytes"
