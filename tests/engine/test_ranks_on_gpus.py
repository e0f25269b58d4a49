"""Ranks on GPUs, none of which is here: in which order ranks speak, wait and measure, and on which sizes they agree."""

import os
from pathlib import Path

import pytest
import torch

from cairn.engine.build import build_core
from cairn.engine.child_process import load_function
from cairn.engine.contract import EngineConfig, KvTransferConfig
from cairn.engine.devices import Device
from cairn.engine.memory_plan import count_slot
from cairn.engine.ranks import runner as ranks_runner
from cairn.engine.ranks import worker
from cairn.engine.ranks.runner import Followers, RankDeadlines, RankedRunner
from cairn.engine.ranks.wire import (
    RankAtBarrier,
    RankAvailableMemory,
    RankConfig,
    RankSizes,
    StepDone,
    frames_of_config,
    frames_of_plans,
    frames_of_sizes,
    frames_to_rank_zero,
)
from cairn.engine.ranks.worker import LoadedRank
from cairn.errors import ConfigError, EngineDead
from cairn.models.registry import open_model
from cairn.runner.decode_graphs import CudaGraphs
from cairn.step import StepPlan
from engine.test_ranks import Recorder

DEADLINES = RankDeadlines(hello=60.0, ready=60.0, stop=10.0)


class Line:
    """A `ParentLink` whose other end says `frames`, then is gone; what has been said to it."""

    def __init__(self, config: RankConfig, *frames: bytes) -> None:
        self.frames = list(frames)
        self.config = config
        self.said: list[str] = []

    def receive_config(self) -> bytes:
        return frames_of_config().encode(self.config)

    def receive(self, seconds: float | None) -> bytes | None:
        if seconds == 0:
            return None
        if not self.frames:
            raise EngineDead("no more")
        return self.frames.pop(0)

    def send(self, frame: bytes) -> None:
        message = frames_to_rank_zero().decode(frame)
        self.said.append(type(message).__name__ + "".join(f" {each}" for each in fields_of(message)))


def fields_of(message) -> list:
    return [getattr(message, name) for name in message.__struct_fields__]


class PretendedRank:
    """A rank with weights on a GPU that has so much room."""

    device = Device("cuda", torch.device("cuda", 1))
    refusal: ConfigError | None = None

    def __init__(self, config: RankConfig) -> None:
        self.sizes: RankSizes | None = None

    def measure_available_memory(self, barrier) -> int:
        if self.refusal is not None:
            raise self.refusal
        barrier("in the step")
        return 700

    def allocate(self, sizes: RankSizes, observe, barrier) -> Recorder:
        assert sizes == RankSizes(9, 2) and observe is None
        barrier("done with a graph")
        return Recorder(0)


def test_a_rank_says_what_room_its_gpu_has_before_it_allocates(monkeypatch):
    monkeypatch.setattr(worker, "LoadedRank", PretendedRank)
    sizes, plan = frames_of_sizes().encode(RankSizes(9, 2)), frames_of_plans().encode(StepPlan(5))
    line = Line(RankConfig(engine=EngineConfig(model="m", tensor_parallel_size=2)), sizes, plan)
    assert worker._serve(line) == 1
    reached = ["RankAtBarrier in the step", "RankAvailableMemory 700", "RankAtBarrier done with a graph"]
    assert line.said == ["RankStarted", "RankLoaded", *reached, "RankReady", "StepDone 5", "Fatal no more"]


def test_a_rank_without_room_refuses(monkeypatch):
    monkeypatch.setattr(worker, "LoadedRank", PretendedRank)
    monkeypatch.setattr(PretendedRank, "refusal", ConfigError("nothing is left"))
    line = Line(RankConfig(engine=EngineConfig(model="m", tensor_parallel_size=2)))
    assert worker._serve(line) == 2
    assert line.said == ["RankStarted", "RankLoaded", "BuildRefused config nothing is left"]


class PretendedFollowers:
    """`Followers` that answer; what has been asked of them."""

    folder = Path("nowhere")

    def __init__(self, log: list[str], *answers) -> None:
        self.log, self.answers, self.killed = log, list(answers), False

    barrier = Followers.barrier
    _deadlines = DEADLINES

    def receive(self, wanted, seconds, what):
        self.log.append(f"{wanted.__name__} within {seconds:g}")
        if isinstance(self.answers[0], Exception):
            raise self.answers[0]
        return self.answers.pop(0)

    def post(self, plan):
        self.log.append(f"post {plan.step}")

    def cause(self, error):
        return str(error)

    def close(self, kill):
        self.killed = kill


class Own:
    """Rank 0 with room for itself; what it does while its step is out is logged."""

    def __init__(self, log: list[str], available_memory: int) -> None:
        self.log, self.available_memory = log, available_memory

    def measure_available_memory(self, barrier) -> int:
        self.log.append("launch")
        barrier("in the step")
        self.log.append("collect")
        return self.available_memory


@pytest.mark.parametrize("exact", [False, True])
def test_a_rank_joins_with_its_gpu_on_loopback(tiny_model, monkeypatch, exact):
    joined = []

    def join_ranks(path, rank, size, device, **how):
        joined.append((rank, size, device, how, os.environ["NCCL_SOCKET_IFNAME"]))
        raise EngineDead("nobody else")

    monkeypatch.setattr("cairn.layers.process_ranks.join_ranks", join_ranks)
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "")
    monkeypatch.delenv("NCCL_SOCKET_IFNAME")
    engine = EngineConfig(model=str(tiny_model), device="cuda", tensor_parallel_size=2, exact=exact)
    with pytest.raises(EngineDead, match="nobody else"):
        LoadedRank(RankConfig(engine=engine, rank=1, step_seconds=300.0), PretendedRank.device)
    how = {"join_seconds": 60.0, "seconds": 300.0, "exact": exact}
    assert joined == [(1, 2, torch.device("cuda", 1), how, "lo")]


