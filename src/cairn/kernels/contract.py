"""The functions that a kernel backend has.

A backend is a package whose functions have these signatures; a module is an implementation of the protocol.
`reference` is slow and readable, and every other backend is tested against it. No state is kept between calls, except
what `pack` and `build_metadata` give back.

Letters in shapes: T rows of the batch, B sequences, N snapshots (see `Batch`), C channels, W convolution width,
H heads, P head dim, S state size, G groups of heads that share b and c, Hq/Hk query/key heads, D attention head dim,
E experts, K experts of a token.

Operands may be views whose last dimension is contiguous and whose rows are not, as the parts of a fused product are.
Unless a function says so they are left alone, and what is returned is a new contiguous tensor. Model dtype is bfloat16
or float32 (the tests use float64, too); a norm, a gate or a state is computed in float32 or wider and rounded once.
"""

from collections.abc import Sequence, Set
from typing import Any, Protocol

import torch
from torch import Tensor

from cairn.kernels.attention_rule import FULL, AttentionRule
from cairn.kernels.batch import Batch, HostBatch
from cairn.kernels.checkpoint_files import StateSpan
from cairn.kernels.graphs import StepGraphs
from cairn.kernels.int4 import Int4Weight
from cairn.kernels.sampling.contract import Sampler, TokenCounts
from cairn.kernels.sampling.logprobs import LogprobTensors
from cairn.kernels.staging import Staging
from cairn.kernels.state_encoding import EncodedStates
from cairn.kernels.weight_rows import WeightRows
from cairn.types import SamplingParams

Weight = Any
"""What `Kernels.pack` made of a weight: a backend's own."""

StateSpans = Any
"""What `Kernels.pack_state_spans` made of spans: a backend's own."""


