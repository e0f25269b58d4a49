"""What strangers, dead ports and unfetched offers can do to an engine process, each as a context in which it goes on.

`test_strangers` counts what an attack takes and leaves behind; the soak holds that a plain request during any of them
starts almost as soon as without it.
"""

import contextlib
import os
import random
import resource
import socket
import threading
import time
from collections.abc import Callable, Iterator

from nixl_faults import Strangers
from nixl_process import REMOTE_DECODE, Asked, CoreProcess
from nixl_relay import HOST
from nixl_world import World

FEW_DESCRIPTORS = 1024
MEMORY_BYTES = 64 << 20
REST_SECONDS = 20.0


class Footprint:
    """What a process has: descriptors, threads, resident bytes and what its scheduler holds for others."""

    def __init__(self, server) -> None:
        self.server = server
        self.descriptors = len(os.listdir(f"/proc/{server.pid}/fd"))
        self.threads = len(os.listdir(f"/proc/{server.pid}/task"))
        self.resident = resident_bytes(server)
        stats = server.stats()
        self.held = (
            stats.transfers.leased_pages,
            stats.transfers.quarantined_pages,
            stats.transfers.num_open,
            stats.pool.held_pages,
        )

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


def at_rest(world: World, before: list[Footprint]) -> None:
    """All is as it was before. Time passes for the servers until it is; raises AssertionError when it never is."""
    until = time.monotonic() + REST_SECONDS
    while not all(Footprint(each.server).matches(each) for each in before):
        assert time.monotonic() < until, [(vars(Footprint(each.server)), vars(each)) for each in before]
        for each in before:
            each.server.advance(5.0)
        world.turn(0.05)


@contextlib.contextmanager
def more_connections_than_descriptors(world: World, p: CoreProcess, rng: random.Random) -> Iterator[None]:
    """1,090 bare connections to a process that may have 1,024 descriptors."""
    resource.prlimit(p.pid, resource.RLIMIT_NOFILE, (FEW_DESCRIPTORS, FEW_DESCRIPTORS))
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, max(soft, 8192)), hard))
    before, made = p.stats().transfers.dropped_frames, []
    try:
        for _ in range(1090):
            made.append(socket.create_connection((HOST, p.side_port), 20))
        world.wait(lambda: p.stats().transfers.dropped_frames >= before + 1090 - 64, "P has turned the oldest away")
        yield
    finally:
        for each in made:
            each.close()
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@contextlib.contextmanager
def no_descriptor_left(world: World, p: CoreProcess, rng: random.Random) -> Iterator[None]:
    """The process has as many descriptors as it may have."""
    soft, hard = resource.prlimit(p.pid, resource.RLIMIT_NOFILE)
    resource.prlimit(p.pid, resource.RLIMIT_NOFILE, (len(os.listdir(f"/proc/{p.pid}/fd")), hard))
    try:
        yield
    finally:
        resource.prlimit(p.pid, resource.RLIMIT_NOFILE, (soft, hard))


class _Beside:
    """Does the same again and again in a thread, until it is stopped; `count` times at most."""

    def __init__(self, act: Callable[[], None], count: int) -> None:
        self._act, self._left = act, count
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.num_done = 0

    def __enter__(self) -> "_Beside":
        self._thread.start()
        return self

    def __exit__(self, *error) -> None:
        self._stopping.set()
        self._thread.join(20)
        assert not self._thread.is_alive()

    def _run(self) -> None:
        while self._left and not self._stopping.is_set():
            self._left -= 1
            self._act()
            self.num_done += 1


