"""The grammars that answers are held to: tried in a process that can be ended, compiled beside the core's thread, kept.

PendingGrammars   requests that came together go on together, when all their grammars are there
GrammarCompiler   one job a grammar, on threads
GrammarCheck      the child process that a grammar is tried in first: what hangs or fills the memory ends that alone
"""

import math
import subprocess
import tempfile
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

import msgspec
import zmq
from llguidance import LLTokenizer

from cairn.engine.child_process import ChildLate, ChildProcess
from cairn.engine.contract import GenerateRequest, Structure
from cairn.engine.grammars.constraint import GrammarConstraint
from cairn.engine.grammars.structure import grammar_of, refusal
from cairn.errors import ConfigError, EngineDead, InvalidRequest, Overloaded, RequestError
from cairn.types import Clock, SystemClock

_CHECK_SECONDS = 5.0
_START_SECONDS = 30.0
_CLOSE_SECONDS = 2.0
_DOUBTFUL_SECONDS = 60.0
_COMPILE_SECONDS = 30.0
_WAIT_SECONDS = 20.0
_KEPT = 64
_AT_ONCE = 2

_HARMLESS = Structure(kind="regex", text="a", field="regex")


class WantedGrammar(NamedTuple):
    """`is_tried_only`: whether it compiles is all that is asked, for an answer that another server gives."""

    structure: Structure
    is_tried_only: bool


class Tried:
    """It compiles, and nothing was made of it."""

    def start(self) -> "Tried":
        return self


Compiled: TypeAlias = GrammarConstraint | Tried | RequestError
Forms: TypeAlias = dict[str, GrammarConstraint | Tried]
"""A request's id -> what holds its answer to a form."""


# -- the child ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Verdict:
    """Why a grammar is refused, None for one that compiles; `seconds`: for how long that is believed."""

    reason: str | None
    seconds: float = math.inf


class GrammarCheck:
    """Asks one child process at a time, started when it is first needed. For any thread.

    `seconds`: how long a grammar may take. One that takes longer is refused, and the child replaced. Time and memory
    may have been short for another reason, so a refusal for want of them holds for a minute.
    """

    def __init__(self, seconds: float = _CHECK_SECONDS, module: str = "cairn.engine.grammars.worker") -> None:
        self._seconds = seconds
        self._module = module
        self._cleanup = ExitStack()
        self._child: ChildProcess | None = None
        self._turn = threading.Lock()

    def check(self, structure: Structure) -> Verdict:
        """Raises Overloaded when there can be no child."""
        with self._turn:
            child = self._ready_child()
            try:
                return Verdict(self._ask(child, structure, self._seconds))
            except ChildLate:
                reason = f"{structure.field} takes more than {self._seconds:g} s to compile: simplify it"
            except EngineDead:
                reason = f"{structure.field} takes too much memory to compile: simplify it"
            self._end()
            return Verdict(reason, _DOUBTFUL_SECONDS)

    def close(self) -> None:
        """End the child, whatever it does. It may be asked again: then there is a new one."""
        child = self._child
        if child is not None:
            child.process.kill()
        if self._turn.acquire(timeout=_CLOSE_SECONDS):
            try:
                self._end()
            finally:
                self._turn.release()

    def _ready_child(self) -> ChildProcess:
        """The child, which has answered once: to start it is not to count against a grammar."""
        if self._child is not None and self._child.end() is None:
            return self._child
        self._end()
        try:
            folder = self._cleanup.enter_context(tempfile.TemporaryDirectory("", "cairn-", ignore_cleanup_errors=True))
            context = self._cleanup.enter_context(zmq.Context())
            name, address = "the process that compiles grammars", f"ipc://{folder}/grammars"
            self._child = ChildProcess(name, self._module, address, context=context, stderr=subprocess.DEVNULL)
            self._cleanup.callback(self._child.close)
            self._ask(self._child, _HARMLESS, _START_SECONDS)
            return self._child
        except (EngineDead, ConfigError, OSError) as error:
            self._end()
            raise Overloaded("grammars cannot be compiled at the moment: try again later") from error

    def _ask(self, child: ChildProcess, structure: Structure, seconds: float) -> str | None:
        child.wait_for(zmq.POLLOUT, seconds, "ready for a grammar")
        child.send(msgspec.msgpack.encode(structure), "grammar")
        return msgspec.msgpack.decode(child.receive(seconds, "done with a grammar"), type=str | None)

    def _end(self) -> None:
        self._child = None
        self._cleanup.close()


