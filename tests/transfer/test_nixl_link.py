"""The NIXL link keeps the contract with real UCX on loopback: two agents in one process, and two processes."""

import contextlib
import ctypes
import importlib.util
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import numpy as np
import pytest

from cairn.errors import ConfigError
from cairn.transfer.contract import PagesFree, PullEnded
from cairn.transfer.links.contract import LinkError, ReadState, Region
from cairn.transfer.links.nixl import NixlLink
from transfer.link_contract import NUM_PAGES, PAGE_BYTES, LinkContract, pages, pool, ranges
from transfer.ranked_world import World as RankedWorld
from transfer.ranked_world import leased_spec_of, offer_of
from transfer.world import World, keys

pytestmark = pytest.mark.skipif(importlib.util.find_spec("nixl") is None, reason="the extra nixl is not installed")

SOURCE = Path(__file__).with_name("nixl_source.py")
FROZEN_READER = Path(__file__).with_name("nixl_frozen_reader.py")
WAIT_SECONDS = 60


@pytest.fixture(scope="module", autouse=True)
def loopback():
    """UCX reads these once, before the process' first agent."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("UCX_NET_DEVICES", "lo")
        yield


class TestNixlLink(LinkContract):
    @pytest.fixture
    def sides(self):
        mine, theirs = pool(1), pool(2)
        reader, source = NixlLink("reader"), NixlLink("source")
        reader.register(Region.of(mine))
        source.register(Region.of(theirs))
        yield reader, mine, source, theirs
        assert reader.close() == 0 and source.close() == 0


def test_every_incarnation_has_a_name_of_its_own():
    first, second = NixlLink("decode"), NixlLink("decode")
    assert first._name != second._name and first._name.startswith("decode-")
    first.close()
    second.close()


def test_an_idle_link_costs_no_processor_time():
    """The trap: NIXL's progress thread would spin on a whole core."""
    link = NixlLink("idle")
    link.register(Region.of(pool(1)))
    before = time.process_time()
    time.sleep(0.5)
    assert time.process_time() - before < 0.1
    link.close()


def code_of(function: str, num_bytes: int = 16) -> tuple[bytes, bytes]:
    """The first bytes of a function of libc: in this process, and in libc's file."""
    address = ctypes.cast(getattr(ctypes.CDLL(None), function), ctypes.c_void_p).value
    for line in Path("/proc/self/maps").read_text().splitlines():
        place, _, offset, *_, path = line.split()
        begin, end = (int(bound, 16) for bound in place.split("-"))
        if begin <= address < end:
            with open(path, "rb") as file:
                file.seek(address - begin + int(offset, 16))
                return ctypes.string_at(address, num_bytes), file.read(num_bytes)
    raise AssertionError(f"{function} is nowhere")


def test_a_link_rewrites_no_code_that_other_threads_may_be_in():
    """The trap: UCX would, and a thread that is in the kernel meanwhile returns into the middle of what is new."""
    NixlLink("reader").close()
    for function in ("mmap", "munmap", "mremap", "madvise", "shmat", "shmdt", "brk", "sbrk"):
        loaded, stored = code_of(function)
        assert loaded == stored, function


def test_a_new_process_loads_neither_nixl_nor_torch_before_a_link_is_made():
    code = "import sys, cairn.transfer.links.nixl; print('nixl' in sys.modules, 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=WAIT_SECONDS)
    assert done.stdout == "False False\n", done.stderr


def test_without_the_extra_the_error_says_how_to_install_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "nixl", None)
    with pytest.raises(ConfigError, match=r"pip install 'cairn-serve\[nixl\]'"):
        NixlLink("reader")


def test_memory_of_a_gpu_that_nixl_cannot_reach_is_refused_with_what_to_install(monkeypatch):
    """On this machine NIXL has no GPU; the address is nobody's, and is not looked at."""
    link = NixlLink("reader")
    with pytest.raises(ConfigError, match=r"--device cuda: NIXL cannot register memory: .*nixl-cu13.*UCX_TLS"):
        link.register(Region(0x7D00_0000_0000, NUM_PAGES, PAGE_BYTES, None, device=0))
    assert link.close() == 0


