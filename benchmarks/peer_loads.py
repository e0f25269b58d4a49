"""The loads that servers are compared under: what is sent, and the figures that come of it.

Prompts are token ids, drawn from a seed; sent and timed by the load generator of `cairn bench serve`.
"""

import asyncio
import statistics
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import httpx
import numpy as np
from benchmarks.peer_servers import SERVED_NAME, PeerError

from cairn.bench.client import Endpoint, EventLoopClock, HttpSender, RequestRecord
from cairn.bench.datasets import PrefixRepetition, make_prefix_repetition
from cairn.bench.load import LoadGenerator, LoadResult
from cairn.bench.report import summarize
from cairn.bench.work import Conversation, TokenizerSpeller, Turn, Vocabulary
from cairn.http.cookies import no_cookies

__all__ = ["FULL", "LOADS", "QUICK", "Figures", "LoadClient", "Scale", "check_answers", "decode_rate", "figures_of"]

Figures = dict[str, float]

REQUEST_SECONDS = 600.0
LOAD_SECONDS = 3_600.0
# Servers close idle connections after some seconds; a request sent on one just then would be lost.
KEEP_ALIVE_SECONDS = 2.0
GREEDY: Mapping[str, Any] = MappingProxyType({"temperature": 0})
SAMPLED: Mapping[str, Any] = MappingProxyType({"temperature": 0.8, "top_p": 0.95, "top_k": 20})
# Every token is an event of its own with it, also one that is half a character.
WITH_IDS: Mapping[str, Any] = MappingProxyType({"return_token_ids": True})


@dataclass(frozen=True, slots=True)
class Scale:
    """How much is sent; lengths in tokens. `decode_repeats`, `cold_repeats`: how often each case comes in one round, of
    which the median counts. `idle_seconds`: how long the server is watched doing nothing."""

    repetition: PrefixRepetition
    num_prompts: int = 100
    concurrency: int = 10
    decode_sequences: tuple[int, ...] = (1, 4, 8, 16)
    decode_prompt: int = 16
    decode_answer: int = 128
    decode_repeats: int = 3
    cold_lengths: tuple[int, ...] = (1_200, 4_800)
    shared_length: int = 4_800
    cold_repeats: int = 3
    sampled_sequences: int = 8
    idle_seconds: float = 10.0


FULL = Scale(PrefixRepetition(prefix_len=600, suffix_len=200, num_prefixes=10, output_len=100))
"""A tenth of the published prefix_repetition comparison, and all of the rest."""

QUICK = Scale(
    repetition=PrefixRepetition(prefix_len=600, suffix_len=200, num_prefixes=2, output_len=20),
    num_prompts=10,
    decode_sequences=(1, 8),
    decode_answer=32,
    decode_repeats=1,
    cold_lengths=(1_200,),
    shared_length=1_200,
    cold_repeats=1,
    idle_seconds=3.0,
)
"""Whether everything works: its figures mean little."""


class LoadClient:
    """Sends loads to one server. `rng`: what prompts are drawn with."""

    def __init__(self, http: httpx.AsyncClient, url: str, vocabulary: Vocabulary, rng: np.random.Generator) -> None:
        self._http = http
        self._url = f"{url}/v1/completions"
        self.vocabulary = vocabulary
        self.rng = rng

    def draw(self, count: int, length: int) -> list[tuple[int, ...]]:
        """Prompts that share nothing with any other."""
        return [self.vocabulary.draw(self.rng, length) for _ in range(count)]

    async def run(
        self, work: Sequence[Conversation], concurrency: int, sampling: Mapping[str, Any] = GREEDY
    ) -> LoadResult:
        """Send all of `work`, `concurrency` requests at a time.

        Raises PeerError when one fails, or an answer has not as many tokens as were asked for.
        """
        fields = {**sampling, **WITH_IDS}
        endpoint = Endpoint(self._url, "completions", SERVED_NAME, ignore_eos=True, fields=fields)
        sender = HttpSender(self._http, endpoint, EventLoopClock(), REQUEST_SECONDS)
        async with asyncio.timeout(LOAD_SECONDS):
            ran = await LoadGenerator(sender, concurrency).run(work, [0.0] * len(work), asyncio.Event())
        check_answers(work, ran)
        return ran

    async def together(
        self, prompts: Sequence[tuple[int, ...]], answer: int, sampling: Mapping[str, Any] = GREEDY
    ) -> list[RequestRecord]:
        """All prompts at the same time, with answers of `answer` tokens."""
        work = [Conversation((Turn(prompt, len(prompt), answer),)) for prompt in prompts]
        return (await self.run(work, len(work), sampling)).records


def check_answers(work: Sequence[Conversation], ran: LoadResult) -> None:
    """Raises PeerError unless every request has its whole answer: a shorter one would look fast."""
    asked = [turn.max_tokens for conversation in work for turn in conversation.turns]
    for tokens, outcome in zip(asked, ran.records, strict=True):
        if outcome.failure is not None:
            raise PeerError(f"a request failed: {outcome.failure.kind}: {outcome.failure.detail}")
        if outcome.output_tokens != tokens:
            raise PeerError(f"an answer has {outcome.output_tokens} tokens, and {tokens} were asked for")


