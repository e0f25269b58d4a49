"""Conversations of agents under templates of published forms: each turn hits as far as its prompt agrees with anything
that was computed before, and says what a template or a client has rewritten.

The server is the real one with a tiny model; only the drawn tokens are scripted.
"""

import json
from itertools import product

import numpy as np
import pytest

from cairn.engine.text.tokenizer import ModelTokenizer
from cairn.keys import common_tokens
from cairn.models.random_weights.make_tokenizer import make_tokenizer
from doubles.scripted_core import scripted_core
from engine.chat_templates import (
    DROPS_REASONING,
    HOLLOWS_REASONING,
    HOLLOWS_WITH_XML,
    PYTHON_CALLS,
    ROLE_LINES,
    ROLE_LINES_WITH_JSON,
    TOOLS,
    tokenizer_with,
)
from tiers import by_run

SLACK = 6
"""Tokens between what could be hit and what is, at most."""
SHARE = 0.97
QUESTIONS, ROUNDS = 3, 2
SYSTEM = "You work on a repository of stones and cairns. " * 8


class Agent:
    """A server with the template `name`, and a model that thinks, calls tools and answers as its script says."""

    def __init__(self, running_server, tiny_model, folder, name):
        """`folder`: that of its tokenizer."""
        self.name = name
        self.tokenizer = ModelTokenizer(folder)
        self._script = ""
        self.prompt, self.computed = [], []
        self.server = running_server(
            {"model": "tiny"},
            build=lambda config: scripted_core(
                config.model_copy(update={"tokenizer": str(folder)}), self.tokenizer, self._answer
            ),
            model=str(tiny_model),
            tokenizer=self.tokenizer,
            kv_cache_memory_bytes=64 << 20,
        )

    def says(self, thought, content, path=None):
        """What the model writes next, in the form of its template; for the first two the prompt opens the reasoning."""
        match self.name:
            case "drops_reasoning":
                call = f"<function=read_file>\n<parameter=path>\n{path}\n</parameter>\n</function>"
                parts = [content] * bool(content) + [f"<tool_call>\n{call}\n</tool_call>"] * (path is not None)
                self._script = f"{thought}\n</think>\n\n" + "\n\n".join(parts)
            case "hollows_reasoning":
                call = json.dumps({"name": "read_file", "arguments": {"path": path}})
                calls = f"<TOOLCALL>[{call}]</TOOLCALL>" if path is not None else ""
                self._script = f"{thought}\n</think>\n{content}{calls}"
            case "hollows_with_xml":
                call = f"<function=read_file>\n<parameter=path>\n{path}\n</parameter>\n</function>"
                calls = f"<tool_call>\n{call}\n</tool_call>\n" if path is not None else ""
                self._script = f"{thought}\n</think>\n{content}{calls}"
            case "role_lines_with_json":
                call = json.dumps({"name": "read_file", "arguments": {"path": path}})
                parts = [content] * bool(content) + [f"<tool_call>\n{call}\n</tool_call>"] * (path is not None)
                self._script = "\n".join(parts)
            case "python_calls":
                call = f'<|tool_call_start|>[read_file(path="{path}")]<|tool_call_end|>' if path is not None else ""
                self._script = f"<think>{thought}</think>{content}{call}"
            case _:
                self._script = content or f"I read {path}."

    def _answer(self, spec, prompt):
        self.prompt = spec.prompt.tolist()
        return self._script

    @property
    def writes_calls(self):
        """Whether the calls that `says` writes are ones that are parsed."""
        return self.name != "role_lines"

    def turn(self, cached):
        """`cached` tokens of the request that was just answered, and how many they could have been."""
        possible = max((common_tokens(np.array(self.prompt), np.array(tokens)) for tokens in self.computed), default=0)
        # the end of an answer is drawn and never computed, and of a prompt one token has to be
        answer = self.tokenizer.encode(self._script, add_special_tokens=False)
        self.computed.append(self.prompt + answer)
        # the client may have an answer before its end is cached
        self.server.until(lambda: not self.server.core.has_work)
        return cached, min(possible, len(self.prompt) - 1)

    def end(self):
        self.server.drain()
        assert self.server.join() == 0


