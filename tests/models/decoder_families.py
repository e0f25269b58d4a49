"""Tiny models of the families that are made of parts: configs, weights, drivers, and transformers as their truth."""

import json
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging as transformers_logging

from cairn.kernels.sampling.metadata import SamplingMetadata
from cairn.layers.communicator import SINGLE_RANK, Communicator
from cairn.layers.model import Model
from cairn.models.decoder_builder import Execution, build_decoder
from cairn.models.families import FAMILIES
from cairn.models.sharding import TensorShard
from cairn.runner.runner import Runner
from doubles.thread_ranks import thread_ranks
from models.wide_float import wide_float
from runner.harness import Driver, RunnersSideBySide, left_of

VOCAB = 97


def granite(**changes: Any) -> dict[str, Any]:
    return {
        "model_type": "granitemoehybrid",
        "architectures": ["GraniteMoeHybridForCausalLM"],
        "layer_types": ["mamba", "attention", "mamba"],
        "num_hidden_layers": 3,
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "attention_multiplier": 0.25,
        "embedding_multiplier": 3.0,
        "logits_scaling": 2.0,
        "residual_multiplier": 0.7,
        "mamba_n_heads": 4,
        "mamba_d_head": 16,
        "mamba_d_state": 20,
        "mamba_n_groups": 1,
        "mamba_d_conv": 4,
        "mamba_expand": 2,
        "intermediate_size": 24,
        "shared_intermediate_size": 40,
        "num_local_experts": 6,
        "num_experts_per_tok": 3,
        "position_embedding_type": "nope",
        "tie_word_embeddings": True,
        **changes,
    }


def falcon(**changes: Any) -> dict[str, Any]:
    return {
        "model_type": "falcon_h1",
        "architectures": ["FalconH1ForCausalLM"],
        "num_hidden_layers": 3,
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "rope_theta": 1e5,
        "mamba_d_ssm": 48,
        "mamba_n_heads": 4,
        "mamba_d_head": 12,
        "mamba_d_state": 20,
        "mamba_n_groups": 2,
        "mamba_d_conv": 4,
        "mamba_norm_before_gate": False,
        "mamba_rms_norm": False,
        "intermediate_size": 56,
        "embedding_multiplier": 2.5,
        "lm_head_multiplier": 0.6,
        "key_multiplier": 0.55,
        "attention_in_multiplier": 0.9,
        "attention_out_multiplier": 0.8,
        "ssm_in_multiplier": 1.25,
        "ssm_out_multiplier": 0.7,
        "mlp_multipliers": [0.85, 0.65],
        "ssm_multipliers": [0.9, 0.75, 1.2, 1.1, 0.8],
        "tie_word_embeddings": False,
        **changes,
    }


def lfm2(**changes: Any) -> dict[str, Any]:
    return {
        "model_type": "lfm2",
        "architectures": ["Lfm2ForCausalLM"],
        "layer_types": ["conv", "full_attention", "conv", "conv"],
        "num_hidden_layers": 4,
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "max_position_embeddings": 4096,
        "norm_eps": 1e-5,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "rope_theta": 1e6,
        "conv_L_cache": 3,
        "conv_bias": False,
        "block_auto_adjust_ff_dim": True,
        "block_multiple_of": 8,
        "block_ffn_dim_multiplier": 1.0,
        "block_ff_dim": 80,
        **changes,
    }


def lfm3(**changes: Any) -> dict[str, Any]:
    return {
        "model_type": "lfm3",
        "architectures": ["Lfm3ForCausalLM"],
        "layer_types": ["conv", "full_attention", "sliding_attention", "conv"],
        "num_hidden_layers": 4,
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "max_position_embeddings": 4096,
        "norm_eps": 1e-5,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "sliding_window": 12,
        "conv_L_cache": 7,
        "intermediate_size": 56,
        **changes,
    }


def qwen3(**changes: Any) -> dict[str, Any]:
    return {
        "model_type": "qwen3",
        "architectures": ["Qwen3ForCausalLM"],
        "num_hidden_layers": 3,
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-6,
        "eos_token_id": 2,
        "pad_token_id": 0,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "rope_theta": 1e6,
        "intermediate_size": 56,
        "tie_word_embeddings": False,
        **changes,
    }


def dense_granite(**changes: Any) -> dict[str, Any]:
    return {
        "model_type": "granite",
        "architectures": ["GraniteForCausalLM"],
        "num_hidden_layers": 3,
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "rope_theta": 1e5,
        "attention_multiplier": 0.25,
        "embedding_multiplier": 3.0,
        "logits_scaling": 2.0,
        "residual_multiplier": 0.7,
        "intermediate_size": 56,
        "tie_word_embeddings": True,
        **changes,
    }


def qwen3_moe(**changes: Any) -> dict[str, Any]:
    return {
        "model_type": "qwen3_moe",
        "architectures": ["Qwen3MoeForCausalLM"],
        "num_hidden_layers": 3,
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-6,
        "eos_token_id": 2,
        "pad_token_id": 0,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "rope_theta": 1e6,
        "intermediate_size": 56,
        "moe_intermediate_size": 24,
        "num_experts": 6,
        "num_experts_per_tok": 3,
        "norm_topk_prob": True,
        "mlp_only_layers": [1],
        "tie_word_embeddings": False,
        **changes,
    }


