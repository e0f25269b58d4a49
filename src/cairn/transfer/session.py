"""Both ends of a session on the side channel: one connection to a producer, and all those of a producer's consumers.

    NEW --open--> GREETING --Welcome--> OPEN
                     +---- Denied, lost, time is up ----> CLOSED

The other end of a connection has proved that it holds the secret before any frame arrives here.
"""

from collections import OrderedDict
from collections.abc import Callable, Mapping
from enum import Enum
from types import MappingProxyType
from typing import TypeAlias

from cairn.errors import ConfigError
from cairn.transfer.contract import Identity, Peer, PeerGeometry
from cairn.transfer.geometry import check_checkpoint_dtypes
from cairn.transfer.wire import (
    NONCE_BYTES,
    VERSION,
    Denied,
    FromProducer,
    Hello,
    Reply,
    Request,
    ToProducer,
    Welcome,
    replies,
    requests,
)
from cairn.types import Clock

HANDSHAKE_SECONDS = 5.0
"""How long connecting and the answer to Hello may take."""

REPEAT_SECONDS = 0.5
"""How long an answer may take before a record is repeated."""

Serve: TypeAlias = Callable[[bytes, Request], Reply | None]
"""Answers a record that came by this connection; None when the answer comes later, by `ConsumerSessions.encode`."""

_SILENT_SECONDS = 1.0
_MAX_OPEN = 1024
_OTHER_LAYOUT = "the layouts differ: both sides must serve the same model with the same dtype and quantization"


def _explain_layouts(remote: PeerGeometry, local: PeerGeometry) -> str:
    """Why two hashes of layouts differ, as far as the geometries tell."""
    try:
        check_checkpoint_dtypes(remote, local)
    except ConfigError as error:
        return str(error)
    there, here = (each.page_bytes // each.page_units // each.block_size for each in (remote, local))
    if there != here and remote.header_bytes == local.header_bytes:
        return (
            f"the layouts differ: a kv head has {there} bytes a token at the peer, {here} here: both sides must serve "
            "the same model, and both or neither with the head that drafts: have --speculative-config say mtp, or "
            "suffix, on both"
        )
    return _OTHER_LAYOUT


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
    """`engine_id`: the engine that is expected at the other end. `send` puts a frame on its way and may lose it."""

    def __init__(
        self,
        engine_id: str,
        identity: Identity,
        clock: Clock,
        random: Callable[[int], bytes],
        send: Callable[[bytes], None],
    ) -> None:
        self.engine_id = engine_id
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

    @property
    def dropped(self) -> int:
        """Frames that were ignored."""
        return self._replies.dropped + self._num_ignored

    def open(self) -> None:
        """Send Hello; later calls do nothing."""
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
            self.close(f"no answer to the handshake within {HANDSHAKE_SECONDS:g} s")
            return True
        if now >= self._repeat_at:
            self._greet()
        return False

    def close(self, failure: str) -> None:
        """End the session; later calls do nothing."""
        if self.state is not SessionState.CLOSED:
            self.failure = failure
            self._to(SessionState.CLOSED)

    def lose(self, reason: str) -> bool:
        """The connection has ended, or could not be made; returns whether the peer had been silent until then. A
        refusal comes at once; what took longer was silence. Later calls, and those of a closed session, do nothing."""
        waited = self._clock.now() - (self._until - HANDSHAKE_SECONDS)
        is_silent = self.state is SessionState.GREETING and waited >= _SILENT_SECONDS
        self.close(reason)
        return is_silent

    def request(self, record: ToProducer) -> None:
        """Send a record. Lost while the session is not open."""
        if self.state is SessionState.OPEN:
            self._send(self._requests.encode(record))

    def receive(self, frame: bytes) -> Reply | Denied | None:
        """Take a frame; returns the record in it, if it answers a claim."""
        record = self._replies.decode(frame)
        is_answer = isinstance(record, Welcome | Denied) and record.answers == self._hello.nonce
        if self.state is SessionState.GREETING and is_answer:
            if isinstance(record, Welcome):
                self._welcome(record)
            elif isinstance(record, Denied):
                self.close(f"refused by the peer: {record.text}")
        elif record is not None and not isinstance(record, Welcome):  # Hello is repeated, so its answer may be, too
            if self.state is SessionState.OPEN:
                return record
            self._num_ignored += 1
        return None

    def _welcome(self, welcome: Welcome) -> None:
        if welcome.layout != self._layout:
            self.close(_explain_layouts(welcome.geometry, self._hello.geometry))
            return
        self.peer = Peer(welcome.engine_id, welcome.geometry, tuple(welcome.ranks))
        self._to(SessionState.OPEN)

    def _greet(self) -> None:
        self._repeat_at = self._clock.now() + REPEAT_SECONDS
        self._send(self._requests.encode(self._hello))

    def _to(self, state: SessionState) -> None:
        """Change the state; the only place that does."""
        if state not in TRANSITIONS[self.state]:
            raise AssertionError(f"{self.state.value} -> {state.value} is not a transition")
        self.state = state


class ConsumerSessions:
    """The sessions of a producer, by connection (`sender`), at most 1,024. `dropped` counts frames that were no
    record."""

    def __init__(self, identity: Identity) -> None:
        self._identity = identity
        self._requests = requests()
        self._replies = replies()
        self._greeted: OrderedDict[bytes, None] = OrderedDict()

    @property
    def dropped(self) -> int:
        return self._requests.dropped

    @property
    def num_open(self) -> int:
        """Connections that have been welcomed."""
        return len(self._greeted)

    def receive(self, sender: bytes, frame: bytes, serve: Serve) -> bytes | None:
        """The answer to a frame, or None when there is none (yet). `serve` is asked on welcomed connections alone."""
        match self._requests.decode(frame):
            case None:
                return None
            case Hello() as hello:
                answer: FromProducer | None = self._greet(sender, hello)
            case request if sender in self._greeted:
                self._greeted.move_to_end(sender)
                answer = serve(sender, request)
            case request:
                answer = Denied(request.claim, "no such session: it is too old, or from before a restart")
        return None if answer is None else self.encode(answer)

    def encode(self, reply: FromProducer) -> bytes:
        """A record as a frame."""
        return self._replies.encode(reply)

    def forget(self, sender: bytes) -> None:
        """The connection has ended."""
        self._greeted.pop(sender, None)

    def _greet(self, sender: bytes, hello: Hello) -> Welcome | Denied:
        identity = self._identity
        if hello.version != VERSION:
            return Denied(
                hello.nonce, f"protocol version {hello.version} here, {VERSION} there: run the same cairn on both"
            )
        if hello.layout != identity.layout:
            # It is read at the other end.
            return Denied(hello.nonce, _explain_layouts(identity.me.geometry, hello.geometry))
        self._greeted[sender] = None
        if len(self._greeted) > _MAX_OPEN:
            self._greeted.popitem(last=False)
        return Welcome(
            hello.nonce, identity.me.engine_id, identity.layout, identity.me.geometry, list(identity.me.ranks)
        )
