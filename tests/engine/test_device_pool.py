"""What is laid out on a device is what the host lays out, byte for byte, with one copy and no look at a number; and
events stand where they have to. Nothing here has a GPU."""

import contextlib
import itertools
from typing import ClassVar

import numpy as np
import pytest
import torch

from cairn.engine.transfers.device_pool import CudaStream, DevicePool, NoStream
from cairn.kernels import exact
from cairn.kernels.staging import Readback, StepBuffers, make_event
from cairn.transfer.geometry import pair, staging_pages
from cairn.transfer.memory import HostPool
from cairn.transfer.token_copies import staging_copies
from doubles.counted_device import counted_device
from transfer import test_group_geometry as group_geometry
from transfer.test_geometry import geometry, model

SPANS = ((0, 64), (0, 200), (5, 6), (3, 131), (64, 129), (127, 128), (70, 70))
BLOCKS = ((64, 16), (16, 64), (128, 16), (32, 128))


class Recorded:
    """A stream that writes down what comes when."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def enter_thread(self) -> None:
        self.calls.append("enter")

    @contextlib.contextmanager
    def use(self):
        self.calls.append("begin")
        yield
        self.calls.append("end")

    def record(self):
        self.calls.append("record")
        return lambda: True


def case(blocks, span, *, kv_heads=2, tp=(1, 1)):
    """A pairing, the copies of a span, the pool before, and where the slots are."""
    remote, local = (geometry(size, block, kv_heads) for size, block in zip(tp, blocks, strict=True))
    (pairing,) = pair(model(kv_heads), remote, local, 0).groups
    count = -(-span[1] // local.block_size) - span[0] // local.block_size if span[0] < span[1] else 0
    first_page = count + 3
    rows = first_page + staging_pages(pairing, *span)
    rng = np.random.default_rng(span[1])
    pool = rng.integers(0, 256, (rows, local.page_bytes)).astype(np.uint8)
    pages = rng.permutation(first_page)[:count].astype(np.int32)
    return pairing, staging_copies(pairing, *span, pages), pool, first_page


@pytest.mark.parametrize("blocks", BLOCKS, ids=str)
@pytest.mark.parametrize("tp", [(1, 1), (2, 1), (1, 2)], ids=str)
def test_a_device_lays_out_what_the_host_does(blocks, tp):
    device, transferred = counted_device()
    for place, span in itertools.product((torch.device("cpu"), device), SPANS):
        pairing, copies, before, first_page = case(blocks, span, tp=tp)
        expected = before.copy()
        HostPool(expected).lay_out(pairing, copies, first_page)
        pool = torch.from_numpy(before.copy()).to(place)
        transferred.take()
        with torch.inference_mode():
            DevicePool(pool, NoStream(), exact).lay_out(pairing, copies, first_page)
        assert transferred.take() == (int(place is device and len(copies) > 0), 0)
        assert np.array_equal(pool.cpu().numpy(), expected), span


@pytest.mark.parametrize("group", range(3))
@pytest.mark.parametrize("blocks", [(64, 16), (16, 64)], ids=str)
def test_units_that_leave_something_are_laid_out_one_by_one(blocks, group):
    remote, local = (group_geometry.geometry(1, block) for block in blocks)
    pairing = pair(group_geometry.MODEL, remote, local, 0).groups[group]
    for start, end in SPANS[:5]:
        count = -(-end // pairing.local_tokens) - start // pairing.local_tokens
        first_page = count + 3
        rows = first_page + staging_pages(pairing, start, end)
        before = np.random.default_rng(end).integers(0, 256, (rows, local.page_bytes)).astype(np.uint8)
        copies = staging_copies(pairing, start, end, np.arange(count, dtype=np.int32)[::-1] + 1)
        expected, pool = before.copy(), torch.from_numpy(before.copy())
        HostPool(expected).lay_out(pairing, copies, first_page)
        DevicePool(pool, NoStream(), exact).lay_out(pairing, copies, first_page)
        assert np.array_equal(pool.numpy(), expected) and not np.array_equal(expected, before)


@pytest.mark.parametrize("row_bytes", [8, 4, 2, 1])
def test_words_are_no_wider_than_a_row(row_bytes, monkeypatch):
    monkeypatch.setattr("transfer.test_geometry.ROW", row_bytes)
    pairing, copies, before, first_page = case((64, 16), (3, 131))
    assert pairing.row_bytes == row_bytes
    expected = before.copy()
    HostPool(expected).lay_out(pairing, copies, first_page)
    pool = torch.from_numpy(before)
    DevicePool.of(pool, exact).lay_out(pairing, copies, first_page)
    assert np.array_equal(pool.numpy(), expected) and not np.array_equal(expected, case((64, 16), (3, 131))[2])


def test_copies_go_into_the_stream_and_the_event_behind_them():
    pairing, copies, before, first_page = case((64, 16), (0, 64))
    stream = Recorded()
    pool = DevicePool(torch.from_numpy(before), stream, exact)
    pool.enter_thread()
    pool.lay_out(pairing, copies, first_page)
    assert pool.fence()()
    assert stream.calls == ["enter", "begin", "end", "record"]
    assert pool.region.device is None and pool.region.num_pages == len(before)


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


def test_a_gpus_copies_have_a_stream_and_events_of_their_own(monkeypatch):
    """Every call to CUDA is a double; what it is called with is not."""
    streams, devices, used, device = [], [], [], torch.device("cuda", 1)

    def new_stream(place):
        streams.append(place)
        return f"stream of {place}"

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "Stream", new_stream)
    monkeypatch.setattr(torch.cuda, "set_device", devices.append)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext(used.append(stream)))
    Event.recorded = []
    stream = CudaStream(device)
    stream.enter_thread()
    assert streams == devices == [device] and len(Event.recorded) == 1, "an event makes the thread's context"
    with stream.use():
        pass
    fence = stream.record()
    assert used == ["stream of cuda:1"] and [event.stream for event in Event.recorded] == used * 2
    assert [fence(), fence(), fence()] == [False, False, True]
