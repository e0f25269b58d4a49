"""The load: conversations started when they are due, at most so many requests at a time, until all have ended."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from cairn.bench.endpoint import Endpoint, SentMessage, WaitableClock
from cairn.bench.stream import Failure, RequestOutcome, Sender
from cairn.bench.work import Conversation


class EventLoopClock:
    """The time of the running event loop."""

    def now(self) -> float:
        return asyncio.get_running_loop().time()

    async def until(self, moment: float) -> None:
        await asyncio.sleep(max(0.0, moment - self.now()))


@dataclass(frozen=True, slots=True)
class LoadResult:
    """What became of a load. `outcomes`: in the order of the work, those that have ended; `interrupted`: requests that
    were under way, `unsent`: requests that were still to be sent when it was stopped. `seconds`: from the start on."""

    outcomes: list[RequestOutcome] = field(default_factory=list)
    interrupted: int = 0
    unsent: int = 0
    start: float = 0.0
    seconds: float = 0.0
    stopped: bool = False


class Load:
    """Sends conversations. One `run` at a time."""

    def __init__(self, sender: Sender, endpoint: Endpoint, pace: WaitableClock, max_concurrency: int) -> None:
        self._sender = sender
        self._endpoint = endpoint
        self._pace = pace
        self._places = asyncio.Semaphore(max_concurrency)

    async def run(
        self,
        work: Sequence[Conversation],
        due: Sequence[float],
        stop: asyncio.Event,
        ended: Callable[[RequestOutcome], None] = lambda outcome: None,
    ) -> LoadResult:
        """Send all of `work`, each conversation `due` seconds after the start, ascending.

        Ends early, with what there is, once `stop` is set. `ended` is called for every request that has.
        """
        start = self._pace.now()
        books = [_Progress(conversation) for conversation in work]
        if stop.is_set():
            return LoadResult(unsent=sum(one.unsent for one in books), start=start, stopped=True)
        sending = asyncio.create_task(self._send_all(books, due, start, ended))
        stopping = asyncio.create_task(stop.wait())
        try:
            await asyncio.wait({sending, stopping}, return_when=asyncio.FIRST_COMPLETED)
            stopped = not sending.done()
        finally:
            for task in (sending, stopping):
                task.cancel()
            results = await asyncio.gather(sending, stopping, return_exceptions=True)
        if not stopped and isinstance(results[0], BaseException):
            raise results[0]
        return LoadResult(
            outcomes=[outcome for one in books for outcome in one.outcomes],
            interrupted=sum(one.under_way for one in books),
            unsent=sum(one.unsent for one in books),
            start=start,
            seconds=self._pace.now() - start,
            stopped=stopped,
        )

    async def _send_all(
        self, books: "list[_Progress]", due: Sequence[float], start: float, ended: Callable[[RequestOutcome], None]
    ) -> None:
        async with asyncio.TaskGroup() as group:
            for one, seconds in zip(books, due, strict=True):
                await self._pace.until(start + seconds)
                group.create_task(self._converse(one, start + seconds, ended))

    async def _converse(self, one: "_Progress", due: float, ended: Callable[[RequestOutcome], None]) -> None:
        """One conversation. A turn that fails ends it: the next ones would have no history to stand on."""
        history = [SentMessage("system", one.conversation.system)] if one.conversation.system else []
        for number, turn in enumerate(one.conversation.turns):
            async with self._places:
                sent = self._pace.now()
                one.under_way = 1
                outcome = await self._sender.send(self._endpoint.body(history, turn), turn.num_tokens)
                one.under_way = 0
            one.add(replace(outcome, waited=max(0.0, sent - due)), ended)
            if outcome.failure is not None:
                one.add_lost(number + 1, self._pace.now(), ended)
                return
            if len(one.conversation.turns) > 1:
                assert isinstance(turn.prompt, str), "a conversation is made of text"
                history += [SentMessage("user", turn.prompt), SentMessage("assistant", outcome.text)]
            due = self._pace.now()


@dataclass(slots=True)
class _Progress:
    """How far a conversation is."""

    conversation: Conversation
    outcomes: list[RequestOutcome] = field(default_factory=list)
    under_way: int = 0

    @property
    def unsent(self) -> int:
        return len(self.conversation.turns) - len(self.outcomes) - self.under_way

    def add(self, outcome: RequestOutcome, ended: Callable[[RequestOutcome], None]) -> None:
        self.outcomes.append(outcome)
        ended(outcome)

    def add_lost(self, first: int, now: float, ended: Callable[[RequestOutcome], None]) -> None:
        """The turns from `first` on, which are not sent."""
        for turn in self.conversation.turns[first:]:
            failure = Failure("not sent", "an earlier turn of the conversation failed")
            self.add(RequestOutcome(sent=now, ended=now, prompt_tokens=turn.num_tokens, failure=failure), ended)
