"""What a plan says about the draw of one request's next token, and about how likely its prompt was held."""

from cairn.scheduler.plan_builder import PlanBuilder
from cairn.scheduler.request import Request
from cairn.step import Score


def add_sample(builder: PlanBuilder, request: Request, position: int) -> None:
    """The token at absolute position `position` is drawn in this step."""
    spec = request.spec
    assert position == request.num_known or not waits_for_its_token(request), (
        f"{request.id}: {position} is planned ahead"
    )
    mask = None if spec.constraint is None else spec.constraint.allowed(request.output)
    builder.add_sample(request, position, position - request.num_prompt_tokens < spec.min_tokens, mask)


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
