"""Ranks as processes: the wire between them, one step on all of them, and what happens when one is lost."""

import dataclasses
import gc
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import msgspec
import numpy as np
import psutil
import pytest
import torch
import zmq
from hypothesis import given, settings
from hypothesis import strategies as st

from cairn.engine.build import build_core
from cairn.engine.contract import EngineConfig
from cairn.engine.ranks.runner import RankDeadlines, RankedRunner, load_ranks
from cairn.engine.ranks.wire import (
    RankConfig,
    RankService,
    RankSizes,
    follower_plan,
    frames_of_config,
    frames_of_plans,
    frames_of_sizes,
    frames_to_rank_zero,
)
from cairn.engine.ranks.worker import follow
from cairn.errors import ConfigError, EngineDead, ModelError
from cairn.kernels import cpu
from cairn.kernels.sampling.metadata import SamplingMetadata
from cairn.kernels.staging import Staging
from cairn.models.registry import open_model
from cairn.runner.batch_builder import MOST_STOP_TOKENS
from cairn.runner.contract import StepRunner
from cairn.runner.decode_graphs import DecodeGraphs, PassShape
from cairn.runner.plan_check import CheckedRunner, PlanLimits
from cairn.runner.runner import Runner
from cairn.step import (
    SAMPLED,
    Admit,
    DecodeRows,
    Fold,
    FoldSnapshot,
    Image,
    PageCopy,
    PrefillRow,
    Restore,
    Samples,
    Save,
    Score,
    Snapshot,
    StepPlan,
    TableUpdate,
    VerifyRow,
)
from cairn.types import SamplingParams
from doubles.hand_plans import PlanWriter, SampleOnly, WholeRow
from doubles.rank_threads import RankThreads
from doubles.step_results import result_records
from doubles.thread_ranks import thread_ranks
from engine.rank_service import OWNER_OF_GRAPHS
from kernels.int8_products import NEEDS_INT8
from tiers import more

PROMPT = np.random.default_rng(3).integers(20, 4000, 100)
GREEDY = SamplingParams(temperature=0.0)
DRAWN = SamplingParams(temperature=0.9, top_k=40, top_p=0.95, seed=(1 << 63) + 5)
PENALISED = SamplingParams(0.9, 40, 0.95, 5, 0.1, 0.5, -0.5, 1.5, ((7, 1.5), (9, -100.0)))
TABLE = np.arange(7, dtype=np.int32)
NUM_PAGES, NUM_SLOTS = 100, 3
DEADLINES = RankDeadlines(hello=60.0, ready=60.0, stop=10.0)


# -- the wire --------------------------------------------------------------------------------------------------------


def pages(*numbers: int) -> np.ndarray:
    return np.array(numbers, np.int32)


IMAGE = Image(3, 4, (1, 4, 4), b"d" * 32, 8, 6, b"rgb")
FULL_PLAN = StepPlan(
    step=7,
    admits=(
        Admit(0, (TABLE, pages()), PENALISED, 90, PROMPT, (2, 3), 5, (IMAGE,)),
        Admit(2, (pages(2), pages(3)), SamplingParams()),
    ),
    copies=(PageCopy(3, 9), PageCopy(0, 1)),
    restores=(Restore(2, pages(4, 5, 6)),),
    folds=(Fold(3, 2, (FoldSnapshot(8, pages(11, 12, 13)),)), Fold(0, 1)),
    saves=(Save(1, pages(7, 8, 99)),),
    table_updates=(TableUpdate(1, 1, 7, pages(4, 5)),),
    decodes=DecodeRows(pages(1, 3), pages(5, 9), np.array([SAMPLED, 77]), pages(0, 12)),
    verifies=(VerifyRow(4, 30, np.array([7, 8, 9]), 3, 40),),
    prefills=(
        PrefillRow(0, 64, PROMPT[64:], 70),
        PrefillRow(2, 0, -PROMPT[:3], 0, Score(PROMPT[1:4], 5)),
    ),
    snapshots=(Snapshot(0, 96, pages(10, 11, 12)),),
    samples=Samples(pages(0, 2), pages(100, 3), np.array([False, True])),
)