# -- compiled, and kept ------------------------------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class _Job:
    """A grammar that is being compiled, or waits to be. `asked`, `began`: when it was wanted, and when its compilation
    began behind the check, in seconds of the clock. `seconds`: for how long the result is believed."""

    wanted: WantedGrammar
    asked: float
    thread: threading.Thread | None = None
    began: float = math.inf
    seconds: float = math.inf
    result: Compiled | None = None


class GrammarCompiler:
    """Makes constraints of structures, for one thread that asks; the last `kept` of them are remembered, refusals too.

    `make_tokenizer` is called on a thread of its own, when the first grammar is asked for. A grammar that takes longer
    than `seconds` is given up: its requests are refused, and the thread is left to end by itself.
    """

    def __init__(
        self,
        make_tokenizer: Callable[[], LLTokenizer],
        vocab_size: int,
        clock: Clock | None = None,
        check: GrammarCheck | None = None,
        kept: int = _KEPT,
        seconds: float = _COMPILE_SECONDS,
    ) -> None:
        self._make_tokenizer = make_tokenizer
        self._vocab_size = vocab_size
        self._clock = clock or SystemClock()
        self._check = check or GrammarCheck()
        self._kept = kept
        self._seconds = seconds
        self._wake: Callable[[], None] | None = None
        self._known: OrderedDict[WantedGrammar, tuple[Compiled, float]] = OrderedDict()
        self._jobs: OrderedDict[WantedGrammar, _Job] = OrderedDict()
        self._given_up: list[threading.Thread] = []
        self._lock = threading.Lock()
        self._tokenizer: LLTokenizer | None = None

    def start(self, wake: Callable[[], None]) -> None:
        """From now on `wake` is called, on another thread, when something has been compiled."""
        self._wake = wake

    def close(self) -> None:
        self._check.close()

    def take(self, wanted: WantedGrammar) -> GrammarConstraint | Tried | None:
        """The constraint for an answer; None: `poll` will name what was wanted. Raises InvalidRequest."""
        compiled, until = self._known.get(wanted, (None, math.inf))
        if compiled is None or until <= self._clock.now():
            self._jobs.setdefault(wanted, _Job(wanted, self._clock.now()))
            self._run_next()
            return None
        self._known.move_to_end(wanted)
        if isinstance(compiled, RequestError):
            # a new one each time: an exception keeps the frames of all that have raised it
            raise InvalidRequest(compiled.message, compiled.param)
        return compiled.start()

    def forget(self, wanted: WantedGrammar) -> None:
        """Nobody waits for it any more."""
        job = self._jobs.get(wanted)
        if job is not None and job.thread is None:
            del self._jobs[wanted]

    def poll(self) -> dict[WantedGrammar, Compiled]:
        """The grammars that are there, or will never be, since the last call."""
        ready: dict[WantedGrammar, Compiled] = {}
        for job in list(self._jobs.values()):
            result = job.result or self._overdue(job)
            if result is None:
                continue
            if job.result is None and job.thread is not None:
                self._given_up.append(job.thread)
            del self._jobs[job.wanted]
            ready[job.wanted] = result
            if not isinstance(result, Overloaded):  # that may go better the next time
                self._known[job.wanted] = result, self._clock.now() + job.seconds
                self._known.move_to_end(job.wanted)
                while len(self._known) > self._kept:
                    self._known.popitem(last=False)
        self._run_next()
        return ready

    def _overdue(self, job: _Job) -> RequestError | None:
        now = self._clock.now()
        if job.thread is None and now - job.asked > _WAIT_SECONDS:
            return Overloaded("too many grammars wait to be compiled: try again later")
        if now - job.began > self._seconds:
            return refusal(job.wanted.structure, f"compiling it has not ended within {self._seconds:g} s; simplify it")
        return None

    def _run_next(self) -> None:
        self._given_up = [thread for thread in self._given_up if thread.is_alive()]
        # by results, not by threads: the one that has just called `wake` is still alive
        busy = sum(job.thread is not None and job.result is None for job in self._jobs.values())
        for job in self._jobs.values():
            if busy + len(self._given_up) >= _AT_ONCE:
                return
            if job.thread is None:
                busy += 1
                job.thread = threading.Thread(target=self._compile, args=(job,), name="cairn-grammar", daemon=True)
                job.thread.start()

    def _compile(self, job: _Job) -> None:
        structure = job.wanted.structure
        try:
            job.result = self._compiled(job)
        except RequestError as error:
            job.result = error
        except ValueError as error:
            job.result = refusal(structure, str(error))
        except Exception as error:
            job.result = Overloaded(f"{structure.field} could not be compiled: {type(error).__name__}: {error}")
        if self._wake is not None:
            self._wake()

    def _compiled(self, job: _Job) -> Compiled:
        structure, is_tried_only = job.wanted
        verdict = self._check.check(structure)
        if verdict.reason is not None:
            job.seconds = verdict.seconds
            return InvalidRequest(verdict.reason, structure.field.partition(".")[0])
        if is_tried_only:
            return Tried()
        job.began = self._clock.now()
        with self._lock:
            if self._tokenizer is None:
                self._tokenizer = self._make_tokenizer()
        return GrammarConstraint.compile(grammar_of(structure), self._tokenizer, self._vocab_size)


