"""Lines and files of the request log: sharing that is forgotten, full files, failing disks, queues that end."""

import json
import os
import stat
import threading

import numpy as np
import pytest
from logged import KEY, Logged, cached, first_line, layout, logged, replayed

from cairn.cache.lease import Namespace
from cairn.engine.request_log import MAX_OPS, Entry, RequestJournal
from cairn.engine.request_log_file import MAX_ENTRIES, LogFile
from cairn.engine.request_log_lines import LogLines, Shares
from cairn.errors import ConfigError
from cairn.replay.traces import read_trace
from cairn.types import Keys, ManualClock

UNIT = 16


def entry(number, prompt, output=(), salt=None, **fields) -> Entry:
    fields = {"boundaries": (), "arrived": 0.0, "finish": "stop", "timings": {}, "report": None, "ops": ()} | fields
    fields = {"gap": False, "dropped": 0} | fields
    keys = np.array(prompt, np.int64)
    return Entry(number, f"r{number}", Namespace(cache_salt=salt), keys, tuple(output), **fields)


def lines(shared_tokens=1 << 20, key=KEY) -> LogLines:
    return LogLines(first_line(layout(), 100), UNIT, key, shared_tokens)


def keys(*tokens) -> Keys:
    return np.array(tokens, np.int64)


def alike_tokens(ours, theirs) -> int:
    pairs = enumerate(zip(ours, theirs, strict=False))
    return next((place for place, (a, b) in pairs if a != b), min(len(ours), len(theirs)))


def test_sharing_is_exact_against_brute_force():
    shares, told = Shares(1 << 20), []
    draw = np.random.default_rng(1)
    for number in range(400):
        tokens = draw.integers(0, 3, draw.integers(1, 30)).tolist()
        owner, shared = shares.add(number % 2, keys(*tokens), number)
        alike = [other for other in told if other[0] == number % 2]
        common = [alike_tokens(other, tokens) for _, other in alike]
        assert shared == max(common, default=0)
        if shared:
            assert told[owner][0] == number % 2 and told[owner][1][:shared] == tokens[:shared]
        told.append((number % 2, tokens))


def test_what_is_remembered_of_sharing_is_bounded_and_the_oldest_goes_first():
    shares = Shares(100)
    for number in range(50):
        shares.add(number, keys(*range(number, number + 30)), number)
        assert shares.num_tokens <= 100
        assert shares.add(number, keys(*range(number, number + 10)), number) == (number, 10)
    assert shares.add(3, keys(*range(3, 33)), 99) == (99, 0)
    assert len(shares._roots) <= 5
    shares.add(0, keys(*range(500)), 100)
    assert shares.num_tokens <= 100 or shares.num_tokens == 0


def test_hashes_are_equal_for_equal_beginnings_alone():
    made = lines(shared_tokens=0)
    told = [
        json.loads(made.line(entry(number, prompt, salt=salt)))
        for number, (prompt, salt) in enumerate(
            [(range(48), None), ([*range(32), 1, *range(33, 48)], None), (range(48), "a"), ([5, *range(1, 48)], None)]
        )
    ]
    first, second, salted, other = (line["h"] for line in told)
    assert [line["shares"] for line in told] == [[]] * 4 and len(first) == 3
    assert first[:2] == second[:2] and first[2] != second[2]
    # the same unit behind another beginning is another one, and so it is in another namespace, or under another key
    assert not set(first) & set(other) and not set(first) & set(salted)
    assert not set(first) & set(json.loads(lines(0, b"f" * 16).line(entry(0, range(48))))["h"])
    assert all(0 <= each < 1 << 52 for each in first)
    # those behind what is shared are the same as if nothing were
    exact = lines()
    exact.line(entry(0, range(20)))
    assert json.loads(exact.line(entry(1, range(48))))["h"] == first[1:]


def test_what_was_forgotten_is_shared_up_to_a_unit(tmp_path):
    """With no memory at all the hashes tell units; with memory, tokens."""
    prompt = list(range(100))
    for shared_tokens, hit in ((1 << 20, 88), (0, 80)):
        server = Logged(tmp_path / "log", "all", shared_tokens=shared_tokens, sizes=layout(8))
        server.submit("a", prompt)
        server.run()
        server.submit("b", [*prompt[:90], 1, 2])
        server.close()
        trace = read_trace(tmp_path / "log")
        replay = replayed(trace)
        assert logged(trace) == server.hits() == {"a": 0, "b": 88}
        assert trace.logged[1].keys()[:88].tolist() == trace.logged[0].keys()[:88].tolist()
        assert cached(trace, replay) == {"a": 0, "b": 88}
        # of the two tokens behind the last unit only the memory knows
        assert (trace.logged[1].keys()[89] == trace.logged[0].keys()[89]) == (hit == 88)


def test_files_are_private_and_bounded_and_each_can_be_replayed(tmp_path):
    path = tmp_path / "log"
    path.write_text("an older one\n")
    server = Logged(path, max_bytes=12_000)
    for index in range(60):
        server.submit(f"r{index}", range(index % 7, 40 + index % 5 * 16), max_tokens=3)
        if index % 2:
            server.run()
    server.close()
    assert sorted(os.listdir(tmp_path)) == ["log", "log.1"] and server.file.dropped == 0
    for each in (path, tmp_path / "log.1"):
        assert stat.S_IMODE(each.stat().st_mode) == 0o600 and each.stat().st_size <= 12_000
        trace = read_trace(each)
        assert len(trace.logged) > 5
        replayed(trace)
    # the last file was begun with a cold cache's view of things, and the server's was warm
    hits = cached(read_trace(path), replayed(read_trace(path)))
    assert all(hit <= logged(read_trace(path))[name] for name, hit in hits.items())