def plain(value: object) -> object:
    """A plan with lists for its arrays, so that it can be compared."""
    if isinstance(value, np.ndarray):
        return str(value.dtype), value.tolist()
    if isinstance(value, tuple):
        return tuple(map(plain, value))
    if isinstance(value, dict):
        return {key: plain(own) for key, own in value.items()}
    if dataclasses.is_dataclass(value) or isinstance(value, msgspec.Struct):
        fields = msgspec.structs.fields(value) if isinstance(value, msgspec.Struct) else dataclasses.fields(value)
        return type(value).__name__, *(plain(getattr(value, field.name)) for field in fields)
    return value


def through(plan: StepPlan) -> StepPlan:
    return frames_of_plans().decode(frames_of_plans().encode(plan))


def test_a_plan_comes_through_whole():
    values = (getattr(FULL_PLAN, field.name) for field in msgspec.structs.fields(StepPlan))
    assert all(value if isinstance(value, int) else len(value) for value in values), "a record is not covered"
    assert plain(through(FULL_PLAN)) == plain(FULL_PLAN)


def test_an_empty_plan_comes_through():
    assert plain(through(StepPlan(1))) == plain(StepPlan(1))


def test_the_others_are_not_told_what_only_the_draw_and_the_images_need():
    told = through(follower_plan(FULL_PLAN))
    for admit, whole in zip(told.admits, FULL_PLAN.admits, strict=True):
        assert plain(admit.tables) == plain(whole.tables) and admit.slot == whole.slot
        assert (admit.sampling, admit.history) == (SamplingParams(), None)
        assert [(image.start, image.end, image.grid) for image in admit.images] == [
            (image.start, image.end, image.grid) for image in whole.images
        ]
        assert not any(image.rgb or image.digest for image in admit.images)
    same = [field.name for field in msgspec.structs.fields(StepPlan) if field.name != "admits"]
    assert [plain(getattr(told, name)) for name in same] == [plain(getattr(FULL_PLAN, name)) for name in same]


@settings(max_examples=200, deadline=None)
@given(st.one_of(st.binary(max_size=200), st.integers(0, 400)))
def test_frames_that_follow_no_schema_end_the_line(noise):
    whole = frames_of_plans().encode(FULL_PLAN)
    frame = noise if isinstance(noise, bytes) else whole[: noise % len(whole)]
    for frames in (frames_of_plans(), frames_of_config(), frames_of_sizes(), frames_to_rank_zero()):
        with pytest.raises(EngineDead):
            frames.decode(frame)


def test_bytes_that_are_no_whole_numbers_are_refused():
    frame = frames_of_plans().encode(StepPlan(1, saves=(Save(0, TABLE),)))
    broken = frame.replace(bytes([0xC4, 28]) + TABLE.tobytes(), bytes([0xC4, 27]) + TABLE.tobytes()[:-1], 1)
    assert len(broken) == len(frame) - 1
    with pytest.raises(EngineDead, match="multiple of element size"):
        frames_of_plans().decode(broken)


@pytest.mark.parametrize(
    "plan",
    [
        StepPlan(1, saves=(Save(-1, TABLE),)),
        StepPlan(1, saves=(Save(1 << 31, TABLE),)),
        StepPlan(1, saves=(Save(0, TABLE - 1),)),
        StepPlan(1, prefills=(PrefillRow(0, -1, PROMPT, 0),)),
        StepPlan(1, decodes=DecodeRows(slots=pages(-1))),
        StepPlan(1, saves=(Save(0, [1, 2]),)),
        StepPlan(-1),
    ],
)
def test_numbers_out_of_range_are_refused(plan):
    with pytest.raises(EngineDead):
        through(plan)


