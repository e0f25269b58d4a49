"""The consumer's side of transfers: all pulls of one engine, and its sessions with producers."""

import logging
from collections.abc import Callable
from functools import partial

from cairn.transfer.contract import Identity, KvSource, PagesFree, PullEnded, PullId, PullSpec, WorkerSide
from cairn.transfer.peers import Address, PeerPolicy, UnresponsivePeers
from cairn.transfer.pull import Pull, PullLimits, PullState, PullTools
from cairn.transfer.session import ProducerSession, SessionState
from cairn.transfer.wire import NONCE_BYTES, Denied
from cairn.types import Clock

_MAX_SESSIONS = 256

logger = logging.getLogger(__name__)


class Consumer:
    """All pulls of one engine. `send(address, frame)` sends a frame to a producer and may lose it. Call `tick` again
    and again while `num_open` is not 0."""

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
        limits = limits or PullLimits()
        block_size = identity.me.geometry.block_size
        self._tools = PullTools(self._session_with, worker, clock, identity.layout, block_size, limits)
        self._sessions: dict[Address, ProducerSession] = {}
        self._unresponsive = UnresponsivePeers(clock, limits.retry_silent)
        self._pulls: dict[PullId, Pull] = {}
        self._by_claim: dict[bytes, Pull] = {}
        self._next = 0
        self._dropped = 0

    @property
    def num_open(self) -> int:
        """Pulls that need `tick`, those in quarantine included."""
        return len(self._pulls)

    @property
    def num_quarantined(self) -> int:
        """Pulls that have ended and whose pages may still be written to."""
        return sum(pull.state is PullState.ABANDONED for pull in self._pulls.values())

    @property
    def num_skipped(self) -> int:
        """Pulls that were not tried, because their peer had not answered lately."""
        return self._unresponsive.num_skipped

    @property
    def dropped(self) -> int:
        """Frames that were ignored."""
        return self._dropped + sum(session.dropped for session in self._sessions.values())

    def pull(self, spec: PullSpec, pull_id: PullId | None = None) -> PullId:
        """Start a pull; nothing is sent before the next `tick`. `pull_id`: a number that no other pull ever had, None
        for the next one."""
        number = self._next + 1 if pull_id is None else pull_id
        if number in self._pulls:
            raise AssertionError(f"pull {number} is open already")
        self._next = max(self._next, number)
        pull = Pull(PullId(number), spec, self._random(NONCE_BYTES), self._tools)
        self._pulls[pull.id] = self._by_claim[pull.claim] = pull
        return pull.id

    def abort(self, pull: PullId) -> None:
        if pull in self._pulls:
            self._pulls[pull].abort()

    def receive(self, address: Address, frame: bytes) -> None:
        """A frame that came from a producer's address. Never raises on what a peer sent."""
        session = self._sessions.get(address)
        if session is None:
            self._dropped += 1
            return
        self._unresponsive.remove(address)
        reply = session.receive(frame)
        if reply is None:
            return
        pull = self._by_claim.get(reply.answers if isinstance(reply, Denied) else reply.claim)
        if pull is None or pull.session is not session:
            return
        if isinstance(reply, Denied):
            session.close(f"refused by the peer: {reply.text}")
        else:
            pull.receive(reply)

    def lose(self, address: Address, reason: str) -> None:
        """The connection to this address has ended, or could not be made."""
        session = self._sessions.get(address)
        if session is not None and session.lose(reason):
            self._unresponsive.add(address, session.engine_id)

    def tick(self) -> list[PullEnded | PagesFree]:
        """Drive everything once. Returns what has ended since the last call, in order."""
        for address, session in self._sessions.items():
            if session.tick():
                self._unresponsive.add(address, session.engine_id)
        events: list[PullEnded | PagesFree] = []
        for pull in list(self._pulls.values()):
            try:
                pull.advance()
            except Exception as error:
                # One peer's doing must not end the thread that serves all of them.
                logger.exception("transfer %d of %s", pull.id, pull.spec.request_id)
                pull.abort(f"{type(error).__name__}: {error}")
            if pull.is_over and not pull.is_reported:
                pull.is_reported = True
                if pull.is_silent and pull.session is not None:
                    # The next transfer begins with a new handshake: the peer may have forgotten this session.
                    pull.session.close("the peer did not answer")
                    self._unresponsive.add(pull.spec.source.address, pull.spec.source.engine_id)
                events.append(PullEnded(pull.id, pull.failure, pull.position, pull.checkpoint_position, pull.volume))
            if pull.is_drained:
                del self._pulls[pull.id], self._by_claim[pull.claim]
                events.append(PagesFree(pull.id))
        return events

    def _session_with(self, source: KvSource) -> ProducerSession | str:
        """The session with this server, or why there is none."""
        refusal = self._policy.refusal(source.host)
        if refusal is not None:
            return f"remote_host {refusal}"
        address = source.address
        session = self._sessions.get(address)
        if session is not None and session.peer is not None and session.peer.engine_id != source.engine_id:
            if all(pull.session is not session or pull.is_over for pull in self._pulls.values()):
                # The peer of this session has restarted, or never was the one that made the offer.
                session.close("another engine is expected at this address")
        if session is None or session.state is not SessionState.OPEN:
            silent = self._unresponsive.refuse(address, source.engine_id)
            if silent is not None:
                return silent
        if session is None or session.state is SessionState.CLOSED:
            self._remove_sessions()
            if len(self._sessions) >= _MAX_SESSIONS:
                return f"there are {_MAX_SESSIONS} sessions with other engines already"
            send = partial(self._send, address)
            session = ProducerSession(source.engine_id, self._identity, self._clock, self._random, send)
            self._sessions[address] = session
        return session

    def _remove_sessions(self) -> None:
        """Remove closed sessions, and idle ones only when there are many."""
        used = {id(pull.session) for pull in self._pulls.values()}
        for address, session in list(self._sessions.items()):
            idle = id(session) not in used
            if session.state is SessionState.CLOSED or (idle and len(self._sessions) >= _MAX_SESSIONS):
                self._dropped += session.dropped
                del self._sessions[address]
