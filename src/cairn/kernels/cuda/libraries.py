"""The CUDA backend with functions of installed libraries in the place of its own: the same contract."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from importlib import import_module
from types import ModuleType
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from cairn.errors import ConfigError
from cairn.kernels import cuda
from cairn.kernels.attention_rule import FULL, AttentionRule
from cairn.kernels.batch import CHUNK, Batch, HostBatch
from cairn.kernels.contract import Kernels
from cairn.kernels.cuda.fla_gdn import DeltaRulePlan, DeltaRuleShape, FlaDeltaRule
from cairn.kernels.cuda.flashinfer_attention import AttentionPlan, AttentionShape, FlashInferAttention
from cairn.kernels.cuda.metadata import CudaMetadata
from cairn.kernels.operations import OPERATIONS
from cairn.kernels.staging import Staging

FLASHINFER, FLA = "--attention-backend flashinfer", "--gdn-prefill-backend fla"

FLASHINFER_HEAD_DIMS = (64, 128, 256)
"""For which it has FlashAttention-2 and -3, of those that cairn's kernels take, too."""

FLA_MAX_KEY_DIM = 256

Import = Callable[[str], Any]


@dataclass(frozen=True, slots=True)
class LibraryMetadata(CudaMetadata):
    """`Batch.metadata` with the libraries' plans of the step; None where a library has no part in it."""

    attention: AttentionPlan | None = None
    delta_rule: DeltaRulePlan | None = None