@pytest.mark.parametrize("num_stop_tokens", [0, MOST_STOP_TOKENS, MOST_STOP_TOKENS + 1])
def test_all_ranks_replay_a_step_or_none(tiny_model, monkeypatch, num_stop_tokens):
    """Each by itself, by the plan as it was told of it and by those before."""
    monkeypatch.setattr(cpu, "build_metadata", lambda host, staging: None)
    monkeypatch.setattr(DecodeGraphs, "_run", lambda *arguments: None)
    opened = open_model(tiny_model)
    runners = [Runner(opened.build(exact=False), opened.layout(16), NUM_PAGES, NUM_SLOTS, False) for _ in range(2)]
    for runner in runners:
        runner.capture_graphs(SimpleNamespace(capture=lambda run: run), (1, 2), 1000, lambda size: None)
    two = DecodeRows(pages(0, 1), pages(5, 9), np.array([SAMPLED, 77]), pages(0, 0))
    stops = Admit(1, (TABLE,), DRAWN, 4, PROMPT, tuple(range(num_stop_tokens)), 2, (IMAGE,))
    plans = [
        StepPlan(1, decodes=two),
        StepPlan(2, decodes=two, admits=(stops,)),
        StepPlan(3, decodes=two),
        StepPlan(4, decodes=two, snapshots=(Snapshot(0, 6, pages(1)),)),
        StepPlan(5, decodes=two, prefills=FULL_PLAN.prefills),
        StepPlan(6, prefills=FULL_PLAN.prefills),
        StepPlan(7, decodes=DecodeRows(*(np.resize(each, 3) for each in msgspec.structs.astuple(two)))),
    ]
    found = []
    for plan in plans:
        told = (plan, through(follower_plan(plan)))
        found.append([runner._graphs.shape_for(each) for runner, each in zip(runners, told, strict=True)])
        for runner, each in zip(runners, told, strict=True):
            staging = Staging()
            write = runner._slot_tensors.stage_updates(each, staging)
            staging.send(torch.device("cpu"))
            with torch.inference_mode():
                write()
    two_rows = PassShape(2)
    replayed = two_rows if num_stop_tokens <= MOST_STOP_TOKENS else None
    assert found == [[shape] * 2 for shape in (two_rows, replayed, replayed, replayed, None, None, None)]


def test_a_configuration_comes_through_whole():
    engine = EngineConfig(model="m", dtype="bfloat16", tensor_parallel_size=3)
    config = RankConfig(engine=engine, serves_mtp=True, rank=2, graphs="a.b:c")
    assert frames_of_config().decode(frames_of_config().encode(config)) == config


def test_sizes_out_of_range_are_refused():
    engine = EngineConfig(model="m", tensor_parallel_size=2)
    for wrong in (
        {"engine": engine.model_copy(update={"tensor_parallel_size": 0})},
        {"engine": engine.model_copy(update={"dtype": "float8"})},
        {"step_seconds": 0.0},
    ):
        frame = frames_of_config().encode(RankConfig(**{"engine": engine} | wrong))
        with pytest.raises(EngineDead):
            frames_of_config().decode(frame)
    for sizes in (RankSizes(0, 1), RankSizes(1, 0), RankSizes(1 << 31, 1)):
        with pytest.raises(EngineDead):
            frames_of_sizes().decode(frames_of_sizes().encode(sizes))


class Recorder(StepRunner):
    """Steps are complete when they have been looked at so often."""

    forward_passes = steps = 0

    def __init__(self, looks: int) -> None:
        self.log: list[str] = []
        self._looks = self._left = looks

    def launch(self, plan):
        self.log.append(f"launch {plan.step}")

    def sample(self, step, masks):
        self.log.append(f"sample {step}")

    @property
    def is_complete(self):
        self._left -= 1
        return self._left < 0

    def collect(self, step):
        assert self._left < 0, "a wait for the device"
        self._left = self._looks
        self.log.append(f"collect {step}")


def followed(looks: int, comes: list[StepPlan | None]) -> list[str]:
    """What a rank does; `comes`: what it finds each time that it looks for a plan, then the line ends."""
    recorder = Recorder(looks)

    def receive(may_wait):
        if not comes:
            raise EngineDead("no more")
        if may_wait:
            while comes[0] is None:
                comes.pop(0)
        return comes.pop(0)

    with pytest.raises(EngineDead, match="no more"):
        follow(
            recorder, receive, lambda done: recorder.log.append(f"done {done.step}"), lambda _: recorder.log.append("-")
        )
    return recorder.log


def test_a_rank_says_that_a_step_is_done_when_it_is():
    log = followed(0, [StepPlan(1), None, None, StepPlan(2), None])
    assert log == [f"{what} {step}" for step in (1, 2) for what in ("launch", "sample", "collect", "done")]


