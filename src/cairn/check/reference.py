"""What transformers computes with a checkpoint's weights, as the truth that cairn's answers are compared with."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from cairn.errors import ConfigError, ModelError
from cairn.models.weights.gguf.header import is_gguf
from cairn.models.weights.loader import read_config
from cairn.models.weights.quantization_config import read_quantization

_EXTRA = frozenset(("accelerate", "compressed_tensors"))
"""Packages of cairn's extra `check`."""

_PACKAGES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "gguf": ("accelerate",),
        "fp8": ("accelerate",),
        "compressed-tensors": ("accelerate", "compressed_tensors"),
        "mxfp4": ("accelerate",),
        "awq": ("accelerate", "gptqmodel"),
        "gptq": ("optimum", "gptqmodel"),
        "auto-round": ("accelerate", "auto_round"),
    }
)
"""What transformers wants besides, by how a checkpoint is stored."""

_UNREAD = frozenset(("modelopt",))
"""How checkpoints are stored that transformers does not read at all."""


@dataclass(frozen=True, slots=True)
class ReferenceAnswer:
    """A greedy answer. `logprobs`: float32 [num_tokens, vocab_size], log-probabilities at each of its tokens."""

    token_ids: list[int]
    logprobs: torch.Tensor


def check_packages(folder: Path) -> None:
    """Raises ConfigError where transformers does not read such checkpoints, or would want a package that is not
    installed, and ModelError as `read_config` and `read_quantization`."""
    quantization = read_quantization(folder, read_config(folder))
    # Also of plain numbers.
    method = "gguf" if is_gguf(folder) else "" if quantization is None else quantization.method
    if method in _UNREAD:
        raise ConfigError(
            f"--generate: transformers, which answers are compared with, does not read {method} checkpoints"
        )
    missing = [name for name in _PACKAGES.get(method, ()) if find_spec(name) is None]
    if missing:
        wanted = "'cairn-serve[check]'" if _EXTRA.issuperset(missing) else " ".join(missing)
        raise ConfigError(
            f"--generate: transformers, which answers are compared with, reads {method} checkpoints only with "
            f"{' and '.join(missing)}: pip install {wanted}"
        )


class TransformersReference:
    """A checkpoint as transformers loads it, on the CPU, in `dtype`. Code that comes with a checkpoint is never run.
    All methods raise ModelError when transformers cannot compute with it."""

    def __init__(self, folder: Path, dtype: str) -> None:
        """Raises ModelError when transformers cannot load the checkpoint."""
        from transformers import AutoModelForCausalLM

        place, options = (folder.parent, {"gguf_file": folder.name}) if is_gguf(folder) else (folder, {})
        self._folder = folder
        with self._saying("load it"):
            model: Any = AutoModelForCausalLM.from_pretrained(
                place, dtype=getattr(torch, dtype), local_files_only=True, trust_remote_code=False, **options
            )
        # Others than the plain attention leave scores as they are, however they are to be bounded.
        if getattr(model.config, "attn_logit_softcapping", None) is not None:
            model.set_attn_implementation("eager")
        # Activations stay as they are in cairn, also where a checkpoint is published for such in fewer bits.
        for module in model.modules():
            if (scheme := getattr(module, "quantization_scheme", None)) is not None:
                scheme.input_activations = None
        self._model = model.eval()
        # Nemotron-H in transformers 5.23 ignores config.json's time_step_limit and bounds the time steps of prefill,
        # but not those of decode, by time_step_min; vLLM goes by time_step_limit.
        limit = getattr(model.config, "time_step_limit", None)
        for module in model.modules():
            if limit is not None and hasattr(module, "time_step_limit"):
                module.time_step_limit = tuple(limit)

    @torch.inference_mode()
    def sum_logprobs(self, token_ids: Sequence[int]) -> float:
        """The sum of the log-probabilities of all tokens but the first, in nats."""
        tokens = torch.tensor([token_ids])
        with self._saying("compute with it"):
            logits: torch.Tensor = self._model(tokens, use_cache=False).logits[0, :-1].float()
        return -torch.nn.functional.cross_entropy(logits, tokens[0, 1:], reduction="sum").item()

    @torch.inference_mode()
    def logprobs(self, prompt: Sequence[int], answer: Sequence[int]) -> torch.Tensor:
        """float32 [tokens of the answer, vocab_size]: log-probabilities where each of them stands."""
        tokens = torch.tensor([[*prompt, *answer]])
        with self._saying("compute with it"):
            logits: torch.Tensor = self._model(tokens, use_cache=False).logits[0, len(prompt) - 1 : -1]
        return logits.float().log_softmax(dim=-1)

    @torch.inference_mode()
    def generate(self, prompt: Sequence[int], max_tokens: int) -> ReferenceAnswer:
        """The greedy answer of exactly `max_tokens` tokens."""
        tokens = torch.tensor([list(prompt)])
        with self._saying("compute with it"):
            output = self._model.generate(
                tokens,
                attention_mask=torch.ones_like(tokens),
                max_new_tokens=max_tokens,
                min_new_tokens=max_tokens,
                do_sample=False,
                num_beams=1,
                temperature=None,
                top_p=None,
                top_k=None,
                eos_token_id=None,
                pad_token_id=0,
                output_logits=True,
                return_dict_in_generate=True,
            )
        logprobs = torch.cat(output.logits).float().log_softmax(dim=-1)
        return ReferenceAnswer(output.sequences[0, len(prompt) :].tolist(), logprobs)

    @contextmanager
    def _saying(self, what: str) -> Iterator[None]:
        """What is raised inside says that transformers cannot do `what`."""
        try:
            yield
        except Exception as error:  # packages for formats raise anything: gptqmodel an IndexError for a layer it misses
            raise ModelError(f"{self._folder}: transformers cannot {what}: {error}") from error
