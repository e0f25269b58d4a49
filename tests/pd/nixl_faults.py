"""What can go wrong between two servers that are real processes and read each other's memory over NIXL.

One fault a function; `play` runs one round of it, see `nixl_world.Round.finish` for what must hold afterwards. The
same list is played on the memory link in `faults`.
"""

import contextlib
import random
import socket

from nixl_process import REMOTE_DECODE
from nixl_relay import HOST
from nixl_world import Round, World

from cairn.transfer.credentials import derive_credentials
from cairn.types import SystemClock
from doubles.turned_channel import TurnedChannel

SMALL_POOL = 4 << 20
_EXTENSION_SECONDS = 20.0


def p_killed_before_the_claim(r: Round) -> None:
    params = r.prefill()
    kind = r.take(None, "claim", r.rng.choice(["hello", "welcome"]))
    if kind is None:
        r.p.kill()
        r.decode(r.d, params=params)
    else:
        r.relay.hold = frozenset({kind, "claim"})
        r.decode(r.d, params=params)
        r.world.wait(lambda: r.relay.num_held, "D says something")
        r.p.kill()


def p_killed_between_claim_and_read(r: Round) -> None:
    params = r.prefill()
    r.relay.hold = frozenset({"granted"})
    r.decode(r.d, params=params)
    r.until("granted")
    r.p.kill()


def p_killed_mid_read(r: Round) -> None:
    params = r.prefill()
    r.decode(r.d, params=params)
    r.reading()
    r.p.kill()


def p_frozen_and_resumed_late(r: Round) -> None:
    params = r.prefill()
    r.decode(r.d, params=params)
    if r.take(True, True, False):
        r.reading()
    else:
        r.somewhere()
        r.p.freeze()
    r.relay.hold = frozenset()
    r.relay.release()
    for _ in range(r.take(20, 8, 2, 30)):
        r.d.advance(2.0)
        r.world.turn(0.01)
    # meanwhile D has work of its own, which must not get the pages that may still be written to
    busy = r.decode(r.d, r.tokens(r.rng.randint(1, 200)))
    if r.rng.random() < 0.5:
        r.world.wait(lambda: busy.is_over, "D goes on while P stands still")
    else:
        r.pause(0.05)
    r.p.resume()


def d_killed_mid_read(r: Round) -> None:
    params = r.prefill()
    r.relay.hold = frozenset({"granted"})
    r.decode(r.d, params=params)
    r.until("granted")
    r.relay.hold = frozenset()
    r.relay.release()
    r.pause(0.01)
    r.d.kill()
    r.decode(r.p, r.tokens(40))


def client_gone(r: Round) -> None:
    params = r.prefill()
    asked = r.decode(r.d, params=params)
    if r.rng.random() < 0.4:
        r.reading()
    else:
        r.somewhere()
    r.leave(r.d, asked)
    r.decode(r.d, r.tokens(r.rng.randint(1, 120)))
    if r.p.frozen:
        r.pause(0.05)
        r.p.resume()


def client_gone_from_p(r: Round) -> None:
    asked = r.p.submit(r.prompt, 1, REMOTE_DECODE)
    r.pause(0.04)
    r.leave(r.p, asked)
    r.decode(r.p)
    r.decode(r.d)


def lease_expired(r: Round) -> None:
    params = r.prefill()
    r.p.advance(r.rng.choice([30.0, 31.0, 500.0]))
    r.decode(r.p, r.tokens(60))
    r.decode(r.d, params=params)


def lease_expired_mid_read(r: Round) -> None:
    """The pages of the lease are somebody else's by the time that P can be read from again."""
    r.other_p(r.world.server("p-small", transfer={"lease_seconds": 5.0}, kv_cache_memory_bytes=SMALL_POOL))
    r.prompt = r.tokens(r.rng.randint(200, 400))
    params = r.prefill()
    r.decode(r.d, params=params)
    r.reading()
    r.p.advance(_EXTENSION_SECONDS + 1.0)
    r.p.resume()
    busy = r.decode(r.p, r.tokens(300))
    r.world.wait(lambda: busy.is_over, "P fills its pool anew")


