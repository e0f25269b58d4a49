"""One request at a time through a core in this process, timed."""

import time

from cairn.engine.contract import GenerateRequest
from cairn.engine.core import Core


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
