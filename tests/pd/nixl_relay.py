"""A postman between the side channels of two servers, whose secret it holds: it sees every frame, and may hold or
delay it.

D -> TurnedChannel [Relay] TurnedChannel (one for each connection of D) -> P
"""

import heapq
import itertools
import time
from collections import Counter
from collections.abc import Callable

from cairn.transfer.credentials import TlsCredentials
from cairn.types import SystemClock
from doubles.turned_channel import TurnedChannel
from transfer.frames import answers, greeting_answers, greetings, questions

HOST = "127.0.0.1"
_LINKS = 64


def kind_of(frame: bytes) -> str:
    """The record's name in lower case."""
    greeting = greetings().decode(frame) or greeting_answers().decode(frame)
    numbered = questions().decode(frame) or answers().decode(frame)
    return type(greeting or (numbered and numbered.record)).__name__.lower()


class Relay:
    """`seen`: how many frames of each kind were taken. `heard`: what D has said, if `listens`. `hold`: kinds that are
    kept back until `release`. `delay`: the seconds after which a frame is delivered, none before those that
    came before it; None: at once."""

    def __init__(self, target: int, credentials: TlsCredentials) -> None:
        self.target = target
        self._credentials = credentials
        self._front = TurnedChannel(HOST, 0, credentials, SystemClock())
        self.port = self._front.port
        self._backs: dict[bytes, TurnedChannel] = {}
        self._later: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self._held: list[Callable[[], None]] = []
        self.reset()

    def reset(self) -> None:
        """An honest postman from now on."""
        self.release()
        self.seen: Counter[str] = Counter()
        self.heard: list[bytes] = []
        self.listens = False
        self.hold: frozenset[str] = frozenset()
        self.delay: Callable[[], float] | None = None

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
        for deliver in held:
            deliver()

    def cut(self) -> None:
        """End all connections, and lose what is under way."""
        self._held.clear()
        self._front.cut()
        for back in self._backs.values():
            back.close()
        self._backs.clear()

    def sockets(self) -> list[TurnedChannel]:
        return [self._front, *self._backs.values()]

    def turn(self) -> None:
        for incoming in self._front.receive(0.0):
            sender, frame = incoming.sender, incoming.frame
            if incoming.lost is not None:
                # D's end is gone, so is P's
                if (back := self._backs.pop(sender, None)) is not None:
                    back.close()
                continue
            if self.listens:
                self.heard.append(frame)
            self._pass(frame, lambda sender=sender, frame=frame: self._to_producer(sender, frame))
        for sender, back in list(self._backs.items()):
            for incoming in back.receive(0.0):
                # a P that is gone is silent to D: what finds out is tested elsewhere
                if incoming.lost is None:
                    frame = incoming.frame
                    self._pass(frame, lambda sender=sender, frame=frame: self._front.reply(sender, frame))
        while self._later and self._later[0][0] <= time.monotonic():
            heapq.heappop(self._later)[2]()

    def close(self) -> None:
        for channel in self.sockets():
            channel.close()

    def _to_producer(self, sender: bytes, frame: bytes) -> None:
        back = self._backs.get(sender)
        if back is None:
            assert len(self._backs) < _LINKS
            back = self._backs[sender] = TurnedChannel(HOST, 0, self._credentials, SystemClock())
        back.send((HOST, self.target), frame)

    def _pass(self, frame: bytes, deliver: Callable[[], None]) -> None:
        kind = kind_of(frame)
        self.seen[kind] += 1
        if kind in self.hold:
            self._held.append(deliver)
        elif self.delay is None:
            deliver()
        else:
            last = max((at for at, *_ in self._later), default=0.0)
            at = max(last, time.monotonic() + self.delay())
            heapq.heappush(self._later, (at, next(self._numbers), deliver))
