"""An engine core in memory: no model, no torch, the same behaviour every time.

For tests of everything above the core, and for trying the HTTP surface. The answer to a prompt is the prompt: its byte
tokens one by one, then end-of-sequence, and with `ignore_eos` all over again; answer number i begins with byte i.
Requests for transfers are read as a real engine reads them, and answered in its form: see `fake_transfer`.
"""

import os
import signal
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import msgspec
import numpy as np

from cairn.engine.contract import (
    CacheView,
    EngineConfig,
    EngineInfo,
    EngineStats,
    GenerateOutput,
    GenerateRequest,
    Timings,
)
from cairn.engine.sampling import check_token_ids
from cairn.engine.stop_strings import StopStrings
from cairn.engine.wire import check_request, key_tokens
from cairn.errors import AuditError, InvalidRequest, ModelError, QueueFull, RequestError
from cairn.transfer.params import RemotePrefill
from cairn.types import Clock, SystemClock
from doubles.byte_tokenizer import END_OF_SEQUENCE, VOCAB_SIZE, ByteTokenizer
from doubles.fake_answer import FakeAnswer
from doubles.fake_books import FakeBooks
from doubles.fake_faults import FakeFaults
from doubles.fake_paths import FakePaths
from doubles.fake_transfer import FakeTransfers, RemoteRole
from doubles.fake_view import fake_view

__all__ = ["FakeCore", "build_fake_core"]

_BYTES_PER_TOKEN = 8
_PAUSED_SECONDS = 0.002
_LOST_STATUS = 502