def reference_used_twice(r: Round) -> None:
    params = r.prefill()
    first = r.decode(r.d, params=params)
    if r.rng.random() < 0.5:
        r.somewhere()
        r.relay.hold = frozenset()
        r.relay.release()
    else:
        r.world.wait(lambda: first.is_over, "the first has ended")
    # by another D, which cannot have the pages from the first time
    r.involve(other := r.world.d("cma" if r.transport == "tcp" else "tcp", r.on_failure))
    r.decode(other, params=params)


def reference_with_another_prompt(r: Round) -> None:
    params = r.prefill()
    other = list(r.prompt)
    other[r.rng.randrange(len(other))] ^= 1
    r.decode(r.d, r.rng.choice([other, [*r.prompt, 21], r.prompt[:-1]]), params)
    r.decode(r.d, params=params)


def reference_with_another_salt(r: Round) -> None:
    params = r.prefill(cache_salt=r.rng.choice([None, "a"]))
    r.decode(r.d, params=params, cache_salt="b")


def reference_from_before_a_restart(r: Round) -> None:
    params = r.prefill()
    r.p.kill()
    r.other_p(r.world.p())
    r.decode(r.p, r.tokens(100))
    r.decode(r.d, params=params)


def hand_over_after_a_restart(r: Round) -> None:
    """D has a session with the P that was there before, at the same address."""
    first = r.decode(r.d, params=r.prefill())
    r.world.wait(lambda: first.is_over, "the first has ended")
    r.p.kill()
    r.other_p(r.world.p())
    r.prompt = r.tokens(100)
    second = r.decode(r.d, params=r.prefill())
    r.world.wait(lambda: second.is_over, "the second has ended")
    assert second.end is not None and second.end.cache is not None, second.end or second.refusal
    assert second.end.cache.received_tokens == 100, second.end.cache


def reference_forged(r: Round) -> None:
    params = r.prefill()
    request_id, _, nonce = params["remote_request_id"].rpartition("~")
    wrong = r.rng.choice([f"{request_id}x~{nonce}", f"{request_id}~{'0' * 32}", f"{request_id}~{nonce[::-1]}"])
    r.decode(r.d, params=params | {"remote_request_id": wrong})


def p_under_eviction_pressure(r: Round) -> None:
    r.other_p(r.world.server("p-small", transfer={"lease_seconds": 5.0}, kv_cache_memory_bytes=SMALL_POOL))
    params = r.prefill()
    for _ in range(3):
        r.decode(r.p, r.tokens(r.rng.randint(200, 900)))
    if r.rng.random() < 0.7:
        r.world.wait(lambda: all(asked.is_over for _, asked, _ in r.asked), "P fills its pool")
    r.decode(r.d, params=params)


def side_channel_slow(r: Round) -> None:
    params = r.prefill()
    r.relay.delay = lambda: r.rng.choice([0.0, 0.0, 0.0, 0.03, 0.1, 0.25])
    asked = r.decode(r.d, params=params)
    for _ in range(200):
        if asked.is_over:
            break
        r.d.advance(0.05)
        r.world.turn(0.02)


def secret_differs(r: Round) -> None:
    wrong = r.rng.choice([str(r.world.other_secret), None])
    transfer = {"secret_file": wrong, "on_failure": r.on_failure}
    name = f"d-{'none' if wrong is None else 'other'}-{r.on_failure}"
    r.other_d(r.world.server(name, transfer=transfer))
    params = r.prefill()
    r.decode(r.d, params=params)


