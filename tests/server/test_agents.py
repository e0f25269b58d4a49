"""What agents really send, under a template as strict as Qwen3.5's: it takes one system message, at the beginning, and
knows no other roles than `user`, `assistant` and `tool`."""

import base64
import time
from urllib.parse import quote

import httpx
import pytest

from cairn.proxy.app import create_app
from cairn.proxy.options import ProxyOptions
from cairn.proxy.service import ProxyService
from doubles.byte_model_tokenizer import make_byte_tokenizer
from engine.chat_templates import ALTERNATES, DROPS_REASONING, TEMPLATES
from server.asking import CALL as XML_CALL
from server.asking import SCHEMA

PATHS = {"chat": "/v1/chat/completions", "messages": "/v1/messages", "responses": "/v1/responses"}
LIMITS = {"chat": "max_tokens", "messages": "max_tokens", "responses": "max_output_tokens"}
MARK = {"cache_control": {"type": "ephemeral"}}
CALL = {"id": "a", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}


@pytest.fixture(scope="module")
def strict(running_server, tmp_path_factory):
    folder = tmp_path_factory.mktemp("strict")
    running = running_server(tokenizer=make_byte_tokenizer(folder / "tokenizer", DROPS_REASONING), max_model_len=40_000)
    yield running
    running.drain()
    assert running.join() == 0


def prompt_of(server):
    """What the engine was asked last, as text."""
    ids = server.requests[-1].prompt
    return server._tokenizer.decode([int.from_bytes(ids[i : i + 8], "little") for i in range(0, len(ids), 8)])


def prompt_tokens(server):
    return range(len(server.requests[-1].prompt) // 8)


def ends_of(server):
    """The beginnings of the last prompt that end where something is held."""
    ids = server.requests[-1].prompt
    tokens = [int.from_bytes(ids[i : i + 8], "little") for i in range(0, len(ids), 8)]
    held = [place.position for place in server.requests[-1].boundaries if place.retain_seconds]
    return [server._tokenizer.decode(tokens[:end]) for end in held]


def prompt(server, api, said, **fields):
    """The prompt of a conversation. `said`: messages, or items."""
    sent = {"model": "echo", LIMITS[api]: 2, "input" if api == "responses" else "messages": said} | fields
    response = server.post(PATHS[api], sent)
    assert response.status_code == 200, response.text
    return prompt_of(server)


def text(*texts, kind="text"):
    return [{"type": kind, "text": one} for one in texts]


def turn(role, content):
    return f"<|im_start|>{role}\n{content}<|im_end|>\n"


def user(content="Hello."):
    return {"role": "user", "content": content}


OPENING = "<|im_start|>assistant\n<think>\n"


# -- roles -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("said", "system"),
    [
        ([{"role": "developer", "content": "Be kind."}], "Be kind."),
        ([{"role": "developer", "content": text("Be ", "kind.")}], "Be kind."),
        (
            [{"role": "system", "content": "Be brief."}, {"role": "developer", "content": "Be kind."}],
            "Be brief.\n\nBe kind.",
        ),
        (
            [{"role": "system", "content": "Be brief."}, {"role": "system", "content": "Be kind."}],
            "Be brief.\n\nBe kind.",
        ),
        ([{"role": "system", "content": ""}, {"role": "system", "content": text("Be ", "kind.")}], "Be kind."),
    ],
)
def test_leading_instructions_are_one_system_message(strict, said, system):
    assert prompt(strict, "chat", [*said, user()]) == turn("system", system) + turn("user", "Hello.") + OPENING


def test_instructions_and_developers_messages_are_one(strict):
    said = [{"role": "developer", "content": text("Be kind.", " Be quick.", kind="input_text")}, user()]
    wanted = turn("system", "Be brief.\n\nBe kind. Be quick.") + turn("user", "Hello.") + OPENING
    assert prompt(strict, "responses", said, instructions="Be brief.") == wanted
    said[0]["content"][0] |= MARK
    assert prompt(strict, "responses", said, instructions="Be brief.") == wanted
    assert ends_of(strict) == ["<|im_start|>system\nBe brief.\n\nBe kind."]


def reminder(content):
    return f"<system-reminder>\n{content}\n</system-reminder>"


