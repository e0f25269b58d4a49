"""What an answer does not have is null where vLLM says null, so that the attributes exist in its clients."""

import json

import pytest

# The fields of vLLM 0.33's responses and chunks, as its `model_dump` writes them.
USAGE = "prompt_tokens total_tokens completion_tokens prompt_tokens_details completion_tokens_details"
MESSAGE = "role content refusal annotations audio function_call reasoning"
WHOLE = {
    "/v1/completions": {
        "": "id object created model choices service_tier system_fingerprint usage kv_transfer_params "
        "ec_transfer_params metrics",
        "usage": USAGE,
        "choice": "index text logprobs finish_reason stop_reason token_ids prompt_logprobs prompt_token_ids "
        "routed_experts",
    },
    "/v1/chat/completions": {
        "": "id object created model choices service_tier system_fingerprint usage prompt_logprobs prompt_token_ids "
        "prompt_text kv_transfer_params ec_transfer_params metrics",
        "usage": USAGE,
        "choice": "index message logprobs finish_reason stop_reason token_ids routed_experts",
        "message": MESSAGE,
    },
}
OURS = {"cairn", "reasoning_content"}
BODIES = {
    "/v1/completions": {"prompt": "ab", "max_tokens": 3},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "ab"}], "max_tokens": 3},
}
ENVELOPE = {"id", "object", "created", "model", "choices"}


def parts_of(answer):
    (choice,) = answer["choices"]
    return {"": answer, "usage": answer["usage"], "choice": choice, "message": choice.get("message")}


@pytest.mark.parametrize("path", WHOLE)
def test_a_response_has_every_field_of_vllms(server, path):
    answer = server.post(path, BODIES[path]).json()
    parts = parts_of(answer)
    for name, fields in WHOLE[path].items():
        assert parts[name].keys() - OURS == set(fields.split()), name
    said = {"content", "choices", "usage", "message", "text", "finish_reason", "index", "prompt_tokens_details"}
    for name, part in parts.items():
        for field, value in (part or {}).items():
            assert value is not None or field not in said, (name, field)
    nulls = {field for part in parts.values() for field, value in (part or {}).items() if value is None}
    assert {"logprobs", "token_ids", "stop_reason", "prompt_logprobs", "prompt_token_ids", "service_tier"} <= nulls


def test_the_attributes_exist_in_openais_client(server):
    client = server.client()
    text = client.completions.create(model="echo", prompt="ab", max_tokens=2)
    (choice,) = text.choices
    assert (choice.prompt_logprobs, choice.token_ids, choice.prompt_token_ids, choice.logprobs) == (None,) * 4
    assert (
        choice.stop_reason is None and text.kv_transfer_params is None and text.usage.completion_tokens_details is None
    )
    chat = client.chat.completions.create(model="echo", messages=[{"role": "user", "content": "ab"}], max_tokens=2)
    message = chat.choices[0].message
    assert (chat.prompt_logprobs, chat.prompt_token_ids, chat.service_tier) == (None,) * 3
    assert (message.reasoning, message.reasoning_content, message.refusal, message.audio) == (None,) * 4
    assert message.tool_calls is None and message.function_call is None
    # What an answer says is what the next turn may send.
    turn = [{"role": "user", "content": "ab"}, message.model_dump(), {"role": "user", "content": "c"}]
    assert client.chat.completions.create(model="echo", messages=turn, max_tokens=2).choices


@pytest.mark.parametrize("ids", [False, True])
def test_the_chunks_of_a_completion(server, ids):
    body = BODIES["/v1/completions"] | {"stream": True, "return_token_ids": ids}
    sent = chunks(server, "/v1/completions", body | {"prompt": "ab" * 50, "max_tokens": 99})
    fields = "index text logprobs finish_reason stop_reason prompt_token_ids token_ids"
    first, *others = choices = [chunk["choices"][0] for chunk in sent]
    assert all(choice.keys() == set(fields.split()) for choice in choices)
    assert first["prompt_token_ids"] == ([97, 98] * 50 if ids else None)
    assert all(choice["prompt_token_ids"] is None for choice in others)
    assert {type(choice["token_ids"]) for choice in choices} == {list if ids else type(None)}
    assert all(chunk.keys() == ENVELOPE for chunk in sent[:-1])
    assert sent[-1].keys() == ENVELOPE | {"system_fingerprint", "cairn"}


@pytest.mark.parametrize("ids", [False, True])
def test_the_chunks_of_a_chat(server, ids):
    body = {"messages": [{"role": "user", "content": "ab" * 50}], "max_tokens": 99, "stream": True}
    body |= {"return_token_ids": ids}
    first, *middle, last = chunks(server, "/v1/chat/completions", body)
    assert first.keys() == ENVELOPE | {"prompt_token_ids", "prompt_text"} and first["prompt_text"] is None
    assert isinstance(first["prompt_token_ids"], list if ids else type(None))
    assert first["choices"] == [
        {"index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
    ]
    fields = {"index", "delta", "logprobs", "finish_reason", "token_ids"}
    assert all(chunk["choices"][0].keys() == fields and chunk.keys() == ENVELOPE for chunk in middle)
    assert all((chunk["choices"][0]["token_ids"] is not None) == ids for chunk in (*middle, last))
    assert last["choices"][0].keys() == fields | {"stop_reason"} and last["choices"][0]["finish_reason"] == "length"
    assert last.keys() == ENVELOPE | {"system_fingerprint", "cairn"}


@pytest.mark.parametrize("path", BODIES)
def test_the_chunk_with_the_usage(server, path):
    options = {"stream": True, "stream_options": {"include_usage": True}}
    *others, usage = chunks(server, path, BODIES[path] | options)
    assert usage.keys() == ENVELOPE | {"usage", "system_fingerprint", "cairn"} and usage["choices"] == []
    assert None not in usage.values() and None not in usage["usage"].values()
    assert not any(chunk.keys() & {"usage", "system_fingerprint", "cairn"} for chunk in others)


def test_the_fingerprint_is_of_what_computes(serve, server):
    ask = lambda one: one.post("/v1/completions", BODIES["/v1/completions"]).json()["system_fingerprint"]  # noqa: E731
    assert ask(server).startswith("cairn-") and ask(server) == ask(server)
    assert ask(serve(exact=True)) != ask(server)


def chunks(server, path, body):
    *events, done = server.post(path, body).text.strip().split("\n\n")
    assert done == "data: [DONE]"
    return [json.loads(event.removeprefix("data: ")) for event in events]
