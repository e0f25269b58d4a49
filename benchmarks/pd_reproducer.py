"""The field's reproducer of "no hits on the decode side": one request sent twice through a proxy to P and D.

    python -m benchmarks.pd_reproducer [--model FOLDER] [--size tiny|small] [--tokens N ...] [--modes MODE ...]
                                       [--json FILE] [--plot FILE] [--logs FOLDER] [--seed N]

Two servers with the flags of the published commands, word for word, and `cairn proxy` between them and the client:
    --block-size 128 --enable-prefix-caching --no-disable-hybrid-kv-cache-manager --mamba-cache-mode align
    --kv-transfer-config '{"kv_connector":"NixlConnector","kv_role":"kv_both"}'
and the same once more with `--mamba-cache-mode auto`. What D had itself is read from its /metrics before and after each
send: `vllm:prefix_cache_hits_total`, and `vllm:external_prefix_cache_hits_total` for what it got from P.
The second send should hit on D: the prompt down to a multiple of 128 tokens under `align`, all of it under `auto`.
"""

import argparse
import random
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

import httpx
from benchmarks.pd_servers import SECONDS, TRANSFER_FLAGS, Pair, metric, pair, random_prompt
from benchmarks.reporting import (
    add_model_flags,
    add_output_flags,
    as_json,
    circumstances,
    make_console,
    model_folder,
    save_figure,
)
from rich.table import Table

from cairn.http.cookies import no_cookies

MODES = ("align", "auto")
BLOCK = 128
FLAGS = ("--block-size", str(BLOCK), "--enable-prefix-caching", "--no-disable-hybrid-kv-cache-manager")
ANSWER = 8
COUNTERS = {
    "hit": "vllm:prefix_cache_hits_total",
    "received": "vllm:external_prefix_cache_hits_total",
    "computed": "cairn:computed_prompt_tokens_total",
}


@dataclass(frozen=True, slots=True)
class Send:
    """One send. Tokens of the prompt that D had (`hit`), that it got from P (`received`), that it computed; what the
    answer's usage says; the answer's text."""

    mode: str
    tokens: int
    number: int
    hit: int
    received: int
    computed: int
    usage: int
    text: str

    @property
    def due(self) -> int:
        """How many tokens D should have itself."""
        if self.number == 1:
            return 0
        return self.tokens // BLOCK * BLOCK if self.mode == "align" else self.tokens


def counters(http: httpx.Client, servers: Pair) -> dict[str, int]:
    return {key: int(metric(http, servers.decode, name)) for key, name in COUNTERS.items()}


def send(http: httpx.Client, servers: Pair, mode: str, prompt: list[int], number: int) -> Send:
    """Through the proxy, as any client would."""
    assert servers.proxy is not None
    before = counters(http, servers)
    body = {"prompt": prompt, "max_tokens": ANSWER, "temperature": 0, "ignore_eos": True}
    answer = http.post(f"{servers.proxy.url}/v1/completions", json=body).raise_for_status().json()
    after = counters(http, servers)
    return Send(
        mode=mode,
        tokens=len(prompt),
        number=number,
        usage=answer["usage"]["prompt_tokens_details"]["cached_tokens"],
        text=answer["choices"][0]["text"],
        **{key: after[key] - before[key] for key in COUNTERS},
    )


def reproduce(model: Path, mode: str, lengths: list[int], seed: int, logs: Path) -> list[Send]:
    """Every prompt twice, on servers that nobody has asked anything before."""
    rng = random.Random(seed)
    flags = (*FLAGS, "--mamba-cache-mode", mode, *TRANSFER_FLAGS)
    with (
        pair(model, flags, logs / mode, with_proxy=True) as servers,
        httpx.Client(timeout=SECONDS, trust_env=False, cookies=no_cookies()) as http,
    ):
        prompts = [random_prompt(rng, length) for length in lengths]
        return [send(http, servers, mode, prompt, number) for prompt in prompts for number in (1, 2)]


def verdicts(sends: list[Send]) -> dict[str, bool]:
    """Of each second send: whether D had what it should, and the answer was the first one's."""
    pairs = zip(sends[::2], sends[1::2], strict=True)
    return {
        f"{second.mode}, {second.tokens} tokens": second.hit >= second.due > 0 and second.text == first.text
        for first, second in pairs
    }


def plot(sends: list[Send], path: Path) -> None:
    """What became of the prompt's tokens on D: one bar a send."""
    with save_figure(path, 8, 3.8) as figure:
        axes = figure.subplots()
        bottom = [0.0] * len(sends)
        for label, key in (("in D's cache", "hit"), ("received from P", "received"), ("computed on D", "computed")):
            heights = [100 * getattr(one, key) / one.tokens for one in sends]
            axes.bar(range(len(sends)), heights, bottom=bottom, width=0.7, label=label)
            bottom = [low + height for low, height in zip(bottom, heights, strict=True)]
        names = [f"{one.mode}\n{one.tokens:,} tokens\nsend {one.number}" for one in sends]
        axes.set_xticks(range(len(sends)), names, fontsize=9)
        axes.set(ylabel="% of the prompt's tokens", ylim=(0, 115))
        axes.legend(frameon=False, ncols=3, loc="upper center", fontsize=8)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_model_flags(parser)
    parser.add_argument("--tokens", type=int, nargs="+", default=[400, 8_000], help="lengths of the prompts")
    parser.add_argument("--modes", choices=MODES, nargs="+", default=MODES)
    parser.add_argument("--logs", type=Path, help="keep the servers' logs here")
    add_output_flags(parser)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch, model_folder(arguments, "nemotron_h") as folder:
        logs = arguments.logs or Path(scratch) / "logs"
        runs = [reproduce(folder, mode, arguments.tokens, arguments.seed, logs) for mode in arguments.modes]
    sends = [one for run in runs for one in run]
    title = f"cairn serve {' '.join(FLAGS)} ..., twice the same request"
    table = Table("mode", "tokens", "send", "D: hit", "received", "computed", "usage: cached", title=title)
    for one in sends:
        figures = (f"{count:,}" for count in (one.tokens, one.number, one.hit, one.received, one.computed, one.usage))
        table.add_row(one.mode, *figures, end_section=one.number == 2)
    console = make_console()
    console.print(table)
    console.print(f"the second send hits on D, with the first one's answer: {verdicts(sends)}")
    if arguments.json:
        rows = [{**asdict(one), "due": one.due} for one in sends]
        result = {**circumstances(), "size": arguments.size, "seed": arguments.seed, "flags": [*FLAGS, *TRANSFER_FLAGS]}
        arguments.json.write_text(as_json({**result, "verdicts": verdicts(sends), "rows": rows}))
    if arguments.plot:
        plot(sends, arguments.plot)


if __name__ == "__main__":
    main()