def decode_rate(outcomes: Sequence[RequestRecord]) -> float:
    """Tokens a second, from the first request's sending to the last token of all: prompts are short, and a server that
    is out of breath hands over many tokens at once, so that when each was computed cannot be seen."""
    tokens = sum(one.output_tokens for one in outcomes)
    return tokens / (max(one.token_times[-1] for one in outcomes) - min(one.sent for one in outcomes))


async def warm_up(client: LoadClient, scale: Scale) -> None:
    """Whatever a server does only once, in all the shapes that come later. Nothing of it is measured."""
    for length in scale.cold_lengths:
        await client.together(client.draw(1, length), 8)
    for count in scale.decode_sequences:
        await client.together(client.draw(count, scale.decode_prompt), 16)
    await client.together(client.draw(scale.sampled_sequences, scale.decode_prompt), 16, SAMPLED)


async def prefix_repetition_load(client: LoadClient, scale: Scale) -> Figures:
    """Prompts of few prefixes, ten at a time: duration, mean times to and per token, and what was cached."""
    work = make_prefix_repetition(scale.repetition, scale.num_prompts, client.vocabulary, client.rng)
    figures = summarize(await client.run(work, scale.concurrency), (), {})
    found = {
        "prefix_repetition_duration_s": figures["duration"],
        "prefix_repetition_tpot_ms": figures["mean_tpot_ms"],
        "prefix_repetition_ttft_ms": figures["mean_ttft_ms"],
        "prefix_repetition_cached_share": figures["cached_share"],
    }
    return {name: value for name, value in found.items() if value is not None}


async def decode_load(client: LoadClient, scale: Scale) -> Figures:
    """Tokens a second at several numbers of sequences, contexts short."""
    return {
        f"decode_{count}_tokens_per_s": await _median_rate(client, scale, count, GREEDY)
        for count in scale.decode_sequences
    }


async def sampled_load(client: LoadClient, scale: Scale) -> Figures:
    """Tokens a second with temperature, top-k and top-p."""
    count = scale.sampled_sequences
    return {
        f"greedy_decode_{count}_tokens_per_s": await _median_rate(client, scale, count, GREEDY),
        f"sampled_decode_{count}_tokens_per_s": await _median_rate(client, scale, count, SAMPLED),
    }


async def _median_rate(client: LoadClient, scale: Scale, count: int, sampling: Mapping[str, Any]) -> float:
    rates = []
    for _ in range(scale.decode_repeats):
        prompts = client.draw(count, scale.decode_prompt)
        rates.append(decode_rate(await client.together(prompts, scale.decode_answer, sampling)))
    return statistics.median(rates)


async def cold_load(client: LoadClient, scale: Scale) -> Figures:
    """Milliseconds to the first token, one request at a time: of prompts never seen, of the same again, of one that
    shares two thirds with an earlier one, and of the next that does so."""
    outcomes: dict[str, list[RequestRecord]] = {}

    async def send(name: str, prompt: tuple[int, ...]) -> None:
        outcomes.setdefault(name, []).extend(await client.together([prompt], 1))

    for _ in range(scale.cold_repeats):
        for length in scale.cold_lengths:
            (prompt,) = client.draw(1, length)
            await send(f"cold_{length}", prompt)
            await send(f"repeat_{length}", prompt)
        length = scale.shared_length
        first, second, third = client.draw(3, length)
        shared = first[: 2 * length // 3]
        await client.together([first], 1)
        await send(f"shared_{length}", shared + second[len(shared) :])
        await send(f"shared_again_{length}", shared + third[len(shared) :])
    found = {}
    for name, those in outcomes.items():
        found[f"{name}_ms"] = statistics.median(1000 * one.ttft for one in those)
        cached = [one.cached_tokens for one in those if one.cached_tokens is not None]
        if cached and not name.startswith("cold"):
            found[f"{name}_cached_tokens"] = statistics.median(cached)
    return found


LOADS: Mapping[str, Callable[[LoadClient, Scale], Awaitable[Figures]]] = MappingProxyType(
    {
        "prefix_repetition": prefix_repetition_load,
        "decode": decode_load,
        "cold": cold_load,
        "sampled": sampled_load,
    }
)
"""By name; `sampled` is sent to a model with a vocabulary of the published size."""


async def figures_of(url: str, model: Path, loads: Sequence[str], scale: Scale, seed: Sequence[int]) -> Figures:
    """Send the loads of these names to the server at `url`, one after the other, and return all their figures.

    The same `seed` draws the same prompts. Raises PeerError.
    """
    most = max(scale.concurrency, scale.sampled_sequences, *scale.decode_sequences)
    limits = httpx.Limits(max_connections=most, max_keepalive_connections=most, keepalive_expiry=KEEP_ALIVE_SECONDS)
    vocabulary, figures = Vocabulary(TokenizerSpeller(model).regular_token_ids()), {}
    async with httpx.AsyncClient(
        limits=limits, timeout=httpx.Timeout(REQUEST_SECONDS), trust_env=False, cookies=no_cookies()
    ) as http:
        await warm_up(LoadClient(http, url, vocabulary, np.random.default_rng([*seed, len(LOADS)])), scale)
        for number, (name, load) in enumerate(LOADS.items()):
            if name in loads:
                rng = np.random.default_rng([*seed, number])
                figures |= await load(LoadClient(http, url, vocabulary, rng), scale)
    return figures
