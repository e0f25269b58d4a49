"""What a plan says about the draw of one request's next token, and about how likely its prompt was held."""

from cairn.scheduler.request import Request
from cairn.step import Sample, Score


def sample_at(request: Request, position: int) -> Sample:
    """How the token at absolute position `position` is drawn."""
    spec, start = request.spec, request.num_prompt_tokens
    history = None
    if spec.sampling.needs_history:
        assert request.lease is not None and position == request.num_known, f"{request.id}: {position} is planned ahead"
        history = request.lease.keys[:position]
    return Sample(
        spec.sampling,
        position,
        allowed=None if spec.constraint is None else spec.constraint.allowed(request.output),
        banned=tuple(sorted(spec.stop_token_ids)) if position - start < spec.min_tokens else (),
        history=history,
        num_prompt_tokens=start if history is not None else 0,
        logprobs=spec.logprobs,
    )


def score_of(request: Request, start: int, end: int) -> Score | None:
    """What is to be told of the prompt's tokens that follow those of a prefill row [start, end)."""
    if request.spec.prompt_logprobs is None:
        return None
    targets = request.spec.prompt[start + 1 : end + 1]
    return Score(targets, request.spec.prompt_logprobs) if len(targets) else None


def waits_for_its_token(request: Request) -> bool:
    """Whether a token cannot be drawn before the one before it is known: what was drawn last says what may come, or
    makes it less likely. Such a request is not planned ahead."""
    return request.spec.sampling.needs_history or request.spec.constraint is not None
