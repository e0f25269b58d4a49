"""A side channel within one process: it loses, delays and repeats when told to."""

from collections import deque
from collections.abc import Callable, Sequence

from cairn.engine.transfers.side_channel import Incoming
from cairn.transfer.peers import Address

__all__ = ["MemoryChannel", "MemoryNetwork", "faithful"]

_MAX_WAITING = 65_536


def faithful() -> Sequence[int]:
    """Every frame arrives once, at once."""
    return (0,)


class MemoryNetwork:
    """What connects the channels of one test. `fate` is asked for every frame: how many looks at the receiver later
    each copy of it arrives; nothing at all when it is lost."""

    def __init__(self, fate: Callable[[], Sequence[int]] = faithful) -> None:
        self.fate = fate
        self._at: dict[Address, MemoryChannel] = {}
        self._by_name: dict[bytes, MemoryChannel] = {}
        self._made = 0

    def channel(self, host: str, port: int) -> "MemoryChannel":
        """A new one; it takes over the address from a channel that was there before, as a restarted process does."""
        self._made += 1
        made = MemoryChannel(self, (host, port), b"%d" % self._made)
        self._by_name[made.name] = self._at[made.address] = made
        return made

    def to_address(self, address: Address, incoming: Incoming) -> None:
        if (channel := self._at.get(address)) is not None:
            channel.arrive(self.fate(), incoming)

    def to_name(self, name: bytes, incoming: Incoming) -> None:
        if (channel := self._by_name.get(name)) is not None:
            channel.arrive(self.fate(), incoming)

    def cut(self, consumer: "MemoryChannel", producer: "MemoryChannel") -> None:
        """End the connection between two channels: both hear of it, after what is under way."""
        consumer.arrive((0,), Incoming(address=producer.address, lost="cut"))
        producer.arrive((0,), Incoming(sender=consumer.name, lost="cut"))

    def forget(self, channel: "MemoryChannel") -> None:
        """Its process is gone: what is sent to it vanishes."""
        self._by_name.pop(channel.name, None)
        if self._at.get(channel.address) is channel:
            del self._at[channel.address]


class MemoryChannel:
    """A `TlsSideChannel` without sockets. It never waits."""

    def __init__(self, network: MemoryNetwork, address: Address, name: bytes) -> None:
        self.address = address
        self.name = name
        self.dropped = 0
        self._network = network
        self._inbox: deque[tuple[int, Incoming]] = deque()
        self._looks = 0

    @property
    def port(self) -> int:
        return self.address[1]

    def wake(self) -> None:
        """Nobody waits."""

    def arrive(self, delays: Sequence[int], incoming: Incoming) -> None:
        for delay in delays:
            if len(self._inbox) < _MAX_WAITING:
                self._inbox.append((self._looks + delay, incoming))
            else:
                self.dropped += 1

    def receive(self, seconds: float | None) -> list[Incoming]:
        self._looks += 1
        due = [incoming for at, incoming in self._inbox if at < self._looks]
        self._inbox = deque((at, incoming) for at, incoming in self._inbox if at >= self._looks)
        return due

    def reply(self, sender: bytes, frame: bytes) -> None:
        self._network.to_name(sender, Incoming(frame, address=self.address))

    def send(self, address: Address, frame: bytes) -> None:
        self._network.to_address(address, Incoming(frame, sender=self.name))

    def close(self) -> None:
        self._network.forget(self)
