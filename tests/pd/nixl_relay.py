"""A postman between the side channels of two servers: it sees every frame, and may hold, lose, delay or repeat it.

D -> ROUTER [Relay] DEALER (one for each connection of D) -> P
"""

import heapq
import itertools
import time
from collections import Counter
from collections.abc import Callable

import zmq

from cairn.transfer.frames import outer_frames, replies, requests
from cairn.transfer.wire import MAX_FRAME_BYTES, Sealed

HOST = "127.0.0.1"
_LINKS = 64


def kind_of(frame: bytes) -> str:
    """The record's name in lower case; of a sealed one that of what is in it."""
    record = outer_frames().decode(frame)
    if isinstance(record, Sealed):
        record = requests().decode(record.body) or replies().decode(record.body)
    return type(record).__name__.lower()


class Relay:
    """`seen`: how many frames of each kind were taken. `heard`: what D has said, if `listens`. `hold`: kinds that are
    kept back until `release`. `fate`: the seconds after which copies of a frame are delivered; None: one at once."""

    def __init__(self, target: int) -> None:
        self.target = target
        self._context = zmq.Context()
        self._front = self._context.socket(zmq.ROUTER)
        self._front.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
        self._front.setsockopt(zmq.LINGER, 0)
        self.port = self._front.bind_to_random_port(f"tcp://{HOST}")
        self._backs: dict[bytes, zmq.Socket] = {}
        self._later: list[tuple[float, int, zmq.Socket, list[bytes]]] = []
        self._numbers = itertools.count()
        self._held: list[tuple[zmq.Socket, list[bytes]]] = []
        self.reset()

    def reset(self) -> None:
        """An honest postman from now on."""
        self.release()
        self.seen: Counter[str] = Counter()
        self.heard: list[bytes] = []
        self.listens = False
        self.hold: frozenset[str] = frozenset()
        self.fate: Callable[[], tuple[float, ...]] | None = None

    @property
    def num_held(self) -> int:
        return len(self._held)

    def aim(self, target: int) -> None:
        """P has another port now: what is under way to the old one is lost."""
        for back in self._backs.values():
            back.close()
        self._backs.clear()
        self._held.clear()
        self._later.clear()
        self.target = target

    def release(self) -> None:
        """Deliver what was held."""
        held, self._held = self._held, []
        for through, parts in held:
            self._deliver(through, parts)

    def sockets(self) -> list:
        return [self._front, *self._backs.values()]

    def turn(self) -> None:
        for parts in self._received(self._front):
            if len(parts) == 2:
                sender, frame = parts
                if self.listens:
                    self.heard.append(frame)
                self._pass(self._back(sender), [frame], frame)
        for sender, back in list(self._backs.items()):
            for parts in self._received(back):
                self._pass(self._front, [sender, parts[0]], parts[0])
        while self._later and self._later[0][0] <= time.monotonic():
            _, _, through, parts = heapq.heappop(self._later)
            self._deliver(through, parts)

    def close(self) -> None:
        self._context.destroy(linger=0)

    def _pass(self, through, parts: list[bytes], frame: bytes) -> None:
        kind = kind_of(frame)
        self.seen[kind] += 1
        if kind in self.hold:
            self._held.append((through, parts))
        elif self.fate is None:
            self._deliver(through, parts)
        else:
            for seconds in self.fate():
                at = time.monotonic() + seconds
                heapq.heappush(self._later, (at, next(self._numbers), through, parts))

    def _deliver(self, through, parts: list[bytes]) -> None:
        if not through.closed:
            try:
                through.send_multipart(parts, zmq.NOBLOCK)
            except zmq.ZMQError:
                self.seen["lost"] += 1

    def _back(self, sender: bytes):
        back = self._backs.get(sender)
        if back is None:
            assert len(self._backs) < _LINKS
            back = self._backs[sender] = self._context.socket(zmq.DEALER)
            back.setsockopt(zmq.LINGER, 0)
            back.connect(f"tcp://{HOST}:{self.target}")
        return back

    @staticmethod
    def _received(through) -> list[list[bytes]]:
        found = []
        while True:
            try:
                found.append(through.recv_multipart(zmq.NOBLOCK))
            except zmq.Again:
                return found
