"""The processes of one test run, and one round of a fault among them. `Round.finish` checks what must hold."""

import contextlib
import random
import time
from operator import attrgetter
from pathlib import Path

import zmq
from nixl_process import ANSWER_SECONDS, REMOTE_DECODE, START_SECONDS, Asked, CoreProcess, Nursery
from nixl_relay import HOST, Relay

from cairn.engine.contract import EngineConfig, EngineStats, KvTransferConfig
from cairn.transfer.credentials import derive_credentials
from cairn.transfer.pull import PullLimits

SECRET = "a secret that both have, of bytes enough"
_RELAYS = 4
_PATIENCE = 0.4
_LEAST_TOKENS, _MOST_TOKENS = 20, 400
_IDLE_SECONDS = 700.0


class World:
    """Servers by name, made when they are first asked for, and again when they have been killed."""

    def __init__(self, model: Path) -> None:
        self.model = model
        self.nursery = Nursery()
        self.secret = self.nursery.folder / "secret"
        self.secret.write_text(SECRET)
        self.credentials = derive_credentials(SECRET.encode())
        self.secret.chmod(0o600)
        self.other_secret = self.nursery.folder / "other"
        self.other_secret.write_text(SECRET[::-1])
        self.other_secret.chmod(0o600)
        self.servers: dict[str, CoreProcess] = {}
        self.relays: list[Relay] = []
        self._relays: dict[str, list[Relay]] = {}
        self.started = 0

    def server(self, name: str, *, environ=None, transfer=None, **config) -> CoreProcess:
        """The living one of this name. Its arguments count when it has to be made."""
        found = self.servers.get(name)
        if found is None or not found.alive:
            found = self.servers[name] = self.start(name, environ=environ, transfer=transfer, **config)
        if found.info is None:
            found.wait(lambda: found.info is not None, "core", START_SECONDS)
        return found

    def start(self, name: str, *, environ=None, transfer=None, **config) -> CoreProcess:
        """A process that may still be at its start."""
        if transfer is not None:
            secret = str(self.secret)
            config["kv_transfer"] = KvTransferConfig(**{"host": HOST, "port": 0, "secret_file": secret} | transfer)
        config = {"exact": True, "kv_cache_memory_bytes": 48 << 20} | config
        self.started += 1
        return CoreProcess(self.nursery, name, EngineConfig(model=str(self.model), **config), environ or {})

    def p(self) -> CoreProcess:
        return self.server("p", transfer={})

    def d(self, transport: str, on_failure: str) -> CoreProcess:
        environ = {"UCX_TLS": "tcp"} if transport == "tcp" else {}
        return self.server(f"d-{transport}-{on_failure}", environ=environ, transfer={"on_failure": on_failure})

    def alone(self) -> CoreProcess:
        return self.server("alone", enable_prefix_caching=False)

    def living(self) -> list[CoreProcess]:
        return [server for server in self.servers.values() if server.alive]

    def new_relay(self, target: int) -> Relay:
        self.relays.append(Relay(target, self.credentials))
        return self.relays[-1]

    def relay(self, rng: random.Random, p: CoreProcess) -> Relay:
        """One that D may know already from other rounds, or not; it led to servers of this kind alone."""
        known = self._relays.setdefault(p.kind, [])
        index = rng.randrange(_RELAYS)
        if index >= len(known):
            known.append(self.new_relay(p.side_port))
            index = -1
        relay = known[index]
        relay.reset()
        if relay.target != p.side_port:
            relay.aim(p.side_port)
        return relay

    def turn(self, seconds: float = 0.0) -> None:
        """Let everything that is here move once; waits for at most `seconds` until there is something to do."""
        poller = zmq.Poller()
        for relay in self.relays:
            for socket in relay.sockets():
                poller.register(socket, zmq.POLLIN)
        for server in self.living():
            poller.register(server.socket, zmq.POLLIN)
        poller.poll(seconds * 1000)
        for relay in self.relays:
            relay.turn()
        for server in self.living():
            server.turn()

    def wait(self, reached, what: object, seconds: float = ANSWER_SECONDS) -> None:
        until = time.monotonic() + seconds
        while not reached():
            if time.monotonic() >= until:
                logs = "\n".join(f"{server.name}: {server.tail()[-500:]}" for server in self.living())
                raise AssertionError(f"{what}: not within {seconds:g} s\n{logs}")
            self.turn(0.005)

    def close(self) -> None:
        for server in self.living():
            if server.frozen:
                server.resume()
            server.kill()
        for relay in self.relays:
            relay.close()
        self.nursery.close()


