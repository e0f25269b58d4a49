"""The scheduler's door to transfers, without a thread behind it."""

from cairn.engine.transfers.loop import EventQueue, TransferLoop


class TurnedPort(TransferLoop):
    """Looks at everything whenever its events are asked for. It drives no link: its world does."""

    def __init__(self, event_loop, producer, consumer, events, channel):
        super().__init__(event_loop, producer, consumer, events, channel, None, None)

    @property
    def is_idle(self):
        return self.producer.is_idle and not self.consumer.num_open

    @property
    def is_serving(self):
        return self.producer.leases.may_be_read

    def events(self):
        self.event_loop.spin()
        self.consumer.look()
        self.event_loop.spin()
        return super().events()


__all__ = ["EventQueue", "TurnedPort"]
