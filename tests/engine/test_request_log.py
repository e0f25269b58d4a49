"""The request log of a real engine, and its replay: the same cached tokens, within .5 %."""

import json
import random
from argparse import ArgumentParser
from base64 import b64decode
from pathlib import Path

import numpy as np
import pytest
from logged import hits_by_name, logged_hits, replayed

from cairn.cli import engine_config, main
from cairn.engine.build import build_core
from cairn.engine.contract import EngineConfig, RequestLogConfig
from cairn.engine.core import Core
from cairn.errors import ConfigError
from cairn.keys import common_tokens
from cairn.replay.layouts import sizes_for
from cairn.replay.traces import read_trace
from cairn.settings.serve import add_flags, load_settings
from cairn.types import Boundary
from doubles.engine_requests import generate_request
from tiers import more

REQUESTS = 300
VOCAB = (20, 4000)


class Clients:
    """Growing chats on shared system prompts, repeats, branches within units, salts, and aborts."""

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)
        tokens = np.random.default_rng(seed)
        self.fresh = lambda count: tokens.integers(*VOCAB, count).tolist()
        self.systems = [self.fresh(count) for count in (40, 77)]
        self.told: list[tuple[list[int], str | None]] = []
        """RecentSequences so far, with their salts."""

    def prompt(self) -> tuple[list[int], str | None, list[Boundary]]:
        draw = self.draw
        kind = draw.random() if self.told else 1.0
        before, salt = draw.choice(self.told[-24:]) if self.told else ([], None)
        if kind < 0.1:
            return before, salt, []
        if kind < 0.65 and len(before) < 160:
            new = self.fresh(draw.randint(3, 40))
            ends = [Boundary(len(before)), Boundary(len(before) + len(new) - 2)]
            return before + new, salt, ends if draw.random() < 0.7 else []
        if kind < 0.8:
            return before[: draw.randint(1, min(200, len(before)))] + self.fresh(draw.randint(1, 40)), salt, []
        system = draw.choice(self.systems)
        salt = draw.choice((None, None, "blue", "red"))
        return system + self.fresh(draw.randint(5, 60)), salt, [Boundary(len(system), "system_end")]


def serve(core: Core, concurrency: int, seed: int, requests: int = REQUESTS) -> dict[str, int | None]:
    """Serve so many at once; what each was told to have been cached, None for those that were aborted."""
    clients, told = Clients(seed), {}
    going: dict[str, tuple[list[int], str | None, int | None]] = {}
    started = 0
    while going or started < requests:
        while len(going) < concurrency and started < requests:
            prompt, salt, ends = clients.prompt()
            name = f"r{started}"
            core.submit(
                generate_request(
                    request_id=name,
                    prompt=np.array(prompt, np.int64).tobytes(),
                    max_tokens=clients.draw.randint(1, 24 if clients.draw.random() < 0.03 else 2),
                    temperature=0.0,
                    ignore_eos=True,
                    cache_salt=salt,
                    boundaries=ends,
                )
            )
            abort_after = clients.draw.randint(0, 3) if clients.draw.random() < 0.1 else None
            going[name] = (list(prompt), salt, abort_after)
            started += 1
        for output in core.step():
            sequence, salt, abort_after = going[output.request_id]
            sequence += output.token_ids
            if output.finish_reason is not None:
                told[output.request_id] = output.cache.cached_tokens
                clients.told.append((sequence, salt))
                del going[output.request_id]
        for name, (sequence, salt, abort_after) in list(going.items()):
            if abort_after is not None:
                going[name] = (sequence, salt, abort_after - 1)
                if abort_after == 0:
                    core.abort(name)
                    told[name] = None
                    clients.told.append((sequence, salt))
                    del going[name]
    while core.has_work:
        core.step()
    core.idle()
    return told


def config(model: Path, log: Path, **fields) -> EngineConfig:
    fields.setdefault("kv_cache_memory_bytes", 64 << 20)
    fields.setdefault("max_num_batched_tokens", 256)
    return EngineConfig(model=str(model), request_log=RequestLogConfig(path=str(log)), **fields)


