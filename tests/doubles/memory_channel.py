"""A side channel within one process: it delays, stalls and cuts when told to."""

import asyncio
from collections import deque
from collections.abc import Callable

from cairn.transfer.peers import Address
from cairn.transfer.stream import ConnectionLost

__all__ = ["MemoryChannel", "MemoryNetwork", "MemoryStream"]

ROOM = 64
"""Frames that a connection takes before whoever sends has to wait."""


def at_once() -> int:
    """Every frame arrives when its receiver looks next."""
    return 0


class MemoryNetwork:
    """What connects the channels of one test. `delay` is asked for every frame: how many looks at the receiver later it
    arrives; none overtakes another one of its connection."""

    def __init__(self, delay: Callable[[], int] = at_once) -> None:
        self.delay = delay
        self.channels: dict[Address, MemoryChannel] = {}

    def channel(self, host: str, port: int, event_loop: asyncio.AbstractEventLoop) -> "MemoryChannel":
        """A new one; it takes over the address from a channel that was there before, as a restarted process does."""
        made = self.channels[host, port] = MemoryChannel(self, (host, port), event_loop)
        return made

    def cut(self, one: "MemoryChannel", other: "MemoryChannel") -> None:
        """End all connections between two channels: both hear of it, after what is under way."""
        for stream in list(one.streams):
            if stream.far.channel is other:
                stream.arrive(ConnectionLost("cut"))
                stream.far.arrive(ConnectionLost("cut"))


class MemoryStream:
    """One end of a connection. `far` is the other one. `room`: frames that may wait to be taken here."""

    far: "MemoryStream"

    def __init__(self, channel: "MemoryChannel") -> None:
        self.channel = channel
        self.room = ROOM
        self.lost: str | None = None
        self._under_way: deque[tuple[int, bytes | ConnectionLost]] = deque()
        self._arrived: deque[bytes] = deque()
        self._changed = asyncio.Event()

    @property
    def num_waiting(self) -> int:
        """Frames that nobody has taken."""
        return len(self._under_way) + len(self._arrived)

    async def send(self, frame: bytes) -> None:
        while self.lost is None and self.far.num_waiting >= self.far.room:
            await self._wait()
        if self.lost is not None:
            raise ConnectionLost(self.lost)
        self.channel.sent.append(frame)
        self.far.arrive(frame)

    async def receive(self) -> bytes:
        while not self._arrived:
            if self.lost is not None:
                raise ConnectionLost(self.lost)
            await self._wait()
        self.far._changed.set()
        return self._arrived.popleft()

    def close(self, reason: str) -> None:
        if self.lost is None:
            self._lose(reason)
            self.far.arrive(ConnectionLost("the peer has closed the connection"))

    def arrive(self, what: bytes | ConnectionLost) -> None:
        """It is under way from now on; what is sent to a process that is gone vanishes."""
        if not self.channel.is_closed:
            last = self._under_way[-1][0] if self._under_way else 0
            self._under_way.append((max(last, self.channel.looks + self.channel.network.delay()), what))

    def deliver(self) -> bool:
        """Let what is due arrive; whether anything did."""
        moved = False
        while self._under_way and self._under_way[0][0] < self.channel.looks:
            moved, what = True, self._under_way.popleft()[1]
            if isinstance(what, ConnectionLost):
                self._lose(str(what))
            else:
                self._arrived.append(what)
            self._changed.set()
        return moved

    def _lose(self, reason: str) -> None:
        if self.lost is None:
            self.lost = reason
            self.channel.streams.pop(self, None)
        self._changed.set()

    async def _wait(self) -> None:
        self._changed.clear()
        await self._changed.wait()


class MemoryChannel:
    """A `SideChannel` without sockets. `look` lets arrive what is under way to it; `sent` keeps what it has sent."""

    def __init__(self, network: MemoryNetwork, address: Address, event_loop: asyncio.AbstractEventLoop) -> None:
        self.network = network
        self.address = address
        self.looks = 0
        self.dropped = 0
        self.is_closed = False
        self.streams: dict[MemoryStream, None] = {}
        self.sent: list[bytes] = []
        self._event_loop = event_loop
        self._serving: set[asyncio.Task[None]] = set()
        self._serve = None

    @property
    def port(self) -> int:
        return self.address[1]

    @property
    def num_waiting(self) -> int:
        """Frames that have been sent to it and not been taken."""
        return sum(stream.num_waiting for stream in self.streams)

    def listen(self, serve) -> None:
        self._serve = serve

    async def connect(self, address: Address) -> MemoryStream:
        """Where nobody is, nobody answers."""
        near, there = MemoryStream(self), self.network.channels.get(address)
        if there is None or there.is_closed:
            there = MemoryChannel(self.network, address, self._event_loop)
            there.close()
        near.far = there._accept(near)
        self.streams[near] = None
        return near

    def _accept(self, far: MemoryStream) -> MemoryStream:
        made = MemoryStream(self)
        made.far = far
        if self.is_closed:
            return made
        self.streams[made] = None
        task = self._event_loop.create_task(self._serve(made))
        self._serving.add(task)
        task.add_done_callback(self._serving.discard)
        return made

    def look(self) -> bool:
        """Whether anything has arrived."""
        self.looks += 1
        return bool([stream for stream in list(self.streams) if stream.deliver()])

    def close(self) -> None:
        """Its process is gone: what is sent to it vanishes, and nobody hears of it."""
        self.is_closed = True
