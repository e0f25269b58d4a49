"""The main job: requests as they come in practice, one after the other, against one server.

a   one prompt twice, and once more for a single token
b   prompts that share 1,500 of 2,200 tokens and then differ
c   a chat that grows over 6 turns, as messages and as token ids
d   the prompt of a, asked under another cache salt
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from demo.client import Client, Reply
from demo.corpus import Corpus
from demo.shared_prefix import SeenPaths, Shared, branch

__all__ = ["AGAIN", "BRANCHED", "ONE_TOKEN", "PAIR", "TURNS", "Outcome", "run_full_pool", "run_job"]

PROMPT_CHARACTERS = 8_000
BRANCH_TOKENS, BRANCH_AT, BRANCH_CHARACTERS = 2_200, 1_500, 16_000
TURNS = 6
SYSTEM_CHARACTERS, TURN_CHARACTERS = 1_200, 700
ANSWER_TOKENS = 12
END_OF_MESSAGE = "<|im_end|>\n"

FILLERS, PAIRS = 24, 6
"""Prompts that fill a small pool twice over, and pairs of prompts that come after them."""
PAIR = "shares 1,500 tokens with the last but one"

FIRST, AGAIN, ONE_TOKEN = "a prompt", "the same again", "the same, for 1 token"
BRANCHED, BRANCHED_AGAIN = "shares 1,500 tokens", "shares the same 1,500"

# The chat as ids would otherwise hit what the chat as messages has left.
CHAT_AS_IDS, SOMEONE_ELSE = "chat-as-ids", "someone-else"


@dataclass(frozen=True, slots=True)
class Outcome:
    """One request of the job, what the client counted for it, and what it got."""

    part: str
    label: str
    shared: Shared
    reply: Reply


class _Record:
    """Asks, counts what was shared, and remembers."""

    def __init__(self) -> None:
        self.outcomes: list[Outcome] = []
        self._seen = SeenPaths()

    def ask(self, part: str, label: str, send: Callable[..., Reply], prompt: object, **fields: Any) -> Reply:
        """Ask for an answer to `prompt` by `send`, a method of the client."""
        salt = fields.get("cache_salt")
        reply = send(prompt, **{"max_tokens": ANSWER_TOKENS, "ignore_eos": True, **fields})
        shared = self._seen.shared(salt, reply.prompt_ids)
        self._seen.note(salt, reply.prompt_ids, reply.answer_ids)
        self.outcomes.append(Outcome(part, label, shared, reply))
        return reply


def run_job(client: Client, corpus: Corpus) -> list[Outcome]:
    """All requests, in order. Nothing but the texts and the answers decides what is sent."""
    # the first pass through torch's kernels is not what is to be measured
    client.complete(corpus.passage(0, 1_000), max_tokens=2, ignore_eos=True, cache_salt="warm-up")
    record = _Record()
    _repeat(client, corpus, record)
    _branch(client, corpus, record)
    _chat_as_messages(client, corpus, record)
    _chat_as_ids(client, corpus, record)
    _other_salt(client, corpus, record)
    return record.outcomes


def run_full_pool(client: Client, corpus: Corpus) -> list[Outcome]:
    """Prompts that nobody asks again fill the pool; then pairs that share their beginning and say so nowhere, with
    another prompt in between."""
    passages = (client.tokenize(corpus.passage(number, BRANCH_CHARACTERS)) for number in range(20, 20 + FILLERS))
    fillers, record = [passage[:BRANCH_TOKENS] for passage in passages], _Record()
    for filler in fillers:
        client.complete(filler, max_tokens=1)
    for number in range(PAIRS):
        first = 20 + FILLERS + 2 * number
        trunk, tail = (client.tokenize(corpus.passage(first + other, BRANCH_CHARACTERS)) for other in (0, 1))
        record.ask("e", f"pair {number + 1}", client.complete, trunk[:BRANCH_TOKENS], max_tokens=1)
        client.complete([*fillers[number][1:], fillers[number][0]], max_tokens=1)
        prompt = branch(trunk, BRANCH_AT, tail, BRANCH_TOKENS)
        record.ask("e", PAIR, client.complete, prompt, max_tokens=1)
    return record.outcomes


def _repeat(client: Client, corpus: Corpus, record: _Record) -> None:
    prompt = corpus.passage(0, PROMPT_CHARACTERS)
    record.ask("a", FIRST, client.complete, prompt, temperature=0)
    record.ask("a", AGAIN, client.complete, prompt, temperature=0)
    record.ask("a", ONE_TOKEN, client.complete, prompt, temperature=0, max_tokens=1)


def _branch(client: Client, corpus: Corpus, record: _Record) -> None:
    trunk, *tails = (client.tokenize(corpus.passage(number, BRANCH_CHARACTERS)) for number in (1, 2, 3))
    record.ask("b", f"{BRANCH_TOKENS:,} tokens", client.complete, trunk[:BRANCH_TOKENS], temperature=0)
    for label, tail in zip((BRANCHED, BRANCHED_AGAIN), tails, strict=True):
        prompt = branch(trunk, BRANCH_AT, tail, BRANCH_TOKENS)
        record.ask("b", label, client.complete, prompt, temperature=0)


def _chat_as_messages(client: Client, corpus: Corpus, record: _Record) -> None:
    messages = [_system(corpus)]
    for turn in range(TURNS):
        messages.append(_question(corpus, turn))
        reply = record.ask("c", f"chat, turn {turn + 1}", client.chat, messages, seed=turn)
        messages.append({"role": "assistant", "content": reply.text})


def _chat_as_ids(client: Client, corpus: Corpus, record: _Record) -> None:
    """The same chat, kept by the client as the ids it sent and got, so that no answer is tokenized anew."""
    end_of_message = client.tokenize(END_OF_MESSAGE)
    prompt = client.tokenize_chat([_system(corpus), _question(corpus, 0)])
    for turn in range(TURNS):
        reply = record.ask("c", f"as ids, turn {turn + 1}", client.complete, prompt, seed=turn, cache_salt=CHAT_AS_IDS)
        following = client.tokenize_chat([_question(corpus, turn + 1)])
        prompt = [*prompt, *reply.answer_ids, *end_of_message, *following]


def _other_salt(client: Client, corpus: Corpus, record: _Record) -> None:
    prompt = corpus.passage(0, PROMPT_CHARACTERS)
    record.ask("d", "a, another salt", client.complete, prompt, temperature=0, cache_salt=SOMEONE_ELSE)


def _system(corpus: Corpus) -> dict[str, str]:
    return {"role": "system", "content": f"Answer questions about this code.\n\n{corpus.passage(4, SYSTEM_CHARACTERS)}"}


def _question(corpus: Corpus, turn: int) -> dict[str, str]:
    passage = corpus.passage(5 + turn, TURN_CHARACTERS)
    return {"role": "user", "content": f"What does this part do?\n\n{passage}"}