LONG = pytest.mark.long


@pytest.mark.parametrize(
    ("requests", "concurrency", "pool", "mode", "exact"),
    [
        (120, 8, 4 << 20, "auto", False),
        more(300, 8, 4 << 20, "auto", False),
        more(300, 1, 4 << 20, "auto", False),
        pytest.param(300, 8, 64 << 20, "auto", False, marks=LONG),
        pytest.param(300, 1, 64 << 20, "auto", False, marks=LONG),
        pytest.param(300, 8, 3 << 20, "auto", True, marks=LONG),
        pytest.param(300, 8, 6 << 20, "align", False, marks=LONG),
        pytest.param(300, 8, 6 << 20, "junction", False, marks=LONG),
    ],
)
def test_the_replay_of_what_was_served_caches_as_much(tiny_model, tmp_path, requests, concurrency, pool, mode, exact):
    rules = {"max_num_seqs": concurrency, "kv_cache_memory_bytes": pool, "mamba_cache_mode": mode, "exact": exact}
    core = build_core(config(tiny_model, tmp_path / "log", **rules))
    told = serve(core, concurrency, seed=concurrency, requests=requests)
    stats = core.stats()
    core.close()
    trace = read_trace(tmp_path / "log")
    replay, logged = replayed(trace), logged_hits(trace)
    # one that is aborted is told nothing, but its line says what it had
    assert {name for name, hit in told.items() if hit is not None} <= logged.keys() <= told.keys()
    assert all(hit == logged[name] for name, hit in told.items() if hit is not None)
    assert len(trace.requests) >= 0.967 * requests and sum(logged.values()) == stats.prefix_cache.hits > 0
    assert abs(replay.outcome.hit_tokens - stats.prefix_cache.hits) <= 0.005 * stats.prefix_cache.hits
    assert replay.outcome.prompt_tokens == stats.prefix_cache.queries
    assert concurrency > 1 or hits_by_name(trace, replay) == logged
    assert sum(stats.prefix_cache.checkpoints_evicted.values()) or exact or pool > 6 << 20
    assert core.info.logs_requests and stats.request_log_dropped == 0
    assert trace.header.budget_bytes == stats.pool.num_pages * core.info.cache.page_bytes


def test_a_line_says_what_the_answer_said_and_nothing_of_its_text(tiny_model, tmp_path):
    core = build_core(config(tiny_model, tmp_path / "log"))
    system = list(range(100, 180))
    prompts = [([*system, 300, 301, 302], None), (system + [400] * 9, None), (system + [400] * 9, "secret salt")]
    reports = []
    for index, (prompt, salt) in enumerate(prompts):
        raw = np.array(prompt, np.int64).tobytes()
        ends = [Boundary(80, "system_end"), Boundary(82, "breakpoint", 60)]
        asked = generate_request(
            request_id=f"r{index}", prompt=raw, max_tokens=3, temperature=0.0, cache_salt=salt, boundaries=ends
        )
        core.submit(asked)
        while core.has_work:
            reports += [output.cache for output in core.step() if output.finish_reason is not None]
    core.close()
    text = (tmp_path / "log").read_text()
    assert "secret salt" not in text and str(prompts[0][0])[1:40].replace(" ", "") not in text
    header, *lines = [json.loads(line) for line in text.splitlines()]
    assert header["source"] == "cairn" and header["unit"] == 64 and header["salted"] is True
    assert header["layout"]["page_bytes"] == core.info.cache.page_bytes
    assert [line["cached_tokens"] for line in lines] == [report.cached_tokens for report in reports]
    assert [line["reason"] for line in lines] == [report.reason for report in reports]
    assert [line["matched_tokens"] for line in lines] == [report.matched_tokens for report in reports]
    assert lines[1]["cached_tokens"] == 80
    for line, (prompt, salt) in zip(lines, prompts, strict=True):
        assert (line["in"], line["out"], line["finish"]) == (len(prompt), 3, "length")
        assert set(line["timings"]) == {"queue", "prefill", "decode", "ttft", "e2e"}
        assert line["boundaries"] == [[80, "system_end", 0], [82, "breakpoint", 60]]
        assert bool(line["namespace"]) == (salt is not None)
        behind = line["prefix"][1] if "prefix" in line else 0
        assert len(line["block_hashes"]) == (line["in"] + line["out"]) // 64 - behind // 64
        assert len(b64decode(line["token_hashes"])) == 2 * (line["in"] + line["out"] - behind)
        assert line["t"] < line["scheduled"] < line["finished"] < line["released"]
        # one step for the prompt, and two for the tokens after the first
        assert line["finished_step"] - line["arrived_step"] == 3
        assert sum(line["lost_tokens"].values()) == line["in"] - line["cached_tokens"]
    # whole units are said once; another salt shares nothing
    assert [line.get("prefix") for line in lines] == [None, [lines[0]["block_hashes"][0], 64], None]
    # what the server had found is not what the replay goes by
    for line in lines:
        line["cached_tokens"], line["matched_tokens"] = 1, 2
    told = tmp_path / "told"
    told.write_text("\n".join(json.dumps(line) for line in [header, *lines]))
    trace = read_trace(told)
    assert list(logged_hits(trace).values()) == [1, 1, 1]
    assert replayed(trace).outcome.hits == [report.cached_tokens for report in reports]
    # two prompts share what they share, to the token
    first, second, third = (request.path for request in trace.requests)
    assert common_tokens(first.astype(int), second.astype(int)) == 80
    assert common_tokens(second.astype(int), third.astype(int)) == 0