class Round:
    """Two servers, a prompt, and a hand-over. All that is random comes from `rng`; `take` goes through a list, a round
    at a time."""

    def __init__(self, world: World, seed: str, way: tuple[str, str], number: int = 0) -> None:
        transport, on_failure = way
        self.world, self.rng, self.on_failure = world, random.Random(seed), on_failure
        self.number = number
        self.p, self.d = world.p(), world.d(transport, on_failure)
        self.transport = transport
        self.relay = world.relay(self.rng, self.p)
        self.prompt = self.tokens(self.rng.randint(_LEAST_TOKENS, _MOST_TOKENS))
        self.asked: list[tuple[CoreProcess, Asked, Asked]] = []
        self.may_fail: set[str] = set()
        self.left = 0
        self.servers: list[CoreProcess] = []
        self.before: dict[str, EngineStats] = {}
        for server in (self.p, self.d):
            self.involve(server)

    def tokens(self, count: int) -> list[int]:
        return [self.rng.randrange(20, 4000) for _ in range(count)]

    def take(self, *choices):
        return choices[self.number % len(choices)]

    def involve(self, server: CoreProcess) -> None:
        """It must be well in the end."""
        if server not in self.servers:
            self.servers.append(server)
            self.before[server.name] = server.stats()

    def other_p(self, p: CoreProcess) -> None:
        if p.kind != self.p.kind:
            self.relay = self.world.relay(self.rng, p)
        else:
            self.relay.aim(p.side_port)
        self.p = p
        self.involve(p)

    def other_d(self, d: CoreProcess) -> None:
        self.d = d
        self.involve(d)

    @property
    def living(self) -> list[CoreProcess]:
        return [server for server in self.servers if server.alive]

    def warm(self) -> None:
        """D may know some of the prompt already, but never all of it."""
        if self.rng.random() < 0.3:
            known = self.d.submit(self.prompt[: self.rng.randint(1, len(self.prompt) // 2)], 1)
            self.world.wait(lambda: known.is_over, f"{known.name} warms D")

    def prefill(self, prompt=None, **fields) -> dict:
        """P computes the prompt; the reference, which leads to the relay."""
        asked = self.p.submit(prompt or self.prompt, 1, REMOTE_DECODE, **fields)
        self.world.wait(lambda: asked.is_over, f"{asked.name} is prefilled")
        assert asked.refusal is None, asked.refusal
        return asked.params | {"remote_port": self.relay.port}

    def decode(self, server: CoreProcess, prompt=None, params=None, **fields) -> Asked:
        """Not waited for. What is right is asked of a server that is alone."""
        prompt = prompt or self.prompt
        asked = server.submit(prompt, 3, params, **fields)
        self.asked.append((server, asked, self.world.alone().submit(prompt, 3)))
        if params is not None and self.on_failure == "fail":
            self.may_fail.add(asked.name)
        return asked

    def leave(self, server: CoreProcess, asked: Asked) -> None:
        """The client goes away, if it has no answer yet."""
        if not asked.is_over:
            server.abort(asked)
            self.left += 1

    def until(self, kind: str) -> None:
        """A frame of this kind has come to the relay."""
        asked = self.asked[-1][1]
        self.world.wait(lambda: self.relay.seen[kind] or asked.is_over, f"a {kind} comes by")
        assert self.relay.seen[kind], f"no {kind}, only {dict(self.relay.seen)}: {asked.end or asked.refusal}"

    def pause(self, most: float) -> None:
        """Let everything go on for a random time of at most so many seconds."""
        until = time.monotonic() + self.rng.random() * most
        while (left := until - time.monotonic()) > 0:
            self.world.turn(left)

    def somewhere(self) -> None:
        """A random moment of the transfer, by a frame that is held there or by time."""
        kind = self.rng.choice(["hello", "welcome", "claim", "granted", "confirm", "done", None, None])
        if kind is None:
            self.pause(0.08)
            return
        self.relay.hold = frozenset({kind})
        until = time.monotonic() + 0.5
        while not self.relay.num_held and not self.asked[-1][1].is_over and time.monotonic() < until:
            self.world.turn(0.005)

    def reading(self) -> None:
        """P has granted, and D is about to read, or reads, or has read: P stands still meanwhile."""
        self.relay.hold = frozenset({"granted"})
        self.until("granted")
        wait = self.rng.random() < 0.5
        if not wait:
            self.p.freeze()
        self.relay.hold = frozenset()
        self.relay.release()
        self.pause(0.01)
        if wait:
            self.p.freeze()

    # -- the end ---------------------------------------------------------------------------------------------------

    def finish(self) -> None:
        """Let all requests end, as time passes for the servers, then all leases. Raises AssertionError."""
        self.relay.hold = frozenset()
        self.relay.release()
        self._wait_for_requests()
        for server, asked, right in self.asked:
            if server.alive and not asked.aborted:
                self._check(asked, right)
        self._clean()

    def _wait_for_requests(self) -> None:
        until = time.monotonic() + ANSWER_SECONDS
        next_step = time.monotonic() + _PATIENCE
        while open_ones := self._open():
            if time.monotonic() >= until:
                raise AssertionError(f"{', '.join(open_ones)} never ended: {self.d.tail()[-800:]}")
            if time.monotonic() >= next_step:
                next_step += 0.05
                for server in self.living:
                    server.advance(1.5)
            self.world.turn(0.005)

    def _open(self) -> list[str]:
        return [
            each.name
            for server, asked, right in self.asked
            for each in (asked, right)
            if not each.is_over and (server.alive or each is right)
        ]

    def _check(self, asked: Asked, right: Asked) -> None:
        assert asked.refusal is None, f"{asked.name} was refused: {asked.refusal}"
        assert asked.end is not None and right.end is not None
        if asked.end.finish_reason == "error":
            assert asked.name in self.may_fail, f"{asked.name} failed: {asked.end.error}"
            assert asked.end.error and not asked.tokens, f"{asked.name}: no clear error"
        else:
            assert asked.tokens == right.tokens, f"{asked.name}: {asked.tokens} instead of {right.tokens}"

    def _clean(self) -> None:
        """Nobody holds a page for anybody, each can still answer, and has recounted its books since."""
        servers = self.living
        # what was given up is read to its end; this takes no time but ours
        self.world.wait(
            lambda: not any(server.stats().transfers.quarantined_pages for server in servers), _Held(servers)
        )
        self._expire(servers)
        audits = {server.name: server.stats().prefix_cache.audits for server in servers}
        # an offer wakes the transfer thread, whose handshakes may have been out when time leapt
        last = [server.submit([20 + self.rng.randrange(3000)], 1, REMOTE_DECODE) for server in servers]
        self.world.wait(lambda: all(asked.is_over for asked in last), "each is answered")
        assert all(len(asked.tokens) == 1 for asked in last)
        self.world.wait(
            lambda: all(s.stats().prefix_cache.audits > audits[s.name] for s in servers), "the books are recounted"
        )
        self._expire(servers)
        # who was silent until now is tried again in the next round
        for server in servers:
            server.advance(PullLimits().retry_silent)

    def _expire(self, servers: list[CoreProcess]) -> None:
        """Let all leases end by time. One that a late message has begun after it had passed ends with the next."""
        for is_last in (False, True):
            for server in servers:
                server.advance(_IDLE_SECONDS)
            try:
                self.world.wait(
                    lambda: all(_is_empty(server) for server in servers),
                    _Held(servers),
                    ANSWER_SECONDS if is_last else ANSWER_SECONDS / 4,
                )
            except AssertionError:
                if is_last:
                    raise
            else:
                return

    def failures(self) -> bool:
        """Whether any request has ended with an error."""
        return any(asked.end is not None and asked.end.finish_reason == "error" for _, asked, _ in self.asked)

    def grown(self, counter: str) -> int:
        """By how much a counter of the living servers has grown in this round."""
        get = attrgetter(counter)
        return sum(get(s.stats()) - get(self.before[s.name]) for s in self.living)


class _Held:
    """Says what is still held by whom, when it is asked for."""

    def __init__(self, servers: list[CoreProcess]) -> None:
        self._servers = servers

    def __str__(self) -> str:
        return f"all is let go of: {[(server.name, server.stats()) for server in self._servers]}"


def _is_empty(server: CoreProcess) -> bool:
    stats = server.stats()
    held = (
        stats.transfers.leased_pages
        + stats.transfers.quarantined_pages
        + stats.pool.open_sequences
        + stats.pool.held_pages
    )
    return held + stats.transfers.num_open + stats.num_running + stats.num_waiting == 0


@contextlib.contextmanager
def world_of(model: Path):
    world = World(model)
    try:
        yield world
    finally:
        world.close()