def test_a_rank_launches_a_step_while_the_one_before_it_is_out():
    log = followed(2, [StepPlan(1), None, StepPlan(2), None, None, None, None, None])
    first, second = ["launch 1", "sample 1"], ["launch 2", "sample 2"]
    assert log == [*first, "-", *second, "-", "collect 1", "done 1", "-", "-", "collect 2", "done 2"]


# -- processes -------------------------------------------------------------------------------------------------------


def config_of(folder: Path, services=(), step_seconds=20.0, **changes) -> RankConfig:
    engine = EngineConfig(**{"model": str(folder), "tensor_parallel_size": 2, "exact": True} | changes)
    return RankConfig(engine=engine, services=services, step_seconds=step_seconds)


def build_ranked(config: RankConfig, observe=None, deadlines=DEADLINES) -> RankedRunner:
    with load_ranks(config, deadlines=deadlines) as loaded:
        assert loaded.available_memory is None
        return loaded.allocate(RankSizes(NUM_PAGES, NUM_SLOTS), observe)


@pytest.fixture
def started() -> Iterator[list[RankedRunner]]:
    """Runners that are ended, whatever the test did."""
    runners: list[RankedRunner] = []
    yield runners
    for runner in runners:
        runner.close()
        assert not runner.folder.exists()
        assert not any(map(psutil.pid_exists, runner.pids))
    runners.clear()
    gc.collect()


def prefill(step: int, slot: int = 0, **records) -> StepPlan:
    row = WholeRow(slot, 0, 100, PROMPT, (TABLE,), 0, False, SamplingMetadata(GREEDY, 100))
    return PlanWriter().plan(step, [row], **records)


def conversation(checkpoint: int) -> list[StepPlan]:
    """Prefill with snapshots, decode from the step before, save, resume, a full hit."""
    at_64, at_100, saved = (np.arange(first, first + checkpoint, dtype=np.int32) for first in (20, 50, 70))
    plan = PlanWriter().plan
    whole = WholeRow(0, 0, 100, PROMPT, (TABLE,), 0, False, SamplingMetadata(DRAWN, 100))
    plans = [plan(1, [whole], snapshots=(Snapshot(0, 64, at_64), Snapshot(0, 100, at_100)))]
    plans += [
        plan(2 + i, [WholeRow(0, 100 + i, 101 + i, SAMPLED, (TABLE,), 0, True, SamplingMetadata(DRAWN, 101 + i))])
        for i in range(5)
    ]
    resumed = WholeRow(1, 64, 100, PROMPT[64:], (TABLE,), 100, False, SamplingMetadata(GREEDY, 100))
    plans.append(plan(7, [resumed], restores=(Restore(1, at_64),)))
    drawn = (SampleOnly(2, SamplingMetadata(GREEDY, 100)),)
    plans.append(plan(8, restores=(Restore(2, at_100),), sample_only=drawn))
    plans.append(StepPlan(9, copies=(PageCopy(0, 90),), saves=(Save(0, saved),)))
    return plans


def test_processes_compute_what_threads_compute(tiny_model, started, monkeypatch):
    """Bit for bit: tokens, logits and every byte of every rank's pages, which a service beside rank 1 reads out."""
    paths = [str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, paths)))
    services = (RankService("rank_service:page_reader", b"pages"),)
    seen: dict[str, list[torch.Tensor]] = {"processes": [], "threads": []}
    config = config_of(tiny_model, services=services)
    ranked = build_ranked(config, lambda _, logits: seen["processes"].append(logits.clone()))
    started.append(ranked)
    assert ranked.folder.stat().st_mode & 0o077 == 0
    opened = open_model(tiny_model)
    layout = opened.layout(16, 2)
    observers = [lambda _, logits: seen["threads"].append(logits.clone()), None]
    threads = RankThreads(
        [
            Runner(opened.build(exact=True, communicator=rank), layout, NUM_PAGES, NUM_SLOTS, True, observe)
            for rank, observe in zip(thread_ranks(2), observers, strict=True)
        ]
    )
    checked = CheckedRunner(ranked, PlanLimits(layout, NUM_PAGES, NUM_SLOTS, 4096, True))
    for plan in conversation(layout.pages_per_checkpoint):
        assert result_records(checked.run(plan)) == result_records(threads.run(plan))
    assert (ranked.steps, ranked.forward_passes) == (threads.steps, threads.forward_passes) == (9, 7)
    assert len(seen["threads"]) == 8
    assert all(torch.equal(*pair) for pair in zip(seen["processes"], seen["threads"], strict=True))
    # Refused before anything is done, and nobody minds.
    with pytest.raises(ValueError, match="slot 3"):
        checked.run(prefill(10, slot=3))
    with pytest.raises(ValueError, match=r"pages must be in 0\.\.99"):
        checked.run(StepPlan(10, copies=(PageCopy(0, NUM_PAGES),)))
    assert checked.run(prefill(10)).sampled == threads.run(prefill(10)).sampled
    assert ranked.local_runner.pool.shape == (NUM_PAGES, layout.page_bytes)
    assert torch.equal(ranked.local_runner.pool, threads.runners[0].pool)
    with zmq.Context() as context, context.socket(zmq.REQ) as asking:
        asking.setsockopt(zmq.RCVTIMEO, 20_000)
        asking.setsockopt(zmq.LINGER, 0)
        asking.connect(f"ipc://{ranked.folder}/pages-1")
        for page, wanted in enumerate(threads.runners[1].pool):
            asking.send(str(page).encode())
            assert asking.recv() == wanted.numpy().tobytes(), page
    threads.close()


