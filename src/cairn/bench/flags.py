"""The flags of `cairn bench`, with the names that `vllm bench serve` has for the same."""

import argparse
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import fields
from pathlib import Path
from types import MappingProxyType
from typing import Any

from cairn.bench.datasets import Chats, PrefixRepetition, RandomPrompts, ShareGpt, TraceCut
from cairn.bench.metrics import METRICS
from cairn.bench.work import MAX_PROMPTS, MAX_TOKENS

DATASETS: Mapping[str, type[Any]] = MappingProxyType(
    {
        "random": RandomPrompts,
        "prefix_repetition": PrefixRepetition,
        "sharegpt": ShareGpt,
        "trace": TraceCut,
        "chat": Chats,
    }
)
"""By --dataset-name: what can be said of the dataset, in flags that begin with its name."""
_MAX_SECONDS = 7 * 86_400.0


def add_bench_flags(parser: argparse.ArgumentParser) -> None:
    """`serve` and `compare`, and their arguments."""
    commands = parser.add_subparsers(dest="bench_command", required=True, metavar="COMMAND")
    serve = commands.add_parser(
        "serve", help="send a load to any server with OpenAI's API and measure", allow_abbrev=False
    )
    _add_target(serve.add_argument_group("the server"))
    _add_load(serve.add_argument_group("the load"))
    lengths = serve.add_argument_group("lengths of prompts and answers, in tokens")
    lengths.add_argument("--input-len", type=_whole(0, MAX_TOKENS), help="the same as --random-input-len")
    lengths.add_argument("--output-len", type=_whole(1, MAX_TOKENS), help="of answers, whatever the dataset")
    for dataset, settings in DATASETS.items():
        group = serve.add_argument_group("--dataset-name trace") if dataset == "trace" else lengths
        _add_dataset_flags(group, dataset, settings)
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
    group.add_argument("--port", type=_whole(1, 65_535), default=8000, help="default: %(default)s")
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
        "--num-prompts", type=_whole(1, MAX_PROMPTS), help="requests; default: 1000, or all that a trace has"
    )
    group.add_argument("--num-warmups", type=_whole(0, MAX_PROMPTS), default=0, help="requests before the measured")
    group.add_argument(
        "--request-rate", type=_number(1e-6, math.inf), default=math.inf, help="a second; default: all at once"
    )
    group.add_argument(
        "--burstiness",
        type=_number(1e-6, math.inf),
        default=1.0,
        help="shape of the gamma distribution of gaps: 1 is Poisson, less is burstier; default: %(default)g",
    )
    group.add_argument("--max-concurrency", type=_whole(1, MAX_PROMPTS), help="requests that may be open at a time")
    group.add_argument("--seed", type=_whole(0, (1 << 63) - 1), default=0, help="default: %(default)s")
    group.add_argument(
        "--ignore-eos", action="store_true", help="answers have the length asked for; always with random and trace"
    )
    group.add_argument(
        "--vocab-size",
        type=_whole(32, 1 << 22),
        default=4000,
        help="prompts are made of ids from 20 up to this; default: %(default)s, or what --tokenizer has",
    )


def _add_dataset_flags(group: argparse._ArgumentGroup, dataset: str, settings: type[Any]) -> None:
    """A flag for each field of a dataset's record that is one, as `--random-input-len`."""
    for one in fields(settings):
        if one.metadata:
            least, most = one.metadata["least"], one.metadata["most"]
            about = [one.metadata["about"]] if one.metadata["about"] else []
            about += [f"default: {one.default}"] if one.default is not None else []
            kind = _whole(least, most) if isinstance(least, int) else _number(least, most)
            group.add_argument(f"--{dataset}-{one.name}".replace("_", "-"), type=kind, help="; ".join(about))


def _add_sampling(group: argparse._ArgumentGroup) -> None:
    """Sent only where given."""
    for name in ("temperature", "top-p", "min-p", "frequency-penalty", "presence-penalty", "repetition-penalty"):
        group.add_argument(f"--{name}", type=_number(-1e6, 1e6))
    group.add_argument("--top-k", type=_whole(-1, 1 << 31))
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


def _whole(least: int, most: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = least - 1
        if not least <= value <= most:
            raise argparse.ArgumentTypeError(f"must be a whole number from {least} to {most}, not {text!r:.40}")
        return value

    return parse


def _number(least: float, most: float) -> Callable[[str], float]:
    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not least <= value <= most:
            raise argparse.ArgumentTypeError(f"must be a number from {least:g} to {most:g}, not {text!r:.40}")
        return value

    return parse


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
