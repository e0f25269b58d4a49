"""Strangers, dead ports and missing descriptors against real engine processes that hand over over NIXL.

Each attack is bounded in time and memory. During it an honest hand-over works, after it everything is as it was: pages,
leases, descriptors, threads, memory.
"""

import contextlib
import importlib.util
import os
import random
import resource
import socket
import time

import pytest
from nixl_faults import Strangers
from nixl_process import REMOTE_DECODE
from nixl_relay import HOST
from nixl_world import world_of

pytestmark = pytest.mark.skipif(importlib.util.find_spec("nixl") is None, reason="the extra nixl is not installed")

MEMORY_BYTES = 64 << 20
FEW_DESCRIPTORS = 1024


@pytest.fixture(scope="module")
def world(tiny_model):
    with world_of(tiny_model) as made:
        yield made


class Footprint:
    """What a process has: descriptors, threads, resident bytes and what its scheduler holds for others."""

    def __init__(self, server) -> None:
        self.server = server
        self.descriptors = len(os.listdir(f"/proc/{server.pid}/fd"))
        self.threads = len(os.listdir(f"/proc/{server.pid}/task"))
        self.resident = resident_bytes(server)
        stats = server.stats()
        self.held = stats.leased_pages, stats.quarantined_pages, stats.open_transfers, stats.held_pages

    def matches(self, before: "Footprint") -> bool:
        more = self.resident - before.resident
        return (
            self.descriptors <= before.descriptors
            and self.threads <= before.threads
            and self.held == before.held
            and more < MEMORY_BYTES
        )


def resident_bytes(server) -> int:
    with open(f"/proc/{server.pid}/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


@pytest.fixture
def pair(world, request):
    """P and D as they are, that have handed over before; in the end both are as they were."""
    p, d = world.p(), world.d("cma", "fail")
    rng = random.Random(request.node.name)
    for _ in range(2):
        hand_over(world, p, d, rng)
    before = [Footprint(server) for server in (p, d)]
    yield p, d, rng
    until = time.monotonic() + 20
    while not all(Footprint(each.server).matches(each) for each in before):
        assert time.monotonic() < until, [(vars(Footprint(each.server)), vars(each)) for each in before]
        for server in (p, d):
            server.advance(5.0)
        world.turn(0.05)
    hand_over(world, p, d, rng)


def hand_over(world, p, d, rng, **changed) -> None:
    """One that works: D computes nothing but what `on_failure` would call an error."""
    prompt = [rng.randrange(20, 4000) for _ in range(100)]
    first = p.submit(prompt, 1, REMOTE_DECODE)
    world.wait(lambda: first.is_over, "P is done")
    before = d.stats().external_prefix_cache_hits
    asked, right = d.submit(prompt, 3, first.params | changed), world.alone().submit(prompt, 3)
    world.wait(lambda: asked.is_over and right.is_over, "D is done")
    assert asked.tokens == right.tokens and len(right.tokens) == 3, asked.end
    assert d.stats().external_prefix_cache_hits == before + 100


@contextlib.contextmanager
def bare_connections(port, count):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, max(soft, 4 * count)), hard))
    made = []
    try:
        for _ in range(count):
            made.append(socket.create_connection((HOST, port), 20))
        yield made
    finally:
        for each in made:
            each.close()
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_more_connections_than_descriptors(world, pair):
    """With a limit of 1,024 open files, 1,090 bare connections, and then a request that names a new producer."""
    p, d, rng = pair
    resource.prlimit(p.pid, resource.RLIMIT_NOFILE, (FEW_DESCRIPTORS, FEW_DESCRIPTORS))
    with bare_connections(p.side_port, 1090):
        world.wait(lambda: p.stats().side_channel_dropped >= 1090 - 64, "P has turned the oldest away")
        assert len(os.listdir(f"/proc/{p.pid}/fd")) < FEW_DESCRIPTORS // 2
        # P as a consumer, of a port where nobody listens
        failed = p.submit([rng.randrange(20, 4000) for _ in range(100)], 3, reference_to(p, unused_port()))
        world.wait(lambda: failed.is_over, "P goes on alone")
        assert failed.end.finish_reason == "length" and len(failed.tokens) == 3
        hand_over(world, p, d, rng)


def test_no_descriptor_at_all_is_a_failed_transfer(world, pair):
    p, d, rng = pair
    soft, hard = resource.prlimit(p.pid, resource.RLIMIT_NOFILE)
    taken = max(map(int, os.listdir(f"/proc/{p.pid}/fd")))
    prompt = [rng.randrange(20, 4000) for _ in range(50)]
    # every number below the limit is in use, or was when this was measured
    resource.prlimit(p.pid, resource.RLIMIT_NOFILE, (len(os.listdir(f"/proc/{p.pid}/fd")), hard))
    try:
        failed = [p.submit(prompt, 3, reference_to(p, unused_port())) for _ in range(3)]
        world.wait(lambda: all(asked.is_over for asked in failed), "P goes on alone")
        assert [len(asked.tokens) for asked in failed] == [3, 3, 3] and taken
    finally:
        resource.prlimit(p.pid, resource.RLIMIT_NOFILE, (soft, hard))
    hand_over(world, p, d, rng)