@pytest.mark.more
def test_a_rank_that_cannot_capture_ends_the_start_of_all(tiny_model, monkeypatch):
    """Rank 0 hears of it before it waits for its device, which would wait for that rank."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    monkeypatch.setenv(OWNER_OF_GRAPHS, str(os.getpid()))
    met: list[str] = []

    def capture(_graphs, _made, sizes, _max_model_len, captured, warmed):
        met.append(f"{sizes}")
        warmed(3)
        met.append("the device is waited for")

    monkeypatch.setattr(DecodeGraphs, "capture", capture)
    graphs = "engine.rank_service:make_graphs_on_rank_zero"
    with load_ranks(msgspec.structs.replace(config_of(tiny_model, exact=False), graphs=graphs)) as loaded:
        pids = [each.child.process.pid for each in loaded._followers]
        with pytest.raises(
            ConfigError,
            match=r"of 1 to 3 rows cannot be captured .* on rank 1 \(no graphs today\): start with --enforce-eager",
        ):
            loaded.allocate(RankSizes(NUM_PAGES, NUM_SLOTS))
    assert met == ["(1, 2, 3)"] and not any(map(psutil.pid_exists, pids))


def test_ranks_are_told_what_the_engine_was_told(tiny_model, monkeypatch):
    told: list[RankConfig] = []

    def refuse(config, _device):
        told.append(config)
        raise ConfigError("no ranks today")

    monkeypatch.setattr("cairn.engine.build.load_ranks", refuse)
    given = {"tensor_parallel_size": 2, "dtype": "bfloat16", "quantization": "int8"}
    with pytest.raises(ConfigError, match="no ranks today"):
        build_core(EngineConfig(model=str(tiny_model), kv_cache_memory_bytes=64 << 20, **given))
    engines = [each.engine for each in told]
    assert [(each.tensor_parallel_size, each.dtype, each.quantization) for each in engines] == [(2, "bfloat16", "int8")]


@NEEDS_INT8
@pytest.mark.more
def test_processes_quantize_as_threads_do(tiny_model, started):
    """Every rank is told."""
    seen: dict[str, list[torch.Tensor]] = {"processes": [], "threads": []}
    config = config_of(tiny_model, exact=False, dtype="bfloat16", quantization="int8")
    ranked = build_ranked(config, lambda _, logits: seen["processes"].append(logits.clone()))
    started.append(ranked)
    opened = open_model(tiny_model, "bfloat16", "int8")
    observers = [lambda _, logits: seen["threads"].append(logits.clone()), None]
    threads = RankThreads(
        [
            Runner(
                opened.build(exact=False, communicator=rank), opened.layout(16, 2), NUM_PAGES, NUM_SLOTS, False, observe
            )
            for rank, observe in zip(thread_ranks(2), observers, strict=True)
        ]
    )
    assert result_records(ranked.run(prefill(1))) == result_records(threads.run(prefill(1)))
    assert torch.equal(*seen["processes"], *seen["threads"])
    threads.close()


# A rank that is stopped may have given its share of the step's last exchange already; then it is missed later.
@pytest.mark.parametrize(
    ("sent", "seconds", "text"),
    [
        # A process that is killed takes a while to be gone where the machine is busy.
        (signal.SIGKILL, 20.0, "rank 1 has ended: killed by SIGKILL"),
        more(signal.SIGSTOP, 1.0, "(waited|not done .* within) 1 s"),
    ],
)
def test_a_rank_that_is_lost_in_a_step_ends_the_engine(tiny_model, started, sent, seconds, text):
    def strike(_sample, _logits):
        os.kill(started[0].pids[0], sent)

    started.append(build_ranked(config_of(tiny_model, step_seconds=seconds), strike))
    ranked = started[0]
    with pytest.raises(EngineDead, match=text):
        ranked.run(prefill(1))
    # For good, at once, and with the same sentence.
    with pytest.raises(EngineDead, match=text):
        ranked.run(prefill(2))


@pytest.mark.more
def test_a_rank_that_is_lost_between_steps_ends_the_engine(tiny_model, started):
    started.append(build_ranked(config_of(tiny_model)))
    ranked = started[0]
    ranked.run(prefill(1))
    process = psutil.Process(ranked.pids[0])
    process.kill()
    # Rank 0 does nothing with other ranks in this step but to wait for their word that it is done.
    with pytest.raises(EngineDead, match="rank 1 has ended: killed by SIGKILL"):
        ranked.run(StepPlan(2, copies=(PageCopy(0, 9),)))


RANK_ZERO = """
import sys, msgspec
from cairn.engine.ranks.wire import frames_of_config
from cairn.engine.ranks.runner import load_ranks
from cairn.engine.ranks.wire import RankSizes
with load_ranks(frames_of_config().decode(bytes.fromhex(sys.argv[1]))) as loaded:
    ranked = loaded.allocate(RankSizes(100, 3))
