"""The consumer's side of transfers: all pulls of one engine, and its sessions with producers."""

from collections.abc import Callable
from functools import partial

from cairn.transfer.contract import KvSource, PagesFree, PullEnded, PullId, PullSpec
from cairn.transfer.peers import Address, PeerPolicy, UnresponsivePeers
from cairn.transfer.pull import Pull, PullLimits
from cairn.transfer.session import ConsumerTools, PeerFailed, ProducerSession
from cairn.types import Clock

_MAX_SESSIONS = 256


class Consumer:
    """All pulls of one engine. `emit` is called with each outcome. Call `look` again and again while
    `num_open` is not 0."""

    def __init__(
        self, tools: ConsumerTools, policy: PeerPolicy, clock: Clock, emit: Callable[[PullEnded | PagesFree], None]
    ) -> None:
        self.frames = tools.frames
        self._tools = tools
        self._policy = policy
        self._emit = emit
        self._sessions: dict[Address, ProducerSession] = {}
        self.unresponsive = UnresponsivePeers(clock, PullLimits.retry_silent)
        self._pulls: dict[PullId, Pull] = {}

    @property
    def num_open(self) -> int:
        """Pulls that need `look`, those in quarantine included."""
        return len(self._pulls)

    def pull(self, spec: PullSpec, number: PullId) -> None:
        """Start a pull. `number`: one that no other pull ever had."""
        if number in self._pulls:
            raise AssertionError(f"pull {number} is open already")
        pull = self._pulls[number] = Pull(number, spec, self._tools, self._session_with)
        pull.task = self._tools.event_loop.create_task(self._carry_out(pull))

    def abort(self, pull: PullId) -> None:
        if pull in self._pulls:
            self._pulls[pull].abort()

    def look(self) -> None:
        """Drive the link."""
        for pull in list(self._pulls.values()):
            pull.look()

    async def _carry_out(self, pull: Pull) -> None:
        await pull.run()
        self._emit(pull.outcome)
        await pull.drain()
        del self._pulls[pull.id]
        self._emit(PagesFree(pull.id))

    def _session_with(self, source: KvSource) -> ProducerSession:
        """The session with this server. Raises PeerFailed where there is none."""
        refusal = self._policy.refusal(source.host)
        if refusal is not None:
            raise PeerFailed(f"remote_host {refusal}")
        session = self._sessions.get(source.address)
        if session is not None and session.peer is not None and session.peer.engine_id != source.engine_id:
            if not self._is_used(session):
                # The peer of this session has restarted, or never was the one that made the offer.
                session.close("another engine is expected at this address")
                session = None
        if session is None or session.peer is None:
            silent = self.unresponsive.refuse(source.address, source.engine_id)
            if silent is not None:
                raise PeerFailed(silent)
        return session or self._new_session(source)

    def _new_session(self, source: KvSource) -> ProducerSession:
        if len(self._sessions) >= _MAX_SESSIONS:
            idle = next((session for session in self._sessions.values() if not self._is_used(session)), None)
            if idle is None:
                raise PeerFailed(f"there are {_MAX_SESSIONS} sessions with other engines already")
            idle.close("others needed its place")
        address = source.address

        def ended(session: ProducerSession, failure: PeerFailed) -> None:
            del self._sessions[address]
            if failure.is_silent:
                self.unresponsive.add(address, session.engine_id)

        heard = partial(self.unresponsive.remove, address)
        session = self._sessions[address] = ProducerSession(address, source.engine_id, self._tools, heard, ended)
        return session

    def _is_used(self, session: ProducerSession) -> bool:
        return any(pull.session is session and not pull.is_over for pull in self._pulls.values())
