"""flashinfer and fla as the CUDA backend calls them: what these libraries ask of their callers, then the truth in plain
torch. Names, order and defaults of arguments are those of flashinfer-python 0.7.2 and fla-core 0.6.0."""

from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

HALF = (torch.bfloat16, torch.float16)


class _Paged:
    """What both of flashinfer's wrappers do. Of the page numbers a plan keeps the tensor and reads nothing: here they
    are overwritten, so that numbers which stood there too early are found. `num_runs`: since the plan."""

    def __init__(self, workspace: Tensor, kv_layout: str, backend: str) -> None:
        assert workspace.dtype == torch.uint8 and workspace.numel() >= 128 << 20 and workspace.is_contiguous()
        assert kv_layout == "HND" and backend in ("auto", "fa2")
        self.device = workspace.device
        self.num_runs = 0

    def _plan(
        self, qo_indptr: Tensor, indptr: Tensor, indices: Tensor, last_page_len: Tensor,
        num_qo_heads: int, num_kv_heads: int, head_dim: int, page_size: int,
        q_data_type: torch.dtype, kv_data_type: torch.dtype,
    ) -> None:  # fmt: skip
        for array in (qo_indptr, indptr, last_page_len):
            assert array.dtype == torch.int32 and array.is_contiguous() and array.device.type == "cpu"
        assert indices.dtype == torch.int32 and indices.device == self.device
        assert len(qo_indptr) == len(indptr) == len(last_page_len) + 1 > 1
        for array in (qo_indptr, indptr):
            assert array[0] == 0 and bool((array.diff() > 0).all())
        assert len(indices) == indptr[-1]
        assert bool(((last_page_len >= 1) & (last_page_len <= page_size)).all())
        assert num_qo_heads % num_kv_heads == 0 and head_dim in (64, 128, 256)
        assert q_data_type == kv_data_type and q_data_type in HALF
        self.sizes, self.dtype = (num_qo_heads, num_kv_heads, head_dim, page_size), q_data_type
        self.qo_indptr, self.indptr, self.last_page_len = (each.clone() for each in (qo_indptr, indptr, last_page_len))
        self.indices = indices.fill_(2**30)
        self.num_runs = 0

    def run(self, q: Tensor, paged_kv_cache: tuple[Tensor, Tensor], *, out: Tensor) -> Tensor:
        keys, values = paged_kv_cache
        heads, kv_heads, dim, page_size = self.sizes
        assert q.shape == out.shape == (self.qo_indptr[-1], heads, dim)
        assert q.dtype == keys.dtype == values.dtype == out.dtype == self.dtype
        assert keys.shape == values.shape == (keys.shape[0], kv_heads, page_size, dim)
        assert keys.stride() == values.stride() and keys.stride(3) == q.stride(2) == 1
        lengths = ((self.indptr.diff() - 1) * page_size + self.last_page_len).tolist()
        for i, length in enumerate(lengths):
            first, last = self.qo_indptr[i : i + 2].tolist()
            own = self.indices[self.indptr[i] : self.indptr[i + 1]].long()
            # [kv heads, tokens, dim]
            k, v = (part[own].transpose(0, 1).flatten(1, 2)[:, :length].double() for part in (keys, values))
            k, v = (part.repeat_interleave(heads // kv_heads, dim=0) for part in (k, v))
            scores = q[first:last].double().transpose(0, 1) @ k.transpose(1, 2) * dim**-0.5
            positions = torch.arange(length - (last - first), length, device=q.device)
            scores.masked_fill_(torch.arange(length, device=q.device) > positions[:, None], -torch.inf)
            out[first:last] = (scores.softmax(-1) @ v).transpose(0, 1).to(out.dtype)
        self.num_runs += 1
        return out


class BatchPrefillWithPagedKVCacheWrapper(_Paged):
    def __init__(self, float_workspace_buffer: Tensor, kv_layout: str = "NHD", *, backend: str = "auto") -> None:
        super().__init__(float_workspace_buffer, kv_layout, backend)

    def plan(
        self, qo_indptr: Tensor, paged_kv_indptr: Tensor, paged_kv_indices: Tensor, paged_kv_last_page_len: Tensor,
        num_qo_heads: int, num_kv_heads: int, head_dim_qk: int, page_size: int, *, causal: bool = False,
        q_data_type: torch.dtype = torch.float16, kv_data_type: torch.dtype = torch.float16,
    ) -> None:  # fmt: skip
        assert causal
        self._plan(
            qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len, num_qo_heads, num_kv_heads,
            head_dim_qk, page_size, q_data_type, kv_data_type,
        )  # fmt: skip


class BatchDecodeWithPagedKVCacheWrapper(_Paged):
    def __init__(
        self, float_workspace_buffer: Tensor, kv_layout: str = "NHD", *, use_tensor_cores: bool = False,
        backend: str = "auto",
    ) -> None:  # fmt: skip
        super().__init__(float_workspace_buffer, kv_layout, backend)
        assert use_tensor_cores and not bool(float_workspace_buffer.any())

    def plan(
        self, indptr: Tensor, indices: Tensor, last_page_len: Tensor, num_qo_heads: int, num_kv_heads: int,
        head_dim: int, page_size: int, *, q_data_type: torch.dtype = torch.float16,
        kv_data_type: torch.dtype = torch.float16,
    ) -> None:  # fmt: skip
        self._plan(
            torch.arange(len(indptr), dtype=torch.int32), indptr, indices, last_page_len, num_qo_heads, num_kv_heads,
            head_dim, page_size, q_data_type, kv_data_type,
        )  # fmt: skip


FLASHINFER: Any = SimpleNamespace(
    BatchPrefillWithPagedKVCacheWrapper=BatchPrefillWithPagedKVCacheWrapper,
    BatchDecodeWithPagedKVCacheWrapper=BatchDecodeWithPagedKVCacheWrapper,
)


class Fla:
    """The module fla.ops.gated_delta_rule. `calls`: the lengths of the sequences of each call."""

    def __init__(self) -> None:
        self.calls: list[list[int]] = []

    def chunk_gated_delta_rule(
        self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, scale: float | None = None,
        initial_state: Tensor | None = None, output_final_state: bool = False,
        use_qk_l2norm_in_kernel: bool = False, cu_seqlens: Tensor | None = None, chunk_indices: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        assert initial_state is not None and cu_seqlens is not None and chunk_indices is not None
        assert output_final_state and use_qk_l2norm_in_kernel and scale is None
        (one, rows, key_heads, size), (heads, dim) = q.shape, v.shape[2:]
        assert one == 1 and k.shape == q.shape and v.shape == (1, rows, heads, dim) and heads % key_heads == 0
        assert g.shape == beta.shape == (1, rows, heads) and g.dtype == torch.float32 and bool((g <= 0).all())
        assert q.dtype == k.dtype == v.dtype and size <= 256
        ends = cu_seqlens.tolist()
        assert ends[0] == 0 and ends[-1] == rows and initial_state.shape == (len(ends) - 1, heads, size, dim)
        assert initial_state.dtype == torch.float32 and bool(initial_state.isfinite().all())
        lengths = [last - first for first, last in pairwise(ends)]
        wanted = [[i, chunk] for i, length in enumerate(lengths) for chunk in range(-(-length // 64))]
        assert chunk_indices.tolist() == wanted
        self.calls.append(lengths)

        q, k = (part[0].double() / (part[0].double().square().sum(-1, keepdim=True) + 1e-6).sqrt() for part in (q, k))
        q, k = (part.repeat_interleave(heads // key_heads, dim=1) for part in (q, k))
        y, final = torch.empty_like(v[0]), torch.empty_like(initial_state)
        for i, (first, last) in enumerate(pairwise(ends)):
            state = initial_state[i].double()
            for row in range(first, last):
                state = state * g[0, row].double().exp()[:, None, None]
                read = (state * k[row][:, :, None]).sum(1)
                written = beta[0, row].double()[:, None] * (v[0, row].double() - read)
                state = state + k[row][:, :, None] * written[:, None, :]
                y[row] = ((state * q[row][:, :, None]).sum(1) * size**-0.5).to(y.dtype)
            final[i] = state.float()
        return y[None], final
