"""Every wrong request gets a clear answer that names the field, and the server lives."""

import json
import socket
from http import HTTPStatus

import openai
import pytest

CHAT = {"messages": [{"role": "user", "content": "x"}]}
TEXT = {"prompt": "x"}
TYPES = {400: ["BadRequestError", "Bad Request"], 404: ["NotFoundError", "Not Found"], 500: ["InternalServerError"]}
"""vLLM's, by status: where it has two, the second is the framework's, for bodies and paths that it refuses itself."""


def refused(response, status=400):
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["code"] == status
    assert error["type"] in TYPES.get(status, [HTTPStatus(status).phrase])
    return error


@pytest.fixture(autouse=True)
def server_lives(server):
    yield
    assert server.post("/v1/completions", {"prompt": "still there", "max_tokens": 2}).status_code == 200
    server.assert_nothing_is_held()


@pytest.mark.parametrize("prompt", ["", [], [[]], [""]])
def test_empty_prompt(server, prompt):
    error = refused(server.post("/v1/completions", {"prompt": prompt}))
    assert error["param"] == "prompt" and "empty" in error["message"]


@pytest.mark.parametrize("n", [4096, 5000])
def test_prompt_too_long(server, n):
    error = refused(server.post("/v1/completions", {"prompt": [1] * n}))
    assert error["param"] == "prompt" and f"{n} tokens" in error["message"] and "4096" in error["message"]


def test_chat_too_long(server):
    error = refused(server.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "x" * 5000}]}))
    assert error["param"] == "messages"


def test_prompt_and_answer_together_too_long(server):
    error = refused(server.post("/v1/completions", {"prompt": [1] * 4000, "max_tokens": 97}))
    assert error["param"] == "max_tokens" and "97" in error["message"]


@pytest.mark.parametrize("field", ["max_tokens", "max_completion_tokens"])
def test_the_field_that_asks_for_too_much_is_the_one_that_was_sent(server, field):
    error = refused(server.post("/v1/chat/completions", CHAT | {field: 5000}))
    assert error["param"] == field and f"{field} asks for 5000 more" in error["message"]


def test_what_is_too_much_without_having_been_asked_for(server):
    error = refused(server.post("/v1/completions", {"prompt": [1] * 4095}))
    assert error["param"] == "max_tokens" and "without max_tokens an answer may have 16" in error["message"]
    assert error["message"].endswith("send max_tokens of at most 1")
    assert server.post("/v1/completions", {"prompt": [1] * 4095, "max_tokens": 1}).status_code == 200


@pytest.mark.parametrize(
    ("tokens", "said"),
    [
        ([1, 2, 259], "prompt[2] is 259, which is out of vocabulary: token ids of this model are below 259"),
        ([-1], "prompt[0] is -1"),
        ([1, 10**30], "prompt[1] must be at most 9223372036854775807 (less_than_equal: got 1000000000"),
        ([1, "a"], "prompt[1] must be a whole number, not text"),
        ([1, [2]], "prompt[1] must be a whole number, not a list"),
        ([1, 2.5], "prompt[1] must be a whole number, not a fraction"),
        ([None], "prompt[0] must be a whole number, not null"),
    ],
)
def test_token_id_out_of_range(server, tokens, said):
    error = refused(server.post("/v1/completions", {"prompt": tokens}))
    assert error["param"] == "prompt" and said in error["message"]


@pytest.mark.parametrize(
    ("prompt", "said"),
    [
        (["a", ""], "prompt"),
        (["a", 5], "prompt[1] must be text or a list"),
        ([[1], [259]], "prompt[1][0] is 259"),
        ([[1], []], "prompt[1] is empty"),
        ([[], [1]], "prompt[0] is empty"),
        ([[1], [1] * 5000], "prompt[1] is too long: 5000 tokens"),
        (["x"] * 257, "257 prompts are too many"),
    ],
)
def test_several_prompts_of_which_one_is_wrong(server, prompt, said):
    error = refused(server.post("/v1/completions", {"prompt": prompt}))
    assert error["param"] == "prompt" and said in error["message"]


