"""From the flags to what the parts of this room are told."""

import argparse
import math
import os
import re
import resource
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal

import httpx
import numpy as np

from cairn.bench.datasets import (
    Chats,
    PrefixRepetition,
    RandomPrompts,
    ShareGpt,
    TraceCut,
    chats,
    prefix_repetition,
    random_prompts,
    sharegpt,
    trace_prompts,
)
from cairn.bench.endpoint import Endpoint
from cairn.bench.flags import DATASETS
from cairn.bench.work import Conversation, Speller, TokenizerSpeller, Vocabulary, Words, arrival_times, spelled
from cairn.errors import ConfigError

_GOALS = ("ttft", "tpot", "e2el")
_DEFAULT_PROMPTS = 1000
_MAX_OPEN = 4096
_SPARE_FILES = 64
_HEADER_VALUE = re.compile(r"[\x20-\x7e]*")
_HEADER_NAME = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+")
_SAMPLING = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "frequency_penalty",
    "presence_penalty",
    "repetition_penalty",
)


@dataclass(frozen=True, slots=True)
class Workload:
    """What is sent, when (seconds after the start), and what is sent before to warm up. `settings`: of the dataset, for
    the record."""

    work: list[Conversation]
    due: list[float]
    warmups: list[Conversation]
    settings: Mapping[str, Any]
    ignore_eos: bool

    @property
    def num_requests(self) -> int:
        return sum(len(conversation.turns) for conversation in self.work)


def endpoint_of(asked: argparse.Namespace) -> Endpoint:
    """Raises ConfigError naming the flag."""
    base = asked.base_url if asked.base_url is not None else f"http://{_in_url(asked.host)}:{asked.port}"
    base = base.rstrip("/")
    try:
        url = httpx.URL(base)
    except httpx.InvalidURL as error:
        raise ConfigError(f"--base-url: {error}") from error
    if url.scheme not in ("http", "https") or not url.host or url.query or url.userinfo:
        raise ConfigError("--base-url must be http://host:port or https://host:port, without user, password and query")
    chat = asked.backend == "openai-chat"
    path = asked.endpoint or ("/v1/chat/completions" if chat else "/v1/completions")
    if not path.startswith("/"):
        raise ConfigError(f"--endpoint {path} must begin with a slash")
    is_chat = path.rstrip("/").endswith("/chat/completions")
    if asked.backend is not None and is_chat != chat:
        raise ConfigError(f"--backend {asked.backend} and --endpoint {path} do not belong together: leave one out")
    headers = pairs_of(asked.header, "--header")
    key = asked.api_key if asked.api_key is not None else os.environ.get("OPENAI_API_KEY", "")
    if key:
        headers.setdefault("Authorization", f"Bearer {key}")
    for name, value in headers.items():
        if not _HEADER_NAME.fullmatch(name) or not _HEADER_VALUE.fullmatch(value):
            raise ConfigError(f"--header or --api-key: {name!r:.40} must be a header's name with visible ASCII in it")
    # A base URL with the API's version in it is what OpenAI's own clients are given.
    base = base.removesuffix("/v1") if path.startswith("/v1/") else base
    return Endpoint(
        url=base + path,
        base_url=base,
        kind="chat" if is_chat else "completions",
        backend=asked.backend or ("openai-chat" if is_chat else "openai"),
        model=asked.served_model_name or asked.model or "",
        headers=headers,
        secrets=tuple(secret for secret in (key, *headers.values()) if secret),
        fields={name: value for name in _SAMPLING if (value := getattr(asked, name)) is not None} | asked.extra_body,
    )


def _in_url(host: str) -> str:
    return f"[{host}]" if ":" in host and not host.startswith("[") else host


def pairs_of(texts: Sequence[str], flag: str) -> dict[str, str]:
    """KEY=VALUE each. Raises ConfigError naming the flag."""
    pairs = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not name.strip():
            raise ConfigError(f"{flag} takes KEY=VALUE")
        pairs[name.strip()] = value.strip()
    return pairs


def goals_of(texts: Sequence[str]) -> dict[str, float]:
    """Milliseconds by metric. Raises ConfigError."""
    goals = {}
    for text in texts:
        name, _, value = text.partition(":")
        try:
            goals[name] = float(value)
        except ValueError:
            goals[name] = -1.0
        if name not in _GOALS or not goals[name] >= 0:
            raise ConfigError(f"--goodput {text!r:.40}: write ttft:MS, tpot:MS or e2el:MS")
    return goals