@contextlib.contextmanager
def bytes_that_never_end(world: World, p: CoreProcess, rng: random.Random) -> Iterator[_Beside]:
    """As many as are taken, by six connections at a time: TLS records of a message of 16 MiB, and what is no TLS. At
    most 4,000 times a mebibyte is offered."""
    record = b"\x16\x03\x01\x40\x00" + b"\x01\xff\xff\xff" + bytes((1 << 14) - 4)
    payloads = (record * 64, b"\x01" + bytes(1 << 20))
    senders: list[socket.socket] = []

    def send() -> None:
        while len(senders) < 6:
            senders.append(socket.create_connection((HOST, p.side_port), 20))
            senders[-1].setblocking(False)
        each = senders.pop(0)
        try:
            each.send(rng.choice(payloads))
            senders.append(each)
        except BlockingIOError:
            senders.append(each)
        except OSError:
            each.close()

    with _Beside(send, 4000) as beside:
        yield beside
    for each in senders:
        each.close()


@contextlib.contextmanager
def flood_of_handshakes(world: World, p: CoreProcess, rng: random.Random) -> Iterator[_Beside]:
    """400 connections that know no secret, some of which shake hands with another one, and 4,000 more meanwhile."""
    strangers = Strangers(p.side_port)
    strangers.come(200, rng)
    with _Beside(lambda: strangers.come(1, rng), 2000) as beside:
        yield beside
    strangers.close()


@contextlib.contextmanager
def silent_port(
    world: World, p: CoreProcess, rng: random.Random
) -> Iterator[tuple[list[Asked], Callable[[], list[Asked]]]]:
    """48 requests that name a port which takes connections and says nothing; and what sends 48 more."""
    with socket.create_server((HOST, 0), backlog=256) as listener:
        reference = reference_to(listener.getsockname()[1])
        asked: list[Asked] = []

        def send() -> list[Asked]:
            made = [p.submit([rng.randrange(20, 4000) for _ in range(30)], 1, reference) for _ in range(48)]
            asked.extend(made)
            return made

        yield send(), send
        world.wait(lambda: p.advance(0.1) or all(each.is_over for each in asked), "they are computed here")


@contextlib.contextmanager
def unfetched_offers(world: World, p: CoreProcess, rng: random.Random) -> Iterator[list[Asked]]:
    """One prompt of 8,000 tokens, handed over a hundred times, and nobody comes for it."""
    prompt = [rng.randrange(20, 4000) for _ in range(8000)]
    first = p.submit(prompt, 1, REMOTE_DECODE, client="one")
    world.wait(lambda: first.is_over, "the prompt is cached")
    asked = [p.submit(prompt, 1, REMOTE_DECODE, client="one") for _ in range(100)]
    yield asked
    world.wait(lambda: all(each.is_over for each in asked), "all are handed over or refused")
    p.advance(40.0)
    world.wait(lambda: p.stats().transfers.leased_pages == 0, "the leases have run out")


ATTACKS = (
    more_connections_than_descriptors,
    no_descriptor_left,
    bytes_that_never_end,
    flood_of_handshakes,
    silent_port,
    unfetched_offers,
)


def reference_to(port: int) -> dict:
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


def unused_port() -> int:
    with socket.create_server((HOST, 0)) as listener:
        return listener.getsockname()[1]


def play(world: World, attack, seed: int) -> dict[str, float]:
    """Plain requests during an attack, one after the other: seconds to the first token, alone and at worst. Raises
    AssertionError when one starts more than a second later than alone, or something stays behind."""
    rng = random.Random(f"{attack.__name__}, {seed}")
    p = world.p()
    alone = max(seconds_to_first_token(world, p, rng) for _ in range(3))
    before = [Footprint(p)]
    with attack(world, p, rng):
        worst = max(seconds_to_first_token(world, p, rng) for _ in range(5))
    at_rest(world, before)
    assert worst <= alone + 1.0, f"a plain request took {worst:.2f} s to start, {alone:.2f} s alone"
    return {"alone": alone, "worst": worst}


def seconds_to_first_token(world: World, server: CoreProcess, rng: random.Random) -> float:
    prompt = [rng.randrange(20, 4000) for _ in range(30)]
    began = time.monotonic()
    asked = server.submit(prompt, 1)
    world.wait(lambda: asked.is_over, "a plain request")
    assert asked.tokens, asked.refusal or asked.end
    return time.monotonic() - began
