"""The command `cairn`. Exit codes: 0 done, 1 it went wrong while running, 2 it was asked for something wrong.

Heavy imports wait until their command is chosen: `cairn --help` needs neither torch nor the web framework.
"""

import argparse
import io
import sys
from collections.abc import Callable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from cairn import __version__
from cairn.cli.run import find_served_model, load_model_tokenizer, run_generation_check, run_proxy, run_server
from cairn.cli.words import rewrite_words
from cairn.errors import CairnError, ConfigError
from cairn.machine import Machine
from cairn.paths import check_encoding, check_output_file, check_working_folder
from cairn.setting_types import SERVED_DTYPES, parse_count, size_flag

if TYPE_CHECKING:
    from cairn.cli.run import LoadTokenizer
    from cairn.models.weights.hub import ModelSource
    from cairn.settings.serve import ServeSettings

# Written out: to import them would load torch for every --help.
_MADE_FAMILIES = (
    "nemotron_h, qwen3_5, qwen3_5_moe, granitemoehybrid, falcon_h1, lfm2, qwen3, "
    "olmo_hybrid, lfm2_moe, qwen3_moe, granite, gemma4, gemma3, gemma2, lfm3, llama4, gpt_oss, qwen3_5_vl"
)


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line, without repeating all flags."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message} (see `{self.prog} --help`)\n")

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """argparse's, which subcommands are parsed by, too. Words may be paths, and cannot be any bytes."""
        parsed, rest = super().parse_known_args(args, namespace)
        for action in self._actions:
            try:
                check_encoding(getattr(parsed, action.dest, None))
            except ValueError as error:
                # the word itself may be a key
                self.error(f"{'/'.join(action.option_strings) or action.metavar}: {error}")
        return parsed, rest


