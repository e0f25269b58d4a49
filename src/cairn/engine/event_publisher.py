"""KV events over ZMQ, in the form that prefix-aware routers read.

    PUB     topic | sequence number, 8 bytes big-endian | msgpack [timestamp, [event, ...], dp_rank]
    ROUTER  a request of 8 bytes big-endian: every batch kept from that number on, as the requester's frames
            "" | sequence number | batch, and at the end the number -1 with an empty batch

An event is a map with its name under `type`, or with encoding `array` a list with the name first. A thread of its own
owns both sockets; the engine hands it whole batches, one a step, and never waits for it.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from queue import Empty, Full, Queue

import msgspec
import zmq

from cairn.cache.events import AllBlocksCleared, BlockRemoved, BlockStored, Event
from cairn.engine.contract import KvEventsConfig
from cairn.errors import ConfigError

END_OF_REPLAY = (-1).to_bytes(8, "big", signed=True)
POLL_MS = 100
"""How long a batch or a replay request may wait for the thread."""

logger = logging.getLogger(__name__)


def encode_event(event: Event, encoding: str) -> dict[str, object] | list[object]:
    """An event as consumers know it: a map, or the older positional form."""
    match event:
        case BlockStored():
            fields: dict[str, object] = {
                "type": "BlockStored",
                "block_hashes": list(event.block_hashes),
                "parent_block_hash": event.parent_block_hash,
                "token_ids": list(event.token_ids),
                "block_size": event.block_size,
                "lora_id": None,
                "medium": event.medium,
            }
            if event.extra_keys:
                fields["extra_keys"] = [None if keys is None else list(keys) for keys in event.extra_keys]
        case BlockRemoved():
            fields = {"type": "BlockRemoved", "block_hashes": list(event.block_hashes), "medium": event.medium}
        case AllBlocksCleared():
            fields = {"type": "AllBlocksCleared"}
    return fields if encoding == "map" else list(fields.values())


def check_endpoints(config: KvEventsConfig) -> None:
    """Bind both addresses and let go of them again. Raises ConfigError when one cannot be had."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    for each in _bind_sockets(context, config):
        each.close(linger=0)
    # returns when the addresses are free
    context.term()


def _bind_sockets(context: "zmq.Context[zmq.Socket[bytes]]", config: KvEventsConfig) -> "list[zmq.Socket[bytes]]":
    """The one for events and perhaps the one for replays. Raises ConfigError, after destroying the context."""
    sockets = []
    for kind, endpoint in ((zmq.PUB, config.endpoint), (zmq.ROUTER, config.replay_endpoint)):
        if endpoint is None:
            continue
        socket = context.socket(kind)
        socket.setsockopt(zmq.SNDHWM, config.hwm)
        socket.setsockopt(zmq.MAXMSGSIZE, 64)  # requests are eight bytes
        if "[" in endpoint:
            socket.setsockopt(zmq.IPV6, 1)
        try:
            socket.bind(endpoint)
        except zmq.ZMQError as error:
            context.destroy(linger=0)
            raise ConfigError(f"--kv-events-config: cannot bind {endpoint}: {error}") from error
        sockets.append(socket)
    return sockets


class EventPublisher:
    """Collects the events of a step (`publish`) and sends them as one batch (`flush`).

    Keeps the last `config.buffer_steps` batches for replays. `wall` dates batches, in seconds since 1970. Subscribers
    see a batch that was dropped because they were too slow as a gap in the numbers, and ask for it.
    """

    def __init__(self, config: KvEventsConfig, wall: Callable[[], float] = time.time) -> None:
        """Binds both sockets. Raises ConfigError when an address cannot be had."""
        self._config = config
        self._wall = wall
        self._step: list[Event] = []
        self._batches: Queue[tuple[int, bytes]] = Queue(config.max_queue_size)
        self._number = 0
        self._stopping = threading.Event()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._sockets = _bind_sockets(self._context, config)
        self._thread = threading.Thread(target=self._run, name="cairn-kv-events", daemon=True)
        self._thread.start()

    def publish(self, event: Event) -> None:
        """Part of the step's batch. Called from within the cache: it neither blocks nor calls back."""
        self._step.append(event)

    def flush(self) -> None:
        """The step is over: send what it brought, if anything."""
        if not self._step:
            return
        events = [encode_event(event, self._config.encoding) for event in self._step]
        self._step = []
        batch = msgspec.msgpack.encode([self._wall(), events, 0])
        try:
            self._batches.put_nowait((self._number, batch))
        except Full:
            logger.warning(
                "KV events: %d steps wait to be sent, number %d is lost", self._batches.qsize(), self._number
            )
        self._number += 1

    def close(self) -> None:
        """Send what is queued, then end the thread and close the sockets."""
        self._stopping.set()
        self._thread.join(5)
        self._context.destroy(linger=500)

    def _run(self) -> None:
        sent: deque[tuple[int, bytes]] = deque(maxlen=self._config.buffer_steps)
        while True:
            last = self._stopping.is_set()
            try:
                number, batch = self._batches.get(timeout=POLL_MS / 1000)
            except Empty:
                if last:
                    return
            else:
                sent.append((number, batch))
                # a PUB socket drops for a subscriber that is too slow; it never blocks
                self._sockets[0].send_multipart([self._config.topic.encode(), number.to_bytes(8, "big"), batch])
            if len(self._sockets) > 1:
                self._answer_replays(self._sockets[1], sent)

    def _answer_replays(self, socket: "zmq.Socket[bytes]", sent: deque[tuple[int, bytes]]) -> None:
        while socket.poll(0):
            frames = socket.recv_multipart()
            if len(frames) != 3 or len(frames[2]) != 8:
                logger.warning("a replay request of %d frames was ignored: it must be 8 bytes", len(frames) - 1)
                continue
            first = int.from_bytes(frames[2], "big", signed=True)
            for number, batch in sent:
                if number >= first:
                    socket.send_multipart([frames[0], b"", number.to_bytes(8, "big"), batch])
            socket.send_multipart([frames[0], b"", END_OF_REPLAY, b""])
