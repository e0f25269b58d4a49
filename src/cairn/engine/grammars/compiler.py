"""Grammar compilation for structured outputs: checked in a child process, compiled on threads, cached.

PendingGrammars   requests that were submitted together wait until all their grammars are compiled
GrammarCompiler   one job a grammar, on threads
GrammarChecker    compiles each grammar in a child process first: if it hangs or fills the memory, only the child ends
"""

import math
import subprocess
import tempfile
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
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
_MAX_CACHED = 64
_MAX_THREADS = 2

_PROBE = Structure(kind="regex", text="a", field="regex")


class GrammarKey(NamedTuple):
    """`check_only`: only check that it compiles, because another server gives the answer."""

    structure: Structure
    check_only: bool


class CheckedGrammar:
    """A grammar that was only checked: it compiles."""

    def start(self) -> "CheckedGrammar":
        return self


Compiled: TypeAlias = GrammarConstraint | CheckedGrammar | RequestError
Constraints: TypeAlias = dict[str, GrammarConstraint | CheckedGrammar]
"""By request id, what constrains its answer."""


# -- the child ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class CheckResult:
    """`reason`: why a grammar is refused, None if it compiles. `seconds`: for how long the result is cached."""

    reason: str | None
    seconds: float = math.inf


class GrammarChecker:
    """Compiles grammars one at a time in a child process, which is started when it is first needed. For any thread.

    `seconds`: deadline of one grammar. One that takes longer is refused, and the child replaced. Time and memory may
    have been short for another reason, so a refusal for want of them is cached for a minute.
    """

    def __init__(self, seconds: float = _CHECK_SECONDS, module: str = "cairn.engine.grammars.worker") -> None:
        self._seconds = seconds
        self._module = module
        self._cleanup = ExitStack()
        self._child: ChildProcess | None = None
        self._turn = threading.Lock()

    def check(self, structure: Structure) -> CheckResult:
        """Raises Overloaded when there can be no child."""
        with self._turn:
            child = self._ready_child()
            try:
                return CheckResult(self._ask(child, structure, self._seconds))
            except ChildLate:
                reason = f"{structure.field} takes more than {self._seconds:g} s to compile: simplify it"
            except EngineDead:
                reason = f"{structure.field} takes too much memory to compile: simplify it"
            self._end()
            return CheckResult(reason, _DOUBTFUL_SECONDS)

    def close(self) -> None:
        """Kill the child. A later check starts a new one."""
        child = self._child
        if child is not None:
            child.process.kill()
        if self._turn.acquire(timeout=_CLOSE_SECONDS):
            try:
                self._end()
            finally:
                self._turn.release()

    def _ready_child(self) -> ChildProcess:
        """The running child. A new one has answered once, so that its start does not count against a grammar."""
        if self._child is not None and self._child.exit_reason() is None:
            return self._child
        self._end()
        try:
            folder = self._cleanup.enter_context(tempfile.TemporaryDirectory("", "cairn-", ignore_cleanup_errors=True))
            context = self._cleanup.enter_context(zmq.Context())
            name, address = "the process that compiles grammars", f"ipc://{folder}/grammars"
            self._child = ChildProcess(name, self._module, address, context=context, stderr=subprocess.DEVNULL)
            self._cleanup.callback(self._child.close)
            self._ask(self._child, _PROBE, _START_SECONDS)
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


# -- compiled on threads, and cached -----------------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class _Job:
    """A grammar that is being compiled, or waits to be. `queued_at`, `started_at`: clock readings in seconds, the
    second when its compilation began after the check. `seconds`: for how long the result is cached."""

    key: GrammarKey
    queued_at: float
    thread: threading.Thread | None = None
    started_at: float = math.inf
    seconds: float = math.inf
    result: Compiled | None = None