def lfm2_moe(**changes: Any) -> dict[str, Any]:
    return {
        "model_type": "lfm2_moe",
        "architectures": ["Lfm2MoeForCausalLM"],
        "layer_types": ["conv", "full_attention", "conv", "conv"],
        "num_hidden_layers": 4,
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "max_position_embeddings": 4096,
        "norm_eps": 1e-5,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "rope_theta": 1e6,
        "conv_L_cache": 3,
        "intermediate_size": 56,
        "moe_intermediate_size": 24,
        "num_dense_layers": 1,
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "routed_scaling_factor": 1.5,
        **changes,
    }


def olmo_hybrid(**changes: Any) -> dict[str, Any]:
    return {
        "model_type": "olmo_hybrid",
        "architectures": ["OlmoHybridForCausalLM"],
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "num_hidden_layers": 3,
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-6,
        "eos_token_id": 2,
        "pad_token_id": 0,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 12,
        "linear_value_head_dim": 20,
        "linear_conv_kernel_dim": 4,
        "intermediate_size": 56,
        "rope_parameters": {"rope_theta": None, "rope_type": "default"},
        "tie_word_embeddings": False,
        **changes,
    }


def gemma3(**changes: Any) -> dict[str, Any]:
    return {
        "model_type": "gemma3_text",
        "architectures": ["Gemma3ForCausalLM"],
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "num_hidden_layers": 3,
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-6,
        "eos_token_id": 2,
        "pad_token_id": 0,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "query_pre_attn_scalar": 12,
        "sliding_window": 20,
        "rope_theta": 1e6,
        "rope_local_base_freq": 1e4,
        "intermediate_size": 56,
        **changes,
    }


def gemma4(**changes: Any) -> dict[str, Any]:
    return {
        "model_type": "gemma4_text",
        "architectures": ["Gemma4ForCausalLM"],
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
        "num_hidden_layers": 4,
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-6,
        "eos_token_id": 2,
        "pad_token_id": 0,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "num_global_key_value_heads": 2,
        "head_dim": 12,
        "global_head_dim": 16,
        "attention_k_eq_v": True,
        "sliding_window": 12,
        "final_logit_softcapping": 2.5,
        "intermediate_size": 56,
        "hidden_size_per_layer_input": 0,
        "num_kv_shared_layers": 0,
        **changes,
    }


SHARING = {
    "num_kv_shared_layers": 2,
    "use_double_wide_mlp": True,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": VOCAB + 3,
}
"""Of Gemma 4: keys and values of earlier layers, and inputs of each layer."""


def gemma2(**changes: Any) -> dict[str, Any]:
    return {
        "model_type": "gemma2",
        "architectures": ["Gemma2ForCausalLM"],
        "num_hidden_layers": 3,
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-6,
        "eos_token_id": 2,
        "pad_token_id": 0,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "query_pre_attn_scalar": 24,
        "sliding_window": 12,
        "attn_logit_softcapping": 1.5,
        "final_logit_softcapping": 2.5,
        "rope_theta": 1e4,
        "intermediate_size": 56,
        **changes,
    }


def llama4(**changes: Any) -> dict[str, Any]:
    return {
        "model_type": "llama4_text",
        "architectures": ["Llama4ForCausalLM"],
        "num_hidden_layers": 4,
        "no_rope_layers": [1, 0, 1, 1],
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "eos_token_id": 2,
        "pad_token_id": 0,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "rope_theta": 1e5,
        "attention_chunk_size": 20,
        "floor_scale": 12,
        "attn_scale": 0.3,
        "intermediate_size": 24,
        "intermediate_size_mlp": 56,
        "interleave_moe_layer_step": 2,
        "num_local_experts": 6,
        "tie_word_embeddings": False,
        **changes,
    }


def gpt_oss(**changes: Any) -> dict[str, Any]:
    return {
        "model_type": "gpt_oss",
        "architectures": ["GptOssForCausalLM"],
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "num_hidden_layers": 3,
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "eos_token_id": 2,
        "pad_token_id": 0,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "sliding_window": 12,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 1e5,
            "factor": 2.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 64,
        },
        "intermediate_size": 24,
        "num_local_experts": 6,
        "num_experts_per_tok": 3,
        "swiglu_alpha": 1.3,
        "swiglu_limit": 0.8,
        "tie_word_embeddings": False,
        **changes,
    }