def open_limit(asked: int | None) -> int:
    """How many requests may be open at a time. Raises ConfigError when that needs more files than may be open."""
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    most = min(_MAX_OPEN, max(1, files - _SPARE_FILES)) if files != resource.RLIM_INFINITY else _MAX_OPEN
    if asked is not None and asked > most:
        raise ConfigError(
            f"--max-concurrency {asked} is more than the {most} connections that can be open here (ulimit -n)"
        )
    return asked if asked is not None else most


def make_workload(
    asked: argparse.Namespace, kind: Literal["completions", "chat"], tokenizer: Path | None = None
) -> Workload:
    """All prompts, made before anything is sent. Raises ConfigError naming the flag or the file."""
    # Streams of their own: another number of prompts leaves the arrivals as they were, and warm-ups share nothing.
    prompts, arrivals, others = (np.random.default_rng([asked.seed, stream]) for stream in range(3))
    vocabulary, speller = _language(asked.vocab_size, tokenizer)
    work, settings = _dataset(asked, vocabulary, speller, prompts)
    first = work[0].turns[0]
    shape = RandomPrompts(first.num_tokens, first.max_tokens)
    warmups = random_prompts(shape, asked.num_warmups, vocabulary, others) if asked.num_warmups else []
    if kind == "chat":
        work, warmups = ([spelled(one, speller) for one in some] for some in (work, warmups))
    if work[0].at is not None:
        due = [one.at or 0.0 for one in work]
    else:
        due = arrival_times(len(work), asked.request_rate, asked.burstiness, arrivals).tolist()
    ignore_eos = asked.ignore_eos or asked.dataset_name in ("random", "trace")
    return Workload(work, due, warmups, settings, ignore_eos)


def _language(vocab_size: int, tokenizer: Path | None) -> tuple[Vocabulary, Speller]:
    if tokenizer is None:
        return Vocabulary.of_size(vocab_size), Words()
    speller = TokenizerSpeller(tokenizer)
    ids = speller.ordinary_ids()
    if not len(ids):
        raise ConfigError(f"--tokenizer {tokenizer} has special tokens only")
    return Vocabulary(ids), speller


def _dataset(
    asked: argparse.Namespace, vocabulary: Vocabulary, speller: Speller, rng: np.random.Generator
) -> tuple[list[Conversation], dict[str, Any]]:
    """The work, and the dataset's settings."""
    count, name = asked.num_prompts or _DEFAULT_PROMPTS, asked.dataset_name
    if name in ("sharegpt", "trace"):
        path = _needed_path(asked)
    elif asked.dataset_path is not None:
        raise ConfigError(f"--dataset-path has no place beside --dataset-name {name}")
    match name:
        case "trace":
            if not math.isinf(asked.request_rate):
                raise ConfigError(
                    "--request-rate has no place beside a trace, which has its own times: --trace-speedup"
                )
            cut = TraceCut(**_given(asked), most=asked.num_prompts)
            return trace_prompts(path, cut, vocabulary, asked.seed), {"path": str(path), **asdict(cut)}
        case "sharegpt":
            recorded = ShareGpt(path, **_given(asked))
            return sharegpt(recorded, count, speller, rng), asdict(recorded) | {"path": str(path)}
        case "random":
            drawn = RandomPrompts(**_given(asked))
            return random_prompts(drawn, count, vocabulary, rng), asdict(drawn)
        case "prefix_repetition":
            repeated = PrefixRepetition(**_given(asked))
            return prefix_repetition(repeated, count, vocabulary, rng), asdict(repeated)
    talks = Chats(**_given(asked))
    return chats(talks, count, vocabulary, rng, speller), asdict(talks)


def _given(asked: argparse.Namespace) -> dict[str, Any]:
    """What was said of the dataset: by a flag of its own, else by --input-len or --output-len."""
    names = [one.name for one in fields(DATASETS[asked.dataset_name]) if one.metadata]
    general = {name: getattr(asked, name) for name in ("input_len", "output_len") if name in names}
    own = {name: getattr(asked, f"{asked.dataset_name}_{name}") for name in names}
    return {name: value for said in (general, own) for name, value in said.items() if value is not None}


def _needed_path(asked: argparse.Namespace) -> Path:
    path: Path | None = asked.dataset_path
    if path is None:
        raise ConfigError(f"--dataset-name {asked.dataset_name} needs --dataset-path")
    return path