class GrammarCompiler:
    """Compiles structures to constraints, for one caller's thread. Caches the last `max_cached` results, refusals too.

    `make_tokenizer` is called on a thread of its own, for the first grammar. A grammar that takes longer than `seconds`
    is refused, and its thread abandoned.
    """

    def __init__(
        self,
        make_tokenizer: Callable[[], LLTokenizer],
        vocab_size: int,
        clock: Clock | None = None,
        check: GrammarChecker | None = None,
        max_cached: int = _MAX_CACHED,
        seconds: float = _COMPILE_SECONDS,
    ) -> None:
        self._make_tokenizer = make_tokenizer
        self._vocab_size = vocab_size
        self._clock = clock or SystemClock()
        self._check = check or GrammarChecker()
        self._max_cached = max_cached
        self._seconds = seconds
        self._wake: Callable[[], None] | None = None
        self._cache: OrderedDict[GrammarKey, tuple[Compiled, float]] = OrderedDict()
        self._jobs: OrderedDict[GrammarKey, _Job] = OrderedDict()
        self._abandoned: list[threading.Thread] = []
        self._lock = threading.Lock()
        self._tokenizer: LLTokenizer | None = None

    def start(self, wake: Callable[[], None]) -> None:
        """From now on `wake` is called, on another thread, when something has been compiled."""
        self._wake = wake

    def close(self) -> None:
        self._check.close()

    def get(self, key: GrammarKey) -> GrammarConstraint | CheckedGrammar | None:
        """A constraint for a new answer; None until `poll` has named `key`. Raises InvalidRequest."""
        compiled, until = self._cache.get(key, (None, math.inf))
        if compiled is None or until <= self._clock.now():
            self._jobs.setdefault(key, _Job(key, self._clock.now()))
            self._run_next()
            return None
        self._cache.move_to_end(key)
        if isinstance(compiled, RequestError):
            # a new one each time: an exception keeps the frames of all that have raised it
            raise InvalidRequest(compiled.message, compiled.param)
        return compiled.start()

    def cancel(self, key: GrammarKey) -> None:
        """No request waits for it any more: drop it if its job has not begun."""
        job = self._jobs.get(key)
        if job is not None and job.thread is None:
            del self._jobs[key]

    def poll(self) -> dict[GrammarKey, Compiled]:
        """The grammars that were compiled or refused since the last call."""
        ready: dict[GrammarKey, Compiled] = {}
        for job in list(self._jobs.values()):
            result = job.result or self._overdue(job)
            if result is None:
                continue
            if job.result is None and job.thread is not None:
                self._abandoned.append(job.thread)
            del self._jobs[job.key]
            ready[job.key] = result
            if not isinstance(result, Overloaded):  # that may go better the next time
                self._cache[job.key] = result, self._clock.now() + job.seconds
                self._cache.move_to_end(job.key)
                while len(self._cache) > self._max_cached:
                    self._cache.popitem(last=False)
        self._run_next()
        return ready

    def _overdue(self, job: _Job) -> RequestError | None:
        now = self._clock.now()
        if job.thread is None and now - job.queued_at > _WAIT_SECONDS:
            return Overloaded("too many grammars wait to be compiled: try again later")
        if now - job.started_at > self._seconds:
            return refusal(job.key.structure, f"compiling it has not ended within {self._seconds:g} s; simplify it")
        return None

    def _run_next(self) -> None:
        self._abandoned = [thread for thread in self._abandoned if thread.is_alive()]
        # by results, not by threads: the one that has just called `wake` is still alive
        busy = sum(job.thread is not None and job.result is None for job in self._jobs.values())
        for job in self._jobs.values():
            if busy + len(self._abandoned) >= _MAX_THREADS:
                return
            if job.thread is None:
                busy += 1
                job.thread = threading.Thread(target=self._compile, args=(job,), name="cairn-grammar", daemon=True)
                job.thread.start()

    def _compile(self, job: _Job) -> None:
        structure = job.key.structure
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
        structure, check_only = job.key
        checked = self._check.check(structure)
        if checked.reason is not None:
            job.seconds = checked.seconds
            return InvalidRequest(checked.reason, structure.field.partition(".")[0])
        if check_only:
            return CheckedGrammar()
        job.started_at = self._clock.now()
        with self._lock:
            if self._tokenizer is None:
                self._tokenizer = self._make_tokenizer()
        return GrammarConstraint.compile(grammar_of(structure), self._tokenizer, self._vocab_size)


# -- requests that wait for their grammars -----------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class RequestBatch:
    """Requests that were submitted together. `missing`: grammars that are not compiled yet, by request id; `error`: why
    one was refused."""

    requests: dict[str, GenerateRequest]
    constraints: Constraints = field(default_factory=dict)
    missing: dict[str, GrammarKey] = field(default_factory=dict)
    error: RequestError | None = None


class PendingGrammars:
    """Requests that wait for `compiler`. Those that were submitted together become ready together: one that began alone
    would have begun when another one is refused."""

    def __init__(self, compiler: GrammarCompiler) -> None:
        self._compiler = compiler
        self._batches: dict[str, RequestBatch] = {}

    def __len__(self) -> int:
        """How many requests wait."""
        return len(self._batches)

    def add(self, requests: Sequence[GenerateRequest], grammars: Mapping[str, GrammarKey]) -> Constraints | None:
        """The constraints for `grammars`, by request id; None: `poll` will return the requests. Raises InvalidRequest,
        and then none of them waits."""
        for request in requests:
            if request.request_id in self._batches:
                raise InvalidRequest(f"request id {request.request_id!r} is in use", "request_id")
        batch = RequestBatch({request.request_id: request for request in requests})
        try:
            for request_id, grammar in grammars.items():
                constraint = self._compiler.get(grammar)
                if constraint is None:
                    batch.missing[request_id] = grammar
                else:
                    batch.constraints[request_id] = constraint
        except RequestError:
            self._cancel_unused(batch.missing.values())
            raise
        if not batch.missing:
            return batch.constraints
        self._batches.update(dict.fromkeys(batch.requests, batch))
        return None

    def cancel(self, request_id: str) -> None:
        """The request does not wait any more; unknown ids are ignored."""
        batch = self._batches.pop(request_id, None)
        if batch is not None:
            del batch.requests[request_id]
            grammar = batch.missing.pop(request_id, None)
            self._cancel_unused([] if grammar is None else [grammar])

    def poll(self) -> list[tuple[list[GenerateRequest], Constraints | RequestError]]:
        """The requests that do not wait any more, as they were submitted: with their constraints, or the refusal."""
        results = self._compiler.poll()
        ready = []
        for batch in dict.fromkeys(self._batches.values()):
            for request_id, grammar in list(batch.missing.items()):
                if (compiled := results.get(grammar)) is None:
                    continue
                del batch.missing[request_id]
                if isinstance(compiled, RequestError):
                    batch.error = compiled
                else:
                    batch.constraints[request_id] = compiled.start()
            if batch.error is not None or not batch.missing:
                ready.append(batch)
        for request_id in [name for batch in ready for name in batch.requests]:
            del self._batches[request_id]
        self._cancel_unused([grammar for batch in ready for grammar in batch.missing.values()])
        return [(list(batch.requests.values()), batch.error or batch.constraints) for batch in ready]

    def _cancel_unused(self, grammars: Iterable[GrammarKey]) -> None:
        for grammar in grammars:
            if not any(grammar in batch.missing.values() for batch in self._batches.values()):
                self._compiler.cancel(grammar)
