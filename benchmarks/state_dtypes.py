"""What --checkpoint-dtype and --mamba-ssm-cache-dtype cost: logits after a restore, or of states that run in fewer
bits, beside those of one bfloat16 forward pass.

    python -m benchmarks.state_dtypes [--model DIR] [--families NAMES ...] [--seeds 3] [--restores 200] [--turns 50]
                                      [--continuation 8] [--random-restores 24] [--copies 30] [--json FILE]
                                      [--plot FILE] [--texts 16] [--prompt 320] [--answer 288]

The model of --model (demo/model, which is trained) answers Python's own sources; of each family a tiny model of random
weights, in bfloat16, answers random tokens, once for each seed. All of it is computed in float32, with checkpoints in
float32, float16 and int8; `bfloat16` is the same in bfloat16, with float32 checkpoints.
  restores  a prompt of random length is computed, which leaves a checkpoint at its end; then it is asked for again with
            --continuation more tokens: all before them is restored. Of the logits behind the last one: their distance
            to float32's, over these ones' distance from their mean; the Kullback-Leibler divergence; how often the
            likeliest token is the same; and for a trained model the perplexity of the tokens that really follow.
  turns     one conversation, each turn of --continuation tokens, restored from the checkpoint of the turn before and
            stored again at its end.
  bytes     of a checkpoint.
  running   --texts texts of a --prompt and an --answer, which is computed token by token, with states that run in
            float32, float16 and bfloat16; `model in bfloat16` is a bfloat16 model with float32 states: see
            `benchmarks.running_states`. A fourth as many of each random model.
  copies    milliseconds of saving and of restoring a state of 8 MiB in float32 (4 layers of Nemotron-3-Nano) on one
            thread of the CPU: the median, each form measured in turn.
"""

import argparse
import gc
import math
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
import torch
from benchmarks.core_requests import greedy_request
from benchmarks.quantization import errors
from benchmarks.reporting import add_output_flags, as_json, check_positive, circumstances, make_console, save_figure
from benchmarks.running_states import cut_texts, measure_running, running_table
from demo.corpus import LEAST_CHARACTERS, Corpus
from numpy.typing import NDArray
from rich.table import Table
from torch import Tensor

from cairn.engine.build import build_core
from cairn.engine.contract import EngineConfig
from cairn.engine.core import Core
from cairn.engine.text.tokenizer import ModelTokenizer
from cairn.errors import CairnError
from cairn.kernels.state_encoding import ENCODINGS
from cairn.layers.memory import AttentionSpec, ConvPart, RecurrentSpec
from cairn.models.decoder_builder import load_kernels
from cairn.models.layer_sizes import CacheSpec
from cairn.models.random_weights.make_model import make_model
from cairn.runner.checkpoint import CheckpointPages
from cairn.runner.memory import LiveStates

Ids = NDArray[np.int64]

TRAINED = Path(__file__).parents[1] / "demo" / "model"
FAMILIES = ("nemotron_h", "qwen3_5", "qwen3_5_moe", "granitemoehybrid", "falcon_h1")
"""Those with a recurrent state that `cairn make-model` makes."""

Variant = Literal["float32", "float16", "int8", "bfloat16"]
VARIANTS: tuple[Variant, ...] = get_args(Variant)
COMPARED = VARIANTS[1:]
SHORTEST, LONGEST = 64, 1024
FIRST_TOKEN, LAST_TOKEN = 64, 400


class Place(NamedTuple):
    """`prompt` is computed, `restored` tokens of it are then a checkpoint's; `following`: the token behind it."""

    prompt: Ids
    restored: int
    following: int


