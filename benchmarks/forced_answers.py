"""Answers that are known beforehand, given in place of what a model draws: what a drafter makes of a text can be
measured with any weights. Everything is computed as it would be, the draw included; only its outcome is another one.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from benchmarks.hand_turned import NOTHING, HandTurned
from torch import Tensor

from cairn.engine.build import build_core
from cairn.engine.contract import EngineConfig, SpeculativeConfig
from cairn.engine.core import Core
from cairn.scheduler.request import Request
from cairn.step import DRAFTED, VerifyRow
from cairn.types import Keys

__all__ = ["Engine", "FixedDrafter", "FixedHead", "ForcedAnswers"]


class ForcedAnswers:
    """Has the runner of a core, in this process and on the CPU, give the tokens that are known. `texts`: by request id,
    prompt and answer, which must be as long as the request's; requests without one are answered by the model."""

    def __init__(self, core: Core) -> None:
        self.texts: dict[str, Keys] = {}
        self._requests = core._scheduler.state.requests
        runner: Any = core._runner
        self._runner, self._sample, self._verify = runner, runner._sample, runner._verifier._sample
        runner._sample, runner._verifier._sample = self._forced_sample, self._forced_verify

    def _texts_by_slot(self) -> dict[int, Keys]:
        requests = self._requests.items()
        return {request.slot: self.texts[name] for name, request in requests if name in self.texts}

    def _forced_sample(self, step: Any, logits: Tensor, masks: Any) -> Tensor:
        tokens: Tensor = self._sample(step, logits, masks)
        texts, samples = self._texts_by_slot(), step.plan.samples
        if texts:
            drawn = zip(samples.slots.tolist(), samples.positions.tolist(), tokens.tolist(), strict=True)
            known = [int(texts[slot][place]) if slot in texts else token for slot, place, token in drawn]
            tokens = torch.tensor(known, dtype=tokens.dtype)
            # where the next pass reads them
            self._runner._slot_tensors.last_tokens.index_copy_(0, step.inputs.sampled_slots.tensor, tokens)
        return tokens

    def _forced_verify(self, verifies: Sequence[VerifyRow], logits: Tensor, masks: Any) -> list[list[int]]:
        verified: list[list[int]] = self._verify(verifies, logits, masks)
        texts = self._texts_by_slot()
        return [
            _until_wrong(row, texts[row.slot]) if row.slot in texts else tokens
            for row, tokens in zip(verifies, verified, strict=True)
        ]


def _until_wrong(row: VerifyRow, text: Keys) -> list[int]:
    """The known tokens after the row's first one and after each draft that is right."""
    known = text[row.start + 1 : row.end + 1]
    wrong = np.flatnonzero(row.tokens[1:] != known[:-1])
    end = int(wrong[0]) + 1 if len(wrong) else len(known)
    return [int(token) for token in known[:end]]


class FixedDrafter:
    """Drafts the next `depth` tokens of the texts that it knows, see `Drafter` and `ForcedAnswers.texts`."""

    max_decodes = 1 << 31

    def __init__(self, texts: dict[str, Keys]) -> None:
        self.depth = 0
        self._texts = texts

    def propose(self, request: Request, most: int, num_decodes: int) -> Keys:
        """See `Drafter`."""
        begin = request.num_tokens
        return self._texts.get(request.id, NOTHING)[begin : begin + min(most, self.depth)]

    def idle_tokens(self, request: Request) -> int:
        """See `Drafter`."""
        return 0

    def record(self, request: Request, num_draft_tokens: int, num_accepted: int) -> None:
        """See `Drafter`."""

    def record_step(self, num_decodes: int, num_draft_tokens: int, seconds: float, has_folds: bool = False) -> None:
        """See `Drafter`."""

    def end(self, request: Request) -> None:
        """See `Drafter`."""


class FixedHead(FixedDrafter):
    """As `FixedDrafter`, but that the model's head drafts, which computes all that it has to and then comes to these
    tokens."""

    def __init__(self, texts: dict[str, Keys], core: Core) -> None:
        super().__init__(texts)
        head: Any = core._runner._head  # type: ignore[attr-defined]
        requests = core._scheduler.state.requests
        advance = head.advance

        def come_to_known(rows: Sequence[VerifyRow], depth: int) -> None:
            advance(rows, depth)
            by_slot = {request.slot: self._texts[name] for name, request in requests.items() if name in self._texts}
            head.tokens[: len(rows)] = torch.tensor([int(by_slot[row.slot][row.start + 1 + depth]) for row in rows])

        head.advance = come_to_known

    def propose(self, request: Request, most: int, num_decodes: int) -> Keys:
        """See `Drafter`."""
        return np.full(len(super().propose(request, most, num_decodes)), DRAFTED, np.int64)


class Engine(HandTurned):
    """One core with the default flags, whose answers may be forced. `method`: what drafts, `most_drafts` at once."""

    def __init__(
        self,
        model: Path,
        precision: str,
        sequences: int,
        clock: Callable[[], float],
        method: str = "suffix",
        most_drafts: int = SpeculativeConfig().num_speculative_tokens,
    ) -> None:
        self.clock, self._sequences = clock, sequences
        config = EngineConfig(
            model=str(model),
            dtype="bfloat16",
            quantization=None if precision == "bfloat16" else precision,
            max_num_seqs=sequences,
            max_num_batched_tokens=2048,
            kv_cache_memory_bytes=1 << 29,
            speculative=SpeculativeConfig(method=method, num_speculative_tokens=most_drafts),  # type: ignore[arg-type]
        )
        super().__init__(build_core(config))
        self.texts = ForcedAnswers(self.core).texts
        self.drafting = self.core._scheduler.state.drafting

    def force(self, prompt: Keys, answer: Keys) -> None:
        """Begin a request, and turn on until its first token has come."""
        self.texts[self.submit(prompt, len(answer))] = np.concatenate([prompt, answer])
        while not self.step():
            pass

    def record_steps(self, most: int) -> None:
        """Have steps with 1 to `most` drafts, and their folds, recorded: of one sequence, and of all of them, of which
        two draft. The drafter learns nothing of it."""
        drafter, num_answered = self.drafting.drafter, 3 * (most + 2)
        for sequences in {1, self._sequences}:
            drafting = dict[str, Keys]()
            self.drafting.drafter = fixed = FixedDrafter(drafting)
            for number in range(sequences):
                prompt = self.draw(64)
                answer = self.draw((num_answered if number > 1 else num_answered * (most + 2) // 2) + sequences)
                name = self.submit(prompt, len(answer))
                self.texts[name] = np.concatenate([prompt, answer])
                if number < 2:
                    drafting[name] = self.texts[name]
            while self.step() < sequences:
                pass
            for fixed.depth in range(most + 1):
                for _ in range(3):
                    self.step()
            self.until_idle()
        self.drafting.drafter = drafter
