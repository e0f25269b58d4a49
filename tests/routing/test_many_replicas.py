"""An index under the events of random caches, with batches lost, repeated and replayed, and replicas that die.

The subscribers are real; what they connect to is in memory.
"""

import struct
from collections import deque

import msgspec
import zmq
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from cairn.cache.events import AllBlocksCleared, BlockRemoved, BlockStored
from cairn.engine.event_publisher import encode_event
from cairn.routing.index import PrefixIndex
from cairn.routing.subscriber import KvEventSubscriber
from cairn.types import ManualClock
from routing.index_audit import audit

NAMES = ("a", "b", "c")
DEPTH = 6
PATHS = st.lists(st.integers(0, 1), min_size=1, max_size=DEPTH).map(tuple)


def block(path):
    """The hash of the block at the end of a path."""
    return int("1" + "".join(map(str, path)))


def hashes(path):
    return [block(path[:end]) for end in range(1, len(path) + 1)]


ALL_PATHS = [tuple(int(digit) for digit in f"{number:06b}") for number in range(1 << DEPTH)]


class MemorySocket:
    """As much of a ZMQ socket as a subscriber uses."""

    def __init__(self, on_send=None):
        self.messages = deque()
        self._on_send = on_send
        self.monitor = None

    def recv_multipart(self, flags):
        assert flags == zmq.NOBLOCK
        if not self.messages:
            raise zmq.Again
        return self.messages.popleft()

    def send_multipart(self, frames, flags):
        self._on_send(self, frames)

    def get_monitor_socket(self, events):
        self.monitor = MemorySocket()
        return self.monitor

    def setsockopt(self, option, value): ...
    def connect(self, endpoint): ...
    def disable_monitor(self): ...
    def close(self, linger=0): ...
    def __enter__(self):
        return self

    def __exit__(self, *error): ...


class Replica:
    """A cache that announces its blocks, the publisher it does it with, and who subscribes to it."""

    def __init__(self, name, index, clock, kept):
        self.name = name
        self.blocks = set()
        self.answers = True
        self._before = 0
        self._clock = clock
        self._kept = kept
        self._number = 0
        self._sent = deque(maxlen=kept)
        self.subscriber = KvEventSubscriber(name, index, "tcp://e", "tcp://r", clock=clock, context=self)
        self.connect()

    def socket(self, kind):
        made = MemorySocket(self._answer)
        if kind == zmq.SUB:
            self._events = made
        return made

    def connect(self):
        self._tell(zmq.EVENT_HANDSHAKE_SUCCEEDED)
        self.subscriber.receive()

    def restart(self):
        """Another process with an empty cache."""
        self.blocks, self._number, self._before = set(), 0, self.subscriber.sequence.num_batches
        self._sent = deque(maxlen=self._kept)
        self._events.messages.clear()
        self._tell(zmq.EVENT_DISCONNECTED)
        self.connect()

    def publish(self, event, lost, repeated):
        batch = msgspec.msgpack.encode([1.0, [encode_event(event, "map")], 0])
        frames = [b"", self._number.to_bytes(8, "big"), batch]
        self._sent.append(frames)
        self._number += 1
        if not lost:
            self._events.messages.extend([frames] * (2 if repeated else 1))

    def deliver(self):
        """All that has come. A replay that was asked for in silence is never answered."""
        while self.subscriber.receive() or (self.subscriber.is_replaying and self.subscriber._replay.messages):
            pass

    @property
    def synced(self):
        return self.subscriber.sequence.next_number == self._number

    @property
    def complete(self):
        """Every batch has been received at last, the replayed ones included."""
        return self.subscriber.sequence.num_batches - self._before == self._number

    def _answer(self, socket, frames):
        if self.answers:
            first = int.from_bytes(frames[-1], "big")
            socket.messages.extend(sent for sent in self._sent if int.from_bytes(sent[1], "big") >= first)
            socket.messages.append([b"", (-1).to_bytes(8, "big", signed=True), b""])

    def _tell(self, event):
        self._events.monitor.messages.append([struct.pack("=hi", event, 0), b"tcp://e"])


