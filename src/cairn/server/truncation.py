"""`truncate_prompt_tokens`: a long prompt's end instead of a refusal."""

from dataclasses import replace

from cairn.errors import InvalidRequest
from cairn.server.prompts import Prompt
from cairn.server.requests import SamplingFields
from cairn.server.sampling import max_tokens_of

_FIELD = "truncate_prompt_tokens"


def truncated(prompt: Prompt, body: SamplingFields, max_model_len: int) -> Prompt:
    """The prompt, or its last tokens where it has more than the body wants kept. -1: as many as leave room for
    `max_tokens`, or for one.

    Raises InvalidRequest for a number out of range, and where images would be cut off or in two.
    """
    asked = body.truncate_prompt_tokens
    if asked is None:
        return prompt
    if not (asked == -1 or 1 <= asked <= max_model_len):
        raise InvalidRequest(f"{_FIELD} is {asked}: it must be -1, or 1 to {max_model_len}", _FIELD)
    keep = max(1, max_model_len - (max_tokens_of(body) or 1)) if asked == -1 else asked
    cut = len(prompt.token_ids) - keep
    if cut <= 0:
        return prompt
    if prompt.images:
        raise InvalidRequest(f"{_FIELD}: the prompt has images and is {cut} tokens longer: shorten it yourself", _FIELD)
    kept = [replace(place, position=place.position - cut) for place in prompt.boundaries if place.position > cut]
    # An echo is what the model has seen.
    return replace(prompt, token_ids=prompt.token_ids[cut:], boundaries=kept, text=None)