@pytest.mark.parametrize("role", ["system", "developer"])
def test_a_later_instruction_stays_where_it_is(strict, role):
    first = [{"role": "system", "content": "Be brief."}, user(), {"role": "assistant", "content": "Hi."}]
    before = prompt(strict, "chat", first[:2]).removesuffix(OPENING)
    said = [*first, {"role": role, "content": "Be kind."}, user("Well?")]
    found = prompt(strict, "chat", said)
    assert found.startswith(before)
    assert found.endswith(turn("user", reminder("Be kind.")) + turn("user", "Well?") + OPENING)
    again = prompt(strict, "chat", [*said, {"role": "assistant", "content": "Yes."}, user("And?")])
    assert again.startswith(found.removesuffix(OPENING))


@pytest.mark.parametrize("before", [True, False])
def test_an_instruction_beside_a_tools_result_is_in_it(strict, before):
    """As a message of the user's it would end the turn, and the template would take back the reasoning in it."""
    called = {"role": "assistant", "content": "", "reasoning_content": "I ask.", "tool_calls": [CALL]}
    result, note = {"role": "tool", "tool_call_id": "a", "content": "rain"}, {"role": "system", "content": "Be kind."}
    first = prompt(strict, "chat", [user(), called, result])
    found = prompt(strict, "chat", [user(), called, *([note, result] if before else [result, note])])
    shown = [reminder("Be kind."), "rain"] if before else ["rain", reminder("Be kind.")]
    assert "\n\n".join(shown) in found and "I ask." in found
    assert found.startswith(first[: first.index("rain")])