@dataclass(frozen=True)
class Tiny:
    """A config, parsed, with random weights by published name."""

    raw: Mapping[str, Any]
    weights: Mapping[str, Tensor]

    @property
    def family(self) -> Any:
        return FAMILIES[self.raw["model_type"]]

    @property
    def config(self) -> Any:
        return self.family.parse(self.raw)

    def load(self, name: str, shape: tuple[int, ...], shard: TensorShard | None = None) -> Tensor:
        assert tuple(self.weights[name].shape) == shape, name
        return left_of(self.weights[name], shard).clone()

    def model(self, exact: bool, communicator: Communicator = SINGLE_RANK, **options: Any) -> Model:
        dtype = options.pop("dtype", torch.float32)

        def load(name: str, shape: tuple[int, ...], shard: TensorShard | None = None) -> Tensor:
            narrow = not name.endswith(self.family.float32_tensors)
            return self.load(name, shape, shard).to(dtype if narrow else torch.float32)

        return build_decoder(self.family.spec(self.config), load, Execution(exact, dtype, communicator, **options))

    def driver(self, exact: bool, **options: Any) -> "TinyDriver":
        return TinyDriver(self, [self.model(exact)], exact, **options)

    def ranks(self, size: int, exact: bool, **options: Any) -> "TinyDriver":
        return TinyDriver(self, [self.model(exact, each) for each in thread_ranks(size)], exact, **options)


def tiny(raw: Mapping[str, Any], seed: int = 0) -> Tiny:
    """Weights of a size that keeps every layer's output near 1; decay and time steps are spread out."""
    family = FAMILIES[raw["model_type"]]
    generator = torch.Generator().manual_seed(seed)

    def uniform(shape: tuple[int, ...], low: float, high: float) -> Tensor:
        return torch.rand(shape, generator=generator) * (high - low) + low

    weights = {}
    for name, shape in family.tensors(family.parse(raw)).items():
        last = name.rsplit(".", 1)[1]
        if last == "A_log":
            weights[name] = uniform(shape, 0.0, 2.8)
        elif last == "dt_bias":
            weights[name] = uniform(shape, -10.0, 2.0)
        elif last.endswith("bias"):
            weights[name] = uniform(shape, -0.2, 0.2)
        elif len(shape) == 1:
            weights[name] = uniform(shape, 0.5, 1.5)
        else:
            weights[name] = torch.randn(shape, generator=generator) * shape[-1] ** -0.5
            if "embed" in name:
                weights[name] *= shape[-1] ** 0.5 if not raw.get("tie_word_embeddings", True) else 1.5
    return Tiny(raw, weights)


@dataclass
class TinyDriver(Driver):
    """A driver of one model or of the ranks of one, as threads; `model` is the list of them. All ranks have to have the
    same logits."""

    config: Tiny
    model: list[Model]
    exact: bool
    seen: list[list[Tensor]] = field(init=False)

    def __post_init__(self) -> None:
        dtype = self.model[0].spec.dtype
        self.layout = self.config.config.layout(self.block_size, dtype.itemsize, len(self.model))
        self.seen = [[] for _ in self.model]
        runners = [
            Runner(model, self.layout, self.num_pages, self.num_slots, self.exact, observe=self._observer(rank))
            for rank, model in enumerate(self.model)
        ]
        for runner in runners:
            runner.pool.fill_(0xFF)  # recycled pages may hold bytes that read as NaN
        self.runner = RunnersSideBySide(runners) if len(runners) > 1 else runners[0]
        self._begin(self.model[0])

    def _observer(self, rank: int) -> Any:
        def observe(sample: SamplingMetadata, logits: Tensor) -> None:
            self.seen[rank].append(logits.clone())
            if rank == 0:
                self._observe(sample, logits)

        return observe

    def submit(self, *rows: Any, **records: Any) -> Any:
        for seen in self.seen:
            seen.clear()
        result = super().submit(*rows, **records)
        for seen in self.seen[1:]:
            assert len(seen) == len(self.seen[0])
            assert all(torch.equal(one, other) for one, other in zip(seen, self.seen[0], strict=True))
        return result


def prompt(length: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, VOCAB, length).tolist()


# -- transformers ----------------------------------------------------------------------------------------------------


def write(tiny: Tiny, folder: Path) -> None:
    """The checkpoint as it is published."""
    save_file(dict(tiny.weights), folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(dict(tiny.raw)))


def published(tiny: Tiny) -> PreTrainedModel:
    """transformers' model, which has read the checkpoint under its published names and missed or left nothing."""
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as folder:
        write(tiny, Path(folder))
        # Others than the plain one do not bound scores, and None is the model's own choice.
        model, report = AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=torch.float32,
            output_loading_info=True,
            experts_implementation="eager",
            attn_implementation="eager" if tiny.raw.get("attn_logit_softcapping") else None,
        )
    assert not any(report[problem] for problem in ("missing_keys", "unexpected_keys", "mismatched_keys")), report
    return model.eval()


def logits_of(model: PreTrainedModel, tokens: list[int], wide: bool) -> Tensor:
    """Logits at every position by full recompute, [n, vocab]; `wide`: computed in float64 throughout."""
    with torch.inference_mode():
        if not wide:
            return model(torch.tensor([tokens]), use_cache=False).logits[0]
        model = model.double()
        with wide_float(sys.modules[type(model).__module__]):
            logits = model(torch.tensor([tokens]), use_cache=False).logits[0]
    assert logits.dtype == torch.float64
    return logits
