"""The engine on a device that only counts: one copy in and one out a step, and the answers of the host. More of it runs
there in `test_exactness` and `test_exactness_families`.

What is copied beside that, by name:

    token rules    masks, bad words, lists of tokens, biases and penalties come in one copy more, with the draw that
                   they are for: what was drawn before says what they are
    images         one that is encoded has a copy of its own, of its pixels (`test_counted_steps`)
    ranks          of the CPU put their sums together by way of the host (gloo); those of GPUs do not (NCCL)
"""

import numpy as np
import pytest
import torch

from cairn.engine.step_pipeline import StepPipeline
from cairn.kernels import staging
from cairn.layers.process_ranks import ProcessRank
from cairn.models.decoder_builder import load_kernels
from cairn.models.registry import open_model
from cairn.runner.decode_graphs import DecodeGraphs, PassShape
from cairn.runner.runner import Runner
from cairn.scheduler.request import Spec
from cairn.types import RequestId, SamplingParams
from doubles.counted_device import HostRead, counted_device, counted_kernels
from doubles.device_group import DeviceGroup
from doubles.rank_threads import RankThreads
from doubles.thread_ranks import Meeting, thread_ranks
from engine.test_exactness import OTHER, TEXT, Engine, Loaded, OnDevice
from engine.test_ranks_exactness import Layouts
from tiers import more


@pytest.fixture(scope="module")
def on_device(made_model) -> OnDevice:
    return OnDevice(made_model("qwen3_5"))


class Mixed(Engine):
    """Requests with parameters of their own; their tokens and logprobs."""

    def __init__(self, loaded: Loaded, ahead: int) -> None:
        super().__init__(loaded, exact=False, ahead=ahead)
        model = loaded.models[False]
        self.runner = Runner(model, self.runner.layout, 400, 4, False)
        self.pipeline = StepPipeline(self.scheduler, self.runner)
        self.told: dict[str, list] = {}
        self.copies: list[tuple[int, int]] = []

    def add(self, name: str, prompt, sampling: SamplingParams, **fields) -> None:
        keys = np.array(prompt, np.int64)
        self.scheduler.submit(Spec(request_id=RequestId(name), prompt=keys, sampling=sampling, max_tokens=8, **fields))

    def run_all(self) -> None:
        while self.scheduler.has_work:
            plans = 0
            while self.pipeline.can_launch:
                self.pipeline.launch()
                plans += 1
            for progress in self.pipeline.collect():
                told = None if progress.logprobs is None else [array.tolist() for array in vars_of(progress.logprobs)]
                self.told.setdefault(progress.request.id, []).append((progress.tokens, told))
                if progress.finish is not None:
                    scores = [
                        [array.tolist() for array in vars_of(one)] for one in progress.request.outcome.prompt_logprobs
                    ]
                    self.told[progress.request.id].append((progress.finish, scores))
            if self._copies is not None:
                self.copies.append((plans, *self._copies.take()))


def vars_of(logprobs):
    return logprobs.token_ids, logprobs.values, logprobs.ranks


class Mask:
    """Tokens below 3,000, and of these every other one behind an even token."""

    def allowed(self, output):
        bits = np.zeros(4096, np.bool_)
        bits[: 3000 : 2 if output and output[-1] % 2 == 0 else 1] = True
        return np.packbits(bits, bitorder="little").view(np.int32)


class SeveralRanks:
    """A model cut among two ranks that are threads, on the host or on devices that count."""

    def __init__(self, opened, host: bool) -> None:
        size, device = 2, None
        self.opened = Layouts(opened, size)
        self.groups: list[DeviceGroup] = []
        if host:
            communicators, backend = thread_ranks(size), None
        else:
            device, self.copies = counted_device()
            self.groups = [DeviceGroup(meeting, rank, device) for meeting in [Meeting(size, 30.0)] for rank in (0, 1)]
            communicators = [ProcessRank(each, rank, size, 30.0, False) for rank, each in enumerate(self.groups)]
            backend = counted_kernels("cpu")
        self.ranks = [
            opened.build(exact=False, communicator=each, backend=backend, device=device) for each in communicators
        ]
        self.models = {False: self.ranks[0]}


class MixedOnRanks(Mixed):
    def __init__(self, loaded: SeveralRanks, ahead: int) -> None:
        super().__init__(loaded, ahead)
        self.runner = RankThreads([Runner(model, self.runner.layout, 400, 4, False) for model in loaded.ranks])
        self.pipeline = StepPipeline(self.scheduler, self.runner)


