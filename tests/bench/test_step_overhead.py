"""What a step costs beside the kernels: the engine without a model, how its parts are told apart, the arithmetic."""

import itertools
from pathlib import Path

import pytest
from benchmarks import step_overhead
from benchmarks.made_model import make_thin_model
from benchmarks.no_model import build_engine
from benchmarks.ready_stream import PACE_SECONDS
from benchmarks.step_overhead import (
    CLOCK_READS,
    OF_CORE,
    PARTS,
    PREFILL_TOKENS,
    WARM_UP,
    WINDOW,
    Decoding,
    StepRow,
    Stopwatch,
    StreamRow,
    config_of,
    context_ratios,
    count_body,
    measure_steps,
    parse,
    plot,
    prefill_steps,
    ready_stream,
    requests_of,
    step_table,
    stream,
    stream_table,
)
from rich.console import Console

from bench.scripted import DONE, event, token, usage
from cairn.errors import InvalidRequest


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("thin") / "model"
    make_thin_model(folder, seed=0)
    return folder


@pytest.mark.more
def test_every_step_has_all_sequences_and_no_more_than_that(model):
    cases = measure_steps(model, 3, (16, 80), 1, seed=0)
    assert [(case.context, len(case.windows)) for case in cases] == [(16, 1), (80, 1)]
    assert all({*window} == {*PARTS} and min(window.values()) >= 0 for case in cases for window in case.windows)
    for case, row in zip(cases, [case.row() for case in cases], strict=True):
        assert (row.sequences, row.context, {*row.us}) == (3, case.context, {*PARTS})
        assert row.core_us > 0
    assert len(context_ratios(cases)) == 1 and min(context_ratios(cases)) > 0


