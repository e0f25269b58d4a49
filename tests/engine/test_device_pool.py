"""Events stand where they have to: behind what has arrived in a GPU's pool, and behind every step. Nothing here has a
GPU."""

from argparse import Namespace
from typing import ClassVar

import pytest
import torch

from cairn.engine.transfers.device_pool import open_pool
from cairn.kernels.staging import Readback, StepBuffers, make_event


class Event:
    """`recorded`: those that were, in order. `stream`: None for the one that steps run in."""

    recorded: ClassVar[list["Event"]] = []

    def __init__(self) -> None:
        self.asked = 0

    def record(self, stream=None) -> None:
        self.stream = stream
        self.recorded.append(self)

    def query(self) -> bool:
        self.asked += 1
        return self.asked > 2


@pytest.mark.parametrize("place", ["cuda", "cpu"])
def test_a_step_of_which_nothing_is_read_is_waited_for_on_a_gpu_too(place, monkeypatch):
    """What it has written may be leased to others as soon as it is collected."""
    monkeypatch.setattr(torch.cuda, "Event", Event)
    Event.recorded = []
    buffers = StepBuffers(torch.device("cpu"))
    buffers.done = make_event(torch.device(place))
    readback = Readback(buffers)
    readback.send()
    readback.wait()
    assert [event.asked for event in Event.recorded] == ([3] if place == "cuda" else [])


def test_a_gpus_fences_have_a_stream_and_events_of_their_own(monkeypatch):
    """Every call to CUDA is a double; what it is called with is not."""
    waited, streams, devices, device = [], [], [], torch.device("cuda", 1)

    def new_stream(place):
        streams.append(place)
        return f"stream of {place}"

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "Stream", new_stream)
    monkeypatch.setattr(torch.cuda, "set_device", devices.append)
    monkeypatch.setattr(torch.cuda, "synchronize", waited.append)
    Event.recorded = []
    pool = open_pool(Namespace(device=device, shape=(9, 64), data_ptr=lambda: 4096))
    assert waited == [device], "the zeros that it is filled with are there before peers write to it"
    assert (pool.region.address, pool.region.num_pages, pool.region.page_bytes, pool.region.device) == (4096, 9, 64, 1)
    pool.enter_thread()
    assert streams == devices == [device] and len(Event.recorded) == 1, "an event makes the thread's context"
    fence = pool.fence()
    assert [event.stream for event in Event.recorded] == ["stream of cuda:1"] * 2
    assert [fence(), fence(), fence()] == [False, False, True]


def test_the_hosts_pool_is_seen_at_once():
    memory = torch.zeros(9, 64, dtype=torch.uint8)
    pool = open_pool(memory)
    pool.enter_thread()
    assert pool.fence()() and pool.region.device is None
    assert (pool.region.address, pool.region.num_pages, pool.region.page_bytes) == (memory.data_ptr(), 9, 64)
