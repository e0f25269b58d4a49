"""A conversation with a prefill server (P) and a decode server (D): what is asked, and what of it came from where.

It is kept as the ids that were sent and answered, so that no answer is tokenized anew. A lone server is asked the same.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import httpx
from prometheus_client.parser import text_string_to_metric_families

from cairn.http.cookies import no_cookies
from demo.client import counter_total
from demo.corpus import Corpus
from demo.server import DemoError
from demo.shared_prefix import SeenPaths, Shared

__all__ = ["AGAIN", "FIRST", "LONELY", "TURNS", "Asked", "Pages", "Place", "converse"]

TURNS = 4
SYSTEM_CHARACTERS, TURN_CHARACTERS = 1_200, 700
ANSWER_TOKENS = 80
END_OF_MESSAGE = "<|im_end|>\n"
REQUEST_SECONDS = 120.0

FIRST, AGAIN, LONELY = "turn 1", "turn 1 again", f"turn {TURNS + 1}, P killed"

HITS = "vllm:prefix_cache_hits_total"
PULLED = "vllm:nixl_bytes_transferred_sum"
CONFIGURATION = "vllm:cache_config_info"


@dataclass(frozen=True, slots=True)
class Pages:
    """The server's pages in tokens and bytes, and how many of them hold one checkpoint."""

    block_size: int
    page_bytes: int
    checkpoint: int

    def num_bytes(self, first_token: int, end: int) -> int:
        """Of the pages that hold tokens [first_token, end), and of one checkpoint."""
        pages = -(-end // self.block_size) - first_token // self.block_size
        return (max(0, pages) + self.checkpoint) * self.page_bytes


@dataclass(frozen=True, slots=True)
class Asked:
    """One request, what the client counted for it, and what became of its prompt on the server that answered (D).

    `hit`: tokens that D had; `received`: that came from P; `computed`: that went through D's model. `pulled`: bytes
    that D read from P, `pulled_back`: that P read from D. `shared`: with what was asked and answered before.
    """

    label: str
    prompt_ids: tuple[int, ...]
    answer_ids: tuple[int, ...]
    shared: Shared
    hit: int
    received: int
    computed: int
    pulled: int
    pulled_back: int


class Place:
    """Where to ask (`front`), and whose numbers to read: D's, and those of P while there is one."""

    def __init__(
        self, front: str, decode: str, prefill: str | None = None, transport: httpx.BaseTransport | None = None
    ) -> None:
        self._front, self._decode, self.prefill = front, decode, prefill
        self._http = httpx.Client(timeout=REQUEST_SECONDS, trust_env=False, cookies=no_cookies(), transport=transport)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._http.close()

    def complete(self, prompt: Sequence[int]) -> dict[str, Any]:
        """The answer's JSON. Raises DemoError when it is refused."""
        body = {"prompt": prompt, "max_tokens": ANSWER_TOKENS, "temperature": 0, "ignore_eos": True}
        return self._post(f"{self._front}/v1/completions", {**body, "return_token_ids": True})

    def tokenize(self, text: str) -> list[int]:
        """The ids of `text`: of D, because a proxy has none."""
        return self._tokens({"prompt": text, "add_special_tokens": False})

    def tokenize_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """The ids of a chat as the model would be asked to go on with it."""
        return self._tokens({"messages": messages, "add_generation_prompt": True})

    def hits(self) -> int:
        return self._count(self._decode, HITS)

    def pulled(self) -> int:
        """Bytes that D has read. A lone server reads none."""
        return 0 if self._front == self._decode else self._count(self._decode, PULLED)

    def pulled_back(self) -> int:
        return 0 if self.prefill is None else self._count(self.prefill, PULLED)

    def pages(self) -> Pages:
        """Raises DemoError when /metrics has no such facts."""
        return pages_of(self._metrics(self._decode))

    def _tokens(self, body: Mapping[str, Any]) -> list[int]:
        tokens: list[int] = self._post(f"{self._decode}/tokenize", body)["tokens"]
        return tokens

    def _post(self, url: str, body: Mapping[str, Any]) -> dict[str, Any]:
        response = self._http.post(url, json=body)
        if response.is_error:
            raise DemoError(f"{response.request.url.path} answered {response.status_code}: {response.text[:500]}")
        answer: dict[str, Any] = response.json()
        return answer

    def _count(self, url: str, name: str) -> int:
        return int(counter_total(self._metrics(url), name))

    def _metrics(self, url: str) -> str:
        return self._http.get(f"{url}/metrics").raise_for_status().text


def pages_of(exposition: str) -> Pages:
    """The labels of vllm:cache_config_info. Raises DemoError."""
    for family in text_string_to_metric_families(exposition):
        for sample in family.samples:
            if sample.name == CONFIGURATION:
                sizes = (int(sample.labels[key]) for key in ("block_size", "page_bytes", "pages_per_checkpoint"))
                return Pages(*sizes)
    raise DemoError(f"/metrics has no {CONFIGURATION}")


def converse(place: Place, corpus: Corpus, kill_prefill: Callable[[], None]) -> list[Asked]:
    """TURNS turns, the first one sent twice, and one turn more after `kill_prefill`."""
    asked: list[Asked] = []
    seen = SeenPaths()
    end_of_message = place.tokenize(END_OF_MESSAGE)
    prompt = place.tokenize_chat([_system(corpus), _question(corpus, 0)])
    for turn in range(TURNS + 1):
        if turn == TURNS:
            kill_prefill()
            place.prefill = None
        labels = (FIRST, AGAIN) if turn == 0 else (LONELY,) if turn == TURNS else (f"turn {turn + 1}",)
        asked += [_ask(place, label, prompt, seen) for label in labels]
        following = place.tokenize_chat([_question(corpus, turn + 1)])
        prompt = [*prompt, *asked[-1].answer_ids, *end_of_message, *following]
    return asked


def _ask(place: Place, label: str, prompt: Sequence[int], seen: SeenPaths) -> Asked:
    hits, pulled, pulled_back = place.hits(), place.pulled(), place.pulled_back()
    answer = place.complete(prompt)
    cache, tokens = answer["cairn"]["cache"], answer["choices"][0]["token_ids"]
    shared = seen.shared(None, prompt)
    seen.note(None, prompt, tokens)
    return Asked(
        label=label,
        prompt_ids=tuple(prompt),
        answer_ids=tuple(tokens),
        shared=shared,
        hit=place.hits() - hits,
        received=cache["received_tokens"],
        computed=cache["computed_tokens"],
        pulled=place.pulled() - pulled,
        pulled_back=place.pulled_back() - pulled_back,
    )


def _system(corpus: Corpus) -> dict[str, str]:
    return {"role": "system", "content": f"Answer questions about this code.\n\n{corpus.passage(4, SYSTEM_CHARACTERS)}"}


def _question(corpus: Corpus, turn: int) -> dict[str, str]:
    passage = corpus.passage(5 + turn, TURN_CHARACTERS)
    return {"role": "user", "content": f"What does this part do?\n\n{passage}"}
