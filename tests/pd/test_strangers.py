"""Strangers, dead ports and missing descriptors against real engine processes that hand over over NIXL.

Each attack is bounded in time and memory. During it an honest hand-over works, after it everything is as it was: pages,
leases, descriptors, threads, memory.
"""

import contextlib
import importlib.util
import os
import random
import socket

import attacks
import pytest
from attacks import MEMORY_BYTES, Footprint, at_rest, reference_to, resident_bytes, unused_port
from nixl_process import REMOTE_DECODE
from nixl_relay import HOST
from nixl_world import world_of

pytestmark = [
    pytest.mark.more,  # a prefill server of their own
    pytest.mark.skipif(importlib.util.find_spec("nixl") is None, reason="the extra nixl is not installed"),
]


@pytest.fixture(scope="module")
def world(tiny_model):
    with world_of(tiny_model) as made:
        yield made


@pytest.fixture
def pair(world, request):
    """P and D as they are, that have handed over before; in the end both are as they were."""
    p, d = world.p(), world.d("cma", "fail")
    rng = random.Random(request.node.name)
    for _ in range(2):
        hand_over(world, p, d, rng)
    before = [Footprint(server) for server in (p, d)]
    yield p, d, rng
    at_rest(world, before)
    hand_over(world, p, d, rng)


def hand_over(world, p, d, rng, **changed) -> None:
    """One that works: D computes nothing but what `on_failure` would call an error."""
    prompt = [rng.randrange(20, 4000) for _ in range(100)]
    first = p.submit(prompt, 1, REMOTE_DECODE)
    world.wait(lambda: first.is_over, "P is done")
    before = d.stats().transfers.received_tokens
    asked, right = d.submit(prompt, 3, first.params | changed), world.alone().submit(prompt, 3)
    world.wait(lambda: asked.is_over and right.is_over, "D is done")
    assert asked.tokens == right.tokens and len(right.tokens) == 3, asked.end
    assert d.stats().transfers.received_tokens == before + 100


def test_more_connections_than_descriptors(world, pair):
    """And then a request that names a new producer."""
    p, d, rng = pair
    with attacks.more_connections_than_descriptors(world, p, rng):
        assert len(os.listdir(f"/proc/{p.pid}/fd")) < attacks.FEW_DESCRIPTORS // 2
        failed = p.submit([rng.randrange(20, 4000) for _ in range(100)], 3, reference_to(unused_port()))
        world.wait(lambda: failed.is_over, "P goes on alone")
        assert failed.end.finish_reason == "length" and len(failed.tokens) == 3
        hand_over(world, p, d, rng)


def test_no_descriptor_at_all_is_a_failed_transfer(world, pair):
    p, d, rng = pair
    with attacks.no_descriptor_left(world, p, rng):
        prompt = [rng.randrange(20, 4000) for _ in range(50)]
        failed = [p.submit(prompt, 3, reference_to(unused_port())) for _ in range(3)]
        world.wait(lambda: all(asked.is_over for asked in failed), "P goes on alone")
        assert [len(asked.tokens) for asked in failed] == [3, 3, 3]
    hand_over(world, p, d, rng)


def test_bytes_that_never_end_take_no_memory(world, pair):
    p, d, rng = pair
    before, most = resident_bytes(p), 0
    with attacks.bytes_that_never_end(world, p, rng) as beside:
        while beside.num_done < 500:
            world.turn(0.01)
            most = max(most, resident_bytes(p) - before)
        hand_over(world, p, d, rng)
        most = max(most, resident_bytes(p) - before)
    assert most < MEMORY_BYTES


def test_a_flood_of_handshakes_evicts_nobody(world, pair):
    """Five hand-overs during it work, and so does one a while later."""
    p, d, rng = pair
    with attacks.flood_of_handshakes(world, p, rng) as beside:
        for _ in range(5):
            hand_over(world, p, d, rng)
        p.advance(4.0)
        d.advance(4.0)
        hand_over(world, p, d, rng)
        assert beside.num_done


def test_a_stranger_that_a_client_names_hears_a_handshake_and_no_more(world, pair):
    p, _, rng = pair
    with socket.create_server((HOST, 0)) as listener:
        listener.settimeout(20)
        port = listener.getsockname()[1]
        asked = p.submit([rng.randrange(20, 4000) for _ in range(100)], 3, reference_to(port))
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
    """A plain request is answered meanwhile, and 48 more that name the port wait no longer."""
    p, _, rng = pair
    before = p.stats()
    with attacks.silent_port(world, p, rng) as (silent, send):
        plain = p.submit([rng.randrange(20, 4000) for _ in range(30)], 3)
        world.wait(lambda: plain.is_over, "the plain request")
        assert plain.end.finish_reason == "length" and not any(asked.is_over for asked in silent)
        world.wait(lambda: p.advance(0.1) or all(asked.is_over for asked in silent), "all others")
        again = send()
        world.wait(lambda: all(asked.is_over for asked in again), "they are computed here")
    stats = p.stats()
    assert stats.transfers.num_skipped >= before.transfers.num_skipped + 48
    assert stats.transfers.num_failed == before.transfers.num_failed + 96
    p.advance(20.0)


def test_offers_that_nobody_fetches_take_their_pages_once(world, pair):
    """One client's: what it may have at a time, each page counted once, and a plain request is answered meanwhile."""
    p, _, rng = pair
    before = p.stats()
    with attacks.unfetched_offers(world, p, rng) as asked:
        plain = p.submit([rng.randrange(20, 4000) for _ in range(30)], 3)
        world.wait(lambda: plain.is_over, "the plain request")
        assert plain.end.finish_reason == "length"
        world.wait(lambda: all(each.is_over for each in asked), "all are handed over or refused")
        refused = [each for each in asked if each.refusal is not None]
        assert len(refused) == 100 - 63 and all("max_leases_per_client" in each.refusal for each in refused)
        stats = p.stats()
        assert stats.transfers.refused_kv_exports["client"] == len(refused)
        pages = stats.transfers.leased_pages - before.transfers.leased_pages
        assert 8000 // 16 <= pages <= 8000 // 16 + 64, "63 leases of the same pages"


def test_without_a_secret_one_line_says_who_is_believed(world):
    server = world.server("no-secret", transfer={"secret_file": None})
    lines = [line for line in server.log.read_text().splitlines() if "without --kv-secret-file" in line]
    assert len(lines) == 1 and "remote_port" in lines[0] and "WARNING" in lines[0]
    server.kill()
