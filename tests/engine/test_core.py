"""The core with a runner of tags: text, stops, reports, and what is refused."""

import itertools

import numpy as np
import pytest

from cairn.cache.eviction import LeastRecentlyUsed
from cairn.cache.layout import AttentionGroup, CacheLayout
from cairn.cache.placement import Auto
from cairn.cache.prefix_cache import CachePolicy, PrefixCache
from cairn.engine.contract import CacheInfo, EngineInfo, GenerateRequest, RepetitionDetection
from cairn.engine.core import Core
from cairn.engine.output_processor import StopStringChecker
from cairn.engine.specs import SpecBuilder
from cairn.errors import AuditError, InvalidRequest, Overloaded
from cairn.scheduler.scheduler import Scheduler
from cairn.scheduler.state import SchedulerConfig
from cairn.transfer.contract import TransferRole
from cairn.types import Boundary, ManualClock
from doubles.byte_tokenizer import ByteTokenizer
from doubles.drafters import KnowingDrafter
from doubles.engine_requests import NEVER, generate_request
from doubles.simulated_runner import SimulatedRunner

VOCAB = 128
LAYOUT = CacheLayout(16, 64, 1, (AttentionGroup("full", 16),), 8, 180, 1)


def core(num_pages=400, eos=(), seed=0, drafter=None, **config) -> Core:
    scheduling = SchedulerConfig(max_model_len=2000, **config)
    cache = PrefixCache(LAYOUT, num_pages, CachePolicy(Auto(), LeastRecentlyUsed()))
    info = EngineInfo(
        model="m",
        architecture="simulated",
        dtype="float32",
        vocab_size=VOCAB,
        max_model_len=2000,
        max_num_seqs=8,
        exact=False,
        cache=CacheInfo(
            block_size=16,
            num_pages=num_pages,
            page_bytes=64,
            bytes_per_token=4,
            checkpoint_bytes=188,
            pages_per_checkpoint=3,
            min_cacheable_tokens=1,
            mamba_cache_mode="auto",
            enable_prefix_caching=True,
        ),
    )
    clock = ManualClock()
    runner = SimulatedRunner(LAYOUT, num_pages, 8, VOCAB, numerics=False)
    return Core(info, Scheduler(scheduling, cache, clock, drafter=drafter), runner, ByteTokenizer(), eos, seed)


def request(prompt=range(100), name="a", **fields) -> GenerateRequest:
    fields.setdefault("seed", 1)
    return generate_request(request_id=name, prompt=np.array(prompt, np.int64).tobytes(), **fields)


def run(engine: Core, asked: GenerateRequest):
    """All outputs of one request, run alone."""
    engine.submit(asked)
    outputs = []
    while engine.has_work:
        outputs += engine.step()
    engine.idle()
    return outputs


def tokens_of(outputs):
    return [token for output in outputs for token in output.token_ids]


def test_an_answer_comes_token_by_token_and_ends_with_a_report():
    outputs = run(core(), request(max_tokens=7))
    assert [len(output.token_ids) for output in outputs] == [1] * 7
    assert [output.finish_reason for output in outputs] == [None] * 6 + ["length"]
    report = outputs[-1].cache
    assert (report.prompt_tokens, report.cached_tokens, report.computed_tokens) == (100, 0, 100)
    assert report.reason == "never_seen" and outputs[-1].timings is not None
    assert outputs[0].cache == report and all(output.cache is None for output in outputs[1:-1])


def test_a_repeated_prompt_reports_itself_cached():
    engine = core()
    first = run(engine, request(max_tokens=3))
    second = run(engine, request(max_tokens=3))
    report = second[-1].cache
    assert (report.cached_tokens, report.matched_tokens, report.computed_tokens) == (100, 100, 0)
    assert report.reason == "none" and tokens_of(first) == tokens_of(second)
    stats = engine.stats()
    assert (stats.prefix_cache.queries, stats.prefix_cache.hits) == (200, 100)
    assert (
        stats.prefix_cache.miss_reasons["none"] == stats.prefix_cache.miss_reasons["never_seen"] == 1
        and stats.prefix_cache.lost_tokens["never_seen"] == 100
    )
    assert (stats.pool.held_pages, stats.pool.open_sequences) == (0, 0)
    assert stats.pool.cached_pages + stats.pool.free_pages == stats.pool.num_pages
    assert stats.prefix_cache.checkpoints_hit == {"prompt_end": 1} and stats.prefix_cache.audits == 2