RULES = {
    "penalties": {"sampling": SamplingParams(seed=3, frequency_penalty=1.0, repetition_penalty=1.2)},
    "bad words": {"sampling": SamplingParams(temperature=0.0, bad_words=((5, 6), (7,)))},
    "bias": {"sampling": SamplingParams(temperature=0.0, logit_bias=((11, 3.0), (12, -100.0)))},
    "list": {"sampling": SamplingParams(seed=4, allowed_token_ids=(5, 6, 7, 8, 9))},
    "mask": {"sampling": SamplingParams(seed=5), "constraint": Mask()},
    "min_tokens": {"sampling": SamplingParams(seed=6), "min_tokens": 8, "stop_token_ids": frozenset(range(0, 4096, 2))},
}
PLAIN = {
    "greedy": {"sampling": SamplingParams(temperature=0.0)},
    "top_k": {"sampling": SamplingParams(0.8, 20, 0.95, 7)},
    "top_p": {"sampling": SamplingParams(0.8, 0, 0.9, 8)},
    "min_p": {"sampling": SamplingParams(1.0, 0, 1.0, 9, 0.02)},
    "logprobs": {"sampling": SamplingParams(seed=10), "logprobs": 3},
    "prompt_logprobs": {"sampling": SamplingParams(seed=11), "prompt_logprobs": 2, "logprobs": 0},
    "stops": {"sampling": SamplingParams(seed=12), "stop_token_ids": frozenset(range(0, 4096, 5))},
}


def answers(loaded: Loaded | SeveralRanks, requests, ahead: int) -> Mixed:
    engine = (MixedOnRanks if isinstance(loaded, SeveralRanks) else Mixed)(loaded, ahead)
    if engine._copies is not None:
        engine._copies.take()
    for number, (name, fields) in enumerate(requests.items()):
        engine.add(name, TEXT[: 70 + number] + OTHER[:20], **fields)
    engine.run_all()
    return engine


class Events:
    """Made for the counted device, which has none: each is complete when its step has been recorded. Says which sets of
    buffers there are, and how often a step ended."""

    def __init__(self) -> None:
        self.made: list[Events.Event] = []

    def make(self, device: torch.device) -> "Events.Event":
        self.made.append(Events.Event())
        return self.made[-1]

    class Event:
        def __init__(self) -> None:
            self.num_recorded, self.is_complete = 0, True

        def record(self) -> None:
            assert self.is_complete, "two steps have one set of buffers"
            self.num_recorded, self.is_complete = self.num_recorded + 1, False

        def query(self) -> bool:
            assert not self.is_complete, "a step is waited for that has not been recorded, or twice"
            self.is_complete = True
            return True


@pytest.mark.parametrize("ahead", [2, more(1)])
def test_a_step_ends_once_and_has_buffers_of_its_own(on_device, ahead, monkeypatch):
    """Of prefill without samples, too: what such a step writes is committed when its end is known."""
    events = Events()
    monkeypatch.setattr(staging, "make_event", events.make)
    engine = Mixed(on_device, ahead)
    engine._copies.take()
    engine.add("long", (TEXT + OTHER + TEXT)[:1200], SamplingParams(temperature=0.0))
    engine.add("short", TEXT[:80], SamplingParams(seed=2))
    engine.run_all()
    steps = engine.runner.steps
    assert sum(event.num_recorded for event in events.made) == steps and len(events.made) == ahead
    assert all(event.is_complete for event in events.made)
    ins, outs = (sum(copied[i] for copied in engine.copies) for i in (1, 2))
    assert ins == steps > outs


def test_buffers_grow_and_are_used_again():
    device, _ = counted_device()
    buffers = staging.StepBuffers(device)
    addresses = [buffers.inputs(size)[0].data_ptr() for size in (10, 1 << 16, 100, (1 << 16) + 1, 5)]
    assert addresses[0] == addresses[1] == addresses[2] != addresses[3] == addresses[4]
    assert len(buffers._host_in._memory) == 1 << 17
    assert [len(each) for each in buffers.outputs(7)] == [7, 7]


def test_what_one_step_alone_needs_is_not_kept(monkeypatch):
    monkeypatch.setattr(staging, "MOST_KEPT_BYTES", 1000)
    buffers = staging.StepBuffers(torch.device("cpu"))
    assert [len(each) for each in buffers.inputs(1001)] == [1001, 1001] and not len(buffers._host_in._memory)


def test_results_that_were_read_are_not_the_buffers():
    device, _ = counted_device()
    buffers = staging.StepBuffers(device)
    found = []
    for number in (1, 2):
        readback = staging.Readback(buffers)
        found.append(readback.add(torch.full((3,), number).to(device)))
        readback.send()
        readback.wait()
    assert [one.array.tolist() for one in found] == [[1, 1, 1], [2, 2, 2]]


@pytest.mark.parametrize("ahead", [2, more(1)])
def test_one_copy_in_and_one_out_whatever_is_drawn_and_told(on_device, ahead):
    found, wanted = answers(on_device, PLAIN, ahead), answers(on_device._host, PLAIN, ahead)
    assert found.told == wanted.told and sorted(found.told) == sorted(PLAIN)
    assert all(ins == plans and outs <= 2 for plans, ins, outs in found.copies)
    assert sum(outs for _, _, outs in found.copies) <= found.runner.steps == sum(plans for plans, _, _ in found.copies)


