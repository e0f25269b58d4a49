"""The flags of `cairn bench`, with the names that `vllm bench serve` has for the same, and what is made of them."""

import argparse
import json
import math
import os
import re
import resource
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

import httpx
import numpy as np

from cairn.addresses import make_url
from cairn.bench.client import Endpoint
from cairn.bench.datasets import (
    Chats,
    PrefixRepetition,
    RandomPrompts,
    ShareGpt,
    TraceCut,
    make_chats,
    make_prefix_repetition,
    make_random_prompts,
    read_sharegpt,
    read_trace_prompts,
)
from cairn.bench.report import METRICS
from cairn.bench.work import (
    MAX_PROMPTS,
    MAX_TOKENS,
    Conversation,
    Speller,
    TokenizerSpeller,
    Vocabulary,
    WordSpeller,
    draw_arrival_times,
    spell_prompts,
)
from cairn.errors import ConfigError

DATASETS: Mapping[str, type[Any]] = MappingProxyType(
    {
        "random": RandomPrompts,
        "prefix_repetition": PrefixRepetition,
        "sharegpt": ShareGpt,
        "trace": TraceCut,
        "chat": Chats,
    }
)
"""By --dataset-name: the record of its settings; each field of it is a flag that begins with the dataset's name."""
_MAX_SECONDS = 7 * 86_400.0
_GOALS = ("ttft", "tpot", "e2el")
_DEFAULT_PROMPTS = 1000
_MAX_OPEN = 4096
_SPARE_FILES = 64
_HEADER_VALUE = re.compile(r"[\x20-\x7e]*")
_ZONE = re.compile(r"(?<=\[)([0-9A-Fa-f:.]+)%25")
_HEADER_NAME = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+")
_SAMPLING = (
    *("temperature", "top_p", "min_p", "top_k"),
    *("frequency_penalty", "presence_penalty", "repetition_penalty"),
)


def add_bench_flags(parser: argparse.ArgumentParser) -> None:
    """`serve` and `compare`, and their arguments."""
    commands = parser.add_subparsers(dest="bench_command", required=True, metavar="COMMAND")
    serve = commands.add_parser(
        "serve", help="send a load to any server with OpenAI's API and measure", allow_abbrev=False
    )
    _add_target(serve.add_argument_group("the server"))
    _add_load(serve.add_argument_group("the load"))
    lengths = serve.add_argument_group("lengths of prompts and answers, in tokens")
    lengths.add_argument("--input-len", type=_integer(0, MAX_TOKENS), help="the same as --random-input-len")
    lengths.add_argument("--output-len", type=_integer(1, MAX_TOKENS), help="of answers, whatever the dataset")
    for dataset, settings in DATASETS.items():
        group = serve.add_argument_group("--dataset-name trace") if dataset == "trace" else lengths
        _add_dataset(group, dataset, settings)
    _add_sampling(serve.add_argument_group("sampling"))
    _add_report(serve.add_argument_group("the report"))
    compare = commands.add_parser("compare", help="two result files side by side", allow_abbrev=False)
    compare.add_argument("first", type=Path, metavar="A.json", help="what is compared with")
    compare.add_argument("second", type=Path, metavar="B.json", help="what is compared; ratios are B / A")
    compare.add_argument("--plot", type=Path, metavar="FILE", help="write a PNG or SVG there as well")


