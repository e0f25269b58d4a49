"""Drafters that know what comes, or lie about it."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from cairn.runner.contract import StepRunner
from cairn.scheduler.request import Request
from cairn.step import DRAFTED
from cairn.types import Keys

Pattern = Callable[[int], int]
"""Of the drafts of the n-th proposal, how many are right."""


class KnowingDrafter:
    """Drafts `num_drafts` tokens of answers that are known beforehand, by request id; after as many as `num_right` says
    of the n-th proposal come tokens that are not. Proposes nothing for whom it does not know."""

    max_decodes = 1 << 31

    def __init__(self, answers: Mapping[str, list[int]], num_drafts: int, num_right: Pattern, vocab_size: int) -> None:
        self._answers, self._num_drafts, self._num_right = answers, num_drafts, num_right
        self._vocab_size = vocab_size
        self._proposals = 0
        self.records: list[tuple[str, int, int]] = []
        self.steps: list[tuple[int, int, float]] = []
        self.ended: list[str] = []

    def propose(self, request: Request, most: int, num_decodes: int) -> Keys:
        answer = self._answers.get(request.id, [])
        drafts = answer[len(request.output) :][: min(self._num_drafts, most)]
        num_right = self._num_right(self._proposals)
        self._proposals += bool(drafts)
        lies = [(token + 1) % self._vocab_size for token in drafts[num_right:]]
        return np.array([*drafts[:num_right], *lies], np.int64)

    def idle_tokens(self, request: Request) -> int:
        return 0

    def record(self, request: Request, num_draft_tokens: int, num_accepted: int) -> None:
        self.records.append((request.id, num_draft_tokens, num_accepted))

    def record_step(self, num_decodes: int, num_draft_tokens: int, seconds: float, has_folds: bool = False) -> None:
        self.steps.append((num_decodes, num_draft_tokens, seconds))

    def end(self, request: Request) -> None:
        self.ended.append(request.id)


class LeftToTheHead(KnowingDrafter):
    """Leaves `num_drafts` tokens to the model's head, whatever it makes of them, with `only_first` in the first step
    of an answer alone."""

    def __init__(self, num_drafts: int, only_first: bool = False) -> None:
        super().__init__({}, num_drafts, lambda proposal: 0, 0)
        self._only_first = only_first

    def propose(self, request: Request, most: int, num_decodes: int) -> Keys:
        if self._only_first and len(request.output) > 1:
            return np.zeros(0, np.int64)
        return np.full(min(self._num_drafts, most), DRAFTED, np.int64)


class KnowingHead(KnowingDrafter):
    """As `KnowingDrafter`, but that what it drafts is left to the head of `runner`'s model, which computes all that it
    has to and then comes to these tokens: on each rank of a `RankThreads`. `num_made`: on rank 0."""

    def __init__(
        self, answers: Mapping[str, list[int]], num_drafts: int, num_right: Pattern, vocab_size: int, runner: StepRunner
    ) -> None:
        super().__init__(answers, num_drafts, num_right, vocab_size)
        self._drafts: dict[int, Keys] = {}
        self.num_made = 0
        for rank, each in enumerate(getattr(runner, "runners", (runner,))):
            self._replace_drafts(each._head, rank)

    def _replace_drafts(self, head: Any, rank: int) -> None:
        assert head is not None
        advance = type(head).advance

        def advance_to_known(rows, depth):
            advance(head, rows, depth)
            assert torch.isfinite(head.hidden[: len(rows)]).all()
            self.num_made += len(rows) if rank == 0 else 0
            known = [int(self._drafts[row.slot][depth]) for row in rows]
            head.tokens[: len(rows)] = torch.tensor(known)

        head.advance = advance_to_known

    def propose(self, request: Request, most: int, num_decodes: int) -> Keys:
        drafts = super().propose(request, most, num_decodes)
        self._drafts[request.slot] = drafts
        return np.full(len(drafts), DRAFTED, np.int64)
