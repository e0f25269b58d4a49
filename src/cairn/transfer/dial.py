"""The consumer's half of the handshake, and the session that comes of it.

NEW --open--> GREETING --Challenge--> PROVING --Welcome--> OPEN
                 +---- Denied, wrong proof, time is up ----+----> CLOSED
"""

from collections.abc import Callable, Mapping
from enum import Enum
from types import MappingProxyType

from cairn.transfer.contract import Peer
from cairn.transfer.frames import outer_frames, replies, requests
from cairn.transfer.proof import NONCE_BYTES, Role, Seal
from cairn.transfer.sessions import HANDSHAKE_SECONDS, Identity
from cairn.transfer.transcript import framed_ranks, transcript
from cairn.transfer.wire import (
    VERSION,
    Challenge,
    Denied,
    Frame,
    FromProducer,
    Hello,
    Prove,
    Sealed,
    ToProducer,
    Welcome,
)
from cairn.types import Clock

__all__ = ["TRANSITIONS", "Dial", "DialState"]

REPEAT_SECONDS = 0.5
"""What was not answered by then is said again."""


class DialState(Enum):
    """Where a connection is."""

    NEW = "new"
    GREETING = "greeting"
    """Hello is out."""
    PROVING = "proving"
    """The producer has proved itself; our proof is out."""
    OPEN = "open"
    """Both have proved themselves; `peer` is known."""
    CLOSED = "closed"
    """Over, and `failure` says why. A new Dial may try again."""


TRANSITIONS: Mapping[DialState, frozenset[DialState]] = MappingProxyType(
    {
        DialState.NEW: frozenset({DialState.GREETING, DialState.CLOSED}),
        DialState.GREETING: frozenset({DialState.PROVING, DialState.CLOSED}),
        DialState.PROVING: frozenset({DialState.OPEN, DialState.CLOSED}),
        DialState.OPEN: frozenset({DialState.CLOSED}),
        DialState.CLOSED: frozenset(),
    }
)


class Dial:
    """One connection to one producer. `send` puts a frame on its way and may lose it."""

    def __init__(
        self, identity: Identity, clock: Clock, random: Callable[[int], bytes], send: Callable[[bytes], None]
    ) -> None:
        self._identity = identity
        self._clock = clock
        self._send = send
        self._frames = outer_frames()
        self._requests = requests()
        self._replies = replies()
        me = identity.me
        self._hello = Hello(VERSION, me.engine_id, random(NONCE_BYTES), identity.layout, me.geometry)
        self._said: Frame = self._hello
        self._repeat_at = self._until = clock.now()
        self._seal: Seal | None = None
        self._session = b""
        self._ignored = 0
        self.state = DialState.NEW
        self.peer: Peer | None = None
        self.failure: str | None = None

    @property
    def dropped(self) -> int:
        """Frames that were ignored."""
        return self._frames.dropped + self._replies.dropped + self._ignored

    def open(self) -> None:
        """Begin; later calls do nothing."""
        if self.state is DialState.NEW:
            self._to(DialState.GREETING)
            self._until = self._clock.now() + HANDSHAKE_SECONDS
            self._say(self._hello)

    def tick(self) -> None:
        """Repeat what was not answered, or give up."""
        if self.state not in (DialState.GREETING, DialState.PROVING):
            return
        now = self._clock.now()
        if now >= self._until:
            self._close(f"no answer to the handshake within {HANDSHAKE_SECONDS:g} s")
        elif now >= self._repeat_at:
            self._say(self._said)

    def close(self, failure: str) -> None:
        """Give the connection up; later calls do nothing."""
        if self.state is not DialState.CLOSED:
            self._close(failure)

    def request(self, record: ToProducer) -> None:
        """Send a record under the session's seal. Lost while the session is not open."""
        if self._seal is not None and self.state is DialState.OPEN:
            body = self._requests.encode(record)
            self._send(self._frames.encode(Sealed(self._session, self._seal.mark(Role.CONSUMER, body), body)))

    def receive(self, frame: bytes) -> FromProducer | None:
        """Take a frame; returns the record in it, if it is one of this session."""
        match self._frames.decode(frame):
            case Challenge(answers=answers) as challenge if (
                self.state is DialState.GREETING and answers == self._hello.nonce
            ):
                self._challenge(challenge)
            case Welcome(session=session) as welcome if self.state is DialState.PROVING and session == self._session:
                self._welcome(welcome)
            case Denied(answers=answers, text=text) if self._is_denied(answers):
                self._close(f"refused by the peer: {text}")
            case Sealed(session=session) as sealed if self.state is DialState.OPEN and session == self._session:
                return self._sealed(sealed)
            case None:
                pass
            case _:
                self._ignored += 1
        return None

    def _challenge(self, challenge: Challenge) -> None:
        peer = Peer(challenge.engine_id, challenge.geometry, ())
        if challenge.layout != self._identity.layout:
            self._close("the layouts differ: both sides must serve the same model with the same dtypes")
            return
        seal = Seal(self._identity.secret, transcript(self._hello, challenge.nonce, peer, challenge.layout))
        if not seal.proves(Role.PRODUCER, challenge.proof):
            self._close("the peer's proof is wrong: both sides need the same --kv-secret-file")
            return
        self._seal, self._session, self.peer = seal, challenge.nonce, peer
        self._to(DialState.PROVING)
        self._say(Prove(self._session, seal.proof(Role.CONSUMER)))

    def _welcome(self, welcome: Welcome) -> None:
        if self._seal is None or self.peer is None:
            raise AssertionError("proving without a challenge")
        if not self._seal.marks(Role.PRODUCER, framed_ranks(welcome.ranks), welcome.mark):
            self._ignored += 1
            return
        self.peer = Peer(self.peer.engine_id, self.peer.geometry, tuple(welcome.ranks))
        self._to(DialState.OPEN)

    def _sealed(self, sealed: Sealed) -> FromProducer | None:
        if self._seal is None or not self._seal.marks(Role.PRODUCER, sealed.body, sealed.mark):
            self._ignored += 1
            return None
        return self._replies.decode(sealed.body)

    def _is_denied(self, answers: bytes) -> bool:
        """Whether a Denied speaks of what is open now. It is not proven, but only who sees our nonces can make one."""
        match self.state:
            case DialState.GREETING:
                return answers == self._hello.nonce
            case DialState.PROVING | DialState.OPEN:
                return answers == self._session
            case _:
                return False

    def _say(self, frame: Frame) -> None:
        self._said = frame
        self._repeat_at = self._clock.now() + REPEAT_SECONDS
        self._send(self._frames.encode(frame))

    def _close(self, failure: str) -> None:
        self.failure = failure
        self._to(DialState.CLOSED)

    def _to(self, state: DialState) -> None:
        """The only place where the state changes."""
        if state not in TRANSITIONS[self.state]:
            raise AssertionError(f"{self.state.value} -> {state.value} is not a transition")
        self.state = state
