"""The load: conversations started when they are due, at most so many requests at a time, until all have ended."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from cairn.bench.client import ChatMessage, Failure, HttpSender, RequestRecord
from cairn.bench.work import Conversation


@dataclass(frozen=True, slots=True)
class LoadResult:
    """`records`: the requests that have ended, in the order of the work; `num_interrupted`: requests that were in
    flight when the load was stopped, `num_unsent`: those not yet sent. `seconds`: duration since `start`."""

    records: list[RequestRecord] = field(default_factory=list)
    num_interrupted: int = 0
    num_unsent: int = 0
    start: float = 0.0
    seconds: float = 0.0
    stopped: bool = False


@dataclass(slots=True)
class _Progress:
    """How far a conversation is."""

    conversation: Conversation
    records: list[RequestRecord] = field(default_factory=list)
    num_in_flight: int = 0

    @property
    def num_unsent(self) -> int:
        return len(self.conversation.turns) - len(self.records) - self.num_in_flight


class LoadGenerator:
    """Sends conversations. One `run` at a time."""

    def __init__(self, sender: HttpSender, max_concurrency: int) -> None:
        self._sender = sender
        self._clock = sender.clock
        self._slots = asyncio.Semaphore(max_concurrency)

    async def run(
        self,
        work: Sequence[Conversation],
        due: Sequence[float],
        stop: asyncio.Event,
        on_end: Callable[[RequestRecord], None] = lambda record: None,
    ) -> LoadResult:
        """Send all of `work`, each conversation `due` seconds after the start, ascending.

        Ends early, with the records so far, once `stop` is set. `on_end` is called for every request that has ended.
        """
        start = self._clock.now()
        progress = [_Progress(conversation) for conversation in work]
        stopped, sending = stop.is_set(), asyncio.create_task(self._send_all(progress, due, start, on_end))
        stopping = asyncio.create_task(stop.wait())
        try:
            if not stopped:
                await asyncio.wait({sending, stopping}, return_when=asyncio.FIRST_COMPLETED)
                stopped = not sending.done()
        finally:
            for task in (sending, stopping):
                task.cancel()
            results = await asyncio.gather(sending, stopping, return_exceptions=True)
        if not stopped and isinstance(results[0], BaseException):
            raise results[0]
        return LoadResult(
            records=[record for entry in progress for record in entry.records],
            num_interrupted=sum(entry.num_in_flight for entry in progress),
            num_unsent=sum(entry.num_unsent for entry in progress),
            start=start,
            seconds=self._clock.now() - start,
            stopped=stopped,
        )

    async def _send_all(
        self, progress: list[_Progress], due: Sequence[float], start: float, on_end: Callable[[RequestRecord], None]
    ) -> None:
        async with asyncio.TaskGroup() as group:
            for entry, seconds in zip(progress, due, strict=True):
                await self._clock.wait_until(start + seconds)
                group.create_task(self._converse(entry, start + seconds, on_end))

    async def _converse(self, progress: _Progress, due: float, on_end: Callable[[RequestRecord], None]) -> None:
        """One conversation. A turn that fails ends it: the next turns would lack its answer in their history."""

        def add(record: RequestRecord) -> None:
            progress.records.append(record)
            on_end(record)

        conversation, history = progress.conversation, list[ChatMessage]()
        if conversation.system:
            history.append({"role": "system", "content": conversation.system})
        for number, turn in enumerate(conversation.turns):
            async with self._slots:
                sent = self._clock.now()
                progress.num_in_flight = 1
                record = await self._sender.send(self._sender.endpoint.body(history, turn), turn.num_tokens)
                progress.num_in_flight = 0
            add(replace(record, queue_time=max(0.0, sent - due)))
            due = self._clock.now()
            if record.failure is not None:
                failure = Failure("not sent", "an earlier turn of the conversation failed")
                for lost in conversation.turns[number + 1 :]:
                    add(RequestRecord(sent=due, ended=due, prompt_tokens=lost.num_tokens, failure=failure))
                return
            if len(conversation.turns) > 1:
                assert isinstance(turn.prompt, str), "a conversation is made of text"
                history += [{"role": "user", "content": turn.prompt}, {"role": "assistant", "content": record.text}]