def test_messages_may_have_system_messages_anywhere(strict):
    called = {"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "weather", "input": {}}]}
    result = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a", "content": "rain"}]}
    note = {"role": "system", "content": text("Be kind.")}
    found = prompt(strict, "messages", [user(), called, note, result, note, user("Well?")], system="Be brief.")
    assert found.startswith(turn("system", "Be brief."))
    assert found.count(reminder("Be kind.")) == 2 and found.index("<function=weather>") < found.index("Be kind.")
    assert found.index("rain") < found.rindex("Be kind.") < found.index("Well?")


def test_a_template_that_wants_turns_to_alternate(running_server, tmp_path):
    server = running_server(tokenizer=make_byte_tokenizer(tmp_path / "tokenizer", ALTERNATES))
    note = {"role": "system", "content": "Be kind."}
    found = prompt(server, "chat", [user("One."), note, {"role": "assistant", "content": "Two."}, note, user("Three.")])
    assert found.index("One.\n\n<system-reminder>\nBe kind.") < found.index("Two.")
    assert found.index("Two.") < found.index("Be kind.\n</system-reminder>\n\nThree.")
    server.drain()
    assert server.join() == 0


@pytest.mark.parametrize("template", [*TEMPLATES])
@pytest.mark.parametrize("before", ["user", "tool"])
def test_an_instruction_at_the_end_is_the_same_in_the_next_turn(tmp_path, template, before):
    tokenizer = make_byte_tokenizer(tmp_path / "tokenizer", TEMPLATES[template])
    called = {"role": "assistant", "content": "", "tool_calls": [CALL]}
    said = [
        user("One."),
        *([called, {"role": "tool", "tool_call_id": "a", "content": "rain"}] if before == "tool" else []),
    ]
    said.append({"role": "system", "content": "Be kind."})
    first = tokenizer.decode(tokenizer.render_chat(said, add_generation_prompt=False).token_ids)
    assert "assistant\nBe kind." not in first and "model\nBe kind." not in first
    for answer in ({"role": "assistant", "content": "So."}, called):
        more = tokenizer.decode(tokenizer.render_chat([*said, answer], add_generation_prompt=False).token_ids)
        assert more.startswith(first)


def test_thousands_of_instructions_take_no_longer_than_messages(strict):
    """Each of them once, wherever they stand."""
    many = [{"role": "system", "content": f"note {number};"} for number in range(5000)]
    called = {"role": "assistant", "content": "", "tool_calls": [CALL]}
    result = {"role": "tool", "tool_call_id": "a", "content": "rain"}
    for said in ([*many, user()], [user(), called, result, *many], [user(), called, *many, result], [user(), *many]):
        tokenizer, started = strict._tokenizer, time.monotonic()
        rendered = tokenizer.decode(tokenizer.render_chat(said).token_ids)
        assert time.monotonic() - started < 20
        places = [rendered.index(f"note {number};") for number in range(0, 5000, 100)]
        assert places == sorted(places) and rendered.count("note ") == 5000


@pytest.mark.parametrize("role", ["ctx", "narrator"])
def test_roles_that_nobody_knows_are_refused(strict, role):
    refused = strict.post(PATHS["chat"], {"model": "echo", "messages": [user(), {"role": role, "content": "x"}]})
    assert refused.status_code == 400 and "role" in refused.json()["error"]["message"]
    for api, place in (("responses", "input[1]"), ("messages", "messages[1]")):
        name = "input" if api == "responses" else "messages"
        sent = {"model": "echo", LIMITS[api]: 2, name: [user(), {"role": role, "content": "x"}]}
        error = strict.post(PATHS[api], sent).json()["error"]
        assert f"{place}.role" in error["message"]


# -- parts -------------------------------------------------------------------------------------------------------------


def test_several_texts_are_what_the_template_makes_of_them(strict):
    found = prompt(strict, "chat", [{"role": "system", "content": text("alpha ", "beta")}, user(text("one ", "two"))])
    assert found == turn("system", "alpha beta") + turn("user", "one two") + OPENING
    assert prompt(strict, "messages", [user(text("one ", "two"))], system=text("alpha ", "beta")) == found
    said = [user(text("one ", "two", kind="input_text"))]
    assert prompt(strict, "responses", said, instructions="alpha beta") == found


def test_marks_between_parts_are_where_the_parts_end(strict):
    said = [user([*text("one "), *text("two")])]
    said[0]["content"][0] |= MARK
    system = text("alpha ", "beta")
    system[0] |= MARK
    prompt(strict, "messages", said, system=system)
    first = "<|im_start|>system\nalpha "
    assert ends_of(strict) == [first, f"{first}beta<|im_end|>\n<|im_start|>user\none "]


# -- what was answered comes back --------------------------------------------------------------------------------------


@pytest.mark.parametrize("arguments", ['{"city": "Os', "", "null", None, '"null"', "[1]", "\\", '{"a":' * 5000])
def test_broken_arguments_are_none(strict, arguments):
    call = CALL | {"function": {"name": "weather", "arguments": arguments}}
    said = [user(), {"role": "assistant", "content": None, "tool_calls": [call]}]
    result = {"role": "tool", "tool_call_id": "a", "content": "rain"}
    assert "<function=weather>\n</function>" in prompt(strict, "chat", [*said, result])


TEMPLATE_OF_PARTS = """\
{%- for message in messages -%}
{{- '<|im_start|>' + message.role + '\\n' -}}
{%- if message.content is string -%}{{- message.content -}}
{%- else -%}{%- for part in message.content -%}{{- '[' + part.text + ']' -}}{%- endfor -%}{%- endif -%}
{{- '<|im_end|>\\n' -}}
{%- endfor -%}
"""
TEMPLATE_OF_TEXT = """\
{%- for message in messages -%}
{{- '<|im_start|>' + message.role + '\\n' }}{{ message.content }}{{ '<|im_end|>\\n' -}}
{%- endfor -%}
"""


@pytest.mark.parametrize(("template", "wanted"), [(TEMPLATE_OF_PARTS, "[one ][two]"), (TEMPLATE_OF_TEXT, "one two")])
def test_parts_go_to_a_template_that_reads_them(tmp_path, template, wanted):
    tokenizer = make_byte_tokenizer(tmp_path / "tokenizer", template)
    rendered = tokenizer.render_chat([user(text("one ", "two"))], add_generation_prompt=False)
    assert tokenizer.decode(rendered.token_ids) == turn("user", wanted)


def test_a_call_that_was_cut_off_is_gone_on_with(xml):
    """In each API as it was answered, whether something is said to it or not."""
    said, tool = XML_CALL, {"name": "weather", "input_schema": SCHEMA}
    # the whole prompt is echoed, and a byte is a token
    num_tokens = prompt(xml, "messages", [user(said)], tools=[tool]).index("Oslo") + 2
    sent = {"model": "echo", "max_tokens": num_tokens, "messages": [user(said)], "tools": [tool]}
    cut = xml.post("/v1/messages", sent).json()
    (block,) = (block for block in cut["content"] if block["type"] == "tool_use")
    assert cut["stop_reason"] == "max_tokens" and list(block["input"]) == ["partial_json"]
    answered = [user(said), {"role": "assistant", "content": cut["content"]}]
    result = {"type": "tool_result", "tool_use_id": block["id"], "content": "cut off", "is_error": True}
    for more in ([], [user("Go on.")], [user([result])]):
        found = prompt(xml, "messages", [*answered, *more], tools=[tool])
        assert '"name": "weather"' in found and "partial_json" not in found and found.endswith("assistant\n")


# -- documents ---------------------------------------------------------------------------------------------------------

DATA = base64.b64encode("Stein auf Stein: ä.".encode()).decode()
SHOWN = "Stein auf Stein: ä."
DOCUMENTS = [
    {"source": {"type": "text", "media_type": "text/plain", "data": SHOWN}, "title": "Steine"},
    {"source": {"type": "content", "content": SHOWN}},
    {"source": {"type": "content", "content": text("Stein auf ", "Stein: ä.")}, "context": "Of stones."},
    {"source": {"type": "base64", "media_type": "text/markdown", "data": DATA}},
]


@pytest.mark.parametrize("document", DOCUMENTS)
def test_documents_are_their_text(strict, document):
    block = {"type": "document"} | document
    assert SHOWN in prompt(strict, "messages", [user([block, *text("Well?")])])
    called = {"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "weather", "input": {}}]}
    result = {"type": "tool_result", "tool_use_id": "a", "content": [*text("So: "), block | MARK]}
    found = prompt(strict, "messages", [user(), called, user([result])])
    assert "So: " in found and found.count(SHOWN) == 1
    assert ends_of(strict)[0].endswith((SHOWN, f"{SHOWN}\n</tool_response><|im_end|>\n"))
    for head in ("title", "context"):
        assert document.get(head, "") in found


def test_what_was_searched_for_is_its_text(strict):
    called = {"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "search", "input": {}}]}
    found = {"type": "search_result", "source": "https://a.example", "title": "Cairns", "content": text("A heap.")}
    named = {"type": "tool_reference", "tool_name": "build_cairn"}
    result = {"type": "tool_result", "tool_use_id": "a", "content": [found, named], "is_error": True}
    shown = prompt(strict, "messages", [user(), called, user([result])])
    assert "Error: Cairns\nhttps://a.example\n\nA heap.build_cairn\n</tool_response>" in shown
    assert "A heap." in prompt(strict, "messages", [user([found])])


FILES = [
    {"file_data": f"data:text/plain;base64,{DATA}"},
    {"file_data": f"data:text/x-python;charset=utf-8;base64,{DATA}", "filename": "a.py"},
    {"file_data": f"data:application/json;base64,{DATA}"},
    {"file_data": f"data:text/plain,{quote(SHOWN)}"},
    {"file_data": DATA},
]


@pytest.mark.parametrize("file", FILES)
def test_files_of_text_are_their_text(strict, file):
    part = {"type": "input_file"} | file
    wanted = prompt(strict, "responses", [user([part, *text("Well?", kind="input_text")])])
    assert SHOWN in wanted and file.get("filename", "") in wanted
    assert prompt(strict, "chat", [user([{"type": "file", "file": file}, *text("Well?")])]) == wanted
    if "filename" not in file:
        url = {"type": "input_file", "file_url": f"data:text/plain;base64,{DATA}"}
        assert prompt(strict, "responses", [user([url, *text("Well?", kind="input_text")])]) == wanted


@pytest.mark.parametrize(
    "file",
    [
        {"file_data": f"data:application/pdf;base64,{DATA}"},
        {"file_data": "data:text/plain;base64,%%%"},
        {"file_data": base64.b64encode(b"%PDF-1.7\xe2\xe3").decode()},
        {"file_data": "data:" + ";" * 100_000},
        {"file_url": "https://a.example/b.txt"},
        {"file_id": "file-1"},
        {},
    ],
)
def test_other_files_are_refused_by_their_place(strict, file):
    sent = {"model": "echo", "input": [user([{"type": "input_file"} | file])]}
    error = strict.post(PATHS["responses"], sent).json()["error"]
    assert error["code"] == 400 and "input[0].content[0]" in error["message"], error
    sent = {"model": "echo", "messages": [user([*text("x"), {"type": "file", "file": file}])]}
    error = strict.post(PATHS["chat"], sent).json()["error"]
    assert error["code"] == 400 and "messages[0].content[1]" in error["message"], error


@pytest.mark.parametrize(
    "source",
    [
        {"type": "base64", "media_type": "application/pdf", "data": DATA},
        {"type": "base64", "media_type": "text/plain", "data": "%"},
        {"type": "url", "url": "https://a.example"},
        {"type": "file", "file_id": "x"},
    ],
)
def test_other_documents_are_refused_by_their_place(strict, source):
    sent = {"model": "echo", "max_tokens": 2, "messages": [user([{"type": "document", "source": source}])]}
    error = strict.post(PATHS["messages"], sent)
    assert error.status_code == 400 and "messages[0].content[0].source" in error.json()["error"]["message"]


# -- tools that nobody here can run ------------------------------------------------------------------------------------

SEARCH = {"type": "web_search_20250305", "name": "web_search", "max_uses": 8}


def test_messages_run_without_hosted_tools(xml, caplog):
    tool = {"name": "weather", "input_schema": SCHEMA}
    wanted = prompt(xml, "messages", [user()], tools=[tool])
    others = [SEARCH, {"type": "tool_search_tool_regex_20251119", "name": "tool_search"}, {"type": "bash_20250124"}]
    with caplog.at_level("INFO", "cairn.server.notices"):
        for _ in range(2):
            assert prompt(xml, "messages", [user()], tools=[others[0], tool, *others[1:]]) == wanted
    assert sorted(caplog.messages) == sorted(
        f"tools of the type {one['type']!r} are left out of requests: nobody here can run them" for one in others
    )
    for choice in ({"type": "tool", "name": "web_search"}, {"type": "any"}):
        assert prompt(xml, "messages", [user()], tools=[SEARCH], tool_choice=choice) == prompt(
            xml, "messages", [user()]
        )
        assert xml.requests[-2].structure is None
    used = [{"type": "server_tool_use", "id": "b", "name": "web_search", "input": {"query": "x"}}]
    used += [{"type": "web_search_tool_result", "tool_use_id": "b", "content": []}, *text("So.")]
    assert "assistant\nSo." in prompt(xml, "messages", [user(), {"role": "assistant", "content": used}, user("And?")])


def test_a_strict_server_refuses_hosted_tools(serve):
    server = serve({"strict_tools": True})
    sent = {
        "model": "echo",
        "max_tokens": 2,
        "messages": [user()],
        "tools": [{"name": "a", "input_schema": {}}, SEARCH],
    }
    for path in ("/v1/messages", "/v1/messages/count_tokens"):
        error = server.post(path, sent)
        assert error.status_code == 400 and "tools[1].type" in error.json()["error"]["message"]


# -- what is new in every request --------------------------------------------------------------------------------------

BILLING = "x-anthropic-billing-header: cc_version=2.1.177.01c; cc_entrypoint=cli; cch={};"


def test_a_billing_header_is_no_part_of_the_prompt(strict, caplog):
    """Whichever API a gateway sends it on by, alone in a block or as the first line of one."""
    rules = text("You work here.") + text("Rules.")
    rules[1] |= MARK
    wanted = prompt(strict, "messages", [user()], system=rules)
    with caplog.at_level("INFO", "cairn.server.notices"):
        for turn_number in ("00001", "0aaa9"):
            header = BILLING.format(turn_number)
            assert prompt(strict, "messages", [user()], system=[*text(header), *rules]) == wanted
            assert ends_of(strict) == ["<|im_start|>system\nYou work here.Rules.<|im_end|>\n"]
            assert prompt(strict, "messages", [user()], system=f"{header}\nYou work here.Rules.") == wanted
            marked = [text(header)[0] | MARK, *text("You work here.Rules.")]
            assert prompt(strict, "messages", [user()], system=marked) == wanted
            said = [{"role": "system", "content": [*text(header), *rules]}, user()]
            assert prompt(strict, "chat", said) == prompt(strict, "responses", said) == wanted
            counted = {"model": "echo", "messages": [user()], "system": [*text(header), *rules]}
            assert strict.post("/v1/messages/count_tokens", counted).json()["input_tokens"] == len(
                prompt_tokens(strict)
            )
    assert len([one for one in caplog.messages if "docs/agents.md" in one]) == 1
    assert BILLING in prompt(strict, "chat", [user(BILLING)])


@pytest.mark.parametrize("api", ["messages", "chat"])
def test_the_next_turn_hits_behind_a_billing_header(serve, tmp_path, api):
    """What it is for: a conversation whose every request begins with another line."""
    server = serve(tokenizer=make_byte_tokenizer(tmp_path / "tokenizer", DROPS_REASONING))
    said, lengths, cached = [user("How are you?")], [], []
    for number in range(3):
        system = text(BILLING.format(f"0000{number}")) + text("Rules. " * 100)
        sent = {"model": "echo", "max_tokens": 20}
        if api == "messages":
            answer = server.post(PATHS[api], sent | {"system": system, "messages": said}).json()
            usage, reply = answer["usage"], answer["content"]
            cached.append(usage["cache_read_input_tokens"])
        else:
            answer = server.post(PATHS[api], sent | {"messages": [{"role": "system", "content": system}, *said]}).json()
            message = answer["choices"][0]["message"]
            reply = message["content"]
            cached.append(answer["usage"]["prompt_tokens_details"]["cached_tokens"])
        lengths.append(len(prompt_tokens(server)))
        server.assert_nothing_is_held()
        said += [{"role": "assistant", "content": reply or "."}, user("And?")]
    assert cached[0] == 0 and cached[1] >= lengths[0] - 64 and cached[2] >= lengths[1] - 64


@pytest.mark.parametrize("api", PATHS)
def test_too_many_tools_and_results_of_no_call_are_told_as_ever(strict, api):
    function = {"name": "a", "parameters": {"type": "object"}}
    tool = {"chat": {"type": "function", "function": function}, "responses": {"type": "function"} | function}
    tool["messages"] = {"name": "a", "input_schema": {"type": "object"}}
    name = "input" if api == "responses" else "messages"
    sent = {"model": "echo", LIMITS[api]: 2, name: [user()], "tools": [tool[api]] * 10_000}
    error = strict.post(PATHS[api], sent)
    assert error.status_code == 400 and "tools must have at most 1024 entries" in error.json()["error"]["message"]
    result = {"chat": {"role": "tool", "tool_call_id": "a", "content": "rain"}}
    result["responses"] = {"type": "function_call_output", "call_id": "a", "output": "rain"}
    result["messages"] = user([{"type": "tool_result", "tool_use_id": "a", "content": "rain"}])
    answer = strict.post(PATHS[api], {"model": "echo", LIMITS[api]: 2, name: [user(), result[api]]})
    assert answer.status_code == (200 if api == "chat" else 400), answer.text


def test_a_server_says_that_it_is_there(serve, run_app):
    server = serve({"api_key": ["k"]})
    assert httpx.head(server.url).status_code == 200 and httpx.get(server.url).status_code == 404
    proxy = run_app(create_app(ProxyService(ProxyOptions(decode=[server.url], api_key=["k"]))))
    assert proxy.http.head("/").status_code == 200
    assert httpx.get(server.url + "/v1/models").status_code == 401


# -- reasoning ---------------------------------------------------------------------------------------------------------


def test_thinking_comes_back_by_its_signature(strict):
    """For the same key and salt alone, and only where a block has no text of its own."""
    sent = {"model": "echo", "max_tokens": 100, "messages": [user("A thought.</think>So.")], "cache_salt": "s"}
    response = strict.post("/v1/messages", sent | {"thinking": {"type": "adaptive", "display": "omitted"}})
    thought, *_ = response.json()["content"]
    assert thought["type"] == "thinking" and thought["thinking"] == "" and thought["signature"]

    def is_restored(salt="s", **changes):
        call = {"type": "tool_use", "id": "a", "name": "weather", "input": {"city": "Oslo"}}
        result = [{"type": "tool_result", "tool_use_id": "a", "content": "rain"}]
        said = [user(), {"role": "assistant", "content": [thought | changes, call]}, user(result)]
        return "A thought." in prompt(strict, "messages", said, cache_salt=salt)

    assert is_restored() and not is_restored("t") and not is_restored(None)
    assert is_restored("t", thinking="A thought.") and not is_restored(thinking="Another.")
    assert not any(is_restored(signature=text) for text in ("", None, "EqQBCg==", thought["signature"][:-4]))
