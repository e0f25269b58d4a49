"""Whether a prompt ends within the model's reasoning, and how long an answer may go on with it."""

from collections.abc import Callable, Sequence

from cairn.engine.contract import RenderedPrompt, ThinkingBudget
from cairn.errors import InvalidRequest
from cairn.server.openai.requests import ChatRequest, SamplingFields
from cairn.server.parsers.reasoning import THINK_START
from cairn.server.parsers.registry import ParserFactory
from cairn.server.tokenizer_thread import TokenizerThread

_FIELD = "thinking_token_budget"
_MAX_HEAD = 512
"""Characters of the head of a call at most; no parser takes longer names."""
_PROMPT_END = 32
"""Tokens at a chat's end among which the reasoning is opened."""


async def is_reasoning_open(
    parsers: ParserFactory, tokenizer: TokenizerThread, body: SamplingFields, prompt: RenderedPrompt
) -> bool:
    """Whether the answer begins within the reasoning; False, too, where neither its parsing nor a budget asks."""
    has_budget = body.thinking_token_budget not in (None, -1)
    if not parsers.has_reasoning or not (has_budget or isinstance(body, ChatRequest)):
        return False
    if not isinstance(body, ChatRequest):
        return parsers.leaves_reasoning_open(await tokenizer.decode(prompt.token_ids))
    if body.continue_final_message:
        content = body.messages[-1].content
        return isinstance(content, str) and parsers.leaves_reasoning_open(content)
    return parsers.opens_reasoning(await tokenizer.decode(prompt.token_ids[-_PROMPT_END:]))


async def limit_thinking(
    parsers: ParserFactory,
    tokenizer: TokenizerThread,
    body: SamplingFields,
    prompt: RenderedPrompt,
    *,
    is_open: bool,
    call_heads: Sequence[str],
) -> ThinkingBudget | None:
    """What the engine holds the reasoning to; None for no bound. `is_open`: whether the answer begins within it; what
    the prompt has of it counts. `call_heads`: what calls that end it begin with, without whitespace.

    Raises InvalidRequest where no reasoning is looked for, and for a number out of range.
    """
    budget = body.thinking_token_budget
    if budget is None or budget == -1:
        return None
    if budget < 0:
        raise InvalidRequest(f"{_FIELD} must be -1 for no bound, or 0 and more, not {budget}", _FIELD)
    if not parsers.has_reasoning:
        text = f"{_FIELD}: no reasoning is looked for in this model's answers; start the server with --reasoning-parser"
        raise InvalidRequest(text, _FIELD)
    start, end = parsers.reasoning_marks
    if is_open:
        budget -= await tokenizer.apply(lambda text: count_reasoning_tokens(prompt.token_ids, text.token_bytes, start))
    heads = [head for head in call_heads if len(head) <= _MAX_HEAD]
    return ThinkingBudget(num_tokens=max(0, budget), start=start, end=end, is_open=is_open, call_heads=heads)


def count_reasoning_tokens(
    token_ids: Sequence[int], token_bytes: Callable[[int], bytes], start: str = THINK_START
) -> int:
    """Tokens after the last mark that begins the reasoning, without the newlines next to it."""
    spelled = [token_bytes(token) for token in token_ids]
    begin = b"".join(spelled).rfind(start.encode()) + len(start)
    position, following = 0, list[bytes]()
    for part in spelled:
        if position >= begin:
            following.append(part)
        position += len(part)
    num_blank = next((i for i, part in enumerate(following) if part.strip(b"\n")), len(following))
    return len(following) - num_blank