class Strangers:
    """Connections to a side channel that know no secret: bare ones, some that speak other protocols, and some that
    shake hands with another secret. Closed by `close`."""

    WORDS = (
        *(b"", b"\x16", b"GET / HTTP/1.1\r\n\r\n", b"\xff" + bytes(8) + b"\x7f\x03"),
        b"\x16\x03\x01\x40\x00" + bytes(999),
    )

    def __init__(self, port: int) -> None:
        self._port = port
        self._sockets: list[socket.socket] = []
        self._handshakes = TurnedChannel(HOST, 0, derive_credentials(b"what the others hold"), SystemClock())

    def come(self, count: int, rng: random.Random) -> None:
        for _ in range(count):
            made = socket.create_connection((HOST, self._port), 5)
            made.setblocking(False)
            self._sockets.append(made)
            with contextlib.suppress(OSError):
                made.send(rng.choice(self.WORDS))
            self._handshakes.send((HOST, self._port), b"let me in")
            assert not any(incoming.frame for incoming in self._handshakes.receive(0.0))

    def close(self) -> None:
        for each in self._sockets:
            each.close()
        self._handshakes.close()


def strangers_at_the_door(r: Round) -> None:
    params = r.prefill()
    strangers = Strangers(r.p.side_port)
    strangers.come(r.rng.randint(10, 60), r.rng)
    r.relay.hold = frozenset({r.rng.choice(["hello", "claim", "confirm"])})
    asked = r.decode(r.d, params=params)
    r.world.wait(lambda: r.relay.num_held or asked.is_over, "D says something")
    strangers.come(r.rng.randint(10, 60), r.rng)
    r.relay.hold = frozenset()
    r.relay.release()
    r.world.wait(lambda: asked.is_over, "the hand-over has ended")
    strangers.close()


def connection_cut(r: Round) -> None:
    params = r.prefill()
    kind = r.take("hello", "claim", "granted", "confirm", "done")
    r.relay.hold = frozenset({kind})
    r.decode(r.d, params=params)
    r.until(kind)
    r.relay.cut()


def d_in_a_small_pool(r: Round) -> None:
    """More is fetched at once than D has room for."""
    name = f"d-small-{r.transport}"
    environ = {"UCX_TLS": "tcp"} if r.transport == "tcp" else {}
    on_failure = {"on_failure": "recompute"}
    r.other_d(r.world.server(name, environ=environ, transfer=on_failure, kv_cache_memory_bytes=SMALL_POOL // 2))
    for _ in range(5):
        prompt = r.tokens(r.rng.randint(1, 700))
        r.decode(r.d, prompt, r.prefill(prompt) if r.rng.random() < 0.8 else None)


FAILED, RECEIVED = "transfers.num_failed", "transfers.received_tokens"
EXPIRED, LEFT = "transfers.expired_leases", "left"

EFFECTS = {
    p_killed_before_the_claim: FAILED,
    p_killed_between_claim_and_read: FAILED,
    p_killed_mid_read: FAILED,
    p_frozen_and_resumed_late: FAILED,
    d_killed_mid_read: EXPIRED,
    client_gone: LEFT,
    client_gone_from_p: LEFT,
    lease_expired: FAILED,
    lease_expired_mid_read: FAILED,
    reference_used_twice: RECEIVED,
    reference_with_another_prompt: FAILED,
    reference_with_another_salt: FAILED,
    reference_from_before_a_restart: FAILED,
    hand_over_after_a_restart: RECEIVED,
    reference_forged: FAILED,
    p_under_eviction_pressure: RECEIVED,
    side_channel_slow: RECEIVED,
    secret_differs: FAILED,
    strangers_at_the_door: RECEIVED,
    connection_cut: FAILED,
    d_in_a_small_pool: RECEIVED,
}
"""Which counter a round of this fault moves: one round at least must, or the fault never struck."""

FAULTS = tuple(EFFECTS)
WAYS = (("cma", "recompute"), ("tcp", "fail"), ("tcp", "recompute"), ("cma", "fail"))
"""How D reads, and what it does when that fails: the next way each round."""


def play(world: World, fault, seed: int) -> Round:
    """One round. Raises AssertionError that says what went wrong."""
    # prompts that no round before had: a server that knows one asks for nothing
    way = WAYS[(seed + FAULTS.index(fault)) % len(WAYS)]
    made = Round(world, f"{fault.__name__}, {seed}", way, seed)
    made.warm()
    fault(made)
    made.finish()
    return made


def struck(played: Round, counter: str) -> bool:
    """Whether the round has moved the counter that its fault moves."""
    return played.left > 0 if counter == LEFT else played.grown(counter) > 0