class Engine:
    """A core that computes one request at a time."""

    def __init__(self, model: Path, variant: Variant) -> None:
        self._logits: list[Tensor] = []
        self._count = 0
        config = EngineConfig(
            model=str(model),
            dtype="bfloat16" if variant == "bfloat16" else "float32",
            checkpoint_dtype="float32" if variant == "bfloat16" else variant,
            device="cpu",
            max_num_seqs=1,
            language_model_only=True,
        )
        self.core: Core = build_core(config, observe=lambda sample, logits: self._logits.append(logits.clone()))

    def logits_behind(self, prompt: Ids, restored: int | None = None) -> Tensor:
        """float64 [vocabulary]. Raises RuntimeError where other tokens than the first `restored` were cached."""
        self._count += 1
        self.core.submit(greedy_request(str(self._count), prompt, 1))
        cached: list[int] = []
        while self.core.has_work:
            cached += [output.cache.cached_tokens for output in self.core.step() if output.cache is not None]
        if restored is not None and cached[-1] != restored:
            raise RuntimeError(f"{cached[-1]} tokens were cached, not {restored}")
        found, self._logits[:] = self._logits[-1].double().flatten(), ()
        return found


def random_places(tokens: Ids, count: int, continuation: int, rng: np.random.Generator) -> list[Place]:
    """Each out of a stretch of the tokens that no other one has."""
    stretch = len(tokens) // count
    if stretch <= SHORTEST + continuation:
        raise RuntimeError(f"{len(tokens)} tokens are too few for {count} restores")
    places = []
    for number in range(count):
        own = tokens[number * stretch : (number + 1) * stretch]
        restored = int(rng.integers(SHORTEST, min(LONGEST, stretch - continuation - 1)))
        end = restored + continuation
        places.append(Place(own[:end], restored, int(own[end])))
    return places


def measure_model(model: Path, tokens: Ids, arguments: argparse.Namespace, restores: int) -> dict[str, Any]:
    """All figures of one model."""
    step = arguments.continuation
    places = random_places(tokens, restores, step, np.random.default_rng(arguments.seed))
    after, turns, sizes = dict[str, Tensor](), dict[str, Tensor](), dict[str, int]()
    for variant in VARIANTS:
        engine = Engine(model, variant)
        found = []
        for place in places:
            engine.logits_behind(place.prompt[: place.restored])
            found.append(engine.logits_behind(place.prompt, place.restored))
        after[variant] = torch.stack(found)
        # Other tokens than those of the places, which are cached.
        talk = np.ascontiguousarray(tokens[::-1])
        engine.logits_behind(talk[:SHORTEST])
        ends = [SHORTEST + turn * step for turn in range(arguments.turns)]
        turns[variant] = torch.stack([engine.logits_behind(talk[: end + step], end) for end in ends])
        sizes[variant] = engine.core.info.cache.checkpoint_bytes
        engine.core.close()
        del engine
        gc.collect()
    following = torch.tensor([place.following for place in places])
    truth = {name: found.log_softmax(1)[torch.arange(len(places)), following] for name, found in after.items()}
    return {
        "restores": {name: errors(after[name], after["float32"]) for name in COMPARED},
        "perplexity": {name: math.exp(-of.mean().item()) for name, of in truth.items()},
        "turns": {name: errors(turns[name], turns["float32"]) for name in COMPARED},
        "distance_by_turn": {
            name: [
                errors(one[None], wanted[None])["distance"]
                for one, wanted in zip(turns[name], turns["float32"], strict=True)
            ]
            for name in COMPARED
        },
        "checkpoint_bytes": sizes,
    }


def trained_tokens(model: Path, wanted: int) -> Ids:
    """Python's sources, one behind the other, at least so many tokens."""
    tokenizer, corpus, number = ModelTokenizer(model, None), Corpus(), 0
    ids: list[int] = []
    while len(ids) < wanted:
        ids += tokenizer.encode(corpus.passage(number, LEAST_CHARACTERS))
        number += 1
    return np.array(ids, np.int64)


