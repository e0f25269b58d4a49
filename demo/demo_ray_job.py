"""Conversations with a fleet of two replicas: what is asked, which replica answered, and what it had cached."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import httpx
from prometheus_client.parser import text_string_to_metric_families

from cairn.http.cookies import no_cookies
from demo.corpus import Corpus
from demo.demo_pd_job import ANSWER_TOKENS, END_OF_MESSAGE, TURN_CHARACTERS
from demo.server import DemoError
from demo.shared_prefix import SeenPaths, Shared

__all__ = ["CONVERSATIONS", "TURNS", "FleetClient", "Turn", "converse"]

CONVERSATIONS, TURNS = 4, 4
SYSTEM_CHARACTERS = 1_200
REQUEST_SECONDS = 120.0
PROMPT_TOKENS = "vllm:prompt_tokens_total"


@dataclass(frozen=True, slots=True)
class Turn:
    """One request. `replica`: who answered it; `shared`: with what was asked and answered before, by anybody."""

    conversation: int
    turn: int
    prompt_ids: tuple[int, ...]
    answer_ids: tuple[int, ...]
    shared: Shared
    cached: int
    replica: str


class FleetClient:
    """Speaks to the fleet at `url`."""

    def __init__(self, url: str, transport: httpx.BaseTransport | None = None) -> None:
        self._url = url
        self._http = httpx.Client(timeout=REQUEST_SECONDS, trust_env=False, cookies=no_cookies(), transport=transport)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._http.close()

    def complete(self, prompt: Sequence[int], **fields: Any) -> dict[str, Any]:
        """The answer's JSON. Raises DemoError when it is refused."""
        body = {"prompt": prompt, "max_tokens": ANSWER_TOKENS, "temperature": 0, "ignore_eos": True}
        return self._post("/v1/completions", {**body, "return_token_ids": True, **fields})

    def tokenize(self, text: str) -> list[int]:
        return self._tokens({"prompt": text, "add_special_tokens": False})

    def tokenize_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """The ids of a chat as the model would be asked to go on with it."""
        return self._tokens({"messages": messages, "add_generation_prompt": True})

    def prompt_tokens(self) -> dict[str, float]:
        """By replica, the tokens of the prompts that it was given. Raises DemoError when nobody says."""
        found = self._http.get(f"{self._url}/metrics")
        if found.is_error:
            raise DemoError(f"/metrics answered {found.status_code}: {found.text[:500]}")
        return {
            sample.labels["replica"]: sample.value
            for family in text_string_to_metric_families(found.text)
            for sample in family.samples
            if sample.name == PROMPT_TOKENS
        }

    def _tokens(self, body: Mapping[str, Any]) -> list[int]:
        tokens: list[int] = self._post("/tokenize", body)["tokens"]
        return tokens

    def _post(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        response = self._http.post(f"{self._url}{path}", json=body)
        if response.is_error:
            raise DemoError(f"{path} answered {response.status_code}: {response.text[:500]}")
        answer: dict[str, Any] = response.json()
        return answer


class Conversations:
    """CONVERSATIONS of them, each kept as the ids that were sent and answered."""

    def __init__(self, client: FleetClient, corpus: Corpus) -> None:
        self._client, self._corpus = client, corpus
        self._seen = SeenPaths()
        self._end_of_message = client.tokenize(END_OF_MESSAGE)
        self._prompts = [
            client.tokenize_chat([self._system(number), self._question(number, 0)]) for number in range(CONVERSATIONS)
        ]

    def ask(self, number: int, turn: int) -> Turn:
        """The next turn of a conversation. Raises DemoError when not exactly one replica has answered it."""
        prompt = self._prompts[number]
        before = self._client.prompt_tokens()
        answer = self._client.complete(prompt)
        after = self._client.prompt_tokens()
        replicas = [name for name, count in after.items() if count > before.get(name, 0.0)]
        if len(replicas) != 1:
            raise DemoError(f"{len(replicas)} replicas have counted one prompt: {before} became {after}")
        tokens = answer["choices"][0]["token_ids"]
        shared = self._seen.shared(None, prompt)
        self._seen.note(None, prompt, tokens)
        following = self._client.tokenize_chat([self._question(number, turn + 1)])
        self._prompts[number] = [*prompt, *tokens, *self._end_of_message, *following]
        cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
        return Turn(number, turn, tuple(prompt), tuple(tokens), shared, cached, replicas[0])

    def _system(self, number: int) -> dict[str, str]:
        return {"role": "system", "content": self._corpus.passage(20 + number, SYSTEM_CHARACTERS)}

    def _question(self, number: int, turn: int) -> dict[str, str]:
        passage = self._corpus.passage(5 + 7 * number + turn, TURN_CHARACTERS)
        return {"role": "user", "content": f"What does this part do?\n\n{passage}"}


def converse(client: FleetClient, corpus: Corpus, kill: Callable[[str], None]) -> list[Turn]:
    """TURNS turns of each conversation, in turn; then one more of each after `kill` of the first one's replica."""
    conversations = Conversations(client, corpus)
    turns = [conversations.ask(number, turn) for turn in range(TURNS) for number in range(CONVERSATIONS)]
    kill(turns[0].replica)
    return [*turns, *(conversations.ask(number, TURNS) for number in range(CONVERSATIONS))]
