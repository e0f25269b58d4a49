"""What can go wrong between two servers that are real processes and read each other's memory over NIXL.

One fault a function; `play` runs one round of it, see `nixl_world.Round.finish` for what must hold afterwards. The
same list is played on the memory link in `faults`.
"""

import zmq
from nixl_process import REMOTE_DECODE
from nixl_relay import HOST, kind_of
from nixl_world import Round, World

from cairn.transfer.frames import outer_frames, requests
from cairn.transfer.wire import Challenge, Claim, Hello, Prove, Sealed

SMALL_POOL = 4 << 20
_EXTENSION_SECONDS = 20.0


def p_killed_before_the_claim(r: Round) -> None:
    params = r.prefill()
    kind = r.take(None, "claim", r.rng.choice(["hello", "prove"]))
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


def side_channel_unreliable(r: Round) -> None:
    def fate() -> tuple[float, ...]:
        return r.rng.choice([(), (0.0,), (0.0,), (0.0, 0.0), (0.03,), (0.0, 0.1), (0.25,)])

    params = r.prefill()
    r.relay.fate = fate
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


class Stranger:
    """Speaks to P's side channel, and knows no secret."""

    def __init__(self, port: int) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.connect(f"tcp://{HOST}:{port}")

    def ask(self, frame: bytes, seconds: float = 0.05) -> list[bytes]:
        """What comes within so many seconds."""
        self._socket.send(frame)
        found = []
        while self._socket.poll(seconds * 1000):
            found.append(self._socket.recv())
        return found

    def close(self) -> None:
        self._context.destroy(linger=0)


def proof_replayed(r: Round) -> None:
    """What a stranger has recorded of handshake, claim and confirm is said again, by another connection."""
    r.relay.listens = True
    first = r.decode(r.d, params=r.prefill())
    r.world.wait(lambda: first.is_over, "the first has ended")
    heard = r.relay.heard
    assert heard
    r.prompt = r.tokens(60)
    params = r.prefill()
    stranger = Stranger(r.p.side_port)
    for frame in heard * 2:
        _assert_told_nothing(stranger.ask(frame, 0.01))
    stranger.close()
    r.decode(r.d, params=params)


def handshake_without_a_proof(r: Round) -> None:
    """A stranger that knows the protocol, a layout and a reference, but no secret."""
    r.relay.listens = True
    r.relay.hold = frozenset({"claim"})
    params = r.prefill()
    asked = r.decode(r.d, params=params)
    r.until("claim")
    frames, bodies = outer_frames(), requests()
    records = [frames.decode(frame) for frame in r.relay.heard]
    hello = next((record for record in records if isinstance(record, Hello)), None)
    sealed = [record for record in records if isinstance(record, Sealed)][-1]
    claim = bodies.decode(sealed.body)
    assert isinstance(claim, Claim)
    stranger = Stranger(r.p.side_port)
    session = r.rng.randbytes(16)
    if hello is not None:
        mine = Hello(hello.version, "stranger", r.rng.randbytes(16), hello.layout, hello.geometry)
        (challenge,) = [frames.decode(reply) for reply in stranger.ask(frames.encode(mine))]
        assert isinstance(challenge, Challenge)
        session = challenge.nonce
        for proof in (r.rng.randbytes(32), challenge.proof, bytes(32)):
            _assert_told_nothing(stranger.ask(frames.encode(Prove(session, proof))))
    for record in (claim, Claim(**{name: getattr(claim, name) for name in claim.__struct_fields__})):
        for name in (session, sealed.session):
            mark = r.rng.choice([sealed.mark, r.rng.randbytes(32)])
            _assert_told_nothing(stranger.ask(frames.encode(Sealed(name, mark, bodies.encode(record)))))
    stranger.close()
    assert not asked.is_over


def _assert_told_nothing(replies: list[bytes]) -> None:
    kinds = {kind_of(reply) for reply in replies}
    assert kinds <= {"challenge", "denied"}, f"a stranger was told {kinds}"


def d_in_a_small_pool(r: Round) -> None:
    """More is fetched at once than D has room for."""
    name = f"d-small-{r.transport}"
    environ = {"UCX_TLS": "tcp"} if r.transport == "tcp" else {}
    on_failure = {"on_failure": "recompute"}
    r.other_d(r.world.server(name, environ=environ, transfer=on_failure, kv_cache_memory_bytes=SMALL_POOL // 2))
    for _ in range(5):
        prompt = r.tokens(r.rng.randint(1, 700))
        r.decode(r.d, prompt, r.prefill(prompt) if r.rng.random() < 0.8 else None)


FAILED, RECEIVED, EXPIRED, LEFT = "failed_transfers", "external_prefix_cache_hits", "expired_leases", "left"

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
    side_channel_unreliable: RECEIVED,
    secret_differs: FAILED,
    proof_replayed: RECEIVED,
    handshake_without_a_proof: RECEIVED,
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
