"""A side channel of sockets that a test turns by hand: frames in, frames out, whatever they say."""

import asyncio
import contextlib
import select
import time
from dataclasses import dataclass

from cairn.engine.transfers.side_channel import SideChannel, create_listener
from cairn.transfer.peers import Address
from cairn.transfer.stream import ConnectionLost
from turned_loop import TurnedLoop

__all__ = ["Incoming", "TurnedChannel"]


@dataclass(frozen=True, slots=True)
class Incoming:
    """A frame, or with `lost` the end of a connection. `sender`: the connection of the consumer that sent it; None when
    `address`, a producer, did. `lost`: why the connection has ended, or could not be made."""

    frame: bytes = b""
    sender: bytes | None = None
    address: Address | None = None
    lost: str | None = None


class TurnedChannel:
    def __init__(self, host, port, credentials, clock, limits=None) -> None:
        listener = create_listener(host, port)
        self.event_loop = TurnedLoop(clock)
        self.channel = SideChannel(listener, credentials, self.event_loop, limits)
        self.channel.listen(self._serve)
        self.port = self.channel.port
        self.streams: dict[bytes | Address, object] = {}
        self._incoming: list[Incoming] = []
        self._outgoing: dict[bytes | Address, asyncio.Queue[bytes]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._num_accepted = 0

    @property
    def num_connections(self) -> int:
        """Open connections, those of unauthenticated peers included."""
        return len(self.channel._streams)

    @property
    def dropped(self) -> int:
        return self.channel.dropped

    def fileno(self) -> int:
        """Is readable when `receive` has something to do."""
        return self.event_loop._selector.fileno()

    def receive(self, seconds: float) -> list[Incoming]:
        """What has come; waits for at most `seconds` until anything does."""
        until = time.monotonic() + seconds
        while True:
            self.event_loop.spin()
            left = until - time.monotonic()
            if self._incoming or left <= 0:
                break
            readable = select.poll()
            readable.register(self.fileno(), select.POLLIN)
            readable.poll(min(left, 0.01) * 1000)
        incoming, self._incoming = self._incoming, []
        return incoming

    def send(self, address: Address, frame: bytes) -> None:
        """To a producer, by a connection that may have to be made."""
        if address not in self._outgoing:
            self._outgoing[address] = asyncio.Queue()
            self._spawn(self._connect(address))
        self._outgoing[address].put_nowait(frame)
        self.event_loop.spin()

    def reply(self, sender: bytes, frame: bytes) -> None:
        """To the consumer whose frame came with this `sender`."""
        if sender in self._outgoing:
            self._outgoing[sender].put_nowait(frame)
            self.event_loop.spin()

    def cut(self) -> None:
        """End all connections of consumers."""
        for key, stream in list(self.streams.items()):
            if isinstance(key, bytes):
                stream.close("cut")
        self.event_loop.spin()

    def close(self) -> None:
        if not self.event_loop.is_closed():
            self.channel.close()
            for task in self._tasks:
                task.cancel()
            self.event_loop.spin()
            self.event_loop.close()

    def _spawn(self, coroutine) -> None:
        task = self.event_loop.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _connect(self, address: Address) -> None:
        try:
            stream = await self.channel.connect(address)
        except ConnectionLost as lost:
            del self._outgoing[address]
            self._incoming.append(Incoming(address=address, lost=str(lost)))
        else:
            await self._carry(address, stream)

    async def _serve(self, stream) -> None:
        self._num_accepted += 1
        key = self._num_accepted.to_bytes(8, "big")
        self._outgoing[key] = asyncio.Queue()
        await self._carry(key, stream)

    async def _carry(self, key: bytes | Address, stream) -> None:
        where = {"sender": key} if isinstance(key, bytes) else {"address": key}
        self.streams[key] = stream
        sender = self.event_loop.create_task(self._send_all(stream, self._outgoing[key]))
        try:
            while True:
                frame = await stream.receive()
                self._incoming.append(Incoming(frame, **where))
        except ConnectionLost as lost:
            self._incoming.append(Incoming(lost=str(lost), **where))
        finally:
            sender.cancel()
            stream.close("over")
            self.streams.pop(key, None)
            self._outgoing.pop(key, None)

    async def _send_all(self, stream, frames: "asyncio.Queue[bytes]") -> None:
        with contextlib.suppress(ConnectionLost):
            while True:
                await stream.send(await frames.get())