print(*ranked.pids, ranked.folder, flush=True)
sys.stdin.read()
"""


@pytest.mark.more
def test_the_other_ranks_end_when_rank_0_is_killed(tiny_model):
    config = frames_of_config().encode(config_of(tiny_model)).hex()
    command = [sys.executable, "-c", RANK_ZERO, config]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as rank_zero:
        try:
            pid, folder = rank_zero.stdout.readline().split()
            other = psutil.Process(int(pid))
            before = other.cpu_times()
            assert "ranks.worker" in " ".join(other.cmdline())
        finally:
            rank_zero.kill()
        other.wait(20)
    assert before.user > 0
    assert not Path(folder).exists()


@pytest.mark.more
@pytest.mark.parametrize(
    ("changes", "error", "text"),
    [
        ({"tensor_parallel_size": 3}, ConfigError, "--tensor-parallel-size 3 and num_key_value_heads 2"),
        pytest.param({"model": "nowhere"}, ModelError, "nowhere: no such folder", marks=pytest.mark.long),
        ({"services": (RankService("cairn.nothing:here"),)}, ConfigError, "'cairn.nothing:here' cannot be imported"),
        pytest.param(
            {"services": (RankService("builtins:len"),)},
            EngineDead,
            "rank 1 has failed: TypeError",
            marks=pytest.mark.long,
        ),
    ],
)
def test_what_a_rank_refuses_is_raised_and_no_process_is_left(tiny_model, changes, error, text):
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    with pytest.raises(error, match=text):
        build_ranked(config_of(tiny_model, **changes))
    assert {child.pid for child in psutil.Process().children(recursive=True)} <= before


@pytest.mark.parametrize("step_seconds", [20.0, 0.001])
def test_a_rank_that_does_not_start_in_time_ends_the_start(tiny_model, step_seconds):
    """However short a step may be: what a start may take is another matter."""
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    with pytest.raises(EngineDead, match=r"rank 1 was not started within 0\.001 s"):
        build_ranked(
            config_of(tiny_model, step_seconds=step_seconds), None, dataclasses.replace(DEADLINES, hello=0.001)
        )
    assert {child.pid for child in psutil.Process().children(recursive=True)} <= before


def test_a_rank_that_cannot_be_started_ends_the_start(tiny_model, monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "executable", str(tmp_path / "nothing"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with pytest.raises(FileNotFoundError):
        build_ranked(config_of(tiny_model))
    assert not list(tmp_path.iterdir())