def main(
    arguments: Sequence[str] | None = None,
    *,
    core: str = "cairn.engine.build:build_core",
    load_tokenizer: "LoadTokenizer" = load_model_tokenizer,
    find_model: "Callable[[ServeSettings], str]" = find_served_model,
) -> int:
    """Run one command and return its exit code.

    `core` and `load_tokenizer` replace the engine that `serve` runs, `find_model` what MODEL means to it.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # text may have what the terminal's alphabet has not
    try:
        words = rewrite_words(sys.argv[1:] if arguments is None else arguments)
        return _run(words, core, load_tokenizer, find_model)
    except SystemExit as ended:
        return ended.code if isinstance(ended.code, int) else 1
    except ConfigError as error:
        print(f"cairn: {error}", file=sys.stderr)
        return 2
    except CairnError as error:
        print(f"cairn: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def _run(
    arguments: list[str],
    core: str,
    load_tokenizer: "LoadTokenizer",
    find_model: "Callable[[ServeSettings], str]",
) -> int:
    parser, serve, proxy, replay, bench = _parser()
    match arguments[:1]:
        case ["serve"]:
            from cairn.settings.serve import add_flags, load_settings

            source = add_flags(serve)
            return run_server(load_settings(_parse(parser, arguments), source), core, load_tokenizer, find_model)
        case ["proxy"]:
            from cairn.settings.proxy import add_proxy_flags, load_proxy_settings

            proxy_source = add_proxy_flags(proxy)
            return run_proxy(load_proxy_settings(_parse(parser, arguments), proxy_source))
        case ["replay"]:
            from cairn.replay.command import add_replay_flags, run_replay

            add_replay_flags(replay)
            return run_replay(_parse(parser, arguments))
        case ["bench"]:
            from cairn.bench.command import add_bench_flags, run_bench

            add_bench_flags(bench)
            asked = _parse(parser, arguments)
            return run_bench(asked, _find_tokenizer(asked))
    parsed = _parse(parser, arguments)
    return _make_model(parsed) if parsed.command == "make-model" else _check(parsed, core, load_tokenizer)


def _parse(parser: argparse.ArgumentParser, arguments: list[str]) -> argparse.Namespace:
    parsed = parser.parse_args(arguments)
    check_working_folder()
    return parsed


def _parser() -> tuple[argparse.ArgumentParser, ...]:
    """The whole one, and those of serve, proxy, replay and bench, which get their flags only when asked for."""
    parser = _Parser(prog="cairn", description="A serving engine for hybrid language models.", allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"cairn {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    serve = commands.add_parser(
        "serve",
        help="serve a checkpoint over HTTP",
        description="Serve a checkpoint over HTTP, with OpenAI's API. Every flag can also be an environment variable "
        "(CAIRN_MAX_NUM_SEQS=8) or a line of the --config file (max-num-seqs: 8); a flag wins over a variable, and a "
        "variable over the file. vLLM's other flags are taken where they are true here anyway, and refused otherwise.",
        allow_abbrev=False,
    )
    proxy = commands.add_parser(
        "proxy",
        help="put prefill and decode servers behind one address",
        description="Have prompts computed by prefill servers and answered by decode servers, behind one address. "
        "Every flag can also be an environment variable (CAIRN_PROXY_DECODE=http://a:8200,http://b:8200).",
        allow_abbrev=False,
    )
    make = commands.add_parser("make-model", help="write a random-weight checkpoint", allow_abbrev=False)
    make.add_argument("family", metavar="FAMILY", help=f"model family: {_MADE_FAMILIES}")
    make.add_argument("out", metavar="OUT", type=Path, help="folder to write, new or empty")
    make.add_argument("--size", choices=("tiny", "small"), default="tiny", help="default: %(default)s")
    make.add_argument("--seed", type=int, default=0, help="the same seed gives the same bytes; default: %(default)s")
    make.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="default: %(default)s")
    make.add_argument(
        "--mtp", action="store_true", help="with a head of multi-token prediction, where one is published"
    )
    check = commands.add_parser(
        "check", help="account for a checkpoint's tensors and say what serving it takes", allow_abbrev=False
    )
    check.add_argument(
        "model", metavar="MODEL", help="folder of the checkpoint, a GGUF file, or a name on the Hugging Face Hub"
    )
    check.add_argument("--revision", help="branch, tag or commit of a MODEL on the hub; default: main")
    check.add_argument(
        "--download-dir", type=Path, metavar="FOLDER", help="cache of what the hub has; default: the Hugging Face cache"
    )
    check.add_argument(
        "--dtype", type=_dtype, choices=("auto", "float32", "bfloat16"), default="auto", help="default: %(default)s"
    )
    check.add_argument(
        "-q",
        "--quantization",
        choices=("int4", "int8", "fp8", "modelopt", "compressed-tensors", "awq", "gptq", "auto-round", "mxfp4", "gguf"),
        help="of the weights of matrix products; default: the checkpoint's",
    )
    check.add_argument("--block-size", type=_count, default=16, help="tokens per page; default: %(default)s")
    check.add_argument(
        "--mamba-ssm-cache-dtype",
        choices=("auto", "float32", "bfloat16", "float16"),
        default="auto",
        help="what recurrent states of running requests are in; default: %(default)s",
    )
    check.add_argument(
        "--checkpoint-dtype",
        choices=("auto", "float32", "float16", "int8"),
        default="auto",
        help="form in which checkpoints have the recurrent state; default: %(default)s",
    )
    check.add_argument(
        "--kv-cache-memory-bytes", type=size_flag, default="1GiB", help="the pool to count with; default: %(default)s"
    )
    check.add_argument("--max-model-len", type=_count, help="longest prompt and answer; default: the model's")
    check.add_argument(
        "--max-num-seqs", type=_count, help="requests at once; default: 64, and with --gpu what the server would take"
    )
    check.add_argument(
        "--tensor-parallel-size",
        type=_count,
        default=1,
        help="ranks that the model is divided among: what is said is of each; default: %(default)s",
    )
    check.add_argument(
        "--gpu",
        dest="gpu_memory_bytes",
        type=_gpu_memory,
        metavar="NAME",
        help="the GPU to count with, as h100, or its memory, as 80GiB: the pool is what is left on it",
    )
    check.add_argument(
        "--gpu-memory-utilization",
        type=_share,
        default=0.9,
        help="with --gpu: share of its memory that is used; default: %(default)s",
    )
    check.add_argument(
        "--mm-encoder-cache-bytes",
        type=size_flag,
        default="256MiB",
        help="with --gpu: most bytes of encoded images that are kept; default: %(default)s",
    )
    check.add_argument(
        "--generate",
        action="store_true",
        help="answer 20 prompts, and compare them and a text's perplexity with transformers on the same weights",
    )
    check.add_argument("--output", type=Path, metavar="FILE", help="with --generate: write what was found as JSON")
    replay = commands.add_parser("replay", help="run a request trace through the cache", allow_abbrev=False)
    bench = commands.add_parser("bench", help="measure a server, or compare two measurements", allow_abbrev=False)
    return parser, serve, proxy, replay, bench


def _dtype(text: str) -> str:
    return SERVED_DTYPES.get(text, text)


def _count(text: str) -> int:
    number = parse_count(text) or int(text)
    if not 1 <= number <= 1 << 24:
        raise argparse.ArgumentTypeError(f"must be between 1 and {1 << 24}, not {text}")
    return number


def _gpu_memory(text: str) -> int:
    from cairn.check.report import GPU_MEMORY

    known = GPU_MEMORY.get(text.lower().replace(" ", "-"))
    if known is not None:
        return known
    try:
        return size_flag(text)
    except argparse.ArgumentTypeError:
        names = ", ".join(GPU_MEMORY)
        raise argparse.ArgumentTypeError(f"{text!r} is not known: say its memory, as 80GiB, or {names}") from None


def _share(text: str) -> float:
    number = float(text)
    if not 0 < number <= 1:
        raise argparse.ArgumentTypeError(f"must be above 0 and at most 1, not {text}")
    return number


def _make_model(parsed: argparse.Namespace) -> int:
    from cairn.models.random_weights.make_model import make_model

    options = {"size": parsed.size, "seed": parsed.seed, "dtype": parsed.dtype, "mtp": parsed.mtp}
    make_model(parsed.family, parsed.out, **options, show=True)
    return 0


def _source(parsed: argparse.Namespace, name: str, flag: str) -> "ModelSource":
    from cairn.models.weights.hub import ModelSource

    return ModelSource(name, parsed.revision, parsed.download_dir, flag)


def _find_tokenizer(parsed: argparse.Namespace) -> Path | None:
    """Where the --tokenizer of `bench serve` is; None without one."""
    if getattr(parsed, "tokenizer", None) is None:
        return None
    from cairn.models.weights.hub import find_tokenizer

    return find_tokenizer(_source(parsed, parsed.tokenizer, "--tokenizer"))


def _check(parsed: argparse.Namespace, core: str, load_tokenizer: "LoadTokenizer") -> int:
    from rich.console import Console

    from cairn.check.report import CheckSettings, check, render
    from cairn.models.weights.hub import find_checkpoint, find_headers

    if parsed.output is not None and not parsed.generate:
        raise ConfigError("--output: what is written there is found with --generate: add it")
    if parsed.output is not None:
        check_output_file("--output", parsed.output)
    source = _source(parsed, parsed.model, "MODEL")
    folder, headers = (find_checkpoint(source), None) if parsed.generate else find_headers(source)
    names = {field.name for field in fields(CheckSettings)}
    settings = {name: value for name, value in vars(parsed).items() if name in names}
    if parsed.gpu_memory_bytes is None:
        settings["available_memory"] = Machine().available_memory()
    report = check(folder, CheckSettings(**settings), headers)
    Console().print(render(report))
    if report.accounting.problems:
        return 2
    if not report.ok or not parsed.generate:
        return 0 if report.ok else 1
    return run_generation_check(report, parsed.output, core, load_tokenizer)
