"""The way of a request in docs/life-of-a-request.md is that of a real one: a streamed chat, a small model."""

import re
import sys
import threading

import pytest

from cairn.engine.build import build_core
from cairn.engine.text.tokenizer import ModelTokenizer
from source_scan import ROOT

MOST_HOPS = 18
ROW = re.compile(r"^\| (\d+) \| `([\w/]+)` \| `([\w.]+)` \| `(\w+)` \|", re.MULTILINE)
PACKAGE = str(ROOT / "src" / "cairn") + "/"
BODY = {"messages": [{"role": "user", "content": "Where does it go?"}], "max_tokens": 3, "stream": True}


class Trace:
    """Calls within the package as they begin and end, each with the types that it takes or gives, also within lists."""

    def __init__(self):
        self.calls = []

    def __call__(self, frame, event, value):
        code = frame.f_code
        if event not in ("call", "return") or not code.co_filename.startswith(PACKAGE):
            return
        module = code.co_filename.removeprefix(PACKAGE).removesuffix(".py")
        given = list(frame.f_locals.values()) if event == "call" else [value]
        for _ in range(2):
            given += [one for some in given if isinstance(some, list | tuple) for one in some[:1]]
        self.calls.append((module, code.co_qualname, {type(one).__name__ for one in given}))

    def by_thread(self, function):
        """The function, which has the thread that calls it traced from then on."""

        def traced(*arguments):
            sys.setprofile(self)
            return function(*arguments)

        return traced


def hops(text):
    rows = ROW.findall(text)
    assert [int(number) for number, *_ in rows] == list(range(1, len(rows) + 1))
    return [tuple(row) for _, *row in rows]


def not_taken(way, calls):
    """The first hop of `way` that `calls` do not have behind the ones before it; None where all are there."""
    left = iter(calls)
    for module, function, record in way:
        if not any((module, function) == call[:2] and record in call[2] for call in left):
            return module, function, record
    return None


@pytest.fixture(scope="module")
def calls(running_server, tiny_model):
    """Of one streamed chat."""
    server = running_server(
        build=build_core, model=str(tiny_model), tokenizer=ModelTokenizer(tiny_model), kv_cache_memory_bytes=8 << 20
    )
    trace = Trace()
    try:
        # The core's thread is traced from its next word on, the server's from its next turn on.
        server.core.stats = trace.by_thread(server.core.stats)
        assert server.get("/ready").status_code == 200
        traced = threading.Event()
        server._loop.call_soon_threadsafe(trace.by_thread(traced.set))
        assert traced.wait(10)
        answer = server.post("/v1/chat/completions", BODY)
        assert answer.status_code == 200 and answer.text.endswith("data: [DONE]\n\n")
    finally:
        server.drain()
        server.join()
    return trace.calls


@pytest.fixture(scope="module")
def way():
    return hops((ROOT / "docs" / "life-of-a-request.md").read_text())


def test_a_request_takes_the_way_that_is_told(way, calls):
    assert 10 <= len(way) <= MOST_HOPS
    assert not_taken(way, calls) is None


def test_a_hop_that_is_left_out_moved_or_wrong_is_noticed(way, calls):
    module, function, record = way[4]
    for wrong in ([module, function, "Nothing"], [module, "nothing", record], ["engine/core_loop", function, record]):
        assert not_taken([*way[:4], tuple(wrong), *way[5:]], calls) == tuple(wrong)
    assert not_taken([way[-1], way[0]], calls) == way[0]
