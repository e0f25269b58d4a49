"""Whether llama.cpp's server computes what transformers does with the checkpoint that its GGUF file was made from.

A wrong conversion would be a benchmark of something else. The server answers a prompt greedily and says how likely it
found other tokens; transformers, in float32, says the same of the server's own answer, so that one near tie does not
part them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import httpx
import numpy as np
import torch
from benchmarks.peer_setup import PeerError

from cairn.bench.work import TokenizerSpeller, Vocabulary
from cairn.check.reference import TransformersReference
from cairn.http.cookies import no_cookies

__all__ = ["LEAST", "Agreement", "agreement_of", "check_agreement", "compare"]

PROMPT_TOKENS = 600
"""More than llama.cpp computes at once."""
ANSWER_TOKENS = 32
TOP_TOKENS = 4_096
SECONDS = 900.0

LEAST: Mapping[str, tuple[float, float]] = MappingProxyType({"": (0.99, 0.85), "int8": (0.97, 0.7), "int4": (0.6, 0.1)})
"""By quantization: correlation of log-probabilities at any position, and share of positions whose likeliest token is
the same. Random weights are the worst case: their likeliest tokens are near ties, and a wrong conversion has no
correlation at all."""


@dataclass(frozen=True, slots=True)
class Agreement:
    """`correlation`: the least of all positions; `same`: share of positions whose likeliest token is the same."""

    correlation: float
    same: float

    def check(self, name: str, quantization: str) -> None:
        """Raises PeerError where it is less than what rounding explains."""
        correlation, same = LEAST[quantization]
        if not (self.correlation >= correlation and self.same >= same):
            raise PeerError(
                f"{name} does not compute what transformers does with this checkpoint: the correlation of their "
                f"log-probabilities is {self.correlation:.3f} (at least {correlation} is needed), and {self.same:.0%} "
                f"of the likeliest tokens are the same (at least {same:.0%}). A comparison would be one of other models"
            )

    def __str__(self) -> str:
        return f"correlation {self.correlation:.4f}, {self.same:.0%} of the likeliest tokens the same"


def check_agreement(url: str, name: str, model: Path, quantization: str, seed: Sequence[int]) -> Agreement:
    """Ask the server at `url` and transformers. Raises PeerError."""
    vocabulary = Vocabulary(TokenizerSpeller(model).regular_token_ids())
    prompt = vocabulary.draw(np.random.default_rng(seed), PROMPT_TOKENS)
    with httpx.Client(timeout=SECONDS, trust_env=False, cookies=no_cookies()) as http:
        try:
            found = agreement_of(http, url, prompt, TransformersReference(model, "float32").logprobs)
        except httpx.HTTPError as error:
            raise PeerError(f"{name} has not answered: {error or type(error).__name__}") from error
    found.check(name, quantization)
    return found


def agreement_of(http: httpx.Client, url: str, prompt: Sequence[int], reference: Any) -> Agreement:
    """`reference` (prompt, answer): log-probabilities [tokens of the answer, vocabulary]. Raises PeerError."""
    body = {"prompt": list(prompt), "n_predict": ANSWER_TOKENS, "temperature": 0, "ignore_eos": True}
    answered = http.post(
        f"{url}/completion", json={**body, "n_probs": TOP_TOKENS, "cache_prompt": False, "return_tokens": True}
    )
    if answered.status_code != 200:
        raise PeerError(f"{url}/completion: HTTP {answered.status_code}: {answered.text[:300]}")
    found = answered.json()
    answer, positions = found["tokens"], found["completion_probabilities"]
    if len(answer) != ANSWER_TOKENS:
        raise PeerError(f"{url}/completion: {len(answer)} tokens, and {ANSWER_TOKENS} were asked for")
    places = _places(answer, [one["id"] for one in positions])
    if len(places) < max(len(positions), ANSWER_TOKENS // 2):
        raise PeerError(f"{url}/completion: of {len(answer)} tokens only {len(places)} have log-probabilities")
    return compare(positions, reference(prompt, answer)[places])


def _places(answer: Sequence[int], listed: Sequence[int]) -> list[int]:
    """Where the listed tokens stand: those that end within a character have no log-probabilities."""
    places: list[int] = []
    for place, token in enumerate(answer):
        if len(places) < len(listed) and token == listed[len(places)]:
            places.append(place)
    return places


def compare(positions: Sequence[Mapping[str, Any]], logprobs: torch.Tensor) -> Agreement:
    """`positions`: as the server lists them, each with its token's `id` and `top_logprobs`."""
    correlations = []
    for listed, row in zip((one["top_logprobs"] for one in positions), logprobs, strict=True):
        own = torch.tensor([one["logprob"] for one in listed])
        theirs = row[[one["id"] for one in listed]]
        correlations.append(torch.corrcoef(torch.stack((own, theirs)))[0, 1].item())
    same = [one["id"] == token for one, token in zip(positions, logprobs.argmax(dim=-1).tolist(), strict=True)]
    return Agreement(min(correlations), sum(same) / len(same))