def _add_target(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--backend", choices=("openai", "openai-chat", "vllm"), help="which body is sent; default: as --endpoint says"
    )
    group.add_argument("--base-url", metavar="URL", help="http://host:port, instead of --host and --port")
    group.add_argument("--host", default="127.0.0.1", help="default: %(default)s")
    group.add_argument("--port", type=_integer(1, 65_535), default=8000, help="default: %(default)s")
    group.add_argument("--endpoint", metavar="PATH", help="/v1/completions or /v1/chat/completions")
    group.add_argument("--model", help="name of the model; default: the first one that /v1/models lists")
    group.add_argument("--served-model-name", metavar="NAME", help="the model's name in requests; default: --model")
    group.add_argument(
        "--tokenizer",
        metavar="MODEL",
        help="a tokenizer.json, its folder, or a model's name on the Hugging Face Hub, for prompts that go as text",
    )
    group.add_argument("--revision", help="branch, tag or commit of a --tokenizer on the hub; default: main")
    group.add_argument(
        "--download-dir", type=Path, metavar="FOLDER", help="cache of what the hub has; default: the Hugging Face cache"
    )
    group.add_argument(
        "--api-key", metavar="KEY", help="default: OPENAI_API_KEY, which other users of this machine cannot see"
    )
    group.add_argument("--header", nargs="*", default=[], metavar="KEY=VALUE", help="sent with every request")
    group.add_argument("--insecure", action="store_true", help="accept any TLS certificate")
    group.add_argument("--trust-remote-code", action="store_true", help="ignored: no code of a checkpoint is run")
    group.add_argument(
        "--ready-check-timeout-sec",
        type=_number(0, _MAX_SECONDS),
        default=0.0,
        help="wait so long for the server to answer; default: not at all",
    )
    group.add_argument(
        "--request-timeout",
        type=_number(1e-3, _MAX_SECONDS),
        default=600.0,
        help="seconds after which a request has failed; default: %(default)g",
    )


