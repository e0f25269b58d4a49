"""The scheduler's door to transfers in a real engine: a port before the loop that owns sockets and links."""

from cairn.engine.transfers.loop import TransferLoop, TransferPort
from cairn.transfer.ranks import RankedWorker
from doubles.memory_channel import MemoryNetwork
from transfer.scheduler_side_contract import SchedulerSideContract
from transfer.world import HOST, PORT, World


class TurnedPort(TransferPort):
    """One whose loop has turned whenever its events are asked for."""

    def __init__(self, max_pages):
        world = World(max_pages=max_pages)
        channel = MemoryNetwork().channel(HOST, PORT)
        super().__init__(max_pages, world.rng.randbytes, channel.wake)
        ranks = RankedWorker(world.link, world.worker, ())
        self.loop = TransferLoop(
            self, channel, world.p.producer, world.consumer, world.link, ranks, enter_thread=lambda: None
        )

    def events(self):
        self.loop.turn()
        return super().events()


class TestTransferPort(SchedulerSideContract):
    def side(self, max_pages):
        return TurnedPort(max_pages)