def test_a_peer_whose_gpu_cannot_be_reached_is_refused_with_the_limit(reader):
    link, _ = reader
    theirs, source = pool(2), NixlLink("source")
    source.register(Region.of(theirs))
    told = msgspec.msgpack.encode(msgspec.msgpack.decode(source.describe()) | {"device": 0})
    with pytest.raises(LinkError, match=r"host memory here, GPU memory there; UCX needs CUDA IPC"):
        link.connect(told)
    assert link.close() == source.close() == 0


class NixlLinks:
    """Real links where a `World` asks its fabric for some."""

    def __init__(self) -> None:
        self.made = []

    def link(self, name: str) -> NixlLink:
        self.made.append(NixlLink(name))
        return self.made[-1]


def test_a_whole_transfer_from_handshake_to_confirmation():
    world = World(links=NixlLinks())
    prompt = np.arange(160)
    for round_ in range(2):
        ref = world.offer(prompt, range(10, 20), [(160, (40, 41))])
        world.pull(world.pull_spec(ref, prompt, range(6, 10), start=6 * 16, checkpoint=(30, 31)))
        events = []
        until = time.monotonic() + WAIT_SECONDS
        while not any(isinstance(event, PagesFree) for event in events) and time.monotonic() < until:
            events += world.run(1)
            world.p.link.progress()
        assert events[0].failure is None and events[0].checkpoint_position == 160
        assert np.array_equal(world.memory[[6, 7, 8, 9, 30, 31]], world.p.memory[[16, 17, 18, 19, 40, 41]])
        assert not world.memory[:6].any() and world.sent == 3 + 2 * round_
    assert [link.close() for link in world.fabric.made] == [0, 0]