@pytest.mark.parametrize(("own", "others", "least"), [(500, [700, 600], 500), (900, [700, 800], 700)])
def test_the_least_room_of_all_ranks_is_taken(own, others, least):
    log: list[str] = []
    in_the_step = [RankAtBarrier("in the step")] * 2
    followers = PretendedFollowers(log, in_the_step, [RankAvailableMemory(each) for each in others])
    assert ranks_runner._least_available_memory(Own(log, own), followers, DEADLINES) == least
    # whoever is lost in the largest step is missed while rank 0's is out, not by its device
    assert log == ["launch", "RankAtBarrier within 60", "collect", "RankAvailableMemory within 60"]


def test_ranks_that_do_not_do_the_same_end_the_start():
    followers = PretendedFollowers([], [RankAtBarrier("done with 4"), RankAtBarrier("done with 2")])
    with pytest.raises(EngineDead, match="a rank is done with 2 while rank 0 is done with 4"):
        followers.barrier("done with 4")


@pytest.mark.parametrize("exact", [False, True])
def test_ranks_are_told_by_name_what_records_decode_steps_and_moves_pages(tiny_model, monkeypatch, exact):
    told: list[RankConfig] = []

    def refuse(config, _device):
        told.append(config)
        raise ConfigError("no GPUs today")

    monkeypatch.setattr("cairn.engine.build.choose_device", lambda *_: Device("cuda", torch.device("cuda", 0), 2))
    monkeypatch.setattr("cairn.engine.build.load_ranks", refuse)
    settings = {"device": "cuda", "tensor_parallel_size": 2, "max_model_len": 77, "kv_transfer": KvTransferConfig()}
    with pytest.raises(ConfigError, match="no GPUs today"):
        build_core(EngineConfig(model=str(tiny_model), exact=exact, **settings))
    # before anybody knows how many pages there will be
    assert [service.factory for service in told[0].services] == ["cairn.engine.ranks.transfer:serve_rank"]
    assert told[0].graphs == (None if exact else "cairn.runner.decode_graphs:CudaGraphs")
    if not exact:
        assert load_function(told[0].graphs, "graphs") is CudaGraphs


def ranked_recorder(*answers) -> tuple[RankedRunner, list[str], PretendedFollowers]:
    own = Recorder(0)
    own.is_complete  # noqa: B018 - it is, from now on
    followers = PretendedFollowers(own.log, *answers)
    return RankedRunner(own, followers, 300.0), own.log, followers


def test_two_steps_are_posted_before_the_first_is_collected():
    ranked, log, _ = ranked_recorder([StepDone(1), StepDone(1)], [StepDone(2), StepDone(2)])
    for step in (1, 2):
        ranked.launch(StepPlan(step))
        ranked.sample(step, {})
    ranked.collect(1)
    launched = [f"{what} {step}" for step in (1, 2) for what in ("post", "launch", "sample")]
    assert log == [*launched, "StepDone within 300", "collect 1"]


@pytest.mark.parametrize("answer", [EngineDead("rank 1 has ended"), [StepDone(2)]])
def test_a_lost_rank_is_missed_before_rank_0_waits_for_its_gpu(answer):
    """Which would wait for it inside a collective."""
    ranked, log, followers = ranked_recorder(answer)
    ranked.launch(StepPlan(1))
    ranked.sample(1, {})
    with pytest.raises(EngineDead, match=r"rank 1 has ended|done with step 2, and step 1 is the oldest"):
        ranked.collect(1)
    assert log[-1] == "StepDone within 300" and followers.killed


def test_the_pool_of_gpus_is_that_of_the_one_with_least_room(tiny_model, monkeypatch):
    """Memory is not divided among ranks that have their own."""
    told: list[RankSizes] = []

    class Loaded:
        available_memory = 64 << 20

        def __enter__(self):
            return self

        def __exit__(self, *_):
            pass

        def allocate(self, sizes, _observe):
            told.append(sizes)
            raise ConfigError("no GPUs today")

    monkeypatch.setattr("cairn.engine.build.choose_device", lambda *_: Device("cuda", torch.device("cuda", 0), 2))
    monkeypatch.setattr("cairn.engine.build.load_ranks", lambda *_: Loaded())
    settings = {"device": "cuda", "kv_cache_memory_bytes": None, "max_num_seqs": 4, "tensor_parallel_size": 2}
    with pytest.raises(ConfigError, match="no GPUs today"):
        build_core(EngineConfig(model=str(tiny_model), **settings))
    opened = open_model(tiny_model)
    layout, config = opened.layout(16, 2), opened.config
    spec = config.cache_spec(0, 2).memory_spec(opened.dtype, torch.device("cpu"))
    longest = config.max_position_embeddings
    slot = count_slot(spec, layout, Loaded.available_memory // layout.page_bytes, longest, on_gpu=True)
    assert slot > layout.checkpoint_bytes
    assert told == [RankSizes((Loaded.available_memory - 5 * slot) // layout.page_bytes, 4)]