class Kernels(Protocol):
    """One backend."""

    # -- once -----------------------------------------------------------------------------------------------------

    def pack(self, weight: Tensor) -> Weight:
        """A weight [out, in], or a stack of experts' [E, out, in], in the form that this backend multiplies with. It
        may keep the tensor itself, whose memory is then not to be changed any more."""

    def pack_stored(self, rows: Sequence[WeightRows]) -> Weight:
        """As `pack`, of a weight [out, in] whose rows are those of all of these one after the other, of one kind or of
        several, or of a stack of experts', which is one. For `linear` and the experts. A backend that computes with FP8
        weights keeps the numbers and scales of an `Fp8Weight`, and one that computes with codes those of a
        `QuantizedWeight`; others bring it to the model's dtype, which is what products with it give in any case."""

    def lays_out(self, dtype: torch.dtype) -> bool:
        """Whether `pack` and `pack_stored` write weights of models of this dtype, other than float32 ones of bfloat16
        models, to memory of their own, in whatever form they are given: then they may be given rows of a file."""

    def pack_int8(self, weight: Tensor) -> Weight:
        """As `pack`, in int8: each output channel is divided by a scale of its own, its largest number over 127, and
        rounded to whole numbers. Products with it do the same to each row of x, add up whole numbers, and multiply with
        both scales; so rows stay independent of one another, bit for bit. Only for products in float32 or bfloat16.

        Raises ConfigError that names --quantization where this backend or this machine has no such products.
        """

    def pack_int4(self, weight: Int4Weight) -> Weight:
        """As `pack`, of a weight in four bits. Products with it on the CPU bring each row of x to int8, with a scale
        for each of the weight's groups of inputs, add whole numbers up within a group, and groups in their order; so
        rows stay independent of one another, bit for bit. Only for products in float32 or bfloat16. Raises as
        `pack_int8`."""

    def packed_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """In which dtype `pack` keeps a weight of this one."""

    def pack_state_spans(
        self, spans: Sequence[StateSpan], entry_bytes: Sequence[int], pool: Tensor, states: EncodedStates | None = None
    ) -> StateSpans:
        """Where the states of some tensors lie in checkpoint files, in the form that this backend copies with. At least
        one span; no byte is in two, neither of a file nor of an entry. `states`: what files have in another form than
        entries, which is converted while it is copied. `entry_bytes`: from one entry of each tensor to the next.
        `pool`: uint8 [pages, page_bytes], contiguous; of the ones that are copied with, page_bytes and device are the
        same."""

    def warm_up(
        self,
        dtype: torch.dtype | None = None,
        operations: Set[str] | None = None,
        state_dtype: torch.dtype = torch.float32,
    ) -> int:
        """Compiles every kernel that a model of this dtype, or of any, may use in these operations, or in all, with the
        weights that have been packed, and returns their number. Without it the first batches are slower.
        `operations`: names of functions of this contract. `state_dtype`: of recurrent states."""

    def begin_step(self, num_rows: int) -> None:
        """A step of so many rows begins; `build_metadata` says so of those that have some."""

    def build_metadata(self, host: HostBatch, staging: Staging) -> object:
        """What the backend works out about a batch once a step, before its layers run: `Batch.metadata`; and about a
        fold, before states are brought forward. It is complete when `staging` has been sent."""

    def step_graphs(self) -> StepGraphs | None:
        """None where nothing records a pass while it is computed."""

    # -- sampling -------------------------------------------------------------------------------------------------

    def token_counts(self, num_slots: int, vocab_size: int, device: torch.device | None = None) -> TokenCounts:
        """No sequence's yet."""

    def sampler(
        self, params: Sequence[SamplingParams], positions: Sequence[int], vocab_size: int, staging: Staging
    ) -> Sampler:
        """For n rows, n at least 1, with what is known when their step is launched; `staging` is to be sent before
        `Sampler.sample`. See `TorchSampler` for what is drawn: the same token on every backend wherever rounding does
        not decide."""

    def logprobs(
        self, logits: Tensor, tokens: Tensor, num_top: int, listed: Tensor | None = None, rows: Tensor | None = None
    ) -> LogprobTensors:
        """Log-probabilities of `tokens`, int64 [n], and of the `num_top` best, or of the tokens `listed`, int64 [n, k].
        `logits`: float32 [n, vocab], before any logits processor; or of more rows, of which `rows`, int64 [n], are
        asked for."""

    def sampling_bytes(self, num_rows: int, vocab_size: int, num_slots: int) -> int:
        """The most that drawing `num_rows` takes of a device's memory beside their logits, with the counts of
        `num_slots`."""

    # -- products -------------------------------------------------------------------------------------------------

    def embed(self, tokens: Tensor, weight: Tensor) -> Tensor:
        """tokens int64 [T], weight [vocab, hidden], not packed -> [T, hidden]."""

    def linear(self, x: Tensor, weight: Weight, bias: Tensor | None, batch: Batch) -> Tensor:
        """x [T, in], weight [out, in], bias [out] -> [T, out], all in one dtype."""

    def lm_head(self, hidden: Tensor, weight: Weight) -> Tensor:
        """hidden [n, in] of any n rows, weight [vocab, in] -> logits float32 (or wider) [n, vocab]."""

    def experts(
        self, x: Tensor, topk_ids: Tensor, topk_weights: Tensor, up: Weight, down: Weight, batch: Batch
    ) -> Tensor:
        """Squared-ReLU experts: sum over k of topk_weights[t, k] * down[e] relu(up[e] x[t])^2 with e = topk_ids[t, k].

        x [T, in], topk_ids int64 and topk_weights float32 [T, K], a token's experts all different; up [E, inner, in]
        and down [E, in, inner], packed. Returns [T, in] in x's dtype; a token's terms are added in float32 or wider, in
        ascending order of e.
        """

    def gated_experts(
        self, x: Tensor, topk_ids: Tensor, topk_weights: Tensor, gate_up: Weight, down: Weight, batch: Batch
    ) -> Tensor:
        """SwiGLU experts (arXiv 2002.05202), else as `experts`: down[e] (silu(gate) * up) with gate and up the halves
        of gate_up[e] x[t]; gate_up [E, 2 * inner, in], gate first."""

    def gelu_experts(
        self, x: Tensor, topk_ids: Tensor, topk_weights: Tensor, gate_up: Weight, down: Weight, batch: Batch
    ) -> Tensor:
        """GeGLU experts, else as `gated_experts`: with the gelu of `gelu_mul` in the place of the silu."""

    def clamped_experts(
        self,
        x: Tensor,
        topk_ids: Tensor,
        topk_weights: Tensor,
        gate_up: Weight,
        down: Weight,
        gate_up_bias: Tensor,
        down_bias: Tensor | None,
        alpha: float,
        limit: float,
        batch: Batch,
    ) -> Tensor:
        """gpt-oss's experts, else as `gated_experts`: down[e] a + down_bias[e], where

            gate | up = gate_up[e] x[t] + gate_up_bias[e]
            a = (min(max(up, -limit), limit) + 1) g sigmoid(alpha g)  with g = min(gate, limit)

        Biases [E, out] in x's dtype and contiguous; `down_bias` None for none."""

    # -- row by row -----------------------------------------------------------------------------------------------

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """x / rms(x) * weight over the last dimension (arXiv 1910.07467), in x's dtype: x [T, width] or, for the norm
        of each head, [T, heads, width]; weight [width] in x's dtype or float32."""

    def add_rms_norm(self, residual: Tensor, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """residual += x in place, both [T, width] in one dtype and residual contiguous; then `rms_norm` of it."""

    def gated_rms_norm(self, x: Tensor, gate: Tensor, weight: Tensor, groups: int, eps: float) -> Tensor:
        """The norm of x * silu(gate) over each of `groups` equal parts of a row, times weight (Mamba2, arXiv
        2405.21060): x [T, width] as `ssd` gives it, gate [T, width], weight [width] -> gate's dtype."""

    def rms_norm_then_gate(self, x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
        """`rms_norm` of each head times silu(gate) (gated delta net): x [T, H, P] as `gdn` gives it, gate [T, H * P],
        weight float32 [P] -> gate's dtype [T, H * P]."""

    def silu_mul(self, gate: Tensor, x: Tensor) -> Tensor:
        """silu(gate) * x, both [T, width] -> [T, width] in gate's dtype."""

    def gelu_mul(self, gate: Tensor, x: Tensor) -> Tensor:
        """gelu(gate) * x with gelu(v) = v / 2 (1 + tanh(sqrt(2 / pi) (v + 0.044715 v^3))) (arXiv 1606.08415), both
        [T, width] in one dtype -> [T, width]."""

    def softcap(self, x: Tensor, cap: float) -> Tensor:
        """cap tanh(x / cap): x float32 (or wider) [T, width]."""

    def sigmoid_mul(self, x: Tensor, gate: Tensor) -> Tensor:
        """x * sigmoid(gate): x [T, width], gate [T, width] or [T, 1] -> [T, width] in x's dtype."""

    def squared_relu(self, x: Tensor) -> Tensor:
        """relu(x)^2."""

    def rope(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """x [T, heads, D] with its first 2 * pairs elements turned by cos and sin float32 [T, pairs] (arXiv
        2104.09864), element i paired with element i + pairs; in x's dtype."""

    def softmax_router(self, logits: Tensor, top_k: int, normalize: bool) -> tuple[Tensor, Tensor]:
        """logits float32 [T, E] -> (topk_ids int64, topk_weights float32), both [T, K = top_k]: the experts with the
        largest probabilities by softmax(logits), and these, over the chosen ones' sum if `normalize`."""

    def sigmoid_router(
        self,
        logits: Tensor,
        correction: Tensor,
        top_k: int,
        num_groups: int,
        top_groups: int,
        normalize: bool,
        scale: float,
        epsilon: float = 1e-20,
    ) -> tuple[Tensor, Tensor]:
        """DeepSeek-V3's (arXiv 2412.19437, section 2.1.2): chosen by sigmoid(logits) + correction [E] out of the best
        `top_groups` of `num_groups` equal groups, each worth its two best experts; the weight is the sigmoid alone,
        over the chosen ones' sum + epsilon if `normalize`, times scale. Shapes as for `softmax_router`."""

    # -- sequences ------------------------------------------------------------------------------------------------
    #
    # Of a verify (see `cairn.kernels.batch`) functions with states give the y that decodes have one after the other,
    # bit for bit, and leave the states alone. Of a fold they write the states, and snapshots, that decodes leave one
    # after the other, bit for bit, and return the y of the verify once more. No other function is called with a fold.
    # Tokens of a verify have the bits of decodes in `attention` and in products, too, as far as those of decodes do not
    # depend on the rows beside them.
    #
    # States of `ssd` and `gdn` are float32, bfloat16 or float16. They are computed in float32 and rounded to their
    # dtype, to the nearest, ties to even: in the one-token form after each token, in the chunked one at each chunk's
    # end, a multiple of CHUNK of the sequence's own positions, and where a pass ends or a snapshot is taken. So a pass
    # that is cut at a multiple of CHUNK leaves the bits of one that is not. y is of the state before it is rounded.

    def conv(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, states: Tensor, batch: Batch, silu: bool = True
    ) -> tuple[Tensor, Tensor]:
        """Causal depthwise convolution, then silu if wanted: x [T, C] in model dtype -> (y [T, C], snapshots).

        y is float32, or in the model's dtype if the backend's scans multiply in it.

        weight float32 [W, C], taps oldest first, bias float32 [C]; states [slots + 1, W - 1, C] in model dtype: the
        raw inputs before the pass, updated in place but for verifies. Snapshots [N, W - 1, C] in the states' dtype.
        """

    def ssd(
        self,
        x: Tensor,
        dt: Tensor,
        b: Tensor,
        c: Tensor,
        a: Tensor,
        d: Tensor,
        dt_bias: Tensor,
        dt_limit: tuple[float, float],
        states: Tensor,
        batch: Batch,
    ) -> tuple[Tensor, Tensor]:
        """Mamba2's state space scan (arXiv 2405.21060, section 6): (y [T, H, P] in x's dtype, snapshots).

            step = clamp(softplus(dt + dt_bias), *dt_limit)
            state = exp(step a) state + step x b^T,    y = state c + d x        per head

        x [T, H, P], b and c [T, G, S] as `conv` gives them; dt [T, H] in model dtype; a (negative), d and dt_bias
        float32 [H]. states [slots + 1, H, P, S] in place but for verifies; snapshots [N, H, P, S] in the states' dtype.
        """

    def gdn(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        beta: Tensor,
        dt: Tensor,
        a: Tensor,
        dt_bias: Tensor,
        states: Tensor,
        batch: Batch,
        beta_scale: float = 1.0,
    ) -> tuple[Tensor, Tensor]:
        """The gated delta rule (arXiv 2412.06464): (y [T, H, P] in v's dtype, snapshots).

            g = a softplus(dt + dt_bias),    w = beta_scale sigmoid(beta)
            q and k over their lengths (eps 1e-6 under the root)
            state = exp(g) state,    state = state + k (w (v - k state))^T,    y = S^-0.5 q state        per head

        q and k [T, Hk, S] and v [T, H, P] as `conv` gives them: a q/k head serves H / Hk consecutive value heads; beta
        and dt [T, H] in model dtype; a (negative) and dt_bias float32 [H]. states [slots + 1, H, S, P] in place but for
        verifies; snapshots [N, H, S, P] in the states' dtype.
        """

    def write_kv(self, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, group: int, batch: Batch) -> None:
        """k and v [T, Hk, D] into keys and values [page, Hk, token, D] of one layer, at the places that the block table
        of attention group `group` has for their positions; positions below `kv_write_from` are left out."""

    def attention(
        self,
        q: Tensor,
        keys: Tensor,
        values: Tensor,
        group: int,
        batch: Batch,
        rule: AttentionRule = FULL,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Causal attention over the pages: q [T, Hq, D] -> [T, Hq, D]. A token at position p sees positions
        `rule.first_key(p)`..p of its sequence; a key head serves Hq / Hk consecutive query heads. `sinks`: of each
        query head a logit more, [Hq] in float32 or q's dtype, which takes part in the softmax, as it is, and has no
        value (attention sinks, arXiv 2309.17453, as gpt-oss has them).

        What lies in a page after the sequence's end may read as NaN and must not count. Pages that lie wholly before
        what the sequence's first row here sees may be another's by now: neither they nor their entries of the block
        table are read."""

    # -- bytes ----------------------------------------------------------------------------------------------------

    def store_states(
        self, pool: Tensor, files: Tensor, tensors: Sequence[Tensor], entries: Tensor | None, spans: StateSpans
    ) -> None:
        """States into checkpoint files: the bytes of `spans` of entry `entries[i]` of each tensor go to file i, whose
        pages `files[i]` are; nothing else is written. States that are encoded are the same bytes on every backend.

        pool as for `pack_state_spans`; files int64 [n, pages of a file], no page in two of them, n may be 0; tensors
        [entry, ...], whose entries may be apart; entries int64 [n], or None for 0, 1, ... n - 1.
        """

    def load_states(
        self, pool: Tensor, files: Tensor, tensors: Sequence[Tensor], entries: Tensor | None, spans: StateSpans
    ) -> None:
        """The reverse of `store_states`: from files, of which two may be the same, to entries, which are all
        different."""

    def copy_pages(self, pool: Tensor, targets: Tensor, sources: Tensor) -> None:
        """Whole pages of pool [pages, page_bytes], uint8 and contiguous. targets and sources int64 [n], n at least 1:
        targets are all different, and none of them is a source."""


class ExactKernels(Kernels, Protocol):
    """A backend for `--exact`: in float32 a row has the same bits whatever the batch that it is in."""

    def find_dependent_height(self, weight: Weight, bias: Tensor | None, generator: torch.Generator) -> int | None:
        """The number of rows with which a product with a packed weight [out, in] gives a row other bits at another
        place or beside other rows, None where there is none, as it has to be. `generator`: of the rows, on the host.

        It may be a property of the library, the processor and the number of threads, so it is to be asked where the
        model runs."""