def anthropic(message, **fields):
    return "/v1/messages", {"model": "echo", "max_tokens": 5, "messages": [message]} | fields


def block(**fields):
    return anthropic({"role": "user", "content": [fields]})


def part(*parts):
    return "/v1/chat/completions", {"messages": [{"role": "user", "content": [*parts]}]}


def item(**fields):
    return "/v1/responses", {"input": [fields]}


ROLES = 'must be one of "user", "assistant", "system"'
TOOL = {"type": "function", "function": {"name": "f"}}


@pytest.mark.parametrize(
    ("asked", "param", "said"),
    [
        # told apart by `role`
        (anthropic({"content": "x"}), "messages[0].role", "is missing"),
        (anthropic({"role": "tool", "content": "x"}), "messages[0].role", f"{ROLES} (got 'tool')"),
        (anthropic({"role": 5, "type": "user", "content": "x"}), "messages[0].role", f"{ROLES} (got 5)"),
        (anthropic({"type": "message", "content": "x"}), "messages[0].role", "is missing"),
        (anthropic([]), "messages[0]", "must be an object, not a list"),
        # by `type`
        (block(text="x"), "messages[0].content[0].type", "is missing"),
        (block(type="x"), "messages[0].content[0].type", '"document", "search_result" (got \'x\')'),
        (block(type="image", source={}), "messages[0].content[0].source.type", "is missing"),
        (block(type="image", source={"type": 5}), "messages[0].content[0].source.type", '"base64", "url" (got 5)'),
        (anthropic(CHAT["messages"][0], thinking={"type": []}), "thinking.type", "must be one of"),
        (part({"text": "x"}), "messages[0].content[0].type", "is missing"),
        (part("x", {"type": "audio"}), "messages[0].content[1].type", "(got 'audio')"),
        (item(type="x"), "input[0].type", "(got 'x')"),
        (item(role="user", content=[{"type": None}]), "input[0].content[0].type", "(got None)"),
        (item(type="function_call_output", call_id="x", output=[{}]), "input[0].output[0].type", "is missing"),
        (("/v1/responses", {"input": "x", "text": {"format": {"type": 1}}}), "text.format.type", "(got 1)"),
        (("/v1/chat/completions", CHAT | {"response_format": {"type": "x"}}), "response_format.type", "(got 'x')"),
        (("/v1/completions", TEXT | {"response_format": {}}), "response_format.type", "is missing"),
        # by what kind of value it is
        (part(5), "messages[0].content[0]", "must be text or a part: an object with a type, not a number"),
        (part({"type": "input_image", "image_url": 5}), "messages[0].content[0].image_url", "must be a URL"),
        (("/v1/responses", {"input": 5}), "input", "must be text or a list of items, not a number"),
        (anthropic({"role": "user", "content": 5}), "messages[0].content", "must be text or a list of blocks"),
        (("/v1/chat/completions", CHAT | {"tool_choice": 5}), "tool_choice", 'must be "none", "auto"'),
        # not at all: a member, and a field of it called like the member
        (("/v1/chat/completions", {"messages": [{"role": 5}]}), "messages[0].role", "must be text, not a number"),
        (item(role="tool", content="x"), "input[0].role", "must be "),
        (block(type="text"), "messages[0].content[0].text", "is missing"),
        (block(type="text", text=[]), "messages[0].content[0].text", "must be text, not a list"),
        (("/v1/chat/completions", CHAT | {"tools": [TOOL | {"type": "x"}]}), "tools[0].type", "(got 'x')"),
    ],
)  # fmt: skip
def test_the_field_of_a_union_is_named(server, asked, param, said):
    """Whatever tells its members apart, and whichever of the three APIs it is in."""
    response = server.post(*asked)
    error = response.json()["error"]
    assert response.status_code == 400
    assert error["message"].startswith(f"{param} ") and said in error["message"]
    assert param.startswith(error["param"])


