"""Whether a GPU computes what its kernels say: a prompt in one step, whose products are made by tensor cores, and the
same tokens one by one through the kernels of decodes have to come to the same next token. So do the last of them as
drafts that are verified, and their fold, where anything is drafted.

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
from cairn.step import GRID, Admit, DecodeRows, Fold, PrefillRow, Samples, StepPlan, TokenMask, TokenMasks, VerifyRow
from cairn.types import SamplingParams

NUM_TOKENS = GRID + 6
"""Of the prompt: a whole chunk of the scans, and a part of one."""

NUM_VERIFIED = 4
"""Of its tokens, the last ones."""

LEAST_CORRELATION = 0.5
"""Of two rows of logits. Roundings to bfloat16 leave more than .99 of it; random weights, whose routers choose
experts by next to nothing, .84 (40 layers of 256 experts). Wrong products leave next to none."""

Steps = list[tuple[StepPlan, TokenMasks]]

logger = logging.getLogger(__name__)


class KernelCheck:
    """`observe` is the profile run's runner's. Until `begin` nothing is kept."""

    def __init__(self) -> None:
        self._rows: list[Tensor] | None = None

    def observe(self, sample: SamplingMetadata, logits: Tensor) -> None:
        # of what is verified the tokens before are drawn, too
        if self._rows is not None and sample.position == NUM_TOKENS:
            self._rows.append(logits.double().cpu())

    def begin(self, layout: CacheLayout, vocab_size: int, step: int, drafts: bool = False) -> Steps:
        """The prompt, and then the same tokens one by one in the same slot, in steps from number `step` on; logits
        after the last token are kept of both. `drafts`: and those of a verify of the last tokens, and of a decode of
        the last one behind the fold of the others."""
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
        if not drafts:
            return steps
        step, begin = steps[-1][0].step + 1, NUM_TOKENS - NUM_VERIFIED
        masks = [*(_only(int(token), vocab_size) for token in tokens[begin + 1 :]), None]
        verify = VerifyRow(0, begin, tokens[begin:], 0)
        steps += [
            (StepPlan(step, admits=(admit,), prefills=(PrefillRow(0, 0, tokens[:begin], 0),)), {}),
            (StepPlan(step + 1, verifies=(verify,)), {0: masks}),
            (StepPlan(step + 2, folds=(Fold(0, NUM_VERIFIED - 1),), decodes=decodes, samples=last), {}),
        ]
        return steps

    def finish(self) -> None:
        """Raises ConfigError where they differ by more than roundings; other ranks than 0 have seen none of them."""
        rows, self._rows = self._rows or [], None
        if not rows:
            return
        at_once, one_by_one, *drafted = rows
        for what, row in zip(
            ("a prompt in one step", "verified drafts", "folded drafts"), (at_once, *drafted), strict=False
        ):
            correlation = float(torch.corrcoef(torch.stack((row, one_by_one)))[0, 1])
            logger.info("kernels: the logits of %s and token by token correlate by %.4f", what, correlation)
            if not correlation >= LEAST_CORRELATION:
                raise ConfigError(
                    f"--device cuda: {what} and token by token come to different logits (correlation "
                    f"{correlation:.2f}): the kernels were compiled wrongly for this model. Triton's ptxas is the "
                    "likeliest reason: name a newer one (of CUDA 13.1 or later) in TRITON_PTXAS_PATH, or serve with "
                    "--exact, which has no products on tensor cores, or with --device cpu"
                )


def _only(token: int, vocab_size: int) -> TokenMask:
    """Which makes the token be drawn."""
    mask = np.zeros(-(-vocab_size // 32), np.uint32)
    mask[token // 32] = 1 << token % 32
    return mask.view(np.int32)