def copy_milliseconds(copies: int) -> dict[str, dict[str, float]]:
    """By form, of `save` and of `restore`."""
    parts = (ConvPart(4096), ConvPart(1024), ConvPart(1024))
    recurrent = RecurrentSpec(4, 3, parts, state=(64, 64, 128), units=8)
    cache = CacheSpec(2688, recurrent, (AttentionSpec(6, 2, 128),))
    spec, slots = cache.memory_spec(torch.bfloat16, torch.device("cpu")), 8
    live, runs = LiveStates(spec, slots), dict[str, tuple[CheckpointPages, Tensor]]()
    live.recurrent[0].state.normal_()
    for name, encoding in ENCODINGS.items():
        layout = cache.layout(16, 2, encoding)
        pool = torch.zeros(slots * layout.pages_per_checkpoint, layout.page_bytes, dtype=torch.uint8)
        files = torch.randperm(len(pool)).view(slots, -1)
        runs[name] = CheckpointPages(pool, spec, layout, live, load_kernels("cpu")), files
    taken: dict[str, dict[str, list[float]]] = {name: {"save": [], "restore": []} for name in runs}
    for number in range(copies + 1):
        for name, (checkpoints, files) in runs.items():
            # Another slot and another file each time, as a server has it: not those that the cache still knows.
            slot = torch.tensor([number % slots])
            for way, copy in (("save", checkpoints.save), ("restore", checkpoints.restore)):
                begin = time.perf_counter()
                copy(files[number % slots][None], slot)
                if number:  # The first one compiles.
                    taken[name][way].append(1e3 * (time.perf_counter() - begin))
    return {name: {way: statistics.median(of) for way, of in own.items()} for name, own in taken.items()}


