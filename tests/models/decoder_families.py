"""Tiny models of the families that are made of parts: weights, drivers, and transformers as their truth."""

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
from models.tiny_configs import VOCAB
from models.wide_float import wide_float
from runner.harness import Driver, RunnersSideBySide, left_of


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