def test_an_older_log_is_kept_once(tmp_path):
    path = tmp_path / "log"
    path.write_text("an older one\n")
    LogFile(path, 1 << 20, lines).close()
    assert (tmp_path / "log.1").read_text() == "an older one\n"
    assert json.loads(path.read_text())["source"] == "cairn"


@pytest.mark.parametrize("there", ["folder", "link", "nowhere"])
def test_what_is_no_regular_file_is_refused(there, tmp_path):
    path = tmp_path / "log"
    if there == "folder":
        path.mkdir()
    elif there == "link":
        path.symlink_to(tmp_path / "elsewhere")
    else:
        path = tmp_path / "not" / "there"
    with pytest.raises(ConfigError, match=f"--request-log {path}"):
        LogFile(path, 1 << 20, lines)


class Stuck(LogLines):
    """Makes no line until it is let go on."""

    def __init__(self) -> None:
        super().__init__(first_line(layout(), 100), UNIT, KEY, 1 << 20)
        self.go_on, self.began = threading.Event(), threading.Event()

    def line(self, entry, gap=False):
        self.began.set()
        assert self.go_on.wait(20)
        return super().line(entry, gap)


def test_a_full_queue_drops_and_never_waits(tmp_path):
    stuck = Stuck()
    file = LogFile(tmp_path / "log", 1 << 30, lambda: stuck)
    assert file.put(entry(0, [1]))
    assert stuck.began.wait(20)
    taken = sum(file.put(entry(number, [1])) for number in range(1, MAX_ENTRIES + 11))
    assert (taken, file.dropped) == (MAX_ENTRIES, 10)
    stuck.go_on.set()
    file.close()
    assert len((tmp_path / "log").read_text().splitlines()) == 1 + 1 + MAX_ENTRIES
    assert not file.put(entry(1, [1])) and file.dropped == 11


def test_a_line_that_cannot_be_written_leaves_no_trace(tmp_path, monkeypatch):
    file = LogFile(tmp_path / "log", 1 << 20, lines)
    write, failing = os.write, threading.Event()
    written = threading.Semaphore(0)

    def sometimes(descriptor, data):
        if not failing.is_set():
            return write(descriptor, data)
        failing.clear()
        write(descriptor, data[:7])
        written.release()
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("cairn.engine.request_log_file.os.write", sometimes)
    failing.set()
    assert file.put(entry(1, range(40)))
    assert written.acquire(timeout=20)
    assert file.put(entry(2, range(40))) and file.put(entry(3, [*range(20), 7]))
    file.close()
    told = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]
    assert [line.get("n") for line in told] == [None, 2, 3] and file.dropped == 1
    assert told[1]["gap"] is True and "gap" not in told[2]
    # nothing may refer to the line that is not there
    assert told[1]["shares"] == [] and told[2]["shares"] == [2, 20]


def test_half_a_line_at_the_end_is_taken_back(tmp_path, monkeypatch):
    file = LogFile(tmp_path / "log", 1 << 20, lines)
    write = os.write

    def half(descriptor, data):
        if len(data) <= 20:
            raise OSError(28, "No space left on device")
        return write(descriptor, data[:-20])

    monkeypatch.setattr("cairn.engine.request_log_file.os.write", half)
    assert file.put(entry(1, range(40)))
    file.close()
    assert file.dropped == 1 and json.loads((tmp_path / "log").read_text())["source"] == "cairn"


class Sink:
    """Takes what it is told to take."""

    def __init__(self) -> None:
        self.takes, self.entries, self.dropped = True, [], 0

    def put(self, entry) -> bool:
        self.dropped += not self.takes
        if self.takes:
            self.entries.append(entry)
        return self.takes

    def close(self) -> None: ...


def test_calls_outlive_a_line_that_was_dropped():
    server_sink = Sink()
    journal = RequestJournal(server_sink, ManualClock(), UNIT)
    journal.room(1)
    server_sink.takes = False
    request = made_request()
    journal.submitted(request)
    journal.ended(request)
    journal.room(2)
    server_sink.takes = True
    journal.ended(request)
    assert [entry.ops for entry in server_sink.entries] == [(("m", 1), ("m", 2))]
    assert server_sink.entries[0].dropped == journal.dropped == 1 and not server_sink.entries[0].gap
    for number in range(MAX_OPS + 1):
        journal.room(number)
    journal.ended(request)
    assert server_sink.entries[1].gap and server_sink.entries[1].ops == (("m", MAX_OPS),)
    journal.ended(request)
    assert not server_sink.entries[2].gap and not server_sink.entries[2].ops


def made_request():
    from cairn.scheduler.request import Request, Spec, Times
    from cairn.types import RequestId, SamplingParams

    spec = Spec(request_id=RequestId("a"), prompt=np.arange(3), sampling=SamplingParams(), max_tokens=1)
    return Request(spec, Times(0.0), arrival=1)


def test_who_waits_in_vain_is_noted_once():
    sink = Sink()
    journal = RequestJournal(sink, ManualClock(), UNIT)
    request = made_request()
    journal.submitted(request)
    for _ in range(5):
        journal.note("l", "a", 3, 0, 0)
        journal.note("r", "a", None)
    journal.room(1)
    journal.note("l", "a", 3, 0, 0)
    journal.note("r", "a", None)
    journal.note("l", "unknown", 3, 0, 0)
    journal.ended(request)
    tried = [("l", 1, 3, 0, 0), ("r", 1, None)]
    assert sink.entries[0].ops == (*tried, ("m", 1), *tried)
