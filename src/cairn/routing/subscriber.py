"""One replica's KV events over ZMQ, into the index. The form is that of `cairn.engine.event_publisher`.

connected             the replica starts anew in the index, and the replay socket is asked for all it has
a number is missing   the replay socket is asked from there on; what it no longer has is lost, and the index starts
                      anew with what comes after
disconnected          the index keeps what it has until the publisher is back, which may be another process then
"""

import asyncio
import logging
from collections.abc import Callable
from typing import Any

import msgspec
import zmq
from zmq.utils.monitor import parse_monitor_message

from cairn.cache.events import AllBlocksCleared, BlockRemoved, BlockStored, Event
from cairn.errors import ConfigError
from cairn.routing.index import PrefixIndex
from cairn.types import Clock, SystemClock

_END_OF_REPLAY = -1
_MAX_BATCH_BYTES = 64 << 20
_MAX_QUEUED_BATCHES = 10_000
_MOST_BATCHES_AT_ONCE = 64
_MAX_SOCKETS = 65_536
"""Of a process: ZMQ allows for 1,023, which are those of 340 replicas."""
_RECONNECT_MS = (100, 5000)
_RUN_SECONDS = 0.5
"""How often `run` looks after deadlines where nothing comes."""

logger = logging.getLogger(__name__)


class _StoredMap(msgspec.Struct, tag_field="type", tag="BlockStored"):
    block_hashes: list[int]
    parent_block_hash: int | None = None


class _RemovedMap(msgspec.Struct, tag_field="type", tag="BlockRemoved"):
    block_hashes: list[int]


class _ClearedMap(msgspec.Struct, tag_field="type", tag="AllBlocksCleared"):
    pass


class _StoredArray(_StoredMap, array_like=True, tag_field="type", tag="BlockStored"):
    pass


class _RemovedArray(_RemovedMap, array_like=True, tag_field="type", tag="BlockRemoved"):
    pass


class _ClearedArray(_ClearedMap, array_like=True, tag_field="type", tag="AllBlocksCleared"):
    pass


class _MapBatch(msgspec.Struct, array_like=True):
    time: float
    events: list[_StoredMap | _RemovedMap | _ClearedMap]


class _ArrayBatch(msgspec.Struct, array_like=True):
    time: float
    events: list[_StoredArray | _RemovedArray | _ClearedArray]


