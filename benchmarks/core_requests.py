"""One request at a time through a core in this process, timed."""

import time

import numpy as np

from cairn.engine.contract import GenerateRequest, StopConditions
from cairn.engine.core import Core
from cairn.types import SamplingParams


def greedy_request(name: str, prompt: np.ndarray, max_tokens: int) -> GenerateRequest:
    """Of a prompt of token ids, int64 [n]; answered in full length."""
    return GenerateRequest(
        request_id=name,
        prompt=prompt.tobytes(),
        sampling=SamplingParams(temperature=0.0),
        stop_conditions=StopConditions(max_tokens=max_tokens, ignore_eos=True),
    )


def run_request(core: Core, request: GenerateRequest) -> tuple[float, list[int], int]:
    """Seconds to the first token, the answer's tokens, and the cached tokens."""
    start = time.perf_counter()
    core.submit(request)
    first, tokens, cached = 0.0, list[int](), 0
    while core.has_work:
        for output in core.step():
            assert output.error is None, output.error
            first = first or time.perf_counter() - start
            tokens += output.token_ids
            if output.cache is not None:
                cached = output.cache.cached_tokens
    return first, tokens, cached