class FakeCore:
    """An EngineCore that echoes. `sleep` is called where it has to wait, `clock` gives the timings."""

    def __init__(
        self,
        config: EngineConfig,
        faults: FakeFaults | None = None,
        clock: Clock | None = None,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._config = config
        self._faults = faults or FakeFaults()
        self._clock = clock or SystemClock()
        self._sleep = sleep
        self._transfers = FakeTransfers(config, _BYTES_PER_TOKEN)
        self._info = _fake_info(config, self._transfers.side_channel)
        self._waiting: deque[FakeAnswer] = deque()
        self._running: dict[tuple[str, int], FakeAnswer] = {}
        self._paths = FakePaths()
        self._books = FakeBooks(self._info, self._clock)

    @property
    def info(self) -> EngineInfo:
        return self._info

    @property
    def has_work(self) -> bool:
        return bool(self._waiting or self._running)

    def submit(self, *requests: GenerateRequest) -> None:
        self._check_room([request.n for request in requests])
        taken: list[str] = []
        try:
            for request in requests:
                self._take(request)
                taken.append(request.request_id)
        except RequestError:
            for request_id in taken:
                self.abort(request_id)
            raise

    def _check_room(self, num_answers: Sequence[int]) -> None:
        limit, total = self._config.max_waiting, sum(num_answers)
        if total > limit:
            field = "n" if max(num_answers) > limit else "prompt"
            raise InvalidRequest(f"{total} answers are more than may wait", field)
        if len(self._waiting) + total > limit:
            raise QueueFull(f"{len(self._waiting)} requests are waiting already: try again later")

    def _take(self, request: GenerateRequest) -> None:
        check_request(request)
        keys = key_tokens(request)
        info = self._info
        if len(keys) >= info.max_model_len:
            raise InvalidRequest(f"the prompt has {len(keys)} tokens; at most {info.max_model_len - 1} fit", "prompt")
        wrong = np.flatnonzero((keys < 0) | (keys >= info.vocab_size))
        if len(wrong):
            raise InvalidRequest(f"prompt[{wrong[0]}] is no token id of this model", "prompt")
        check_token_ids(request, info.vocab_size)
        role = self._transfers.role_of(request)
        cached = self._paths.look_up(request.cache_salt, keys) if self._config.enable_prefix_caching else 0
        received = self._receive(role, len(keys) - cached)
        echo = [token for token in keys.tolist() if token < END_OF_SEQUENCE]
        for index in range(request.n):
            turned = echo[index % max(1, len(echo)) :] + echo[: index % max(1, len(echo))]
            answer = FakeAnswer(
                request=request,
                index=index,
                keys=keys,
                source=[*turned, END_OF_SEQUENCE],
                cached_tokens=cached,
                received_tokens=received,
                role=role,
                room=info.max_model_len - len(keys),
                stream=ByteTokenizer().stream(request.skip_special_tokens),
                stops=StopStrings(request.stop, request.include_stop_str_in_output),
                submitted=self._clock.now(),
            )
            self._waiting.append(answer)
        self._books.counts.update(prefix_cache_queries=len(keys), prefix_cache_hits=cached)

    def abort(self, request_id: str) -> None:
        self._running = {key: answer for key, answer in self._running.items() if key[0] != request_id}
        self._waiting = deque(answer for answer in self._waiting if answer.request.request_id != request_id)

    def start(self, wake: Callable[[], None]) -> None:
        """Nothing happens outside of this core: it never has to be woken."""

    def take_formed(self) -> list[tuple[str, RequestError]]:
        return []

    def poll(self) -> list[GenerateOutput]:
        return []

    def close(self) -> None:
        """There is nothing to give back."""

    def step(self) -> list[GenerateOutput]:
        self._books.counts["steps"] += 1
        self._misbehave(self._books.counts["steps"])
        self._admit()
        limit = self._faults.pause_after
        moving = [answer for answer in self._running.values() if limit is None or answer.num_tokens < limit]
        if not moving:
            self._sleep(_PAUSED_SECONDS)
            return []
        self._books.stepped(moving)
        return [self._fail(answer) if self._is_lost(answer) else self._advance(answer) for answer in moving]

    def idle(self) -> None:
        if self._faults.bad_audit:
            raise AuditError("the fake accounting was told not to add up")
        self._books.counts["audits"] += 1

    def stats(self) -> EngineStats:
        return self._books.stats(self._running.values(), len(self._waiting))

    def reset_cache(self) -> int:
        held = self.stats().held_pages
        if not held:
            self._paths.clear()
        return held

    def cache_view(self, max_paths: int) -> Iterator[CacheView | None]:
        yield None
        yield fake_view(self._info, self.stats(), self._paths, self._books.visits, max_paths)

    def resume(self) -> None:
        """Let paused answers grow on. May be called from another thread."""
        self._faults = msgspec.structs.replace(self._faults, pause_after=None)

    def _receive(self, role: RemoteRole, missing: int) -> int:
        """Prompt tokens that come from the server that prefilled them."""
        if not isinstance(role, RemotePrefill) or not missing:
            return 0
        received = 0 if self._faults.lose_transfers else missing
        self._books.pulled(missing, received)
        return received

    def _is_lost(self, answer: FakeAnswer) -> bool:
        """Whether a request has to end because what it waited for did not come."""
        lost = isinstance(answer.role, RemotePrefill) and answer.missing_tokens
        return bool(lost and not self._transfers.recomputes)

    def _fail(self, answer: FakeAnswer) -> GenerateOutput:
        self.abort(answer.request.request_id)
        return GenerateOutput(
            request_id=answer.request.request_id,
            finish_reason="error",
            error="the prefill server's pages did not arrive",
            status=_LOST_STATUS,
        )

    def _misbehave(self, step: int) -> None:
        faults = self._faults
        if step == faults.fail_at_step:
            raise RuntimeError("the fake step was told to fail")
        if step == faults.die_at_step:
            os.kill(os.getpid(), signal.SIGKILL)
        if step == faults.stall_at_step:
            self._sleep(faults.stall_seconds)

    def _admit(self) -> None:
        while self._waiting and len(self._running) < self._config.max_num_seqs:
            answer = self._waiting.popleft()
            answer.started = self._clock.now()
            self._running[answer.request.request_id, answer.index] = answer
            if not answer.index:
                self._paths.remember(answer.request.cache_salt, answer.request.prompt)
                self._books.begun(answer)

    def _advance(self, answer: FakeAnswer) -> GenerateOutput:
        if answer.num_tokens == 0:
            answer.first = self._clock.now()
        output = answer.advance()
        self._books.counts["generation_tokens"] += 1
        if output.finish_reason is None:
            return output
        del self._running[output.request_id, output.index]
        timings = Timings(
            queue=answer.started - answer.submitted,
            prefill=answer.first - answer.started,
            decode=self._clock.now() - answer.first,
        )
        if answer.index:
            return msgspec.structs.replace(output, timings=timings)
        cache, received = self._books.ended(answer), answer.received_tokens
        return msgspec.structs.replace(
            output,
            cache=cache,
            timings=timings,
            kv_transfer_params=self._transfers.response(answer.role, output.request_id, cache),
            transfer=self._transfers.report(received) if received else None,
        )


def _fake_info(config: EngineConfig, side_channel: str | None) -> EngineInfo:
    page_bytes = config.block_size * _BYTES_PER_TOKEN
    return EngineInfo(
        model=config.model,
        architecture="FakeForCausalLM",
        dtype="float32",
        vocab_size=VOCAB_SIZE,
        max_model_len=config.max_model_len or 4096,
        block_size=config.block_size,
        num_pages=config.kv_cache_memory_bytes // page_bytes,
        page_bytes=page_bytes,
        bytes_per_token=float(_BYTES_PER_TOKEN),
        checkpoint_bytes=page_bytes,
        pages_per_checkpoint=1,
        max_num_seqs=config.max_num_seqs,
        min_cacheable_tokens=1,
        mamba_cache_mode=config.mamba_cache_mode,
        enable_prefix_caching=config.enable_prefix_caching,
        exact=config.exact,
        tensor_parallel_size=config.tensor_parallel_size,
        side_channel=side_channel,
    )


def build_fake_core(config: EngineConfig) -> FakeCore:
    """A FakeCore whose faults stand in the model's name: `fake`, `fake:die_at_step=3`."""
    faults = FakeFaults.parse(config.model)
    time.sleep(faults.build_seconds)
    if faults.refuse:
        raise ModelError(f"{config.model}: the fake model was told to refuse")
    if faults.crash:
        raise RuntimeError("the fake build was told to crash")
    return FakeCore(replace(config, model="fake"), faults)
