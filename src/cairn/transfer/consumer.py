"""The consumer as one piece: all transfers of one engine, and its connections to producers."""

from collections.abc import Callable
from typing import TypeAlias

from cairn.transfer.contract import ContentWant, PagesFree, PullEnded, PullId, Want, WorkerSide
from cairn.transfer.dial import Dial, DialState
from cairn.transfer.peers import PeerPolicy
from cairn.transfer.proof import NONCE_BYTES
from cairn.transfer.pull import Pull, PullTools
from cairn.transfer.pull_states import PullLimits, PullState
from cairn.transfer.sessions import Identity
from cairn.types import Clock

__all__ = ["Address", "Consumer"]

Address: TypeAlias = tuple[str, int]

_MAX_DIALS = 256


class Consumer:
    """`send(address, frame)` puts a frame on its way to a producer and may lose it. Call `tick` again and again
    while `num_open` is not 0; nothing has to be done while it is."""

    def __init__(
        self,
        identity: Identity,
        policy: PeerPolicy,
        worker: WorkerSide,
        clock: Clock,
        random: Callable[[int], bytes],
        send: Callable[[Address, bytes], None],
        limits: PullLimits | None = None,
    ) -> None:
        self._identity = identity
        self._policy = policy
        self._clock = clock
        self._random = random
        self._send = send
        block_size = identity.me.geometry.block_size
        self._tools = PullTools(self._dial_to, worker, clock, identity.layout, block_size, limits or PullLimits())
        self._dials: dict[Address, Dial] = {}
        self._pulls: dict[PullId, Pull] = {}
        self._claims: dict[bytes, Pull] = {}
        self._told: set[PullId] = set()
        self._next = 0
        self._dropped = 0

    @property
    def num_open(self) -> int:
        """Transfers that need `tick`, those in quarantine included."""
        return len(self._pulls)

    @property
    def num_quarantined(self) -> int:
        """Transfers that have ended and whose pages may still be written to."""
        return sum(pull.state is PullState.ABANDONED for pull in self._pulls.values())

    @property
    def dropped(self) -> int:
        """Frames that were ignored."""
        return self._dropped + sum(dial.dropped for dial in self._dials.values())

    def pull(self, want: Want | ContentWant, pull_id: PullId | None = None) -> PullId:
        """Start a transfer; nothing is sent before the next `tick`. `pull_id`: a number that none had before, else the
        next one."""
        number = self._next + 1 if pull_id is None else pull_id
        if number in self._pulls:
            raise AssertionError(f"pull {number} is open already")
        self._next = max(self._next, number)
        pull = Pull(PullId(number), want, self._random(NONCE_BYTES), self._tools)
        self._pulls[pull.id] = self._claims[pull.claim] = pull
        return pull.id

    def abort(self, pull: PullId) -> None:
        if pull in self._pulls:
            self._pulls[pull].abort()

    def receive(self, address: Address, frame: bytes) -> None:
        """A frame that came from a producer's address. Never raises on what a peer sent."""
        dial = self._dials.get(address)
        if dial is None:
            self._dropped += 1
            return
        reply = dial.receive(frame)
        pull = self._claims.get(reply.claim) if reply is not None else None
        if reply is not None and pull is not None and pull.dial is dial:
            pull.receive(reply)

    def tick(self) -> list[PullEnded | PagesFree]:
        """Drive everything once. Returns what has ended since the last call, in order."""
        for dial in self._dials.values():
            dial.tick()
        events: list[PullEnded | PagesFree] = []
        for pull in list(self._pulls.values()):
            pull.advance()
            events += self._ended(pull)
        return events

    def _ended(self, pull: Pull) -> list[PullEnded | PagesFree]:
        events: list[PullEnded | PagesFree] = []
        if pull.is_over and pull.id not in self._told:
            self._told.add(pull.id)
            if pull.silent and pull.dial is not None:
                # The next transfer begins with a new handshake: the peer may have forgotten this session.
                pull.dial.close("the peer did not answer")
            events.append(PullEnded(pull.id, pull.failure, pull.position, pull.checkpoint_position, pull.volume))
        if pull.is_settled:
            del self._pulls[pull.id], self._claims[pull.claim]
            self._told.discard(pull.id)
            events.append(PagesFree(pull.id))
        return events

    def _dial_to(self, host: str, port: int, engine_id: str) -> Dial | str:
        refusal = self._policy.refusal(host)
        if refusal is not None:
            return f"remote_host {refusal}"
        address = (host, port)
        dial = self._dials.get(address)
        if dial is not None and dial.peer is not None and dial.peer.engine_id != engine_id and self._is_idle(dial):
            # Whoever listens there now has made the offer: the peer of this session has restarted, or never was.
            dial.close("another engine is expected at this address")
        if dial is None or dial.state is DialState.CLOSED:
            self._forget_dials()
            if len(self._dials) >= _MAX_DIALS:
                return f"there are {_MAX_DIALS} connections to other engines already"
            dial = Dial(self._identity, self._clock, self._random, lambda frame: self._send(address, frame))
            self._dials[address] = dial
        return dial

    def _is_idle(self, dial: Dial) -> bool:
        """Whether no transfer waits for what comes by this connection."""
        return not any(pull.dial is dial and not pull.is_over for pull in self._pulls.values())

    def _forget_dials(self) -> None:
        """Closed connections go; of the idle ones only when there are many."""
        used = {id(pull.dial) for pull in self._pulls.values()}
        for address, dial in list(self._dials.items()):
            idle = id(dial) not in used
            if dial.state is DialState.CLOSED or (idle and len(self._dials) >= _MAX_DIALS):
                self._dropped += dial.dropped
                del self._dials[address]