class RemoteSource:
    """A source in a process of its own: pages whose every byte follows from its place."""

    def __init__(self, tls: str = "") -> None:
        environment = dict(os.environ, UCX_NET_DEVICES="lo") | ({"UCX_TLS": tls} if tls else {})
        self.process = subprocess.Popen(
            [sys.executable, str(SOURCE)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment
        )
        self.description = bytes.fromhex(self.process.stdout.readline().decode())

    def stop(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)
        self.process.stdin.close()
        self.process.wait(WAIT_SECONDS)
        self.process.stdout.close()


@pytest.mark.parametrize(
    "changed",
    [
        {"address": 0},
        {"address": 2**64 - 1},
        {"address": 4096},
        {"num_pages": 0},
        {"num_pages": 1000},
        {"num_pages": 10**9},
        {"page_bytes": -1},
        {"page_bytes": 2**50},
        {"device": 5000},
        {"metadata": b""},
        {"metadata": b"garbage"},
        {"metadata": b"x" * (2 << 20)},
        {"name": ""},
        {"name": "another"},
        {"name": 5},
        {"type": "nixl2"},
    ],
)
def test_a_description_with_a_wrong_number_is_refused_and_the_true_one_still_works(changed, reader):
    link, mine = reader
    theirs, source = pool(2), NixlLink("source")
    source.register(Region.of(theirs))
    true = source.describe()
    with pytest.raises(LinkError):
        link.connect(msgspec.msgpack.encode(msgspec.msgpack.decode(true) | changed))
    handle = link.read(link.connect(true), pages([3], [1]))
    while link.poll(handle) is ReadState.READING:
        source.progress()
    assert np.array_equal(mine[1], theirs[3])
    assert link.close() == source.close() == 0


@pytest.mark.parametrize(
    ("remote", "local", "num_ranges"),
    [([3, 4, 5], [0, 1, 2], 1), ([3, 4, 5], [0, 2, 1], 3), ([5, 3, 4], [0, 1, 2], 2), ([3], [1], 1)],
)
def test_pages_that_follow_each_other_on_both_sides_are_one_range(monkeypatch, reader, remote, local, num_ranges):
    link, mine = reader
    theirs, source = pool(2), NixlLink("source")
    source.register(Region.of(theirs))
    peer, rows, describe = link.connect(source.describe()), [], link._agent.get_xfer_descs
    monkeypatch.setattr(
        link._agent, "get_xfer_descs", lambda table, kind: (rows.append(len(table)), describe(table, kind))[1]
    )
    handle = link.read(peer, pages(remote, local))
    while link.poll(handle) is ReadState.READING:
        source.progress()
    assert np.array_equal(mine[local], theirs[remote])
    assert rows == [num_ranges, num_ranges] and link.close() == source.close() == 0


@pytest.fixture
def source():
    source = RemoteSource()
    yield source
    source.stop()


@pytest.fixture
def reader():
    memory = np.zeros((NUM_PAGES, PAGE_BYTES), np.uint8)
    link = NixlLink("reader")
    link.register(Region.of(memory))
    yield link, memory
    link.close()


def finish(link, handle):
    until = time.monotonic() + WAIT_SECONDS
    while (state := link.poll(handle)) is ReadState.READING:
        if time.monotonic() > until:
            raise AssertionError("the read does not end")
        time.sleep(0.001)
    return state


def test_two_processes(source, reader):
    link, mine = reader
    theirs = pool(7)
    peer = link.connect(source.description)
    assert finish(link, link.read(peer, pages([3, 11, 0], [1, 2, 5]))) is ReadState.DONE
    assert np.array_equal(mine[[1, 2, 5]], theirs[[3, 11, 0]])
    assert finish(link, link.read(peer, ranges((4, 10, 0, 20, 30), (5, 0, 0, 0, 1)))) is ReadState.DONE
    assert np.array_equal(mine[0, 20:50], theirs[4, 10:40]) and mine[0, 0] == theirs[5, 0]
    assert not mine[[3, 4, *range(6, NUM_PAGES)]].any()


@pytest.mark.more
def test_a_killed_peer_is_an_error_at_once_and_its_successor_another_peer(source, reader):
    link, mine = reader
    peer = link.connect(source.description)
    assert finish(link, link.read(peer, pages([3], [1]))) is ReadState.DONE
    source.process.kill()
    source.process.wait(WAIT_SECONDS)
    with contextlib.suppress(LinkError):
        assert finish(link, link.read(peer, pages([4], [2]))) is ReadState.FAILED
    with pytest.raises(LinkError, match="gone"):
        link.read(peer, pages([4], [2]))
    with pytest.raises(LinkError, match="failed"):
        link.connect(source.description)
    link.disconnect(peer)
    assert not mine[2].any() and link.num_open == 0
    successor = RemoteSource()
    try:
        assert finish(link, link.read(link.connect(successor.description), pages([4], [2]))) is ReadState.DONE
    finally:
        successor.stop()
    assert np.array_equal(mine[2], pool(7)[4])


@pytest.mark.more
def test_a_frozen_peer_over_tcp_keeps_the_read_open_until_the_late_write_has_come():
    """The trap: releasing the handle would report an end, and the bytes would come all the same."""
    source = RemoteSource(tls="tcp")
    try:
        environment = dict(os.environ, UCX_NET_DEVICES="lo", UCX_TLS="tcp")
        done = subprocess.run(
            [sys.executable, str(FROZEN_READER), str(source.process.pid), source.description.hex()],
            env=environment,
            capture_output=True,
            text=True,
            timeout=4 * WAIT_SECONDS,
        )
    finally:
        source.stop()
    assert done.stdout.splitlines() == [
        "warm done",
        "frozen reading False",
        "close 1 1",
        "resumed cancelled True 0",
    ], done.stderr


class Agents:
    """Makes the links of one test; all of them are closed at its end."""

    def __init__(self):
        self.made = []

    def link(self, name):
        self.made.append(NixlLink(name))
        return self.made[-1]


@pytest.mark.parametrize(("p", "d"), [((1, 64), (2, 16)), ((2, 16), (2, 16))])
def test_several_ranks_and_other_block_sizes_over_real_links(p, d):
    agents = Agents()
    world = RankedWorld(p, d, kv_heads=2, links=agents, sides={"num_pages": 96})
    content, prompt, count, k = world.content(400), keys(400), world.p.pages_of(400), world.p.pages_per_file
    offer = offer_of(world.p, content, prompt, range(count), {400: range(count, count + k)})
    reference = world.p.door.offer(offer)
    local, file = range(5, 5 + world.d.pages_of(400)), range(60, 60 + world.d.pages_per_file)
    pull = world.d.door.pull(leased_spec_of(reference, world.p, prompt, local, checkpoint=file))
    events, until = [], time.monotonic() + WAIT_SECONDS
    while len(events) < 2:
        events += world.run(1)["d"]
        assert time.monotonic() < until, "the transfer does not end"
    assert events == [PullEnded(pull, None, 400, 400), PagesFree(pull)]
    for rank in world.d.ranks:
        rank.check_tokens(content, 0, 400, local, only_these=False)
        rank.check_file(content, 400, file)
    assert [link.close() for link in agents.made] == [0] * len(agents.made)