def _add_load(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--dataset-name", choices=tuple(DATASETS), default="random", help="default: %(default)s")
    group.add_argument("--dataset-path", type=Path, metavar="FILE", help="of sharegpt and trace")
    group.add_argument(
        "--num-prompts", type=_integer(1, MAX_PROMPTS), help="requests; default: 1000, or all that a trace has"
    )
    group.add_argument("--num-warmups", type=_integer(0, MAX_PROMPTS), default=0, help="requests before the measured")
    group.add_argument(
        "--request-rate", type=_number(1e-6, math.inf), default=math.inf, help="a second; default: all at once"
    )
    group.add_argument(
        "--burstiness",
        type=_number(1e-6, math.inf),
        default=1.0,
        help="shape of the gamma distribution of gaps: 1 is Poisson, less is burstier; default: %(default)g",
    )
    group.add_argument("--max-concurrency", type=_integer(1, MAX_PROMPTS), help="requests that may be open at a time")
    group.add_argument("--seed", type=_integer(0, (1 << 63) - 1), default=0, help="default: %(default)s")
    group.add_argument(
        "--ignore-eos", action="store_true", help="answers have the length asked for; always with random and trace"
    )
    group.add_argument(
        "--vocab-size",
        type=_integer(32, 1 << 22),
        default=4000,
        help="prompts are made of ids from 20 up to this; default: %(default)s, or what --tokenizer has",
    )


def _add_dataset(group: argparse._ArgumentGroup, dataset: str, settings: type[Any]) -> None:
    """A flag for each field of a dataset's record that is one, as `--random-input-len`."""
    for field in fields(settings):
        if field.metadata:
            least, most = field.metadata["least"], field.metadata["most"]
            about = [field.metadata["about"]] if field.metadata["about"] else []
            about += [f"default: {field.default}"] if field.default is not None else []
            kind = _integer(least, most) if isinstance(least, int) else _number(least, most)
            group.add_argument(f"--{dataset}-{field.name}".replace("_", "-"), type=kind, help="; ".join(about))


def _add_sampling(group: argparse._ArgumentGroup) -> None:
    """Sent only where given."""
    for name in _SAMPLING:
        kind = _integer(-1, 1 << 31) if name == "top_k" else _number(-1e6, 1e6)
        group.add_argument(f"--{name}".replace("_", "-"), type=kind)
    group.add_argument(
        "--extra-body", type=_json_object, default={}, metavar="JSON", help="further fields of every request"
    )


def _add_report(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--percentile-metrics",
        type=_metrics,
        default=tuple(METRICS),
        metavar="NAMES",
        help=f"which of {','.join(METRICS)} are shown; default: all",
    )
    group.add_argument(
        "--metric-percentiles", type=_percentiles, default=(99.0,), metavar="NUMBERS", help="default: 99"
    )
    group.add_argument(
        "--goodput",
        nargs="+",
        default=[],
        metavar="NAME:MS",
        help="goals by ttft, tpot and e2el; requests that keep all of them are counted",
    )
    group.add_argument("--save-result", action="store_true", help="write a JSON file, and plots beside it")
    group.add_argument("--save-detailed", action="store_true", help="with the texts of the answers")
    group.add_argument("--append-result", action="store_true", help="add to the file as a line of its own")
    group.add_argument("--result-dir", type=Path, metavar="FOLDER", help="default: here")
    group.add_argument("--result-filename", metavar="NAME", help="default: made of backend, rate, model and date")
    group.add_argument("--metadata", nargs="*", default=[], metavar="KEY=VALUE", help="kept in the JSON file")
    group.add_argument("--label", help="kept in the JSON file and used for its name; default: the backend")
    group.add_argument("--disable-tqdm", action="store_true", help="no progress bar")


def _bounded(convert: Callable[[str], float], what: str, form: str, least: float, most: float) -> Callable[[str], Any]:
    """Reads `what` from `least` to `most`, which are shown in this form."""

    def parse(text: str) -> float:
        try:
            value = convert(text)
        except ValueError:
            value = math.nan
        if not least <= value <= most:
            raise argparse.ArgumentTypeError(f"must be {what} from {least:{form}} to {most:{form}}, not {text!r:.40}")
        return value

    return parse


_integer, _number = partial(_bounded, int, "a whole number", ""), partial(_bounded, float, "a number", "g")


def _json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise argparse.ArgumentTypeError(f"must be a JSON object: {error}") from error
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError("must be a JSON object")
    return value


def _metrics(text: str) -> tuple[str, ...]:
    names = tuple(name.strip() for name in text.split(","))
    for name in names:
        if name not in METRICS:
            raise argparse.ArgumentTypeError(f"{name!r:.40} is none of {', '.join(METRICS)}")
    return names


def _percentiles(text: str) -> tuple[float, ...]:
    parse = _number(0, 100)
    return tuple(parse(part) for part in text.split(","))


# -- what is made of the flags -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Workload:
    """`work`: the conversations that are sent, each `due` seconds after the start; `warmups`: those sent before.
    `settings`: the dataset's, for the result file."""

    work: list[Conversation]
    due: list[float]
    warmups: list[Conversation]
    settings: Mapping[str, Any]
    ignore_eos: bool

    @property
    def num_requests(self) -> int:
        return sum(len(conversation.turns) for conversation in self.work)


def make_endpoint(arguments: argparse.Namespace) -> Endpoint:
    """Raises ConfigError naming the flag."""
    given = arguments.base_url if arguments.base_url is not None else make_url("http", arguments.host, arguments.port)
    # httpx takes the zone of an address as it is, and not as URLs write it
    base = _ZONE.sub(r"\1%", given.rstrip("/"))
    try:
        url = httpx.URL(base)
    except httpx.InvalidURL as error:
        raise ConfigError(f"--base-url: {error}") from error
    if url.scheme not in ("http", "https") or not url.host or url.query or url.userinfo:
        raise ConfigError("--base-url must be http://host:port or https://host:port, without user, password and query")
    chat = arguments.backend == "openai-chat"
    path = arguments.endpoint or ("/v1/chat/completions" if chat else "/v1/completions")
    if not path.startswith("/"):
        raise ConfigError(f"--endpoint {path} must begin with a slash")
    is_chat = path.rstrip("/").endswith("/chat/completions")
    if arguments.backend is not None and is_chat != chat:
        raise ConfigError(f"--backend {arguments.backend} and --endpoint {path} do not belong together: leave one out")
    headers = parse_pairs(arguments.header, "--header")
    key = arguments.api_key if arguments.api_key is not None else os.environ.get("OPENAI_API_KEY", "")
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
        backend=arguments.backend or ("openai-chat" if is_chat else "openai"),
        model=arguments.served_model_name or arguments.model or "",
        headers=headers,
        secrets=tuple(secret for secret in (key, *headers.values()) if secret),
        fields={name: getattr(arguments, name) for name in _SAMPLING if getattr(arguments, name) is not None}
        | arguments.extra_body,
    )


def parse_pairs(texts: Sequence[str], flag: str) -> dict[str, str]:
    """KEY=VALUE each. Raises ConfigError naming the flag."""
    pairs = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not name.strip():
            raise ConfigError(f"{flag} takes KEY=VALUE")
        pairs[name.strip()] = value.strip()
    return pairs


def parse_goals(texts: Sequence[str]) -> dict[str, float]:
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


