"""What can go wrong between two servers, one fault a function; `play` runs one round of it and checks what must hold:

every request of a living server ends, with the answer of a server that is alone (or with a clear failure, where the
policy says so); nobody holds a page in the end; and no byte arrives in a page that has a new owner.
"""

import random

from pd_world import REMOTE_DECODE, Server, World

from cairn.cache.sequence_blocks import Namespace
from doubles.memory_link import Fault


class Round:
    """Two servers, a prompt, and a hand-over under way. `turn` lets both move once. In every other round the model has
    attention of limited reach."""

    def __init__(self, seed: int, on_failure: str = "recompute", **fabric) -> None:
        self.rng = random.Random(seed)
        self.on_failure = on_failure
        fabric.setdefault("descriptors_per_poll", self.rng.choice([1, 1, 2, 100]))
        fabric.setdefault("late_writes", self.rng.random() < 0.5)
        self.world = World(seed, limited=seed % 2 == 1, **fabric)
        blocks = self.rng.choice([(16, 16), (16, 16), (16, 32), (128, 16)])
        modes = self.rng.choice(["auto", "auto", "align", None]), self.rng.choice(["auto", "auto", "align", None])
        self.p = self.world.server(1, mode=modes[0], block_size=blocks[0])
        self.d = self.world.server(2, mode=modes[1], block_size=blocks[1], on_failure=on_failure)
        self.prompt = self.tokens(self.rng.randint(1, 90))
        self.expected: dict[str, list[int]] = {}
        self.may_fail: set[str] = set()

    def tokens(self, count: int) -> list[int]:
        return [self.rng.randrange(50) for _ in range(count)]

    def warm(self) -> None:
        """D may know some of the prompt already."""
        if self.rng.random() < 0.4:
            self.decode(self.d, self.prompt[: self.rng.randint(1, len(self.prompt))])
            self.world.run(self.d)

    def prefill(self, prompt=None, **arguments) -> dict:
        name = self.p.submit(prompt or self.prompt, max_tokens=1, params=REMOTE_DECODE, **arguments)
        self.world.run(self.p)
        return self.p.params(name)

    def decode(self, server: Server, prompt, params=None, **arguments) -> str:
        name = server.submit(prompt, max_tokens=3, params=params, **arguments)
        self.expected[name] = self.world.alone(prompt, 3)
        return name

    def turn(self) -> bool:
        moved = [server.turn() for server in self.world.servers if server.alive]
        return any(moved)

    def until(self, reached, limit: int = 60) -> bool:
        """Turn until `reached()`; False if that never comes."""
        for _ in range(limit):
            if reached():
                return True
            self.turn()
        return False

    def reading(self, least: int = 0) -> bool:
        pull = next(iter(self.d.consumer._pulls.values()), None)
        return pull is not None and pull.is_reading and not pull.is_over and len(self.d.link.moved) >= least

    def somewhere(self) -> None:
        """A random moment of the transfer."""
        for _ in range(self.rng.randrange(10)):
            self.turn()

    def finish(self, seconds: float = 120.0) -> None:
        """Let time pass until all is over, and check it."""
        for _ in range(int(seconds / 1.5)):
            while self.turn():
                pass
            self.world.clock.advance(1.5)
        for server in self.world.servers:
            if server.alive:
                server.assert_clean()
        for name, expected in self.expected.items():
            server = next(server for server in self.world.servers if name.startswith(server.engine_id))
            if not server.alive or name in self.gone:
                continue
            assert name in server.ended, f"{name} never ended"
            request = server.ended[name]
            if request.outcome.finish_reason == "error":
                assert name in self.may_fail, f"{name} failed: {request.outcome.failure}"
                assert request.outcome.failure and not server.answers[name]
            else:
                assert server.answers[name] == expected, f"{name} has a wrong answer"

    gone: frozenset[str] = frozenset()


def p_killed_before_the_claim(r: Round) -> None:
    params = r.prefill()
    _kill(r, r.p)
    r.decode(r.d, r.prompt, params)


def p_killed_between_claim_and_read(r: Round) -> None:
    r.world.fabric.delay = 3
    params = r.prefill()
    r.decode(r.d, r.prompt, params)
    r.until(r.reading)
    _kill(r, r.p)


