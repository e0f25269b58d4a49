"""One replica's KV events over ZMQ, into the index. The form is that of `cairn.engine.event_publisher`.

connected             the replica starts anew in the index, and the replay socket is asked for all it has
a number is missing   the replay socket is asked from there on; what it no longer has is lost, and the index starts
                      anew with what comes after
disconnected          the index keeps what it has until the publisher is back, which may be another process then
"""

import asyncio
import logging

import zmq
from zmq.utils.monitor import parse_monitor_message

from cairn.errors import ConfigError
from cairn.routing.event_sequence import EventSequence, MalformedBatch, parse_frames
from cairn.routing.index import PrefixIndex
from cairn.types import Clock, SystemClock

_END_OF_REPLAY = -1
_MAX_BATCH_BYTES = 64 << 20
_MAX_QUEUED_BATCHES = 10_000
"""As many as a publisher keeps for replays unless told otherwise."""
_MOST_BATCHES_AT_ONCE = 64
_MAX_SOCKETS = 65_536
"""Of a process: ZMQ allows for 1,023, which are those of 340 replicas."""
_RECONNECT_MS = (100, 5000)
_RUN_SECONDS = 0.5
"""How often `run` looks after deadlines where nothing comes."""

logger = logging.getLogger(__name__)


class KvEventSubscriber:
    """Keeps one replica in the index. Single-threaded: `receive` and `run` are called where the index is used.

    `endpoint`, `replay_endpoint`, `topic`: as the publisher was told, with an address that can be connected to. Without
    a replay socket the replica starts anew in the index at every lost batch.
    `silence_seconds`: how long a connection or an answer may take; `check_seconds`: after so long without a batch the
    replay socket is asked whether there was none. `context`: ZMQ's, shared by all subscribers of a process.

    `error` says why the index may be out of date, None when it is not: events are missed while nobody answers.
    """

    def __init__(
        self,
        replica: str,
        index: PrefixIndex,
        endpoint: str,
        replay_endpoint: str | None = None,
        topic: str = "",
        clock: Clock | None = None,
        silence_seconds: float = 5.0,
        check_seconds: float = 30.0,
        context: "zmq.Context[zmq.Socket[bytes]] | None" = None,
    ) -> None:
        """Connects, without waiting. Raises ConfigError for an address that is none."""
        self.error: str | None = None
        self.num_malformed = 0
        self.sequence = EventSequence(replica, index, numbered=replay_endpoint is not None)
        self._endpoint = endpoint
        self._replay_endpoint = replay_endpoint
        self._clock = clock or SystemClock()
        self._silence_seconds = silence_seconds
        self._check_seconds = check_seconds
        if context is None:
            context = zmq.Context.instance()
            context.set(zmq.MAX_SOCKETS, _MAX_SOCKETS)
        self._context = context
        self.connected = False
        self._early: tuple[int, bytes] | None = None
        """A batch before which others are missing, until these are replayed."""
        self._deadline: float | None = self._clock.now() + silence_seconds
        """For the connection or, once it is there, for the replay that is under way."""
        self._last_batch = self._clock.now()
        self._replay: zmq.Socket[bytes] | None = None
        self._events = self._socket(zmq.SUB)
        self._events.setsockopt(zmq.SUBSCRIBE, topic.encode())
        # before it connects: an event that nobody listens to is not kept
        self._monitor: zmq.Socket[bytes] = self._events.get_monitor_socket(
            zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED
        )
        try:
            _connect(self._events, endpoint, "endpoint")
            if replay_endpoint is not None:
                # so that an address that is none is known now
                with self._socket(zmq.DEALER) as socket:
                    _connect(socket, replay_endpoint, "replay_endpoint")
        except BaseException:
            self.close()
            raise

    @property
    def is_replaying(self) -> bool:
        return self.connected and self._deadline is not None

    def receive(self) -> int:
        """Put what has come into the index, 64 batches at most; returns how many. Never waits."""
        now, num_batches = self._clock.now(), 0
        self._follow_connection(now)
        while num_batches < _MOST_BATCHES_AT_ONCE:
            source = self._sources()[-1]
            frames = _take(source) if source is not self._monitor else None
            if frames is None:
                break
            num_batches += 1
            self._last_batch = now
            try:
                number, batch = parse_frames(frames)
                if source is self._replay:
                    self._on_replayed(number, batch, now)
                else:
                    self._on_batch(number, batch, now)
            except MalformedBatch as error:
                self._leave_out(error)
        self._check_deadlines(now)
        return num_batches

    async def run(self) -> None:
        """Receive until cancelled."""
        loop, ready = asyncio.get_running_loop(), asyncio.Event()
        while True:
            while self.receive() == _MOST_BATCHES_AT_ONCE:
                await asyncio.sleep(0)
            ready.clear()
            sources = self._sources()
            for socket in sources:
                loop.add_reader(socket.fileno(), ready.set)
            try:
                # a descriptor tells of the next message only once its socket was asked
                if not any(int(socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN for socket in sources):
                    async with asyncio.timeout(_RUN_SECONDS):
                        await ready.wait()
            except TimeoutError:
                pass
            finally:
                for socket in sources:
                    loop.remove_reader(socket.fileno())

    def close(self) -> None:
        """Close the sockets. The index keeps the replica."""
        self._end_replay()
        self._events.disable_monitor()
        self._monitor.close(linger=0)
        self._events.close(linger=0)

    # -- connection ----------------------------------------------------------------------------------------------

    def _socket(self, kind: int) -> "zmq.Socket[bytes]":
        socket: zmq.Socket[bytes] = self._context.socket(kind)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.RCVHWM, _MAX_QUEUED_BATCHES)
        socket.setsockopt(zmq.MAXMSGSIZE, _MAX_BATCH_BYTES)
        socket.setsockopt(zmq.RECONNECT_IVL, _RECONNECT_MS[0])
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, _RECONNECT_MS[1])
        # a machine that is gone does not say so
        socket.setsockopt(zmq.HEARTBEAT_IVL, round(self._silence_seconds * 1000))
        return socket

    def _follow_connection(self, now: float) -> None:
        while (frames := _take(self._monitor)) is not None:
            connected = parse_monitor_message(frames)["event"] == zmq.EVENT_HANDSHAKE_SUCCEEDED
            if connected:
                # perhaps another process, whose numbers start again
                self.connected, self.error, self._early = True, None, None
                self.sequence.reset(0)
                self._ask_replay(now)
            elif self.connected:
                self.connected = False
                self._end_replay()
                self._fail(f"{self._endpoint}: the publisher is gone")

    def _check_deadlines(self, now: float) -> None:
        if self._deadline is not None and now >= self._deadline:
            if not self.connected:
                self._deadline = None
                self._fail(f"{self._endpoint}: no connection within {self._silence_seconds:g} s")
            else:
                self._end_replay()
                self._fail(f"{self._replay_endpoint}: no answer within {self._silence_seconds:g} s")
                self._apply_early()
        elif self.connected and self._replay is None and now - self._last_batch >= self._check_seconds:
            self._last_batch = now
            self._ask_replay(now)

    def _fail(self, error: str) -> None:
        if error != self.error:
            logger.warning("KV events of %s: %s", self.sequence.replica, error)
        self.error = error

    # -- batches -------------------------------------------------------------------------------------------------

    def _on_batch(self, number: int, batch: bytes, now: float) -> None:
        """A batch as it was published."""
        if number < 0:
            raise MalformedBatch(f"number {number}")
        if self.sequence.is_ahead(number):
            self._early = number, batch
            if self._replay_endpoint is None:
                self._apply_early()
            else:
                self._ask_replay(now)
        elif not self.sequence.is_old(number):  # else it was replayed before
            self.sequence.apply(number, batch)

    def _on_replayed(self, number: int, batch: bytes, now: float) -> None:
        if number == _END_OF_REPLAY:
            self._end_replay()
            self.error = None
            self._apply_early()
            return
        self._deadline = now + self._silence_seconds
        if self.sequence.is_old(number):
            raise MalformedBatch(f"number {number} where {self.sequence.next_number} is the next")
        if self.sequence.is_ahead(number):
            self.sequence.skip_to(number)
        self.sequence.apply(number, batch)

    def _apply_early(self) -> None:
        """What is still missing before it is lost; it may have been replayed itself."""
        early, self._early = self._early, None
        if early is None or self.sequence.is_old(early[0]):
            return
        if self.sequence.is_ahead(early[0]):
            self.sequence.skip_to(early[0])
        try:
            self.sequence.apply(*early)
        except MalformedBatch as error:
            self._leave_out(error)

    def _leave_out(self, error: MalformedBatch) -> None:
        self.num_malformed += 1
        logger.warning("KV events of %s: a batch that cannot be read is left out: %s", self.sequence.replica, error)

    # -- replays -------------------------------------------------------------------------------------------------

    def _ask_replay(self, now: float) -> None:
        """Until it is answered, what is published waits in its socket."""
        self._end_replay()
        if self._replay_endpoint is None or self.sequence.next_number is None:
            return
        self._replay = self._socket(zmq.DEALER)
        _connect(self._replay, self._replay_endpoint, "replay_endpoint")
        self._replay.send_multipart([b"", self.sequence.next_number.to_bytes(8, "big")], zmq.NOBLOCK)
        self._deadline = now + self._silence_seconds

    def _end_replay(self) -> None:
        self._deadline = None
        if self._replay is not None:
            self._replay.close(linger=0)
            self._replay = None

    def _sources(self) -> "list[zmq.Socket[bytes]]":
        """Where the next message is to be taken from."""
        batches = self._replay or (self._events if self.connected else None)
        return [self._monitor] if batches is None else [self._monitor, batches]


def _connect(socket: "zmq.Socket[bytes]", endpoint: str, name: str) -> None:
    if "[" in endpoint:
        socket.setsockopt(zmq.IPV6, 1)
    try:
        socket.connect(endpoint)
    except zmq.ZMQError as error:
        raise ConfigError(f"{name}: cannot connect to {endpoint!r}: {error}; it looks like tcp://host:port") from error


def _take(socket: "zmq.Socket[bytes]") -> list[bytes] | None:
    try:
        return socket.recv_multipart(zmq.NOBLOCK)
    except zmq.Again:
        return None