def test_too_many_answers_to_too_many_prompts(server):
    assert refused(server.post("/v1/completions", {"prompt": ["x"] * 3, "n": 128}))["param"] == "prompt"


@pytest.mark.parametrize(("prompt", "kind"), [(5, "a number"), ({}, "an object"), (True, "a boolean")])
def test_prompt_of_a_wrong_type(server, prompt, kind):
    error = refused(server.post("/v1/completions", {"prompt": prompt}))
    assert error["param"] == "prompt"
    assert error["message"] == f"prompt must be text or a list of token ids, not {kind}"


def test_no_prompt(server):
    assert refused(server.post("/v1/completions", {"max_tokens": 1}))["message"] == "prompt is missing"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", -1),
        ("max_tokens", 0),
        ("max_tokens", 2**31),
        ("max_tokens", "5.5"),
        ("max_tokens", "five"),
        ("max_tokens", ""),
        ("max_tokens", "9" * 5000),
        ("max_tokens", 1e300),
        ("max_tokens", 5.5),
        ("max_tokens", [5]),
        ("temperature", -0.1),
        ("temperature", "hot"),
        ("temperature", "nan"),
        ("temperature", "9" * 5000),
        ("top_p", 0),
        ("top_p", 1.1),
        ("top_k", -2),
        ("top_k", 2**31),
        ("seed", 2**63),
        ("seed", -(2**63) - 1),
        ("stop", 5),
        ("stop", ["x"] * 17),
        ("stop", ["x" * 1025]),
        ("stop", ""),
        ("stop_token_ids", [259]),
        ("stop_token_ids", [1] * 65),
        ("stop_token_ids", "1"),
        ("ignore_eos", "maybe"),
        ("cache_salt", ""),
        ("cache_salt", "two\nlines"),
        ("cache_salt", "\x7f"),
        ("cache_salt", "x" * 1025),
        ("cache_salt", 5),
        ("stream", "ja"),
        ("stream_options", {"include_usage": True}),
        ("stream_options", []),
        ("request_id", "x" * 129),
        ("request_id", "a\nb"),
        ("return_token_ids", 2),
        ("kv_transfer_params", []),
        ("kv_transfer_params", "{}"),
        ("kv_transfer_params", True),
        ("model", 5),
        ("n", 0),
        ("n", -1),
        ("n", 129),
        ("n", 10**6),
        ("n", False),
        ("stop", ["x"] * 10_000),
        ("stop", ["x" * 100_000]),
        ("min_tokens", -1),
        ("min_tokens", "one"),
        ("min_p", 1.5),
        ("min_p", -0.1),
        ("frequency_penalty", 2.1),
        ("frequency_penalty", -2.1),
        ("presence_penalty", 3),
        ("presence_penalty", "much"),
        ("repetition_penalty", 0),
        ("repetition_penalty", -1.5),
        ("repetition_penalty", 101),
        ("logit_bias", {"259": 1}),
        ("logit_bias", {"-1": 1}),
        ("logit_bias", {"five": 1}),
        ("logit_bias", {"9" * 400: 1}),
        ("logit_bias", {"5": 101}),
        ("logit_bias", {"5": "much"}),
        ("logit_bias", {str(i): 1 for i in range(1025)}),
        ("logit_bias", [5]),
        ("allowed_token_ids", []),
        ("allowed_token_ids", [259]),
        ("allowed_token_ids", [-1]),
        ("allowed_token_ids", [1.5]),
        ("allowed_token_ids", ["-1"]),
        ("allowed_token_ids", ["a"]),
        ("allowed_token_ids", [10**30]),
        ("allowed_token_ids", 5),
        ("allowed_token_ids", [1] * 1025),
        ("bad_words", "word"),
        ("bad_words", [""]),
        ("bad_words", [" "]),
        ("bad_words", ["\x1c"]),
        ("bad_words", ["fine", 5]),
        ("bad_words", ["x" * 257]),
        ("bad_words", ["x"] * 129),
        ("truncate_prompt_tokens", 0),
        ("truncate_prompt_tokens", -2),
        ("truncate_prompt_tokens", 4097),
        ("truncate_prompt_tokens", 10**30),
        ("truncate_prompt_tokens", 1.5),
        ("truncate_prompt_tokens", False),
        ("truncate_prompt_tokens", "all"),
        ("logprobs", 1.5),
        ("logprobs", -1),
        ("logprobs", 21),
        ("prompt_logprobs", -1),
        ("prompt_logprobs", 21),
        ("prompt_logprobs", {}),
        ("priority", 2**31),
        ("priority", 0.5),
        ("skip_special_tokens", []),
        ("include_stop_str_in_output", 1.5),
    ],
)
@pytest.mark.parametrize(("path", "body"), [("/v1/completions", TEXT), ("/v1/chat/completions", CHAT)])
def test_fields_out_of_range_or_of_a_wrong_type(server, path, body, field, value):
    error = refused(server.post(path, body | {field: value}))
    assert error["param"].startswith(field) and field in error["message"]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"stop": ""}, "stop[0]"),
        ({"stop": ["a", 5]}, "stop[1]"),
        ({"logit_bias": {"5": "much"}}, "logit_bias.5"),
        ({"stream": True, "stream_options": {"include_usage": 5}}, "stream_options.include_usage"),
    ],
)
def test_places_within_a_field(server, body, param):
    error = refused(server.post("/v1/completions", TEXT | body))
    assert error["param"] == param and error["message"].startswith(param)


