"""What form a request's answers have to have, and how they are taken apart."""

from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from cairn.engine.contract import Structure
from cairn.errors import InvalidRequest
from cairn.server.chat_message import ChatMessage
from cairn.server.parsers.plain import PlainText
from cairn.server.prompts import Prompt
from cairn.server.requests import ChatRequest, SamplingFields
from cairn.server.service import Service
from cairn.server.structured import structure_of
from cairn.server.tools import FORCED_FORM, tool_use

_PROMPT_END = 32
"""Tokens at a prompt's end among which the reasoning is opened."""


@dataclass(frozen=True, slots=True)
class AnswerForm:
    """`structure`: what the engine holds the answers to. `message`: makes the message of one answer."""

    structure: Structure | None
    message: Callable[[], ChatMessage]


async def form_of(service: Service, body: SamplingFields, prompt: Prompt) -> AnswerForm:
    """Raises InvalidRequest naming the field."""
    structure = structure_of(body)
    if not isinstance(body, ChatRequest):
        return AnswerForm(structure, lambda: ChatMessage(PlainText(), service.new_id))
    use = tool_use(body, auto=service.options.enable_auto_tool_choice)
    if use.structure is not None and structure is not None:
        raise InvalidRequest(
            f"{structure.field} and a tool_choice that requires a call cannot go together: send one of them",
            "tool_choice",
        )
    parsers, opened = service.parsers, await _opened(service, body, prompt)
    structure = use.structure or structure
    if structure is not None and parsers.reasons:
        structure = msgspec.structs.replace(structure, reasoning="opened" if opened else "possible")
    calls = None if use.structure is None else FORCED_FORM

    def message() -> ChatMessage:
        parser = parsers.parser(use.tools, opened=opened, calls=calls)
        return ChatMessage(parser, service.new_id, parallel=use.parallel)

    return AnswerForm(structure, message)


async def _opened(service: Service, body: ChatRequest, prompt: Prompt) -> bool:
    """Whether the answer begins within the reasoning."""
    if not service.parsers.reasons:
        return False
    content = body.messages[-1].content
    if body.continue_final_message:
        return isinstance(content, str) and service.parsers.leaves_open(content)
    return service.parsers.opens(await service.decode(prompt.token_ids[-_PROMPT_END:]))
