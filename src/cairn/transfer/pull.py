"""One transfer, from the consumer's side, as one state machine.

    RESOLVING -> HANDSHAKING -> CLAIMING -> READING -> CONFIRMING -> DONE
                      |             +---- nothing to read ---^
                      +---- only a release ---------------------------^
    any of them -> FAILED            nothing can arrive any more
    READING     -> ABANDONED         a late write may still come: the pages stay in quarantine
    ABANDONED   -> FAILED            the link says that none will

No method waits. `advance` looks at clock, connection and link, repeats what was not answered, and goes on or gives up.
The outcome is known in DONE, FAILED and ABANDONED. Every state but ABANDONED has a deadline, and nobody waits for
ABANDONED. What was read may be used in DONE alone: the producer has then confirmed that its lease never lapsed before
the last byte had arrived.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType

from cairn.transfer.claim import make_claim, plan_read
from cairn.transfer.contract import KvSource, PullId, PullSpec, Volume, WorkerSide
from cairn.transfer.links.contract import LinkError, ReadState
from cairn.transfer.session import ProducerSession, SessionState
from cairn.transfer.wire import (
    Claim,
    Confirm,
    Confirmed,
    Granted,
    Heartbeat,
    Refused,
    Release,
    Reply,
    Request,
    RequestTag,
)
from cairn.types import Clock


class PullState(Enum):
    """Where a transfer is, and what is true there."""

    RESOLVING = "resolving"
    """Nothing was sent; the host has not been checked."""
    HANDSHAKING = "handshaking"
    """The peer may be spoken to; it has not proved itself."""
    CLAIMING = "claiming"
    """The claim is sent; the lease may be ours or not."""
    READING = "reading"
    """The lease is ours; bytes arrive in the own pages."""
    CONFIRMING = "confirming"
    """All bytes have arrived; the producer has to confirm that the lease never lapsed."""
    DONE = "done"
    """Confirmed. The pages may be used."""
    FAILED = "failed"
    """Nothing may be used. No write can come; the pages are free."""
    ABANDONED = "abandoned"
    """Nothing may be used, and bytes may still arrive: the pages are in quarantine."""


TRANSITIONS: Mapping[PullState, frozenset[PullState]] = MappingProxyType(
    {
        PullState.RESOLVING: frozenset({PullState.HANDSHAKING, PullState.FAILED}),
        PullState.HANDSHAKING: frozenset({PullState.CLAIMING, PullState.DONE, PullState.FAILED}),
        PullState.CLAIMING: frozenset({PullState.READING, PullState.CONFIRMING, PullState.FAILED}),
        PullState.READING: frozenset({PullState.CONFIRMING, PullState.FAILED, PullState.ABANDONED}),
        PullState.CONFIRMING: frozenset({PullState.DONE, PullState.FAILED}),
        PullState.ABANDONED: frozenset({PullState.FAILED}),
        PullState.DONE: frozenset(),
        PullState.FAILED: frozenset(),
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PullLimits:
    """Times in seconds: `answer` and `read` are deadlines, `repeat` and `heartbeat` intervals; a peer that did not
    answer is not tried again for `retry_silent`."""

    answer: float = 5.0
    read: float = 30.0
    repeat: float = 0.5
    heartbeat: float = 5.0
    retry_silent: float = 10.0


_REQUESTS: Mapping[PullState, RequestTag] = MappingProxyType(
    {PullState.CLAIMING: "claim", PullState.READING: "heartbeat", PullState.CONFIRMING: "confirm"}
)
"""The request that a refusal has to answer, by state."""


@dataclass(frozen=True, slots=True)
class PullTools:
    """What all transfers of an engine share. `session_with` returns the session with a server, or why there is none.
    `layout` and `block_size` are the own ones."""

    session_with: Callable[[KvSource], ProducerSession | str]
    worker: WorkerSide
    clock: Clock
    layout: bytes
    block_size: int
    limits: PullLimits


class Pull:
    """One transfer. `claim`: 16 random bytes that name it to the producer. Call `advance` again and again. `is_silent`:
    it failed because the peer did not answer; `is_reported`: for the owner, who reports the outcome once."""

    def __init__(self, pull: PullId, spec: PullSpec, claim: bytes, tools: PullTools) -> None:
        self.id = pull
        self.spec = spec
        self.claim = claim
        self.state = PullState.RESOLVING
        self.failure: str | None = None
        self.is_silent = False
        self.is_reported = False
        self.volume: Volume | None = None
        self.session: ProducerSession | None = None
        self._tools = tools
        self._until = self._repeat_at = tools.clock.now()
        self._unanswered: Claim | Confirm | None = None
        self._grant: Granted | None = None

    @property
    def position(self) -> int:
        """Tokens that may be used after a success. Before a grant: those that the lease promises."""
        if self._grant is not None:
            return self._grant.position
        return 0 if self.spec.source.nonce is None else len(self.spec.keys)

    @property
    def checkpoint_position(self) -> int | None:
        """Position of the granted checkpoint, None if there is none."""
        return None if self._grant is None else self._grant.checkpoint_position

    @property
    def is_over(self) -> bool:
        """Whether the outcome is known."""
        return self.state in (PullState.DONE, PullState.FAILED, PullState.ABANDONED)

    @property
    def is_drained(self) -> bool:
        """Whether the outcome is known, and no write can come any more."""
        return self.state in (PullState.DONE, PullState.FAILED)

    def advance(self) -> None:
        """Look at clock, connection and link, and go on. Call it again and again until `is_drained`."""
        match self.state:
            case PullState.RESOLVING:
                self._resolve()
            case PullState.HANDSHAKING:
                self._handshake()
            case PullState.CLAIMING | PullState.CONFIRMING:
                self._wait_for_answer()
            case PullState.READING:
                self._read()
            case PullState.ABANDONED:
                self._drain()

    def abort(self, reason: str = "aborted") -> None:
        """Give the transfer up."""
        if not self.is_over:
            self._give_up(reason)

    def receive(self, reply: Reply) -> None:
        """Handle a record of the producer that names this claim. One that does not fit the state is late and
        ignored."""
        match self.state, reply:
            case PullState.CLAIMING, Granted():
                self._granted(reply)
            case PullState.CONFIRMING, Confirmed() if self._grant and reply.generation == self._grant.generation:
                self._to(PullState.DONE)
            case state, Refused(request=tag, reason=reason) if tag == _REQUESTS.get(state):
                # Nothing to give back: the lease is not ours, or no longer.
                self._give_up(f"refused by the peer: {reason.value}", release=False)

    def _resolve(self) -> None:
        session = self._tools.session_with(self.spec.source)
        if isinstance(session, str):
            self._give_up(session)
            return
        self.session = session
        session.open()
        self._until = self._tools.clock.now() + self._tools.limits.answer
        self._to(PullState.HANDSHAKING)
        self._handshake()

    def _handshake(self) -> None:
        if self.session is None or self.session.state is not SessionState.OPEN:
            self._check_peer()
            return
        peer = self.session.peer
        if peer is None or peer.engine_id != self.spec.source.engine_id:
            self._give_up("the peer is another engine than the one that made the offer: it has restarted")
        elif self.spec.release_only:
            self._release()
            self._to(PullState.DONE)
        elif (record := make_claim(self.spec, self.claim, self._tools.layout)) is None:
            self._give_up("there is too little to ask for")
        else:
            self._to(PullState.CLAIMING)
            self._ask(record)

    def _granted(self, granted: Granted) -> None:
        peer = self.session.peer if self.session is not None else None
        order = plan_read(self.spec, self.id, peer, granted, self._tools.block_size) if peer is not None else None
        if order is None:
            self._give_up("the peer's grant is not what was claimed")
            return
        self._grant = granted
        if not len(order.remote_pages) and order.remote_checkpoint is None:
            self._confirm(granted)
            return
        try:
            self._tools.worker.start(order)
        except LinkError as error:
            self._give_up(f"the pages cannot be read: {error}")
            return
        now = self._tools.clock.now()
        self._until, self._repeat_at = now + self._tools.limits.read, now + self._tools.limits.heartbeat
        self._to(PullState.READING)
        self._read()

    def _read(self) -> None:
        assert self._grant is not None
        state = self._tools.worker.poll(self.id)
        now = self._tools.clock.now()
        if state is ReadState.DONE:
            self.volume = self._tools.worker.take_volume(self.id)
            self._confirm(self._grant)
        elif state is not ReadState.READING:
            self._release()
            self._fail("the link failed while reading")
        elif now >= self._until:
            self._give_up(f"the read took longer than {self._tools.limits.read:g} s")
        elif self.session is None or self.session.state is not SessionState.OPEN:
            self._check_peer()
        else:
            self._heartbeat(self._grant, now)

    def _drain(self) -> None:
        """Some links end a read only with the peer's help, so the heartbeats go on."""
        assert self._grant is not None
        if self._tools.worker.poll(self.id) is not ReadState.READING:
            self._to(PullState.FAILED)
        else:
            self._heartbeat(self._grant, self._tools.clock.now())

    def _heartbeat(self, grant: Granted, now: float) -> None:
        if now >= self._repeat_at:
            self._repeat_at = now + self._tools.limits.heartbeat
            self._send(Heartbeat(self.claim, grant.request_id, grant.nonce))

    def _confirm(self, grant: Granted) -> None:
        self._to(PullState.CONFIRMING)
        self._ask(Confirm(self.claim, grant.request_id, grant.nonce, grant.generation))

    def _wait_for_answer(self) -> None:
        now = self._tools.clock.now()
        if self._check_peer() and now >= self._repeat_at and self._unanswered is not None:
            self._repeat_at = now + self._tools.limits.repeat
            self._send(self._unanswered)

    def _check_peer(self) -> bool:
        """Whether the session is open and the deadline has not passed; gives up otherwise."""
        if self.session is None or self.session.state is SessionState.CLOSED:
            self._give_up(
                self.session.failure or "the connection is closed" if self.session else "there is no connection"
            )
        elif self._tools.clock.now() >= self._until:
            self.is_silent = True
            self._give_up(f"no answer within {self._tools.limits.answer:g} s while {self.state.value}")
        else:
            return True
        return False

    def _ask(self, record: Claim | Confirm) -> None:
        now = self._tools.clock.now()
        self._unanswered = record
        self._until, self._repeat_at = now + self._tools.limits.answer, now + self._tools.limits.repeat
        self._send(record)

    def _send(self, record: Request) -> None:
        if self.session is not None:
            self.session.request(record)

    def _release(self) -> None:
        """Sent once; if it is lost, the lease expires."""
        lease = self.spec.source if self._grant is None else self._grant
        self._send(Release(self.claim, lease.request_id, lease.nonce))

    def _give_up(self, failure: str, *, release: bool = True) -> None:
        """Fail, or go into quarantine while something may still be written."""
        if release and self.state in (PullState.CLAIMING, PullState.READING, PullState.CONFIRMING):
            self._release()
        if self.state is PullState.READING:
            self._tools.worker.cancel(self.id)
            if self._tools.worker.poll(self.id) is ReadState.READING:
                self.failure = failure
                self._to(PullState.ABANDONED)
                return
        self._fail(failure)

    def _fail(self, failure: str) -> None:
        self.failure = failure
        self._to(PullState.FAILED)

    def _to(self, state: PullState) -> None:
        """Change the state; the only place that does."""
        if state not in TRANSITIONS[self.state]:
            raise AssertionError(f"{self.spec.request_id}: {self.state.value} -> {state.value} is not a transition")
        self.state = state
