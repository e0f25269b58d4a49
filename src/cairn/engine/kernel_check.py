"""Whether a GPU computes what its kernels say: a prompt in one step, whose products are made by tensor cores, and the
same tokens one by one through the kernels of decodes have to come to the same next token.

Compilers make mistakes that no test of another model's sizes sees: with ptxas 12.8 products of some sizes of heads are
wrong, or NaN, on Hopper (`cairn.kernels.cuda.assembler`). The check is made with the model's own weights, before the
server takes requests.
"""

import logging

import numpy as np
import torch
from torch import Tensor

from cairn.cache.layout import CacheLayout
from cairn.errors import ConfigError
from cairn.kernels.sampling.metadata import SamplingMetadata
from cairn.step import GRID, Admit, DecodeRows, PrefillRow, Samples, StepPlan, TokenMasks
from cairn.types import SamplingParams

NUM_TOKENS = GRID + 6
"""Of the prompt: a whole chunk of the scans, and a part of one."""

LEAST_CORRELATION = 0.5
"""Of the two rows of logits. Roundings to bfloat16 leave more than .99 of it; random weights, whose routers choose
experts by next to nothing, .84 (40 layers of 256 experts). Wrong products leave next to none."""

Steps = list[tuple[StepPlan, TokenMasks]]

logger = logging.getLogger(__name__)


class KernelCheck:
    """`observe` is the profile run's runner's. Until `begin` nothing is kept."""

    def __init__(self) -> None:
        self._rows: list[Tensor] | None = None

    def observe(self, sample: SamplingMetadata, logits: Tensor) -> None:
        if self._rows is not None:
            self._rows.append(logits.double().cpu())

    def begin(self, layout: CacheLayout, vocab_size: int, step: int) -> Steps:
        """The prompt, and then the same tokens one by one in the same slot, in steps from number `step` on; logits
        after the last token are kept of both."""
        self._rows = []
        tokens = np.random.default_rng(0).integers(0, vocab_size, NUM_TOKENS)
        tables = tuple(np.arange(group.pages_for(NUM_TOKENS), dtype=np.int32) for group in layout.groups)
        admit, slot = Admit(0, tables, SamplingParams(temperature=0.0)), np.zeros(1, np.int32)
        last = Samples(slot, slot + NUM_TOKENS, np.zeros(1, np.bool_))
        steps: Steps = [
            (StepPlan(step, admits=(admit,), prefills=(PrefillRow(0, 0, tokens, 0),), samples=last), {}),
        ]
        for position in range(NUM_TOKENS):
            decodes = DecodeRows(slot, slot + position, tokens[position : position + 1], slot)
            samples = last if position == NUM_TOKENS - 1 else Samples()
            admits = () if position else (admit,)
            steps.append((StepPlan(step + 1 + position, admits, decodes=decodes, samples=samples), {}))
        return steps

    def finish(self) -> None:
        """Raises ConfigError where the two differ by more than roundings; other ranks than 0 have seen none of them."""
        rows, self._rows = self._rows or [], None
        if not rows:
            return
        at_once, one_by_one = rows
        correlation = float(torch.corrcoef(torch.stack((at_once, one_by_one)))[0, 1])
        logger.info("kernels: the logits of a prompt in one step and token by token correlate by %.4f", correlation)
        if not correlation >= LEAST_CORRELATION:
            raise ConfigError(
                "--device cuda: a prompt in one step and token by token come to different logits (correlation "
                f"{correlation:.2f}): the kernels were compiled wrongly for this model. Triton's ptxas is the "
                "likeliest reason: name a newer one (of CUDA 13.1 or later) in TRITON_PTXAS_PATH, or serve with "
                "--exact, which has no products on tensor cores, or with --device cpu"
            )
