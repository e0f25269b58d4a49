"""A core turned by hand: how fast it prefills and decodes, without HTTP and without a process of its own."""

import statistics
import time
from typing import Any

import numpy as np
import torch

from cairn.engine.contract import GenerateRequest, StopConditions
from cairn.engine.core import Core
from cairn.types import SamplingParams

__all__ = ["GREEDY", "NOTHING", "Figures", "HandTurned", "decode", "prefill"]

FIRST_TOKEN, TOKENS = 64, 4_000
SPIN_CYCLES = 100_000_000
"""For which the GPU is held up: some 50 ms, more than the host takes to send a step."""

GREEDY = SamplingParams(temperature=0.0)
NOTHING = np.zeros(0, np.int64)

Figures = dict[str, float]


class HandTurned:
    """A core, and when tokens came of it."""

    def __init__(self, core: Core, seed: int = 0) -> None:
        self.core = core
        self._rng = np.random.default_rng(seed)
        self._count = 0

    def draw(self, length: int) -> np.ndarray:
        return self._rng.integers(FIRST_TOKEN, TOKENS, length)

    def submit(
        self,
        prompt: np.ndarray,
        max_tokens: int,
        sampling: SamplingParams = GREEDY,
        prediction: np.ndarray = NOTHING,
        cache_salt: str | None = None,
    ) -> str:
        """The request's id. `prediction`: tokens that the answer is expected to be much like."""
        self._count += 1
        request_id = f"request-{self._count}"
        self.core.submit(
            GenerateRequest(
                request_id=request_id,
                prompt=prompt.astype(np.int64).tobytes(),
                prediction=prediction.astype(np.int64).tobytes(),
                cache_salt=cache_salt,
                sampling=sampling,
                stop_conditions=StopConditions(max_tokens=max_tokens, ignore_eos=True),
            )
        )
        return request_id

    def step(self) -> int:
        """How many tokens came."""
        return sum(len(output.token_ids) for output in self.core.step())

    def until_idle(self) -> None:
        while self.core.has_work:
            self.step()

    def first_token_ms(self, prompt: np.ndarray) -> float:
        """Of one request, alone."""
        begin = time.perf_counter()
        self.submit(prompt, 1)
        while not self.step():
            pass
        seconds = time.perf_counter() - begin
        self.until_idle()
        return 1000 * seconds


def prefill(engine: HandTurned, length: int, repeats: int) -> Figures:
    """Milliseconds to the first token of cold prompts of one length, and of the last of them again."""
    engine.first_token_ms(engine.draw(length))  # compiles what is not compiled yet
    prompts = [engine.draw(length) for _ in range(repeats)]
    cold = statistics.median(engine.first_token_ms(prompt) for prompt in prompts)
    again = statistics.median(engine.first_token_ms(prompts[-1]) for _ in range(repeats))
    return {"ttft_ms": cold, "tokens_per_s": 1000 * length / cold, "again_ttft_ms": again}


def decode(engine: HandTurned, count: int, context: int, window: int, held: int, has_gpu: bool) -> Figures:
    """`count` sequences at once, behind prompts of `context` tokens: `window` steps are timed when all of them are past
    their prompts, and then, on a GPU, `retained` more by events."""
    answer = window + 2 * held + 2 * count + 64
    for _ in range(count):
        engine.submit(engine.draw(context), answer)
    while engine.step() < count:
        if not engine.core.has_work:
            raise RuntimeError(f"{count} sequences of {context} tokens do not run at once")
    for _ in range(held):
        engine.step()
    begin, cpu = time.perf_counter(), time.thread_time()
    tokens = sum(engine.step() for _ in range(window))
    seconds, host = time.perf_counter() - begin, time.thread_time() - cpu
    found = {
        "tokens_per_s": tokens / seconds,
        "step_us": 1e6 * seconds / window,
        "host_us": 1e6 * host / window,
    }
    if has_gpu:
        found["device_us"] = device_us(engine, held)
        found["gpu_idle_share"] = max(0.0, 1 - found["device_us"] / found["step_us"])
    engine.until_idle()
    return found


def device_us(engine: HandTurned, steps: int) -> float:
    """Of a step, between two CUDA events; the GPU is held up before the first one until the host has sent all of it."""
    runner: Any = engine.core._runner
    launch, sample = runner.launch, runner.sample
    events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    def held_launch(plan: Any) -> None:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(SPIN_CYCLES)
        begin.record()
        launch(plan)
        events.append((begin, end))

    def marked_sample(step: int, masks: Any) -> None:
        sample(step, masks)
        events[-1][1].record()

    runner.launch, runner.sample = held_launch, marked_sample
    try:
        for _ in range(steps):
            engine.step()
    finally:
        del runner.launch, runner.sample
    torch.cuda.synchronize()
    return 1000 * statistics.median(begin.elapsed_time(end) for begin, end in events)