def p_killed_mid_read(r: Round) -> None:
    params = r.prefill()
    r.decode(r.d, r.prompt, params)
    r.until(lambda: r.reading(1))
    _kill(r, r.p)


def p_frozen_and_resumed_late(r: Round) -> None:
    params = r.prefill()
    r.decode(r.d, r.prompt, params)
    r.somewhere()
    r.world.fabric.inject(r.p.engine_id, Fault.FROZEN)
    r.p.alive = False
    for _ in range(r.rng.randint(1, 90)):
        r.world.clock.advance(0.5)
        while r.turn():
            pass
    # meanwhile D has work of its own, which must not get the pages that may still be written to
    r.decode(r.d, r.tokens(r.rng.randint(1, 200)))
    r.somewhere()
    r.world.fabric.inject(r.p.engine_id, Fault.NONE)
    r.p.alive = True


def d_killed_mid_read(r: Round) -> None:
    params = r.prefill()
    r.decode(r.d, r.prompt, params)
    r.somewhere()
    _kill(r, r.d)
    r.decode(r.p, r.tokens(40))


def client_gone(r: Round) -> None:
    params = r.prefill()
    name = r.decode(r.d, r.prompt, params)
    for _ in range(r.rng.randrange(7)):
        r.turn()
    r.gone = frozenset({name})
    request = r.d.scheduler.state.requests.get(name)
    if request is not None:
        r.d.scheduler.finish(request, "abort")
    r.decode(r.d, r.tokens(r.rng.randint(1, 120)))


def client_gone_from_p(r: Round) -> None:
    name = r.p.submit(r.prompt, max_tokens=1, params=REMOTE_DECODE)
    for _ in range(r.rng.randrange(3)):
        r.p.turn()
    request = r.p.scheduler.state.requests.get(name)
    if request is not None:
        r.p.scheduler.finish(request, "abort")
    r.decode(r.p, r.prompt)


def lease_expired(r: Round) -> None:
    params = r.prefill()
    r.world.clock.advance(r.rng.choice([29.9, 30.0, 31.0, 500.0]))
    r.decode(r.p, r.tokens(60))
    r.decode(r.d, r.prompt, params)


def lease_expired_mid_read(r: Round) -> None:
    _kill(r, r.p)
    r.p = r.world.server(1, lease_seconds=8.0, block_size=r.d.layout.block_size)
    r.prompt = r.tokens(r.rng.randint(40, 90))
    params = r.prefill()
    r.decode(r.d, r.prompt, params)
    r.until(lambda: r.reading(1))
    r.world.fabric.inject(r.p.engine_id, Fault.FROZEN)
    for _ in range(r.rng.randint(16, 50)):
        r.world.clock.advance(0.5)
        r.p.turn()
    # the pages of the lease are somebody else's now, and the read goes on
    r.p.cache.clear()
    r.decode(r.p, r.tokens(200))
    for _ in range(3):
        r.p.turn()
    r.world.fabric.inject(r.p.engine_id, Fault.NONE)


def reference_used_twice(r: Round) -> None:
    params = r.prefill()
    r.decode(r.d, r.prompt, params)
    if r.rng.random() < 0.5:
        r.somewhere()
    else:
        r.world.run()
        r.d.cache.clear()
    r.decode(r.d, r.prompt, params)


def reference_with_another_prompt(r: Round) -> None:
    params = r.prefill()
    other = list(r.prompt)
    other[r.rng.randrange(len(other))] += 1
    r.decode(r.d, r.rng.choice([other, [*r.prompt, 1], r.prompt[:-1] or [3]]), params)
    r.decode(r.d, r.prompt, params)


def reference_with_another_salt(r: Round) -> None:
    params = r.prefill(namespace=Namespace(cache_salt=r.rng.choice([None, "a"])))
    r.decode(r.d, r.prompt, params, namespace=Namespace(cache_salt="b"))


def reference_from_before_a_restart(r: Round) -> None:
    params = r.prefill()
    _kill(r, r.p)
    r.p = r.world.server(1)
    r.decode(r.p, r.tokens(100))
    r.world.run(r.p)
    r.decode(r.d, r.prompt, params)