def drafted(answer, **options) -> Core:
    """A core that drafts five tokens of an answer at a time, all of them right."""
    return core(drafter=KnowingDrafter({"a": answer}, 5, lambda proposal: 99, VOCAB), **options)


@pytest.mark.parametrize("place", [3, 4, 5, 6, 7, 8, 9])
@pytest.mark.parametrize("include", [False, True])
def test_a_stop_string_within_a_chain_ends_the_answer_where_it_ends_without_drafts(place, include):
    """Text, tokens, log-probabilities and what the next turn finds cached."""
    whole = tokens_of(run(core(), request(max_tokens=20)))
    stop = chr(whole[place - 1]) + chr(whole[place])
    asked = {"max_tokens": 20, "stop": [stop], "logprobs": 2, "include_stop_str_in_output": include}
    answers, hits = [], []
    for engine in (core(), drafted(whole)):
        outputs = run(engine, request(**asked))
        logprobs = [output.logprobs for output in outputs]
        parts = [b"".join(getattr(each, field) for each in logprobs) for field in ("token_ids", "values", "ranks")]
        text = "".join(output.text for output in outputs)
        answers.append((tokens_of(outputs), text, outputs[-1].finish_reason, outputs[-1].stop_reason, parts))
        following = [*range(100), *tokens_of(outputs)[:-1], 99, 98]
        hits.append(run(engine, request(following, name="b", max_tokens=1))[-1].cache.cached_tokens)
        num_outputs = len(outputs)
    assert answers[0] == answers[1] and hits[0] == hits[1] == 100 + len(answers[0][0]) - 1
    assert num_outputs < len(answers[0][0])


def test_a_repetition_within_a_chain_ends_the_answer_where_it_ends_without_drafts():
    limit = RepetitionDetection(max_pattern_size=1, min_pattern_size=1, min_count=2)
    params = {"repetition_detection": limit}
    prompt = next(
        prompt
        for prompt in (range(i, 60 + i) for i in range(500))
        if any(a == b for a, b in itertools.pairwise(tokens_of(run(core(), request(prompt, max_tokens=12)))[2:]))
    )
    whole = tokens_of(run(core(), request(prompt, max_tokens=12)))
    plain, chained = (run(engine, request(prompt, max_tokens=12, **params)) for engine in (core(), drafted(whole)))
    assert tokens_of(chained) == tokens_of(plain) and len(tokens_of(plain)) < 12
    assert chained[-1].finish_reason == plain[-1].finish_reason == "repetition"


def test_end_of_sequence_ends_unless_ignored():
    plain = tokens_of(run(core(), request(max_tokens=30)))
    eos = plain[5]
    ended = run(core(eos=(eos,)), request(max_tokens=30))
    assert tokens_of(ended) == plain[: plain.index(eos) + 1]
    assert ended[-1].finish_reason == "stop" and ended[-1].stop_reason is None
    assert tokens_of(run(core(eos=(eos,)), request(max_tokens=30, ignore_eos=True))) == plain


def test_a_stop_token_ends_and_is_named():
    plain = tokens_of(run(core(), request(max_tokens=30)))
    ended = run(core(), request(max_tokens=30, stop_token_ids=[plain[7]]))
    assert ended[-1].finish_reason == "stop" and ended[-1].stop_reason == plain[7]


def test_a_stop_string_across_tokens_ends_and_is_cut_off():
    whole = "".join(output.text for output in run(core(), request(max_tokens=40, stop=[NEVER])))
    stop = whole[10:13]
    engine = core()
    outputs = run(engine, request(max_tokens=40, stop=[stop, NEVER]))
    assert "".join(output.text for output in outputs) == whole[: whole.index(stop)]
    assert outputs[-1].finish_reason == "stop" and outputs[-1].stop_reason == stop
    assert engine.stats().pool.held_pages == 0


@pytest.mark.parametrize("stops", [["ab"], ["abc", "b"], ["cab", "aab"], ["aaa"], ["x"], []])
@pytest.mark.parametrize("text", ["aabab", "abcabc", "caab", "aaaa", "bxab", ""])
def test_stop_strings_in_any_pieces(stops, text):
    places = [(text.index(stop), stop) for stop in stops if stop in text]
    for size in range(1, 4):
        found, given, met = StopStringChecker(stops), "", None
        for start in range(0, len(text), size):
            piece, met = found.push(text[start : start + size])
            given += piece
            if met is not None:
                break
        if met is None:
            given += found.flush()
            assert not places and given == text
        else:
            # whatever stop string is completed first by the pieces ends the text where it begins
            assert text.startswith(given + met)
            assert not any(stop in given for stop in stops)