def measure(arguments: argparse.Namespace) -> tuple[dict[str, Any], dict[str, Any]]:
    """What restores come to, and what running states do."""
    length, few = (arguments.prompt, arguments.answer), -(-arguments.texts // 4)
    wanted = max(arguments.restores * (LONGEST // 2), arguments.texts * sum(length))
    tokens = trained_tokens(arguments.model, wanted)
    found: dict[str, Any] = {"trained": measure_model(arguments.model, tokens, arguments, arguments.restores)}
    running = {"trained": measure_running(arguments.model, cut_texts(tokens, arguments.texts, *length))}
    for family in arguments.families:
        own = []
        for seed in range(arguments.seed, arguments.seed + arguments.seeds):
            with tempfile.TemporaryDirectory(prefix="cairn-states-") as scratch:
                folder, rng = Path(scratch) / "model", np.random.default_rng(seed)
                make_model(family, folder, seed=seed, dtype="bfloat16")
                drawn = rng.integers(FIRST_TOKEN, LAST_TOKEN, arguments.random_restores * LONGEST // 2)
                own.append(measure_model(folder, drawn, arguments, arguments.random_restores))
                if seed == arguments.seed:
                    drawn = rng.integers(FIRST_TOKEN, LAST_TOKEN, few * sum(length))
                    running[family] = measure_running(folder, cut_texts(drawn, few, *length))
        found[family] = own
    return found, running


def worst(found: dict[str, Any], case: str, variant: str, figure: str) -> float:
    """Of the seeds of a family, or of the trained model."""
    own = found if isinstance(found, list) else [found]
    values = [each[case][variant][figure] for each in own]
    return min(values) if figure == "same_likeliest" else max(values)


def ratios(found: dict[str, Any]) -> dict[str, dict[str, float]]:
    """By model, the distance of each form over that of bfloat16: the larger one of restores and turns, and the largest
    of the seeds'. `checkpoint_dtypes.FLOAT16_ERRORS` has them."""
    return {
        model: {
            variant: max(
                each[case][variant]["distance"] / each[case]["bfloat16"]["distance"]
                for each in (own if isinstance(own, list) else [own])
                for case in ("restores", "turns")
            )
            for variant in ("float16", "int8")
        }
        for model, own in found.items()
    }


def tables(found: dict[str, Any]) -> list[Table]:
    shown = []
    for case in ("restores", "turns"):
        table = Table("", *COMPARED, "float16 / bfloat16", title=f"logits to float32's, {case}")
        for column in table.columns[1:]:
            column.justify = "right"
        for model, own in found.items():
            for figure in ("distance", "kl_divergence", "same_likeliest"):
                values = [worst(own, case, variant, figure) for variant in COMPARED]
                ratio = f"{values[0] / values[-1]:.3f}" if figure == "distance" else ""
                table.add_row(f"{model}, {figure}", *(f"{value:.3g}" for value in values), ratio)
        shown.append(table)
    trained = found["trained"]
    table = Table("", *VARIANTS, title="the trained model, and bytes of a checkpoint")
    table.add_row("perplexity", *(f"{trained['perplexity'][name]:.4f}" for name in VARIANTS))
    for model, own in found.items():
        sizes = (own[0] if isinstance(own, list) else own)["checkpoint_bytes"]
        table.add_row(f"{model}, bytes", *(f"{sizes[name]:,}" for name in VARIANTS))
    return [*shown, table]


def copies_table(copies: dict[str, dict[str, float]]) -> Table:
    table = Table("", *copies, title="copies of a state of 8 MiB, milliseconds, and to float32's")
    for way in ("save", "restore"):
        base = copies["float32"][way]
        table.add_row(way, *(f"{own[way]:.2f} ({own[way] / base:.2f})" for own in copies.values()))
    return table


def draw(found: dict[str, Any], path: Path) -> None:
    """The distance by turn, of the trained model."""
    with save_figure(path) as figure:
        axes = figure.subplots()
        for variant, values in found["trained"]["distance_by_turn"].items():
            axes.semilogy(range(1, len(values) + 1), values, label=variant)
        axes.set_xlabel("turns, each restored and stored again")
        axes.set_ylabel("distance of logits to float32's")
        axes.legend()


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=TRAINED, help="a trained checkpoint; default: demo/model")
    parser.add_argument("--families", nargs="*", default=list(FAMILIES), help="of random weights")
    parser.add_argument("--seeds", type=int, default=3, help="random models of each family")
    parser.add_argument("--restores", type=int, default=200, help="of the trained model")
    parser.add_argument("--random-restores", type=int, default=24, help="of each random one")
    parser.add_argument("--turns", type=int, default=50)
    parser.add_argument("--copies", type=int, default=30, help="copies of each form that are timed")
    parser.add_argument("--continuation", type=int, default=8, help="tokens computed behind what was restored")
    parser.add_argument(
        "--texts", type=int, default=16, help="of the trained model, with states that run in fewer bits"
    )
    parser.add_argument("--prompt", type=int, default=320, help="tokens of each that are computed at once")
    parser.add_argument("--answer", type=int, default=288, help="tokens of each that are computed one by one")
    add_output_flags(parser)
    arguments = parser.parse_args(words)
    check_positive(
        parser,
        arguments,
        "seeds",
        "restores",
        "random_restores",
        "turns",
        "continuation",
        "copies",
        "texts",
        "prompt",
        "answer",
    )
    return arguments


def main() -> None:
    arguments = parse()
    torch.set_num_threads(1)
    copies = copy_milliseconds(arguments.copies)
    make_console().print(copies_table(copies))
    try:
        found, running = measure(arguments)
    except (CairnError, RuntimeError) as error:
        raise SystemExit(f"state_dtypes: {error}") from error
    for table in [*tables(found), running_table(running)]:
        make_console().print(table)
    if arguments.json:
        names = ("restores", "random_restores", "seeds", "turns", "continuation", "seed", "texts", "prompt", "answer")
        flags = {name: getattr(arguments, name) for name in names}
        results = {"ratios": ratios(found), "copies": copies, "models": found, "running": running}
        arguments.json.write_text(as_json({**circumstances(), **flags, **results}))
    if arguments.plot:
        draw(found, arguments.plot)


if __name__ == "__main__":
    main()