class _Malformed(Exception):
    """A batch or an answer that is not as a publisher sends it."""


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
        self.num_batches = 0
        self.num_malformed = 0
        self.num_resets = 0
        """How often the replica had to start anew in the index, the first time included."""
        self._replica = replica
        self._index = index
        self._endpoint = endpoint
        self._replay_endpoint = replay_endpoint
        self._clock = clock or SystemClock()
        self._silence_seconds = silence_seconds
        self._check_seconds = check_seconds
        if context is None:
            context = zmq.Context.instance()
            context.set(zmq.MAX_SOCKETS, _MAX_SOCKETS)
        self._context = context
        self._decode_map = msgspec.msgpack.Decoder(_MapBatch).decode
        self._decode_array = msgspec.msgpack.Decoder(_ArrayBatch).decode
        self._connected = False
        self._next: int | None = None
        self._held: tuple[int, bytes] | None = None
        self._deadline: float | None = self._clock.now() + silence_seconds
        """For the connection or, once it is there, for the replay that is under way."""
        self._heard = self._clock.now()
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
    def connected(self) -> bool:
        return self._connected

    @property
    def is_replaying(self) -> bool:
        return self._connected and self._deadline is not None

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
            self._heard = now
            try:
                number, batch = _batch_frames(frames)
                if source is self._replay:
                    self._on_replayed(number, batch, now)
                else:
                    self._on_batch(number, batch, now)
            except _Malformed as error:
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
                self._connected, self.error, self._held = True, None, None
                self._reset(0)
                self._ask_replay(now)
            elif self._connected:
                self._connected = False
                self._end_replay()
                self._fail(f"{self._endpoint}: the publisher is gone")

    def _check_deadlines(self, now: float) -> None:
        if self._deadline is not None and now >= self._deadline:
            if not self._connected:
                self._deadline = None
                self._fail(f"{self._endpoint}: no connection within {self._silence_seconds:g} s")
            else:
                self._end_replay()
                self._fail(f"{self._replay_endpoint}: no answer within {self._silence_seconds:g} s")
                self._apply_held()
        elif self._connected and self._replay is None and now - self._heard >= self._check_seconds:
            self._heard = now
            self._ask_replay(now)

    def _fail(self, error: str) -> None:
        if error != self.error:
            logger.warning("KV events of %s: %s", self._replica, error)
        self.error = error

    # -- batches -------------------------------------------------------------------------------------------------

    def _on_batch(self, number: int, batch: bytes, now: float) -> None:
        """A batch as it was published."""
        if number < 0:
            raise _Malformed(f"number {number}")
        if self._next is None or number == self._next:
            self._apply(number, batch)
        elif number > self._next:
            self._held = number, batch
            if self._replay_endpoint is None:
                self._apply_held()
            else:
                self._ask_replay(now)
        # lower: it was replayed before

    def _on_replayed(self, number: int, batch: bytes, now: float) -> None:
        if number == _END_OF_REPLAY:
            self._end_replay()
            self.error = None
            self._apply_held()
            return
        self._deadline = now + self._silence_seconds
        if self._next is not None and number < self._next:
            raise _Malformed(f"number {number} where {self._next} is the next")
        if self._next is not None and number > self._next:
            self._lose(number)
        self._apply(number, batch)

    def _apply_held(self) -> None:
        """The batch before which others were missing, which may have been replayed itself."""
        held, self._held = self._held, None
        if held is None or (self._next is not None and held[0] < self._next):
            return
        if held[0] != self._next:
            self._lose(held[0])
        try:
            self._apply(*held)
        except _Malformed as error:
            self._leave_out(error)

    def _leave_out(self, error: _Malformed) -> None:
        self.num_malformed += 1
        logger.warning("KV events of %s: a batch that cannot be read is left out: %s", self._replica, error)

    def _apply(self, number: int, batch: bytes) -> None:
        self._next = number + 1
        for event in self._events_of(batch):
            self._index.apply(self._replica, event)
        self.num_batches += 1

    def _events_of(self, batch: bytes) -> list[Event]:
        decode: Callable[[bytes], Any]
        for decode in (self._decode_map, self._decode_array):
            try:
                return [_event(event) for event in decode(batch).events]
            except (msgspec.DecodeError, RecursionError) as error:
                failure = error
        raise _Malformed(str(failure))

    def _lose(self, number: int) -> None:
        """All batches between the last and this one are lost for good."""
        if self._next:
            logger.warning("KV events of %s: batches %d to %d are lost", self._replica, self._next, number - 1)
            self._reset(number)

    def _reset(self, number: int) -> None:
        self._index.clear(self._replica)
        self.num_resets += 1
        self._next = number if self._replay_endpoint is not None else None

    # -- replays -------------------------------------------------------------------------------------------------

    def _ask_replay(self, now: float) -> None:
        """Until it is answered, what is published waits in its socket."""
        self._end_replay()
        if self._replay_endpoint is None or self._next is None:
            return
        self._replay = self._socket(zmq.DEALER)
        _connect(self._replay, self._replay_endpoint, "replay_endpoint")
        self._replay.send_multipart([b"", self._next.to_bytes(8, "big")], zmq.NOBLOCK)
        self._deadline = now + self._silence_seconds

    def _end_replay(self) -> None:
        self._deadline = None
        if self._replay is not None:
            self._replay.close(linger=0)
            self._replay = None

    def _sources(self) -> "list[zmq.Socket[bytes]]":
        """Where the next message is to be taken from."""
        batches = self._replay or (self._events if self._connected else None)
        return [self._monitor] if batches is None else [self._monitor, batches]


def _connect(socket: "zmq.Socket[bytes]", endpoint: str, name: str) -> None:
    try:
        socket.connect(endpoint)
    except zmq.ZMQError as error:
        raise ConfigError(f"{name}: cannot connect to {endpoint!r}: {error}") from error


def _take(socket: "zmq.Socket[bytes]") -> list[bytes] | None:
    try:
        return socket.recv_multipart(zmq.NOBLOCK)
    except zmq.Again:
        return None


def _batch_frames(frames: list[bytes]) -> tuple[int, bytes]:
    """Number and batch, behind a frame with the topic, or an empty one."""
    if len(frames) != 3 or len(frames[1]) != 8:
        raise _Malformed(f"{len(frames)} frames of {[len(frame) for frame in frames[:4]]} bytes")
    return int.from_bytes(frames[1], "big", signed=True), frames[2]


def _event(event: _StoredMap | _RemovedMap | _ClearedMap) -> Event:
    # the index asks for no tokens
    match event:
        case _StoredMap():
            return BlockStored(tuple(event.block_hashes), event.parent_block_hash, (), 0, "")
        case _RemovedMap():
            return BlockRemoved(tuple(event.block_hashes))
        case _:
            return AllBlocksCleared()
