"""A runner without a model: the answer to a prompt is the prompt. It makes no states and reads none."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace

import numpy as np

from cairn.engine.contract import GenerateRequest
from cairn.engine.grammars.constraint import GrammarConstraint
from cairn.engine.specs import SpecBuilder
from cairn.kernels.sampling.metadata import SamplingMetadata
from cairn.runner.input_batch import InputBatch
from cairn.scheduler.request import Spec
from cairn.step import Logprobs, SampledToken, Scored, StepPlan, StepResult, TokenMasks
from cairn.transfer.contract import TransferRole
from cairn.types import SamplingParams
from doubles.byte_tokenizer import END_OF_SEQUENCE, VOCAB_SIZE
from doubles.step_results import MAX_SLOTS, step_result

__all__ = ["EchoRunner", "EchoSpecs"]


@dataclass(frozen=True, slots=True)
class _EchoParams(SamplingParams):
    """`index`: which of its request's answers it is."""

    index: int = 0

    @property
    def needs_history(self) -> bool:
        """Always: the prompt is what is echoed."""
        return True


class EchoSpecs(SpecBuilder):
    """Asks the scheduler to tell the runner of every request's prompt."""

    def build(
        self,
        request: GenerateRequest,
        role: TransferRole,
        constraint: GrammarConstraint | None,
        max_tokens_for: Callable[[int], int],
    ) -> list[Spec]:
        specs = super().build(request, role, constraint, max_tokens_for)
        return [replace(spec, sampling=_echo(spec.sampling, index)) for index, spec in enumerate(specs)]


def _echo(params: SamplingParams, index: int) -> _EchoParams:
    return _EchoParams(**{field.name: getattr(params, field.name) for field in fields(SamplingParams)}, index=index)


class EchoRunner:
    """Draws the prompt's byte tokens one by one, then end-of-sequence, and with `ignore_eos` all over again; answer
    number i begins with byte i. What may not come is left out. Where an image stands, byte 0 is said.

    One step is out at a time. Token t has the logarithm -1 - t / 1024, so the best ones are 0, 1, 2, ..., and its rank
    is t + 1.
    """

    def __init__(self) -> None:
        self.forward_passes = 0
        self.steps = 0
        self._input_batch = InputBatch(MAX_SLOTS)
        self._plan = StepPlan(0)
        self._masks: TokenMasks = {}

    def launch(self, plan: StepPlan) -> None:
        """Needs plans whose requests come from `EchoSpecs`."""
        self.forward_passes += bool(plan.num_seqs)
        self._input_batch.update(plan)
        self._plan = plan

    def sample(self, step: int, masks: TokenMasks) -> None:
        self._masks = masks

    def collect(self, step: int) -> StepResult:
        self.steps += 1
        plan = self._plan
        scores = [(row.slot, row.start, row.score) for row in plan.prefills if row.score is not None]
        samples = zip(plan.samples.slots.tolist(), self._input_batch.sampling_metadata(plan, self._masks), strict=True)
        sampled = [_drawn(slot, sample) for slot, sample in samples]
        scored = tuple(
            Scored(slot, start + 1 + i, _logprobs(target, score.top))
            for slot, start, score in scores
            for i, target in enumerate(score.targets.tolist())
        )
        result = step_result(plan.step, sampled, scored, [True] * len(plan.decodes))
        self._input_batch.append(result.slots, result.tokens)
        return result

    def settle(self, *, has_slots: bool = True) -> None:
        """Nothing is left for later."""

    def close(self) -> None:
        """Nothing runs beside it."""


def _drawn(slot: int, sample: SamplingMetadata) -> SampledToken:
    token = next((token for token in _wishes(sample) if _may_come(token, sample)), END_OF_SEQUENCE)
    told = None if sample.logprobs is None else _logprobs(token, sample.logprobs, sample.params.logprob_token_ids)
    return SampledToken(slot, token, told)


def _wishes(sample: SamplingMetadata) -> Iterator[int]:
    """What is to be said next, then what else may be said instead."""
    assert sample.history is not None and isinstance(sample.params, _EchoParams)
    prompt, said = np.split(sample.history, [sample.num_prompt_tokens])
    echo = np.maximum(prompt[prompt < END_OF_SEQUENCE], 0).tolist()
    if not echo:
        yield END_OF_SEQUENCE
    else:
        num_said = np.count_nonzero(said != END_OF_SEQUENCE)
        if len(said) and num_said % len(echo) == 0 and said[-1] != END_OF_SEQUENCE:
            yield END_OF_SEQUENCE
        yield echo[(num_said + sample.params.index) % len(echo)]
        yield from echo
    yield from range(VOCAB_SIZE)


def _may_come(token: int, sample: SamplingMetadata) -> bool:
    allowed = sample.allowed_mask is None or bool(int(sample.allowed_mask[token // 32]) >> token % 32 & 1)
    listed = not sample.params.allowed_token_ids or token in sample.params.allowed_token_ids
    return allowed and listed and token not in sample.banned_tokens and token not in sample.bad_word_ends()


def _logprobs(token: int, top: int, listed: tuple[int, ...] = ()) -> Logprobs:
    ids = np.array([[token, *(listed or range(top))]], np.int32)
    return Logprobs(ids, (-1 - ids / 1024).astype(np.float32), ids[:, 0] + 1)
