"""The scheduler's door to transfers, without a thread behind it."""

from cairn.engine.transfers.loop import TransferPort


class TurnedPort(TransferPort):
    """Carries everything out whenever its events are asked for."""

    def __init__(self, producer, consumer):
        super().__init__(producer, consumer, wake=lambda: None)
        self.producer, self.consumer = producer, consumer

    @property
    def is_idle(self):
        return self.producer.is_idle and not self.consumer.num_open and not self.commands_waiting

    @property
    def commands_waiting(self):
        return self._commands.qsize()

    @property
    def is_serving(self):
        return self.producer.leases.may_be_read

    def events(self):
        self.carry_out()
        return super().events()