@pytest.mark.more
def test_steps_of_the_engine_without_a_model_are_real_ones(model):
    engine = build_engine(config_of(model, 3, 200, 100))
    decoding = Decoding(engine, 3, 200, 1, seed=0)
    state = engine.scheduler.state
    assert state.counters.computed_prompt_tokens == state.counters.prompt_tokens == 600
    before = (engine.runner.forward_passes, state.counters.generation_tokens, state.counters.steps)
    decoding.measure()
    after = (engine.runner.forward_passes, state.counters.generation_tokens, state.counters.steps)
    assert tuple(b - a for a, b in zip(before, after, strict=True)) == (WINDOW, 3 * WINDOW, WINDOW)
    answers = [request.output for request in state.running]
    assert all(len(set(answer)) > WINDOW // 2 for answer in answers), "an answer of one token says nothing of texts"
    assert len({tuple(answer) for answer in answers}) == 3


@pytest.mark.more
def test_a_context_that_does_not_fit_is_refused(model):
    with pytest.raises(InvalidRequest, match="32768"):
        measure_steps(model, 1, (32_760,), 1, seed=0)


def test_prompts_share_nothing_and_have_the_asked_length():
    requests = requests_of(5, 48, 7, seed=1)
    assert {len(request.prompt) for request in requests} == {8 * 48}
    assert {request.stop_conditions.max_tokens for request in requests} == {7}
    assert len({request.prompt[:64] for request in requests}) == 5
    assert requests_of(5, 48, 7, seed=1) == requests != requests_of(5, 48, 7, seed=2)
    lengths = [len(request.prompt) // 8 for request in requests_of(7, 48, 7, seed=1, groups=3)]
    assert lengths == [48, 48, 48, 49, 49, 50, 50]


@pytest.mark.more
def test_the_baseline_has_pages_in_as_many_steps_as_the_longest_contexts(model, monkeypatch):
    monkeypatch.setattr(step_overhead, "PREFILL_TOKENS", 128)
    cases = measure_steps(model, 3, (16, 80), 1, seed=0)
    assert [(case.context, case.groups) for case in cases] == [(16, 1), (80, 1), (16, 2)]
    cases[2].windows = [dict.fromkeys(PARTS, 2.0)]
    cases[1].windows = [dict.fromkeys(PARTS, 3.0)]
    assert context_ratios(cases) == [1.5]
    assert [case.row().groups for case in cases] == [1, 1, 2]


def test_prefill_is_over_before_the_answers_outgrow_the_model():
    assert prefill_steps(256, 32_000) == -(-256 * 32_000 // PREFILL_TOKENS) + 8
    assert 32_000 + prefill_steps(256, 32_000) + WARM_UP + parse([]).windows * WINDOW < 32_768


class Calls:
    def __init__(self, *names):
        for name in names:
            setattr(self, name, lambda: None)


def test_parts_of_a_step_are_told_apart():
    """Every look at the clock is a second later than the last one."""
    watch = Stopwatch(itertools.count(100.0).__next__)
    scheduler, runner = Calls("plan", "apply"), Calls("launch", "collect")
    watch.watch("plan", scheduler, "plan")
    watch.watch("apply", scheduler, "apply")
    watch.watch("run", runner, "run", "launch", "sample", "collect")
    for _ in range(2):
        watch.begin()
        start = watch.clock()
        scheduler.plan()  # 1 s
        launched = watch.clock()
        runner.launch()
        forward = (launched + 3.0, launched + 8.0)
        runner.collect()  # 4 s after launch began
        scheduler.apply()  # 1 s
        parts = watch.parts((start, start + 30.0), forward)
        # of each part the looks in it are no part, a second each
        assert parts == {"plan": 1.0 - 1, "batch": 2.0 - 1, "sample": -4.0 - 5, "apply": 1.0 - 1, "text": 25.0 - 4}
        assert sum(parts.values()) == 30.0 - 5.0 - sum(CLOCK_READS.values())
    with pytest.raises(ValueError, match="none of run"):
        watch.watch("run", Calls("other"), "run")


def rows():
    return [StepRow(8, context, dict.fromkeys(PARTS, float(context))) for context in (16, 32)]


def test_table_plot_and_ratios(tmp_path):
    assert rows()[0].core_us == 16.0 * len(OF_CORE) == 16.0 * (len(PARTS) - 1)
    streams = [StreamRow(4, pace, 400, 100, 2.0, 700.0, 900.0) for pace in (0.0, 0.05)]
    streams.append(StreamRow(4, 0.05, 400, 100, 2.0, 600.0, None))
    assert [row.step_ms for row in streams] == [6.4, 6.4, 2.4]
    with (tmp_path / "tables").open("w") as file:
        console = Console(file=file, width=120)
        console.print(step_table(rows()))
        console.print(stream_table(streams))
    text = (tmp_path / "tables").read_text()
    assert "96" in text and "192" in text and "50 ms" in text and "free" in text and "4.0" in text
    assert "6.4" in text and "2.4" in text and "ready-made" in text
    assert streams[0].tokens_per_s == 200.0
    plot(rows(), Path(tmp_path / "plot.svg"))
    assert (tmp_path / "plot.svg").read_text().count("sequences x context") >= 1


def test_tokens_and_events_of_an_answer():
    body = token("a") + token("b c") + token("", "length") + usage(3, 7) + DONE
    assert count_body(body) == (7, 3)
    assert count_body(body.removesuffix(DONE)) == (0, 2)
    assert count_body(event(error={"message": "no"}) + DONE) == (0, 0)


@pytest.mark.parametrize("words", [["--sequences", "0"], ["--windows", "-1"], ["--parts", "all"]])
def test_bad_flags_are_refused(words, capsys):
    with pytest.raises(SystemExit):
        parse(words)
    assert words[0] in capsys.readouterr().err


@pytest.mark.more
def test_a_real_server_streams_every_token(model, tmp_path):
    row = stream(model, 4, 30, 0.02, 0, tmp_path)
    assert (row.streams, row.tokens) == (4, 120) and 4 < row.events <= 120
    assert row.http_us > 0 and row.core_us > 0 and row.seconds > 0.4


def test_streams_of_ready_made_events_are_read_as_those_of_a_server(tmp_path):
    row = ready_stream(4, 6, 0, tmp_path)
    assert (row.streams, row.tokens, row.events, row.core_us) == (4, 24, 24, None)
    assert row.seconds > 5 * PACE_SECONDS