def reference_forged(r: Round) -> None:
    params = r.prefill()
    request_id, _, nonce = params["remote_request_id"].rpartition("~")
    wrong = r.rng.choice([f"{request_id}x~{nonce}", f"{request_id}~{'0' * 32}", f"{request_id}~{nonce[::-1]}"])
    r.decode(r.d, r.prompt, params | {"remote_request_id": wrong})


def p_under_eviction_pressure(r: Round) -> None:
    _kill(r, r.p)
    r.p = r.world.server(1, num_pages=48, mode=r.rng.choice(["auto", "align", None]))
    r.prompt = r.prompt[:60]
    params = r.prefill()
    for _ in range(3):
        r.decode(r.p, r.tokens(r.rng.randint(20, 150)))
    r.decode(r.d, r.prompt, params)


def side_channel_slow(r: Round) -> None:
    """Frames take their time, and a connection takes few of them."""
    params = r.prefill()
    r.world.network.delay = lambda: r.rng.choice([0, 0, 0, 1, 3])
    r.decode(r.d, r.prompt, params)
    for _ in range(3):
        r.turn()
        for server in (r.p, r.d):
            for stream in server.channel.streams:
                stream.room = 1


def connection_cut(r: Round) -> None:
    """At a random moment, and both hear of it."""
    params = r.prefill()
    r.decode(r.d, r.prompt, params)
    for _ in range(r.rng.randint(1, 9)):
        r.turn()
    r.world.network.cut(r.d.channel, r.p.channel)


def d_in_a_small_pool(r: Round) -> None:
    """More is fetched at once than D has room for."""
    _kill(r, r.d)
    r.d = r.world.server(2, num_pages=40, mode=r.rng.choice(["auto", None]), max_num_seqs=3)
    for _ in range(5):
        prompt = r.tokens(r.rng.randint(1, 200))
        r.decode(r.d, prompt, r.prefill(prompt) if r.rng.random() < 0.8 else None)


def _kill(r: Round, server: Server) -> None:
    server.die()
    r.world.fabric.inject(server.engine_id, Fault.DEAD)


FAILED, RECEIVED, LATE, EXPIRED = "failed", "received", "late", "expired"

EFFECTS = {
    p_killed_before_the_claim: FAILED,
    p_killed_between_claim_and_read: FAILED,
    p_killed_mid_read: FAILED,
    p_frozen_and_resumed_late: FAILED,
    d_killed_mid_read: EXPIRED,
    client_gone: LATE,
    client_gone_from_p: EXPIRED,
    lease_expired: EXPIRED,
    lease_expired_mid_read: FAILED,
    reference_used_twice: FAILED,
    reference_with_another_prompt: FAILED,
    reference_with_another_salt: FAILED,
    reference_from_before_a_restart: FAILED,
    reference_forged: FAILED,
    p_under_eviction_pressure: RECEIVED,
    side_channel_slow: RECEIVED,
    connection_cut: FAILED,
    d_in_a_small_pool: RECEIVED,
}
"""What a round of this fault may leave behind; a tenth of the rounds must, or the fault never struck."""

FAULTS = tuple(EFFECTS)


def effects(r: Round) -> set[str]:
    """Which of the marks a round has left."""
    counters = [server.scheduler.state.counters for server in r.world.servers]
    marks = {
        FAILED: any(each.failed_pulls for each in counters),
        RECEIVED: any(each.external_hits for each in counters),
        EXPIRED: any(each.expired_offers for each in counters),
        LATE: any(move.late for server in r.world.servers for move in server.link.moved),
    }
    return {name for name, there in marks.items() if there}


def play(fault, seed: int, on_failure: str = "recompute") -> Round:
    """One round. Raises AssertionError that says what went wrong."""
    made = Round(seed, on_failure)
    if on_failure == "fail":
        made.may_fail = _AllNames()
    if fault is not client_gone_from_p:
        made.warm()
    try:
        fault(made)
        made.finish()
    finally:
        made.world.close()
    return made


class _AllNames(set):
    def __contains__(self, name) -> bool:
        return True