class ManyReplicas(RuleBasedStateMachine):
    @initialize(max_blocks=st.sampled_from([8, 1000]), kept=st.sampled_from([2, 1000]))
    def begin(self, max_blocks, kept):
        self.clock = ManualClock()
        self.bounded, self.kept = max_blocks < 100, kept
        self.index = PrefixIndex(max_blocks)
        self.replicas = {}
        for name in NAMES:
            self.join(name)

    @rule(name=st.sampled_from(NAMES))
    def join(self, name):
        if name not in self.replicas:
            self.replicas[name] = Replica(name, self.index, self.clock, self.kept)

    @rule(name=st.sampled_from(NAMES), path=PATHS, lost=st.booleans(), repeated=st.booleans())
    def store(self, name, path, lost, repeated):
        if name in self.replicas:
            replica = self.replicas[name]
            new = [found for found in hashes(path) if found not in replica.blocks]
            if new:
                before = hashes(path)[: len(path) - len(new)]
                replica.blocks |= set(new)
                event = BlockStored(tuple(new), before[-1] if before else None, (1,) * len(new), 1, "")
                replica.publish(event, lost, repeated)

    @rule(name=st.sampled_from(NAMES), path=PATHS, lost=st.booleans(), repeated=st.booleans())
    def remove(self, name, path, lost, repeated):
        """A path and all that hang at its end."""
        if name in self.replicas:
            replica = self.replicas[name]
            gone = sorted((found for found in replica.blocks if str(found).startswith(str(block(path)))), reverse=True)
            if gone:
                replica.blocks -= set(gone)
                replica.publish(BlockRemoved(tuple(gone)), lost, repeated)

    @rule(name=st.sampled_from(NAMES), lost=st.booleans())
    def clear(self, name, lost):
        if name in self.replicas:
            self.replicas[name].blocks.clear()
            self.replicas[name].publish(AllBlocksCleared(), lost, False)

    @rule(name=st.sampled_from(NAMES))
    def deliver(self, name):
        if name in self.replicas:
            self.replicas[name].deliver()

    @rule(name=st.sampled_from(NAMES))
    def restart(self, name):
        if name in self.replicas:
            self.replicas[name].restart()

    @rule(name=st.sampled_from(NAMES))
    def die(self, name):
        if name in self.replicas:
            self.replicas.pop(name).subscriber.close()
            self.index.remove(name)

    @rule(name=st.sampled_from(NAMES), answers=st.booleans())
    def fall_silent(self, name, answers):
        if name in self.replicas:
            self.replicas[name].answers = answers

    @rule(seconds=st.sampled_from([1, 5, 31]))
    def wait(self, seconds):
        self.clock.advance(seconds)

    @invariant()
    def no_more_than_what_is_there(self):
        """Once all is delivered, the index has what the replica has, or less where batches are lost for good."""
        audit(self.index)
        synced = {name: replica for name, replica in self.replicas.items() if replica.synced}
        for path in ALL_PATHS:
            matched = {}
            for num_blocks, mask in self.index.matched_masks(hashes(path)):
                matched |= {one: num_blocks for one in self.index.replicas if mask >> self.index.number(one) & 1}
            assert matched.keys() <= self.replicas.keys()
            for name, replica in synced.items():
                has = [found in replica.blocks for found in hashes(path)]
                if replica.complete and not self.bounded:
                    assert matched.get(name, 0) == sum(has), (name, path)
                else:
                    assert matched.get(name, 0) <= sum(has), (name, path)

    def teardown(self):
        for name, replica in getattr(self, "replicas", {}).items():
            replica.answers = True
            for _ in range(3):  # what has come, the end of a replay that nobody answered, and one that is answered
                replica.deliver()
                self.clock.advance(31)
            replica.deliver()
            assert replica.synced, name
        if hasattr(self, "index"):
            self.no_more_than_what_is_there()
            if not self.bounded and all(replica.complete for replica in self.replicas.values()):
                self.index._sweep()
                assert self.index.num_blocks == len(set().union(*(each.blocks for each in self.replicas.values())))


TestManyReplicas = ManyReplicas.TestCase
TestManyReplicas.settings = settings(max_examples=25, stateful_step_count=30, deadline=None)