def max_open_requests(max_concurrency: int | None) -> int:
    """How many requests may be open at a time. Raises ConfigError when that needs more files than may be open."""
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    most = min(_MAX_OPEN, max(1, files - _SPARE_FILES)) if files != resource.RLIM_INFINITY else _MAX_OPEN
    if max_concurrency is not None and max_concurrency > most:
        raise ConfigError(
            f"--max-concurrency {max_concurrency} is more than the {most} connections that can be open here (ulimit -n)"
        )
    return max_concurrency if max_concurrency is not None else most


def make_workload(
    arguments: argparse.Namespace, kind: Literal["completions", "chat"], tokenizer: Path | None = None
) -> Workload:
    """All prompts, made before anything is sent. Raises ConfigError naming the flag or the file."""
    # Streams of their own: another number of prompts leaves the arrivals as they were, and warm-ups share nothing.
    prompts, arrivals, others = (np.random.default_rng([arguments.seed, stream]) for stream in range(3))
    speller: Speller = WordSpeller() if tokenizer is None else TokenizerSpeller(tokenizer)
    vocabulary = Vocabulary.of_size(arguments.vocab_size)
    if isinstance(speller, TokenizerSpeller):
        vocabulary = Vocabulary(speller.regular_token_ids())
        if not len(vocabulary.ids):
            raise ConfigError(f"--tokenizer {tokenizer} has special tokens only")
    work, settings = _make_dataset(arguments, vocabulary, speller, prompts)
    first = work[0].turns[0]
    shape = RandomPrompts(first.num_tokens, first.max_tokens)
    warmups = make_random_prompts(shape, arguments.num_warmups, vocabulary, others) if arguments.num_warmups else []
    if kind == "chat":
        work, warmups = ([spell_prompts(conversation, speller) for conversation in some] for some in (work, warmups))
    if work[0].at is not None:
        due = [conversation.at or 0.0 for conversation in work]
    else:
        due = draw_arrival_times(len(work), arguments.request_rate, arguments.burstiness, arrivals).tolist()
    ignore_eos = arguments.ignore_eos or arguments.dataset_name in ("random", "trace")
    return Workload(work, due, warmups, settings, ignore_eos)


def _make_dataset(
    arguments: argparse.Namespace, vocabulary: Vocabulary, speller: Speller, rng: np.random.Generator
) -> tuple[list[Conversation], dict[str, Any]]:
    """The work, and the dataset's settings."""
    count, name, path = arguments.num_prompts or _DEFAULT_PROMPTS, arguments.dataset_name, arguments.dataset_path
    settings = _dataset_settings(arguments)
    if name in ("sharegpt", "trace"):
        if path is None:
            raise ConfigError(f"--dataset-name {name} needs --dataset-path")
    elif path is not None:
        raise ConfigError(f"--dataset-path has no place beside --dataset-name {name}")
    match name:
        case "trace":
            if not math.isinf(arguments.request_rate):
                raise ConfigError(
                    "--request-rate has no place beside a trace, which has its own times: --trace-speedup"
                )
            cut = TraceCut(**settings, most=arguments.num_prompts)
            return read_trace_prompts(path, cut, vocabulary, arguments.seed), {"path": str(path), **asdict(cut)}
        case "sharegpt":
            recorded = ShareGpt(path, **settings)
            return read_sharegpt(recorded, count, speller, rng), asdict(recorded) | {"path": str(path)}
        case "random":
            drawn = RandomPrompts(**settings)
            return make_random_prompts(drawn, count, vocabulary, rng), asdict(drawn)
        case "prefix_repetition":
            repeated = PrefixRepetition(**settings)
            return make_prefix_repetition(repeated, count, vocabulary, rng), asdict(repeated)
    talks = Chats(**settings)
    return make_chats(talks, count, vocabulary, rng, speller), asdict(talks)


def _dataset_settings(arguments: argparse.Namespace) -> dict[str, Any]:
    """The dataset's settings that were given, by flags of its own, else by --input-len and --output-len."""
    names = [field.name for field in fields(DATASETS[arguments.dataset_name]) if field.metadata]
    general = {name: getattr(arguments, name) for name in ("input_len", "output_len") if name in names}
    specific = {name: getattr(arguments, f"{arguments.dataset_name}_{name}") for name in names}
    return {name: value for given in (general, specific) for name, value in given.items() if value is not None}
