"""One connection to one producer, as its consumer sees it.

NEW --open--> GREETING --Welcome--> OPEN
                 +---- Denied, lost, time is up ----> CLOSED

Whoever speaks to us by the connection holds the secret: the channel has seen to that before it sent anything.
"""

from collections.abc import Callable, Mapping
from enum import Enum
from types import MappingProxyType

from cairn.transfer.contract import Identity, Peer
from cairn.transfer.wire import (
    NONCE_BYTES,
    VERSION,
    Denied,
    FromProducer,
    Hello,
    Reply,
    ToProducer,
    Welcome,
    replies,
    requests,
)
from cairn.types import Clock

HANDSHAKE_SECONDS = 5.0
"""How long a producer has to be connected to and to answer Hello."""

_SILENT_SECONDS = 1.0

REPEAT_SECONDS = 0.5
"""What was not answered by then is said again."""


class SessionState(Enum):
    """Where a session is."""

    NEW = "new"
    GREETING = "greeting"
    """Hello is out."""
    OPEN = "open"
    """The producer serves the same layout; `peer` is known."""
    CLOSED = "closed"
    """Over, and `failure` says why. A new session may try again."""


TRANSITIONS: Mapping[SessionState, frozenset[SessionState]] = MappingProxyType(
    {
        SessionState.NEW: frozenset({SessionState.GREETING, SessionState.CLOSED}),
        SessionState.GREETING: frozenset({SessionState.OPEN, SessionState.CLOSED}),
        SessionState.OPEN: frozenset({SessionState.CLOSED}),
        SessionState.CLOSED: frozenset(),
    }
)


class ProducerSession:
    """`send` puts a frame on its way and may lose it. `is_silent`: it was closed because nothing had come."""

    def __init__(
        self, identity: Identity, clock: Clock, random: Callable[[int], bytes], send: Callable[[bytes], None]
    ) -> None:
        self._clock = clock
        self._send = send
        self._requests = requests()
        self._replies = replies()
        self._layout = identity.layout
        me = identity.me
        self._hello = Hello(VERSION, me.engine_id, random(NONCE_BYTES), identity.layout, me.geometry)
        self._repeat_at = self._until = clock.now()
        self._num_ignored = 0
        self.state = SessionState.NEW
        self.peer: Peer | None = None
        self.failure: str | None = None
        self.is_silent = False

    @property
    def dropped(self) -> int:
        """Frames that were ignored."""
        return self._replies.dropped + self._num_ignored

    def open(self) -> None:
        """Begin; later calls do nothing."""
        if self.state is SessionState.NEW:
            self._to(SessionState.GREETING)
            self._until = self._clock.now() + HANDSHAKE_SECONDS
            self._greet()

    def tick(self) -> bool:
        """Repeat what was not answered, or give up; returns whether it has just been given up."""
        now = self._clock.now()
        if self.state is not SessionState.GREETING:
            return False
        if now >= self._until:
            self.is_silent = True
            self.close(f"no answer to the handshake within {HANDSHAKE_SECONDS:g} s")
            return True
        if now >= self._repeat_at:
            self._greet()
        return False

    def close(self, failure: str) -> None:
        """Give the connection up; later calls do nothing."""
        if self.state is not SessionState.CLOSED:
            self.failure = failure
            self._to(SessionState.CLOSED)

    def lose(self, reason: str) -> None:
        """The connection has ended, or could not be made. A refusal comes at once; what took longer was silence."""
        if self.state is SessionState.GREETING:
            waited = self._clock.now() - (self._until - HANDSHAKE_SECONDS)
            self.is_silent = waited >= _SILENT_SECONDS
        self.close(reason)

    def request(self, record: ToProducer) -> None:
        """Send a record. Lost while the session is not open."""
        if self.state is SessionState.OPEN:
            self._send(self._requests.encode(record))

    def receive(self, frame: bytes) -> Reply | Denied | None:
        """Take a frame; returns the record in it, if it answers a claim."""
        record: FromProducer | None = self._replies.decode(frame)
        match record:
            case Welcome(answers=answers) if self.state is SessionState.GREETING and answers == self._hello.nonce:
                self._welcome(record)
                return None
            case Denied(answers=answers, text=text) if (
                self.state is SessionState.GREETING and answers == self._hello.nonce
            ):
                self.close(f"refused by the peer: {text}")
                return None
            case Welcome():
                # Hello is repeated, so its answer may be, too.
                return None
            case None:
                return None
            case _ if self.state is SessionState.OPEN:
                return record
        self._num_ignored += 1
        return None

    def _welcome(self, welcome: Welcome) -> None:
        if welcome.layout != self._layout:
            self.close("the layouts differ: both sides must serve the same model with the same dtype and quantization")
            return
        self.peer = Peer(welcome.engine_id, welcome.geometry, tuple(welcome.ranks))
        self._to(SessionState.OPEN)

    def _greet(self) -> None:
        self._repeat_at = self._clock.now() + REPEAT_SECONDS
        self._send(self._requests.encode(self._hello))

    def _to(self, state: SessionState) -> None:
        """The only place where the state changes."""
        if state not in TRANSITIONS[self.state]:
            raise AssertionError(f"{self.state.value} -> {state.value} is not a transition")
        self.state = state