def with_libraries(attention: FlashInferAttention | None, delta_rule: FlaDeltaRule | None) -> Kernels:
    """A backend. None: cairn's own kernels."""

    def build_metadata(host: HostBatch, staging: Staging) -> LibraryMetadata:
        metadata = cuda.build_metadata(host, staging)
        return LibraryMetadata(
            **{field.name: getattr(metadata, field.name) for field in fields(metadata)},
            attention=None if attention is None else attention.plan(host, staging),
            delta_rule=None if delta_rule is None else delta_rule.plan(host, staging),
        )

    def attend(
        q: Tensor, keys: Tensor, values: Tensor, group: int, batch: Batch, rule: AttentionRule = FULL,
        sinks: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        metadata = cast(LibraryMetadata, batch.metadata)
        # What flashinfer has planned is the plain one, of which all layers have the same shape.
        if attention is None or metadata.attention is None or rule != FULL or sinks is not None:
            return cuda.attention(q, keys, values, group, batch, rule, sinks)
        return attention.attend(metadata.attention, q, keys, values, group, batch)

    def gdn(
        q: Tensor, k: Tensor, v: Tensor, beta: Tensor, dt: Tensor, a: Tensor, dt_bias: Tensor, states: Tensor,
        batch: Batch, beta_scale: float = 1.0,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        metadata = cast(LibraryMetadata, batch.metadata)
        if delta_rule is None or metadata.delta_rule is None:
            return cuda.gdn(q, k, v, beta, dt, a, dt_bias, states, batch, beta_scale)
        return delta_rule.scan(metadata.delta_rule, q, k, v, beta, dt, a, dt_bias, states, batch, beta_scale)

    backend = ModuleType("cairn.kernels.cuda")
    backend.__dict__.update({name: getattr(cuda, name) for name in OPERATIONS})
    backend.__dict__.update(build_metadata=build_metadata, attention=attend, gdn=gdn)
    return cast(Kernels, backend)


def load_flashinfer(
    shape: AttentionShape, device: torch.device, steps_in_flight: int, import_library: Import = import_module
) -> FlashInferAttention:
    """Attention by the flashinfer that is installed, tried out once, for which it may compile kernels for minutes.
    `steps_in_flight`: see `FlashInferAttention`. Raises ConfigError that names --attention-backend and the fix."""
    _check_dtype(FLASHINFER, shape.dtype)
    if shape.head_dim not in FLASHINFER_HEAD_DIMS:
        raise ConfigError(
            f"{FLASHINFER}: takes attention heads of 64, 128 or 256 numbers, and the model's have {shape.head_dim} "
            "(head_dim in its config.json): leave it out"
        )
    fix = "install nvcc, or flashinfer-cubin and flashinfer-jit-cache of the same version, or leave it out"
    library = _import(FLASHINFER, "flashinfer", "flashinfer-python", import_library)
    with _explain(FLASHINFER, fix):
        attention = FlashInferAttention(library, shape, device, steps_in_flight)
        for _ in range(steps_in_flight):
            _try_out(with_libraries(attention, None), device, lambda kernels, batch: _attend(kernels, batch, shape))
    return attention


def load_fla(shape: DeltaRuleShape, device: torch.device, import_library: Import = import_module) -> FlaDeltaRule:
    """The gated delta rule's prefill by the fla that is installed, tried out once, which compiles its kernels. Raises
    ConfigError that names --gdn-prefill-backend and the fix."""
    _check_dtype(FLA, shape.dtype)
    if shape.key_dim > FLA_MAX_KEY_DIM:
        raise ConfigError(
            f"{FLA}: takes keys of at most {FLA_MAX_KEY_DIM} numbers, and the model's have {shape.key_dim} "
            "(linear_key_head_dim in its config.json): leave it out"
        )
    library = _import(FLA, "fla.ops.gated_delta_rule", "fla-core", import_library)
    with _explain(FLA, "install fla-core 0.6 and the Triton that torch brings, or leave it out"):
        delta_rule = FlaDeltaRule(library)
        _try_out(with_libraries(None, delta_rule), device, lambda kernels, batch: _scan(kernels, batch, shape))
    return delta_rule


def _check_dtype(flag: str, dtype: torch.dtype) -> None:
    if dtype != torch.bfloat16:
        name = str(dtype).removeprefix("torch.")
        raise ConfigError(f"{flag}: computes in bfloat16, not in {name}: ask for --dtype bfloat16, or leave it out")


def _import(flag: str, module: str, package: str, import_library: Import) -> Any:
    try:
        return import_library(module)
    except ImportError as error:
        raise ConfigError(
            f"{flag}: {module} cannot be imported ({error}): pip install {package}, or leave it out"
        ) from error


@contextmanager
def _explain(flag: str, fix: str) -> Iterator[None]:
    """Raises ConfigError for what a library of another version, or without a compiler, raises when it is tried out."""
    try:
        yield
    except (RuntimeError, OSError, ImportError, ValueError, TypeError, AttributeError, AssertionError) as error:
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise ConfigError(f"{flag}: does not work on this machine ({reason}): {fix}") from error


def _try_out(kernels: Kernels, device: torch.device, call: Callable[[Kernels, Batch], Tensor]) -> None:
    """A decode and a prefill of a chunk, whose result is waited for."""
    seq_starts, seq_lens = np.array([1, 0], np.int32), np.array([2, CHUNK], np.int32)
    cu_seqlens = np.array([0, 1, 1 + CHUNK], np.int32)
    slots, nothing = np.arange(2, dtype=np.int32), np.zeros(0, np.int32)
    host = HostBatch(1, cu_seqlens, slots, seq_starts, seq_lens, np.zeros(2, np.int32), nothing, nothing)
    staging = Staging()
    lengths = [staging.add(array) for array in (cu_seqlens, slots, seq_starts, seq_lens)]
    metadata = kernels.build_metadata(host, staging)
    staging.send(device)
    on_device = [staged.tensor for staged in lengths]
    batch = Batch(
        tokens=on_device[1],
        positions=on_device[1],
        cu_seqlens=on_device[0],
        slots=on_device[1],
        state_slots=on_device[1],
        seq_starts=on_device[2],
        seq_lens=on_device[3],
        kv_write_from=on_device[1],
        block_tables=[torch.zeros((3, CHUNK), dtype=torch.int32, device=device)],
        host=host,
        metadata=metadata,
    )
    if not call(kernels, batch).isfinite().all().item():
        raise RuntimeError("it gives no finite numbers for zeros")


def _attend(kernels: Kernels, batch: Batch, shape: AttentionShape) -> Tensor:
    device = batch.slots.device
    pages = (1, shape.num_kv_heads, 2, shape.page_size, shape.head_dim)
    page = torch.zeros(pages, dtype=shape.dtype, device=device)
    q = torch.zeros((batch.host.num_tokens, shape.num_heads, shape.head_dim), dtype=shape.dtype, device=device)
    return kernels.attention(q, page[:, :, 0], page[:, :, 1], 0, batch)


def _scan(kernels: Kernels, batch: Batch, shape: DeltaRuleShape) -> Tensor:
    def zeros(*sizes: int, dtype: torch.dtype = shape.dtype) -> Tensor:
        return torch.zeros(sizes, dtype=dtype, device=batch.slots.device)

    rows, heads = batch.host.num_tokens, shape.num_value_heads
    q, k = (zeros(rows, shape.num_key_heads, shape.key_dim) for _ in range(2))
    states = zeros(3, heads, shape.key_dim, shape.value_dim, dtype=torch.float32)
    v, gate, bias = zeros(rows, heads, shape.value_dim), zeros(rows, heads), zeros(heads, dtype=torch.float32)
    return kernels.gdn(q, k, v, gate, gate, bias, bias, states, batch)[0]