def unused_port() -> int:
    with socket.create_server((HOST, 0)) as listener:
        return listener.getsockname()[1]


def reference_to(server, port: int) -> dict:
    """What a client may make up."""
    return {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_block_ids": [[1]],
        "remote_engine_id": f"engine-{port}",
        "remote_request_id": f"cmpl-{port}~{'0' * 32}",
        "remote_host": HOST,
        "remote_port": port,
        "tp_size": 1,
    }


@pytest.mark.parametrize("count", [1, 6])
def test_bytes_that_never_end_take_no_memory(world, pair, count):
    """Mebibytes without a proof, by one connection after the other, as fast as they are taken: 64 MiB each way in."""
    p, d, rng = pair
    before = resident_bytes(p)
    sent, most = 0, 0
    # TLS records that announce a handshake message of 16 MiB, and plain bytes
    record = b"\x16\x03\x01\x40\x00" + b"\x01\xff\xff\xff" + bytes((1 << 14) - 4)
    for payload in (record * 64, b"\x01" + bytes(1 << 20)):
        until = time.monotonic() + 3
        senders: list[socket.socket] = []
        while time.monotonic() < until and sent < 64 << 20:
            while len(senders) < count:
                senders.append(socket.create_connection((HOST, p.side_port), 5))
                senders[-1].setblocking(False)
            for each in list(senders):
                try:
                    sent += each.send(payload)
                except BlockingIOError:
                    continue
                except OSError:
                    each.close()
                    senders.remove(each)
            most = max(most, resident_bytes(p) - before)
        for each in senders:
            each.close()
    assert sent > 1 << 20 and most < MEMORY_BYTES, (sent, most)
    hand_over(world, p, d, rng)


def test_a_flood_of_handshakes_evicts_nobody(world, pair):
    """400 connections that know no secret, and five hand-overs, each of which works; so does one a while later."""
    p, d, rng = pair
    strangers = Strangers(p.side_port)
    strangers.come(200, rng)
    for _ in range(5):
        strangers.come(40, rng)
        hand_over(world, p, d, rng)
    p.advance(4.0)
    d.advance(4.0)
    hand_over(world, p, d, rng)
    strangers.close()


def test_a_stranger_that_a_client_names_hears_a_handshake_and_no_more(world, pair):
    p, _, rng = pair
    with socket.create_server((HOST, 0)) as listener:
        listener.settimeout(20)
        port = listener.getsockname()[1]
        asked = p.submit([rng.randrange(20, 4000) for _ in range(100)], 3, reference_to(p, port))
        with listener.accept()[0] as heard:
            heard.settimeout(0.2)
            said = b""
            with contextlib.suppress(TimeoutError):
                while part := heard.recv(65536):
                    said += part
            assert said[:1] == b"\x16" and len(said) < 1024 and b"engine" not in said
            heard.sendall(b"\x16\x03\x03\x00\x04\x02\x00\x00\x00")
            world.wait(lambda: asked.is_over, "P goes on alone")
    assert asked.end.finish_reason == "length" and len(asked.tokens) == 3


def test_a_silent_port_is_waited_for_once(world, pair):
    """48 requests that name a port that takes connections and says nothing; then a plain one, and 48 more."""
    p, _, rng = pair
    with socket.create_server((HOST, 0), backlog=256) as listener:
        port = listener.getsockname()[1]
        before = p.stats()
        silent = [p.submit([rng.randrange(20, 4000) for _ in range(30)], 1, reference_to(p, port)) for _ in range(48)]
        plain = p.submit([rng.randrange(20, 4000) for _ in range(30)], 3)
        world.wait(lambda: plain.is_over, "the plain request")
        assert plain.end.finish_reason == "length"
        world.wait(lambda: p.advance(0.1) or all(asked.is_over for asked in silent), "all others")
        again = [p.submit([rng.randrange(20, 4000) for _ in range(30)], 1, reference_to(p, port)) for _ in range(48)]
        world.wait(lambda: all(asked.is_over for asked in again), "they are not waited for")
        stats = p.stats()
        assert stats.skipped_transfers >= before.skipped_transfers + 48
        assert stats.failed_transfers == before.failed_transfers + 96
    p.advance(20.0)


def test_without_a_secret_one_line_says_who_is_believed(world):
    server = world.server("no-secret", transfer={"secret_file": None})
    lines = [line for line in server.log.read_text().splitlines() if "without --kv-secret-file" in line]
    assert len(lines) == 1 and "remote_port" in lines[0] and "WARNING" in lines[0]
    server.kill()