# -- requests that wait for them ---------------------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class RequestBatch:
    """What came together. `missing`: the grammars, by request, that are not there yet; `refusal`: why one
    never will be."""

    requests: dict[str, GenerateRequest]
    forms: Forms = field(default_factory=dict)
    missing: dict[str, WantedGrammar] = field(default_factory=dict)
    refusal: RequestError | None = None


class PendingGrammars:
    """Asks `compiler` for the forms of requests that came together, and waits until all of them are there: a request
    that went on alone would have begun when another one is refused."""

    def __init__(self, compiler: GrammarCompiler) -> None:
        self._compiler = compiler
        self._batches: dict[str, RequestBatch] = {}

    def __len__(self) -> int:
        """How many requests wait."""
        return len(self._batches)

    def take(self, requests: Sequence[GenerateRequest], wanted: Mapping[str, WantedGrammar]) -> Forms | None:
        """The forms that are `wanted`, by request; None: `poll` will name the requests. Raises InvalidRequest, and then
        none of them waits."""
        for request in requests:
            if request.request_id in self._batches:
                raise InvalidRequest(f"request id {request.request_id!r} is in use", "request_id")
        batch = RequestBatch({request.request_id: request for request in requests})
        try:
            for request_id, grammar in wanted.items():
                form = self._compiler.take(grammar)
                if form is None:
                    batch.missing[request_id] = grammar
                else:
                    batch.forms[request_id] = form
        except RequestError:
            self._forget_missing(batch)
            raise
        if not batch.missing:
            return batch.forms
        self._batches.update(dict.fromkeys(batch.requests, batch))
        return None

    def forget(self, request_id: str) -> None:
        """A request that waits no more; unknown ids are ignored."""
        batch = self._batches.pop(request_id, None)
        if batch is not None:
            del batch.requests[request_id]
            grammar = batch.missing.pop(request_id, None)
            if grammar is not None:
                self._forget_unless_missed(grammar)

    def poll(self) -> list[tuple[list[GenerateRequest], Forms | RequestError]]:
        """The requests that wait no more, as they came together: with their forms, or with why they are refused."""
        found = self._compiler.poll()
        batches = list(dict.fromkeys(self._batches.values()))
        for batch in batches:
            for request_id, grammar in list(batch.missing.items()):
                compiled = found.get(grammar)
                if compiled is None:
                    continue
                del batch.missing[request_id]
                if isinstance(compiled, RequestError):
                    batch.refusal = compiled
                else:
                    batch.forms[request_id] = compiled.start()
        ready = [batch for batch in batches if batch.refusal is not None or not batch.missing]
        for batch in ready:
            for request_id in batch.requests:
                del self._batches[request_id]
        for batch in ready:
            self._forget_missing(batch)
        return [(list(batch.requests.values()), batch.refusal or batch.forms) for batch in ready]

    def _forget_missing(self, batch: RequestBatch) -> None:
        for grammar in batch.missing.values():
            self._forget_unless_missed(grammar)

    def _forget_unless_missed(self, grammar: WantedGrammar) -> None:
        if not any(grammar in batch.missing.values() for batch in self._batches.values()):
            self._compiler.forget(grammar)