@pytest.fixture(scope="module")
def agent_with(running_server, tiny_model, make_once, tmp_path_factory):
    """The name of a template -> its agent."""
    folder, agents = tmp_path_factory.mktemp("turns"), {}
    # the model has 4,096 tokens, and templates need some of their own
    plain = make_once("tokenizer-4000", lambda folder: make_tokenizer(folder, vocab_size=4000, max_length=1 << 20))

    def agent(name):
        if name not in agents:
            tokenizer_with(plain, folder / name, FORMS[name])
            agents[name] = Agent(running_server, tiny_model, folder / name, name)
        return agents[name]

    yield agent
    for each in agents.values():
        each.end()


class Chats:
    """/v1/chat/completions, with the assistant's messages sent back as they came."""

    path = "/v1/chat/completions"
    keeps_reasoning = True

    def __init__(self, system):
        self._messages = [{"role": "system", "content": system}]

    def body(self):
        return {"messages": self._messages, "tools": TOOLS, "max_tokens": 300}

    def user(self, text):
        self._messages.append({"role": "user", "content": text})

    def result(self, call_id, text):
        self._messages.append({"role": "tool", "tool_call_id": call_id, "content": text})

    def take(self, answer):
        """Keep an answer, and return the ids of its calls."""
        message = answer["choices"][0]["message"]
        if not self.keeps_reasoning:
            message = {name: value for name, value in message.items() if not name.startswith("reasoning")}
        self._messages.append(message)
        return [call["id"] for call in message.get("tool_calls") or []]


class ChatsWithoutReasoning(Chats):
    """The same by a client that sends no reasoning back."""

    keeps_reasoning = False


class StoredResponses:
    """/v1/responses by the id of the one before: the server has the reasoning."""

    path = "/v1/responses"
    keeps_reasoning = True

    def __init__(self, system):
        self._items, self._more = [{"role": "system", "content": system}], {}

    def body(self):
        tools = [{"type": "function", **tool["function"]} for tool in TOOLS]
        return {"input": self._items, "tools": tools, "max_output_tokens": 300, **self._more}

    def user(self, text):
        self._items.append({"role": "user", "content": text})

    def result(self, call_id, text):
        self._items.append({"type": "function_call_output", "call_id": call_id, "output": text})

    def take(self, answer):
        self._items, self._more = [], {"previous_response_id": answer["id"]}
        return [item["call_id"] for item in answer["output"] if item["type"] == "function_call"]


class ResponsesAsTheyCame(StoredResponses):
    """/v1/responses with nothing stored: the client sends all items back, and the reasoning among them."""

    def __init__(self, system):
        super().__init__(system)
        self._more = {"store": False}

    def take(self, answer):
        self._items += answer["output"]
        return [item["call_id"] for item in answer["output"] if item["type"] == "function_call"]


class EncryptedResponses(ResponsesAsTheyCame):
    """The same by a client that sends the reasoning back in its encrypted form alone, as Codex does."""

    def __init__(self, system):
        super().__init__(system)
        self._more |= {"include": ["reasoning.encrypted_content"]}

    def take(self, answer):
        for item in answer["output"]:
            if item["type"] == "reasoning":
                assert item["encrypted_content"]
                item["content"] = []
        return super().take(answer)


class Messages:
    """/v1/messages, with the blocks sent back as they came."""

    path = "/v1/messages"
    keeps_reasoning = True

    def __init__(self, system):
        self._system, self._messages = system, []

    def body(self):
        tools = [{"name": tool["function"]["name"], "input_schema": tool["function"]["parameters"]} for tool in TOOLS]
        return {"system": self._system, "messages": self._messages, "tools": tools, "max_tokens": 300}

    def user(self, text):
        self._messages.append({"role": "user", "content": text})

    def result(self, call_id, text):
        block = {"type": "tool_result", "tool_use_id": call_id, "content": text}
        self._messages.append({"role": "user", "content": [block]})

    def take(self, answer):
        self._messages.append({"role": "assistant", "content": answer["content"]})
        return [block["id"] for block in answer["content"] if block["type"] == "tool_use"]