def test_unseeded_requests_differ_and_the_engine_seed_repeats_them():
    one, two = core(seed=5), core(seed=5)
    first = tokens_of(run(one, request(max_tokens=20, seed=None)))
    assert tokens_of(run(one, request(max_tokens=20, seed=None))) != first
    assert tokens_of(run(two, request(max_tokens=20, seed=None))) == first


def test_the_scheduler_is_told_who_asks_for_every_answer():
    builder = SpecBuilder(VOCAB, frozenset(), 0, None)
    specs = builder.build(request(n=3, client="key:1"), TransferRole(), None, lambda length: 9)
    assert [spec.client for spec in specs] == ["key:1"] * 3
    (spec,) = builder.build(request(), TransferRole(), None, lambda length: 9)
    assert spec.client == ""


def test_an_aborted_request_is_heard_of_no_more():
    engine = core()
    engine.submit(request(name="a", max_tokens=50))
    engine.submit(request(name="b", max_tokens=5))
    engine.step()
    engine.abort("a")
    engine.abort("unknown")
    outputs = []
    while engine.has_work:
        outputs += engine.step()
    engine.idle()
    assert {output.request_id for output in outputs} == {"b"}


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"prompt": []}, "prompt", "empty"),
        ({"prompt": [5, VOCAB]}, "prompt", r"prompt\[1\] is 128"),
        ({"prompt": [-1]}, "prompt", r"prompt\[0\] is -1"),
        ({"prompt": range(100), "boundaries": [Boundary(101)]}, "boundaries", "between 1 and 100"),
        ({"boundaries": [Boundary(p, retain_seconds=9) for p in range(1, 6)]}, "boundaries", "at most 4"),
        ({"boundaries": [Boundary(5, retain_seconds=3601)]}, "boundaries", "at most 3600 seconds"),
        ({"prompt": [1] * 2000}, "prompt", "--max-model-len"),
        ({"prompt": [1] * 1999, "max_tokens": 2}, "max_tokens", "--max-model-len"),
    ],
)
def test_bad_requests_name_the_field(fields, param, words):
    engine = core()
    with pytest.raises(InvalidRequest, match=words) as caught:
        engine.submit(request(**fields))
    assert caught.value.param == param and not engine.has_work
    engine.idle()


def test_a_full_queue_is_refused():
    engine = core(max_waiting=1)
    engine.submit(request(name="a"))
    with pytest.raises(Overloaded):
        engine.submit(request(name="b"))


def test_without_max_tokens_an_answer_may_fill_the_rest():
    engine = core(num_pages=20)
    outputs = run(engine, request(prompt=range(50)))
    assert len(tokens_of(outputs)) == 19 * 16 - 50 and outputs[-1].finish_reason == "length"


def test_a_leaked_lease_is_found_when_idle():
    engine = core()
    run(engine, request())
    cache = engine._scheduler.state.cache
    cache.lookup(next(iter(cache.tree.roots)), np.arange(100), "leak")
    with pytest.raises(AuditError, match="1 sequences"):
        engine.idle()


def test_pages_that_a_step_has_left_behind_are_found_when_idle():
    engine = core()
    run(engine, request())
    cache = engine._scheduler.state.cache
    cache.pinned.steps[7] = [cache.pool.allocate(1)]
    with pytest.raises(AuditError, match="0 sequences"):
        engine.idle()


def test_pages_that_nobody_outside_wants_any_more_are_found_when_idle():
    engine = core()
    run(engine, request())
    cache = engine._scheduler.state.cache
    pages = cache.pool.allocate(1)
    cache.pin(pages)
    cache.pool.release(pages)
    with pytest.raises(AuditError, match="1 pins with 0 transfers"):
        engine.idle()


def test_of_several_answers_the_last_ones_are_aborted_first():
    """Otherwise each would be the next to compute the prompt."""
    engine = core()
    engine.submit(request(n=3))
    aborted, abort = [], engine._scheduler.abort
    engine._scheduler.abort = lambda name: (aborted.append(name), abort(name))
    engine.abort("a")
    assert len(aborted) == 3 and aborted[-1] == "a" and not engine.has_work
