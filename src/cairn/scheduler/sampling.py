"""What a plan says about the draw of one request's next token, and about how likely its prompt was held."""

from cairn.scheduler.plan_builder import PlanBuilder
from cairn.scheduler.request import Phase, Request
from cairn.step import Score, TokenMask


def add_sample(builder: PlanBuilder, request: Request, position: int) -> None:
    """The token at absolute position `position` is drawn in this step."""
    builder.add_sample(request, position, position - request.num_prompt_tokens < request.spec.min_tokens)


def score_of(request: Request, start: int, end: int) -> Score | None:
    """What is to be told of the prompt's tokens that follow those of a prefill row [start, end)."""
    if request.spec.prompt_logprobs is None:
        return None
    targets = request.spec.prompt[start + 1 : end + 1]
    return Score(targets, request.spec.prompt_logprobs) if len(targets) else None


def masks_of(builder: PlanBuilder, is_next: bool) -> dict[int, TokenMask] | None:
    """By slot, the tokens that may come in a plan's draws. `is_next`: whether all plans before it have been applied;
    None where it has to be, since the tokens drawn last say what may come."""
    drawing = [scheduled.request for scheduled in builder.scheduled if scheduled.samples]
    if not is_next and any(
        request.spec.sampling.needs_history or request.spec.constraint is not None for request in drawing
    ):
        return None
    # Of one that has ended meanwhile nobody looks at the token.
    masks = {
        request.slot: request.spec.constraint.allowed(request.output)
        for request in drawing
        if request.spec.constraint is not None and request.phase is Phase.RUNNING
    }
    return {slot: mask for slot, mask in masks.items() if mask is not None}