@pytest.mark.parametrize("field", ["temperature", "stop", "kv_transfer_params", "return_token_ids", "tools"])
@pytest.mark.parametrize("depth", [50, 500, 900, 980, 100_000])
def test_nesting_is_no_crash(server, field, depth):
    body = f'{{"prompt": "x", "{field}": {"[" * depth}{"]" * depth}}}'
    refused(server.post("/v1/completions", content=body, headers={"Content-Type": "application/json"}))


@pytest.mark.parametrize("literal", ["NaN", "Infinity", "-Infinity", "1e999"])
@pytest.mark.parametrize(
    "field", ["temperature", "top_p", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty"]
)
def test_numbers_that_are_none(server, field, literal):
    body = '{"prompt": "x", "' + field + '": ' + literal + "}"
    response = server.post("/v1/completions", content=body, headers={"Content-Type": "application/json"})
    assert refused(response)["param"] == field


@pytest.mark.parametrize("literal", ["NaN", "Infinity"])
def test_a_bias_that_is_no_number(server, literal):
    body = '{"prompt": "x", "logit_bias": {"5": ' + literal + "}}"
    response = server.post("/v1/completions", content=body, headers={"Content-Type": "application/json"})
    assert refused(response)["param"].startswith("logit_bias")


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/completions", TEXT | {"max_tokens": 5, "min_tokens": 6}, "min_tokens"),
        ("/v1/completions", TEXT | {"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        ("/v1/completions", TEXT | {"top_logprobs": 2}, "top_logprobs"),
        ("/v1/completions", TEXT | {"continue_final_message": True}, "continue_final_message"),
        ("/v1/completions", TEXT | {"echo": "loud"}, "echo"),
        ("/v1/completions", TEXT | {"logprobs": "many"}, "logprobs"),
        ("/v1/chat/completions", CHAT | {"echo": "loud"}, "echo"),
        ("/v1/chat/completions", CHAT | {"logprobs": 5}, "logprobs"),
        ("/v1/chat/completions", CHAT | {"top_logprobs": 2}, "top_logprobs"),
        ("/v1/chat/completions", CHAT | {"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ("/v1/chat/completions", CHAT | {"logprobs": True, "top_logprobs": -1}, "top_logprobs"),
        ("/v1/chat/completions", CHAT | {"max_completion_tokens": 0}, "max_completion_tokens"),
        ("/v1/chat/completions", CHAT | {"max_completion_tokens": -5}, "max_completion_tokens"),
        (
            "/v1/chat/completions",
            CHAT | {"continue_final_message": True, "add_generation_prompt": True},
            "continue_final_message",
        ),
        ("/v1/chat/completions", CHAT | {"continue_final_message": "ja"}, "continue_final_message"),
    ],
)
def test_fields_that_do_not_go_together_or_not_here(server, path, body, param):
    error = refused(server.post(path, body))
    assert error["param"] == param and param in error["message"]


def test_no_prompt_is_refused_in_vllms_words(server):
    """Clients look for them."""
    for more in ({}, {"prompt_embeds": []}):
        error = refused(server.post("/v1/completions", {"prompt": None} | more))
        assert error["param"] == "prompt"
        assert "Either prompt or prompt_embeds must be provided and non-empty." in error["message"]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("best_of", 3),
        ("suffix", "end"),
        ("prompt_embeds", "AAAA"),
        ("use_beam_search", True),
    ],
)
@pytest.mark.parametrize(("path", "body"), [("/v1/completions", TEXT), ("/v1/chat/completions", CHAT)])
def test_what_is_not_supported_yet_is_named(server, path, body, field, value):
    error = refused(server.post(path, body | {field: value}))
    assert error["param"] == field and error["message"].startswith(f"{field} is not supported yet")


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([], "messages"),
        ("hello", "messages"),
        ([{"content": "x"}], "messages[0].role"),
        ([{"role": 5, "content": "x"}], "messages[0].role"),
        (["x"], "messages[0]"),
        ([{"role": "wizard", "content": "x"}], "messages"),
        ([{"role": "user", "content": 5}], "messages"),
        ([{"role": "user", "content": [5]}], "messages"),
        (
            [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://169.254.169.254"}}]}],
            "messages",
        ),
        ([{"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]}], "messages"),
    ],
)
def test_messages_that_are_wrong(server, messages, param):
    assert refused(server.post("/v1/chat/completions", {"messages": messages}))["param"] == param


@pytest.mark.parametrize(
    ("body", "why"),
    [
        ("", "must be a JSON object"),
        ("{", "not valid JSON"),
        ('{"prompt": "x",}', "not valid JSON"),
        ("[1", "not valid JSON"),
        ("\ud800".encode("utf-8", "surrogatepass"), "not valid JSON"),
        ("[" * 100_000, "nested too deeply"),
    ],
)
def test_invalid_json(server, body, why):
    headers = {"Content-Type": "application/json"}
    assert why in refused(server.post("/v1/completions", content=body, headers=headers))["message"]


@pytest.mark.parametrize("body", [[], "text", 5, None])
def test_json_that_is_no_object(server, body):
    assert "JSON object" in refused(server.post("/v1/completions", body))["message"] or body is None


def test_json_that_is_not_called_so(server):
    response = server.post("/v1/completions", content=json.dumps(TEXT), headers={"Content-Type": "text/plain"})
    assert "application/json" in refused(response)["message"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", b'{"prompt": "a\\ud800b"}'),
        ("/v1/completions", b'{"prompt": "x", "stop": "\\ud800"}'),
        ("/v1/completions", b'{"prompt": "x", "bad_words": ["\\ud800"]}'),
        ("/v1/completions", b'{"prompt": "x", "cache_salt": "\\ud800"}'),
        ("/v1/chat/completions", b'{"messages": [{"role": "user", "content": "\\udfff"}]}'),
        ("/v1/chat/completions", b'{"messages": [{"role": "\\udfff", "content": "x"}]}'),
        ("/tokenize", b'{"prompt": "\\ud800"}'),
    ],
)
def test_text_that_is_no_unicode(server, path, body):
    headers = {"Content-Type": "application/json"}
    refused(server.post(path, content=body, headers=headers))


def test_unknown_model(server):
    with server.client() as client, pytest.raises(openai.NotFoundError) as caught:
        client.completions.create(model="gpt-17", prompt="x")
    assert caught.value.param == "model" and "gpt-17" in caught.value.message and "'echo'" in caught.value.message


def test_unknown_path_and_method(server):
    assert refused(server.get("/v2/nothing"), 404)["type"] == "Not Found"
    assert refused(server.get("/v1/completions"), 405)["type"] == "Method Not Allowed"


@pytest.mark.parametrize("request_id", ["", "x" * 129, "a b", "ü".encode()])
def test_a_request_id_that_is_no_id(server, request_id):
    response = server.post("/v1/completions", TEXT, headers={"X-Request-Id": request_id})
    assert refused(response)["param"] == "X-Request-Id"


def test_body_too_large(serve):
    server = serve(options={"max_body_bytes": 1000})
    assert server.post("/v1/completions", {"prompt": "x" * 900}).status_code == 200
    error = refused(server.post("/v1/completions", {"prompt": "x" * 1000}), 413)
    assert "1000 bytes" in error["message"]

    def chunks():
        for _ in range(11):
            yield b"x" * 100

    headers = {"Content-Type": "application/json"}
    refused(server.post("/v1/completions", content=chunks(), headers=headers), 413)
    assert server.get("/health").status_code == 200


def test_a_body_that_does_not_come(serve):
    server = serve(options={"body_seconds": 0.1})
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as connection:
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
        assert connection.recv(1000).startswith(b"HTTP/1.1 408 ")
    assert server.get("/health").status_code == 200


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "x", "messages": CHAT["messages"]}, "prompt"),
        ("/tokenize", {"prompt": 5}, "prompt"),
        ("/tokenize", {"prompt": "x", "return_token_strs": "maybe"}, "return_token_strs"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": "x"}, "tokens"),
        ("/detokenize", {"tokens": [1, 999]}, "tokens"),
    ],
)
def test_tokenizing_what_cannot_be(server, path, body, param):
    assert refused(server.post(path, body))["param"] == param