@pytest.mark.parametrize("ahead", [2, more(1)])
def test_token_rules_are_one_copy_more(on_device, ahead):
    found, wanted = answers(on_device, RULES, ahead), answers(on_device._host, RULES, ahead)
    assert found.told == wanted.told and sorted(found.told) == sorted(RULES)
    ins, outs = (sum(copied[i] for copied in found.copies) for i in (1, 2))
    assert found.runner.steps < ins <= 2 * found.runner.steps and outs <= found.runner.steps


def test_ranks_on_devices_never_touch_the_host_in_a_step(made_model):
    """What they compute and exchange stays on the device, with two steps out; what they tell is what ranks of the host
    do."""
    opened = open_model(made_model("qwen3_5"))
    on_devices, on_host = SeveralRanks(opened, host=False), SeveralRanks(opened, host=True)
    found, wanted = (answers(each, PLAIN, 2) for each in (on_devices, on_host))
    assert found.told == wanted.told and sorted(found.told) == sorted(PLAIN)
    assert all(ins == 2 * plans and outs <= 2 * 2 for plans, ins, outs in found.copies)
    assert sum(outs for *_, outs in found.copies) <= 2 * found.runner.steps
    names = [[name for name, *_ in group.calls] for group in on_devices.groups]
    assert names[0] == names[1] and set(names[0]) == {"allreduce", "allgather", "broadcast"}
    for engine in (found, wanted):
        engine.runner.close()


class LaunchedAnew:
    """No graph: the same code is run again."""

    def capture(self, run):
        return run


def test_a_step_that_ranks_replay_is_one_copy_in_and_one_out(made_model, monkeypatch):
    """By all of them or by none, with the same number of rows. The CPU's kernels take their lengths from the host, as
    no graph's do, so of the pass only its sums are made."""
    replayed: list[list[PassShape]] = [[], []]

    def make_sums(graphs, shape, *_):
        communicator = graphs._model.communicator
        replayed[communicator.rank].append(shape)
        graphs._hidden.copy_(communicator.all_reduce(graphs._hidden.clone()) * 0.5)

    loaded = SeveralRanks(open_model(made_model("qwen3_5")), host=False)
    monkeypatch.setattr(DecodeGraphs, "_run", make_sums)
    engine = MixedOnRanks(loaded, 2)
    kernels = loaded.ranks[0].kernels
    build_metadata = kernels.build_metadata
    with monkeypatch.context() as patches:
        patches.setattr(kernels, "build_metadata", lambda host, staging: None)
        engine.runner._on_all(lambda runner: runner.capture_graphs(LaunchedAnew(), (2, 4), 1000, lambda size: None))
    assert kernels.build_metadata is build_metadata and replayed == [[PassShape(4), PassShape(2)]] * 2
    calls = [len(group.calls) for group in loaded.groups]
    engine._copies.take()
    for name, fields in PLAIN.items():
        engine.add(name, TEXT[:70], **fields)
    engine.run_all()
    assert replayed[0] == replayed[1] and set(replayed[0][2:]) == {PassShape(2), PassShape(4)} and len(replayed[0]) > 8
    assert len(replayed[0]) - 2 < engine.runner.forward_passes, "prefill is replayed"
    assert all(ins == 2 * plans and outs <= 2 * 2 for plans, ins, outs in engine.copies)
    assert sum(outs for *_, outs in engine.copies) <= 2 * engine.runner.steps
    names = [[name for name, *_ in group.calls[start:]] for group, start in zip(loaded.groups, calls, strict=True)]
    assert names[0] == names[1]
    engine.runner.close()


def test_the_device_refuses_what_would_wait_for_it():
    device, copies = counted_device()
    with torch.inference_mode():
        numbers = torch.arange(6).to(device)
        copies.take()
        for read in (
            lambda: numbers.sum().item(),
            lambda: int(numbers[0]),
            lambda: bool((numbers > 3).any()),
            lambda: numbers.nonzero(),
            lambda: numbers[numbers > 3],
            lambda: numbers[torch.tensor([1])],
            lambda: numbers + torch.arange(6),
            lambda: torch.equal(numbers, numbers),
        ):
            with pytest.raises(HostRead):
                read()
        for read in (numbers.tolist, numbers.numpy):
            with pytest.raises(RuntimeError):
                read()
        assert copies.take() == (0, 0)
        numbers.view(2, 3)[1] = 7
        assert numbers.cpu().tolist() == [0, 1, 2, 7, 7, 7] and copies.take() == (0, 1)


def test_a_kernel_gets_the_numbers():
    device, _ = counted_device()
    name = counted_kernels("cpu")
    weight = torch.randn(5, 8)
    found = load_kernels(name).embed(torch.tensor([3, 1]).to(device), weight.to(device))
    assert found.device.type == device.type and torch.equal(found.cpu(), weight[[3, 1]])