class MessagesOfHiddenThoughts(Messages):
    """The same where the client does not want to see the reasoning, as Claude Code: its blocks have a signature and no
    text."""

    def body(self):
        return super().body() | {"thinking": {"type": "adaptive", "display": "omitted"}}

    def take(self, answer):
        thoughts = [block for block in answer["content"] if block["type"] == "thinking"]
        assert all(block["thinking"] == "" != block["signature"] for block in thoughts)
        return super().take(answer)


APIS = (Chats, ChatsWithoutReasoning, StoredResponses, ResponsesAsTheyCame, Messages)
APIS += (EncryptedResponses, MessagesOfHiddenThoughts)
FORMS = {
    "drops_reasoning": DROPS_REASONING,  # as Qwen3.5
    "hollows_reasoning": HOLLOWS_REASONING,  # as Nemotron Nano 2
    "role_lines": ROLE_LINES,
    "python_calls": PYTHON_CALLS,  # as LFM2
    "hollows_with_xml": HOLLOWS_WITH_XML,  # as Nemotron 3
    "role_lines_with_json": ROLE_LINES_WITH_JSON,  # as Granite 4
}
NAMES = tuple(FORMS)


def converse(agent, client):
    """Hits and possible hits of each turn, the cache's account of it, and before which of them the user spoke."""
    hits, reports, spoken = [], [], set()
    for question in range(QUESTIONS):
        client.user(f"Question {question}: where does trail {question * 7} lead to?")
        spoken.add(len(hits))
        for number in range(ROUNDS + 1):
            path = f"trails/{question}/{number}.txt" if number < ROUNDS else None
            says = f"I look at {number}." if number % 2 or path is None else ""
            agent.says(f"Trail {question} is in folder {number}, I think.", says, path)
            response = agent.server.post(client.path, {"model": "tiny"} | client.body())
            assert response.status_code == 200, response.text
            answer = response.json()
            reports.append(answer["cairn"]["cache"])
            hits.append(agent.turn(reports[-1]["cached_tokens"]))
            calls = client.take(answer)
            assert len(calls) == (path is not None and agent.writes_calls)
            for call_id in calls:
                client.result(call_id, f"trail {question}: step {number}\n" * (5 + number))
            if path is not None and not calls:
                client.user(f"It says: trail {question}: step {number}")
                spoken.add(len(hits))
    return hits, reports, spoken - {0}


@pytest.mark.parametrize(
    ("name", "api"),
    by_run(
        [
            (NAMES[0], EncryptedResponses),
            (NAMES[1], Chats),
            (NAMES[2], APIS[1]),
            (NAMES[3], StoredResponses),
            (NAMES[5], Messages),
        ],
        # a template that leaves reasoning out, one that keeps a hull of it, and one that knows none
        product((NAMES[0], NAMES[4], NAMES[5]), APIS),
        product(NAMES, APIS),
    ),
)
def test_each_turn_hits_what_its_prompt_shares_with_what_was_computed(agent_with, name, api):
    agent = agent_with(name)
    hits, reports, spoken = converse(agent, api(f"{api.__name__}: {SYSTEM}"))
    assert len(hits) == len(reports) == QUESTIONS * (ROUNDS + 1)
    assert all(possible - hit <= SLACK for hit, possible in hits[1:])
    assert sum(hit for hit, _ in hits[1:]) >= SHARE * sum(possible for _, possible in hits[1:])
    rewritten = {i for i, report in enumerate(reports) if "rewritten" in report["lost_tokens"]}
    if name.startswith("role_lines"):
        assert not rewritten
    elif api.keeps_reasoning:
        # the templates leave it out once the user has asked again
        assert rewritten == spoken
    else:
        assert rewritten == set(range(1, len(reports)))


def test_a_variable_of_the_template_keeps_what_was_thought(agent_with):
    class KeptThoughts(Chats):
        def body(self):
            return super().body() | {"chat_template_kwargs": {"keep_past_thinking": True}}

    hits, reports, _ = converse(agent_with("python_calls"), KeptThoughts(f"Kept: {SYSTEM}"))
    assert all(hit == possible for hit, possible in hits[1:])
    assert not any("rewritten" in report["lost_tokens"] for report in reports)