def test_flops_of_the_log_are_those_of_the_models_folder(tiny_model, tmp_path):
    core = build_core(config(tiny_model, tmp_path / "log", kv_cache_memory_bytes=4 << 20))
    serve(core, 4, seed=5, requests=40)
    core.close()
    results = []
    for index, named in enumerate(([], ["--layout", str(tiny_model)])):
        told = tmp_path / f"{index}.json"
        words = ["replay", str(tmp_path / "log"), "--policy", "auto,align", "--budget", "4MiB", "--json", str(told)]
        assert main([*words, *named]) == 0
        results.append(json.loads(told.read_text()))
    for own, named in zip(*results, strict=True):
        assert own["flops_saved"] > 0 and own["prefill_flops"] > 0
        changing = {"layout", "microseconds_per_request", "tree_bytes"}
        assert {name: own[name] for name in own.keys() - changing} == {
            name: named[name] for name in named.keys() - changing
        }


@pytest.mark.more
def test_flops_are_of_the_whole_model_on_several_ranks(tiny_model, tmp_path):
    headers = []
    for size in (1, 2):
        core = build_core(config(tiny_model, tmp_path / f"log{size}", tensor_parallel_size=size))
        core.close()
        headers.append(json.loads((tmp_path / f"log{size}").read_text().splitlines()[0]))
    assert headers[0]["layout"]["page_bytes"] == 2 * headers[1]["layout"]["page_bytes"]
    assert headers[0]["forward_sizes"] == headers[1]["forward_sizes"]
    sizes = sizes_for(str(tiny_model))
    assert headers[0]["forward_sizes"] == {
        "active_weights": sizes.active_weights,
        "score_numbers": sizes.score_numbers,
        "limited_scores": [],
    }


def test_the_flags_of_the_command_ask_for_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    parser = ArgumentParser()
    source = add_flags(parser)

    def asked(*flags):
        return engine_config(load_settings(parser.parse_args(["m", *flags]), source)).request_log

    assert asked() is None
    assert asked("--request-log", "log") == RequestLogConfig(path=str(tmp_path / "log"), max_bytes=256 << 20)
    assert asked("--request-log", "log", "--request-log-bytes", "1MiB").max_bytes == 1 << 20


def test_a_log_that_cannot_be_written_ends_the_start(tiny_model, tmp_path):
    with pytest.raises(ConfigError, match="--request-log"):
        build_core(config(tiny_model, tmp_path / "nowhere" / "log"))
