"""A PromptRenderer alone, without an engine, gives the tokens and boundaries that a server asks its engine for."""

import asyncio

import numpy as np
import pytest

from cairn.errors import InvalidRequest
from cairn.server.images import MediaConnector
from cairn.server.images.memory import ImageAllocation
from cairn.server.openai.prompts import PromptOptions, PromptRenderer
from cairn.server.openai.requests import ChatRequest, CompletionRequest
from cairn.server.options import ServerLimits
from doubles.byte_tokenizer import VOCAB_SIZE, ByteTokenizer

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
MESSAGES = [
    {"role": "system", "content": "You are brief."},
    {"role": "user", "content": [{"type": "text", "text": "Where?", "cache_control": {"type": "ephemeral"}}]},
]
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
KINDS = {CHAT: ChatRequest, TEXT: CompletionRequest}


def render(body, **options):
    """With a renderer of its own."""

    async def run():
        limits = PromptOptions(**{"vocab_size": VOCAB_SIZE, "max_model_len": 4096} | options)
        renderer = PromptRenderer(ByteTokenizer(), limits, MediaConnector(ServerLimits().images))
        try:
            return await renderer.render(body, ImageAllocation(renderer.images.memory, ""))
        finally:
            await renderer.aclose()

    return asyncio.run(run())


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, {"messages": MESSAGES}),
        (CHAT, {"messages": MESSAGES, "tools": [TOOL], "chat_template_kwargs": {"enable_thinking": False}}),
        (CHAT, {"messages": MESSAGES, "truncate_prompt_tokens": 30}),
        (TEXT, {"prompt": "to be cut", "truncate_prompt_tokens": 3, "truncation_side": "right"}),
        (TEXT, {"prompt": ["several", "of them"]}),
        (TEXT, {"prompt": [5, 6, 7]}),
    ],
)
def test_it_gives_what_the_engine_is_asked(server, path, body):
    before = len(server.requests)
    assert server.post(path, {**body, "max_tokens": 1}).status_code == 200
    asked = server.requests[before:]
    prompts = render(KINDS[path].model_validate(body))
    asked_tokens = [np.frombuffer(request.prompt, "<i8").tolist() for request in asked]
    assert sorted(prompt.token_ids for prompt in prompts) == sorted(asked_tokens)
    if path == CHAT:
        assert list(prompts[0].boundaries) == list(asked[0].boundaries) and prompts[0].boundaries


def test_a_prompt_that_is_handed_over_is_the_one():
    body = ChatRequest(messages=MESSAGES, kv_transfer_params={"prompt_token_ids": [4, 5, 6]}, truncate_prompt_tokens=2)
    (prompt,) = render(body)
    assert prompt.token_ids == [5, 6]


@pytest.mark.parametrize(
    ("fields", "options", "param"),
    [
        ({"chat_template": "x"}, {}, "chat_template"),
        ({"kv_transfer_params": {"prompt_token_ids": [300]}}, {}, "kv_transfer_params.prompt_token_ids"),
        ({"truncate_prompt_tokens": 17}, {"max_model_len": 16}, "truncate_prompt_tokens"),
    ],
)
def test_it_holds_prompts_to_its_options(fields, options, param):
    body = ChatRequest(messages=MESSAGES, **fields)
    with pytest.raises(InvalidRequest) as caught:
        render(body, **options)
    assert caught.value.param == param
    render(body, vocab_size=301, max_model_len=17, trust_request_chat_template=True)