def test_errors_as_vllms_clients_read_them(server):
    """Types and words that vLLM's own tests look for. The client makes a text of `code`."""
    client = server.client()
    chat = {"model": "echo", **CHAT, "max_tokens": 1}
    with pytest.raises(openai.NotFoundError) as error:
        client.chat.completions.create(**chat | {"model": "other"})
    assert (error.value.code, error.value.type, error.value.param) == ("404", "NotFoundError", "model")
    with pytest.raises(openai.BadRequestError) as error:
        client.chat.completions.create(**chat, top_p=2)
    assert (error.value.code, error.value.type, error.value.param) == ("400", "BadRequestError", "top_p")
    with pytest.raises(openai.BadRequestError) as error:
        client.chat.completions.create(**chat, stop=5)
    assert (error.value.code, error.value.type, error.value.param) == ("400", "Bad Request", "stop")
    for seed, word in ((2**63, "less_than_equal"), (-(2**63) - 1, "greater_than_equal")):
        with pytest.raises(openai.BadRequestError, match=word):
            client.chat.completions.create(**chat, seed=seed)
    with pytest.raises(openai.BadRequestError, match="out of vocabulary"):
        client.completions.create(model="echo", prompt=[999_999], max_tokens=1)
    with pytest.raises(openai.BadRequestError, match=r"logit_bias\.bad1 must match .*; so must bad2, bad3$"):
        client.chat.completions.create(**chat, logit_bias={"bad1": 1, "5": 1, "bad2": 1, "bad3": 1})
    with pytest.raises(openai.BadRequestError) as error:
        client.chat.completions.create(**chat, logit_bias={f"bad{i}" + "x" * 999: 1 for i in range(999)})
    assert "bad16" in error.value.message and "bad17" not in error.value.message and len(error.value.message) < 4000
    with pytest.raises(openai.BadRequestError, match=r"260.* 259"):
        client.completions.create(model="echo", prompt="x", max_tokens=1, logit_bias={"260": 1})
