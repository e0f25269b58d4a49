"""The core's grammars: compiled on threads beside its own, once, and kept while they are in use."""

import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from llguidance import LLTokenizer

from cairn.engine.constraint import GrammarConstraint
from cairn.engine.contract import GenerateRequest, Structure
from cairn.engine.structure import grammar_of, refusal
from cairn.errors import InvalidRequest, Overloaded, RequestError
from cairn.types import Clock

_KEPT = 64
_AT_ONCE = 2
_SECONDS = 30.0

Compiled = GrammarConstraint | RequestError


@dataclass(slots=True, eq=False)
class _Job:
    """A grammar that is being compiled, or waits to be. `began`: when, in seconds of the clock; `thread`: on which."""

    structure: Structure
    requests: dict[str, GenerateRequest]
    began: float = 0.0
    thread: threading.Thread | None = None
    result: Compiled | None = None


class Grammars:
    """Makes constraints of structures, for one thread that asks; the last `kept` of them are remembered.

    `make_tokenizer` is called on a thread of its own, when the first grammar is asked for. A grammar that takes longer
    than `seconds` is given up: its requests are refused, and the thread is left to end by itself.
    """

    def __init__(
        self,
        make_tokenizer: Callable[[], LLTokenizer],
        vocab_size: int,
        clock: Clock,
        kept: int = _KEPT,
        seconds: float = _SECONDS,
    ) -> None:
        self._make_tokenizer = make_tokenizer
        self._vocab_size = vocab_size
        self._clock = clock
        self._kept = kept
        self._seconds = seconds
        self._wake: Callable[[], None] | None = None
        self._compiled: OrderedDict[Structure, Compiled] = OrderedDict()
        self._jobs: OrderedDict[Structure, _Job] = OrderedDict()
        self._given_up: list[threading.Thread] = []
        self._lock = threading.Lock()
        self._tokenizer: LLTokenizer | None = None

    def start(self, wake: Callable[[], None]) -> None:
        """From now on `wake` is called, on another thread, when something has been compiled."""
        self._wake = wake

    def take(self, request: GenerateRequest) -> GrammarConstraint | None:
        """The constraint for a request's answer; None: `poll` will name the request. Raises InvalidRequest."""
        structure = request.structure
        assert structure is not None
        compiled = self._compiled.get(structure)
        if compiled is not None:
            self._compiled.move_to_end(structure)
            if isinstance(compiled, RequestError):
                # a new one each time: an exception keeps the frames of all that have raised it
                raise InvalidRequest(compiled.message, compiled.param)
            return compiled.start()
        if request.request_id in self:
            raise InvalidRequest(f"request id {request.request_id!r} is in use", "request_id")
        job = self._jobs.setdefault(structure, _Job(structure, {}))
        job.requests[request.request_id] = request
        self._run_next()
        return None

    def __contains__(self, request_id: str) -> bool:
        """Whether a request waits for its grammar."""
        return any(request_id in job.requests for job in self._jobs.values())

    def __len__(self) -> int:
        """How many requests wait for their grammar."""
        return sum(len(job.requests) for job in self._jobs.values())

    def forget(self, request_id: str) -> None:
        """A request that waits no more; unknown ids are ignored."""
        for job in list(self._jobs.values()):
            job.requests.pop(request_id, None)
            if not job.requests and job.thread is None:
                del self._jobs[job.structure]  # nobody waits for it, and it has not begun

    def poll(self) -> list[tuple[GenerateRequest, Compiled]]:
        """The requests whose grammar is there, or will never be."""
        ready: list[tuple[GenerateRequest, Compiled]] = []
        for job in list(self._jobs.values()):
            result = job.result or self._overdue(job)
            if result is None:
                continue
            if job.result is None and job.thread is not None:
                self._given_up.append(job.thread)
            del self._jobs[job.structure]
            if not isinstance(result, Overloaded):  # that may go better the next time
                self._remember(job.structure, result)
            for request in job.requests.values():
                ready.append((request, result if isinstance(result, RequestError) else result.start()))
        self._run_next()
        return ready

    def _overdue(self, job: _Job) -> RequestError | None:
        if job.thread is None or self._clock.now() - job.began <= self._seconds:
            return None
        return refusal(job.structure, f"compiling it has not ended within {self._seconds:g} s; simplify it")

    def _remember(self, structure: Structure, result: Compiled) -> None:
        self._compiled[structure] = result
        while len(self._compiled) > self._kept:
            self._compiled.popitem(last=False)

    def _run_next(self) -> None:
        self._given_up = [thread for thread in self._given_up if thread.is_alive()]
        # by results, not by threads: the one that has just called `wake` is still alive
        busy = sum(job.thread is not None and job.result is None for job in self._jobs.values())
        for job in self._jobs.values():
            if busy + len(self._given_up) >= _AT_ONCE:
                return
            if job.thread is None:
                job.began, busy = self._clock.now(), busy + 1
                job.thread = threading.Thread(target=self._compile, args=(job,), name="cairn-grammar", daemon=True)
                job.thread.start()

    def _compile(self, job: _Job) -> None:
        try:
            with self._lock:
                if self._tokenizer is None:
                    self._tokenizer = self._make_tokenizer()
            grammar = grammar_of(job.structure)
            job.result = GrammarConstraint.compile(grammar, self._tokenizer, self._vocab_size)
        except RequestError as error:
            job.result = error
        except ValueError as error:
            job.result = refusal(job.structure, str(error))
        except Exception as error:
            job.result = Overloaded(f"{job.structure.field} could not be compiled: {type(error).__name__}: {error}")
        if self._wake is not None:
            self._wake()
