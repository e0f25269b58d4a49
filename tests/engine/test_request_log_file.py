"""Lines and files of the request log: what is said of tokens, full files, failing disks, queues that end."""

import json
import os
import stat
import threading
from base64 import b64decode

import numpy as np
import pytest
from logged import LoggedServer, hits_by_name, logged_hits, replayed

from cairn.cache.sequence_blocks import Namespace
from cairn.engine.request_log.file import MAX_ENTRIES, LogFile, check_log_file
from cairn.engine.request_log.lines import LogEntry, LogLines
from cairn.engine.request_log.log import RequestLog
from cairn.errors import ConfigError
from cairn.keys import common_tokens
from cairn.replay.traces import read_trace
from cairn.scheduler.request import Request, RequestStats, Spec
from cairn.types import ManualClock, RequestId, SamplingParams

UNIT = 16
KEY = b"0123456789abcdef"


def entry(number, prompt, output=(), salt=None) -> LogEntry:
    keys = np.array(prompt, np.int64)
    fields = {"n": number, "id": f"r{number}", "in": len(keys), "out": len(output)}
    return LogEntry(Namespace(cache_salt=salt), keys, tuple(output), fields)


def lines(max_written_tokens=1 << 20, key=KEY) -> LogLines:
    return LogLines({"source": "cairn", "unit": UNIT}, UNIT, key, max_written_tokens)


def hashes(line) -> np.ndarray:
    return np.frombuffer(b64decode(line["token_hashes"]), "<u2").astype(np.int64)


def alike(ours, theirs) -> int:
    return common_tokens(np.array(ours, np.int64), np.array(theirs, np.int64))


def sequences(told) -> list[np.ndarray]:
    """The token hashes of each line's tokens, put together by what the format says."""
    ends, found = {}, []
    for line in told:
        before = found[ends[line["prefix"][0]]][: line["prefix"][1]] if "prefix" in line else np.empty(0, np.int64)
        found.append(np.concatenate([before, hashes(line)]))
        ends |= dict.fromkeys(line["block_hashes"], len(found) - 1)
    return found


@pytest.mark.parametrize("max_written_tokens", [1 << 20, 64, 0])
def test_what_is_shared_is_said_to_the_token(max_written_tokens):
    """Against the tokens themselves, whatever the log still knows of them."""
    made, draw = lines(max_written_tokens), np.random.default_rng(1)
    salts = [(None, "a")[number % 2] for number in range(120)]
    asked = [draw.integers(0, 2, draw.integers(1, 70)).tolist() for _ in salts]
    asked[40:] = [[*asked[number % 7], *tokens][:90] for number, tokens in enumerate(asked[40:])]
    told = [
        json.loads(made.line(entry(n, tokens[:-1], tokens[-1:], salt)))
        for n, (tokens, salt) in enumerate(zip(asked, salts, strict=True))
        if len(tokens) > 1
    ]
    asked, salts = zip(*[(one, salt) for one, salt in zip(asked, salts, strict=True) if len(one) > 1], strict=True)
    made_again = sequences(told)
    assert [len(each) for each in made_again] == [len(each) for each in asked]
    for i in range(len(asked)):
        for j in range(i):
            expected = alike(asked[i], asked[j]) if salts[i] == salts[j] else 0
            assert alike(made_again[i], made_again[j]) == expected


def test_whole_units_are_said_once():
    made = lines()
    first, again, longer = (json.loads(made.line(entry(n, range(n_tokens)))) for n, n_tokens in enumerate((40, 40, 70)))
    assert "prefix" not in first and len(hashes(first)) == 40 and len(first["block_hashes"]) == 2
    assert again["prefix"] == [first["block_hashes"][1], 32] and len(hashes(again)) == 8 and again["block_hashes"] == []
    assert (
        longer["prefix"] == [first["block_hashes"][1], 32]
        and len(hashes(longer)) == 38
        and len(longer["block_hashes"]) == 2
    )


def test_what_is_known_of_the_file_is_bounded_and_the_oldest_goes_first():
    made = lines(max_written_tokens=10 * UNIT)
    for number in range(20):
        made.line(entry(number, range(1000 * number, 1000 * number + 3 * UNIT)))
        assert len(made._written) <= 10
    newest = json.loads(made.line(entry(99, range(19_000, 19_000 + 3 * UNIT))))
    assert newest["prefix"][1] == 3 * UNIT and newest["token_hashes"] == ""
    assert "prefix" not in json.loads(made.line(entry(100, range(3 * UNIT))))


def test_digests_are_equal_for_equal_beginnings_alone():
    def told(prompt, salt=None, key=KEY):
        return json.loads(lines(0, key).line(entry(0, prompt, salt=salt)))["block_hashes"]

    first = told(range(48))
    assert len(first) == 3 and all(0 <= each < 1 << 52 for each in first)
    assert told([*range(32), 1, *range(33, 48)])[:2] == first[:2] != told(range(1, 49))[:2]
    # the same unit behind another beginning is another one, and so it is in another namespace, or under another key
    for other in (told([5, *range(1, 48)]), told(range(48), "a"), told(range(48), key=b"f" * 16)):
        assert not set(first) & set(other)


def test_images_are_told_apart_like_tokens():
    made = lines()
    told = [json.loads(made.line(entry(n, [1, 2, -5 - n, -6, 3]))) for n in range(2)]
    assert alike(hashes(told[0]), hashes(told[1])) == 2


def test_files_are_private_and_bounded_and_each_can_be_replayed(tmp_path):
    path = tmp_path / "log"
    path.write_text("an older one\n")
    server = LoggedServer(path, max_bytes=9_400)
    for index in range(60):
        server.submit(f"r{index}", range(index % 7, 40 + index % 5 * 16), max_tokens=3)
        if index % 2:
            server.run()
    server.close()
    assert sorted(os.listdir(tmp_path)) == ["log", "log.1"] and server.log.dropped == 0
    for each in (path, tmp_path / "log.1"):
        assert stat.S_IMODE(each.stat().st_mode) == 0o600 and each.stat().st_size <= 9_400
        trace = read_trace(each)
        assert len(trace.requests) > 3
        replayed(trace)
    # the last file was begun with a cold cache's view of things, and the server's was warm
    trace = read_trace(path)
    assert all(hit <= logged_hits(trace)[name] for name, hit in hits_by_name(trace, replayed(trace)).items())


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
        super().__init__({}, UNIT, KEY, 1 << 20)
        self.go_on, self.began = threading.Event(), threading.Event()

    def line(self, entry):
        self.began.set()
        assert self.go_on.wait(20)
        return super().line(entry)


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

    monkeypatch.setattr("cairn.engine.request_log.file.os.write", sometimes)
    failing.set()
    assert file.put(entry(1, range(40)))
    assert written.acquire(timeout=20)
    assert file.put(entry(2, range(40))) and file.put(entry(3, [*range(20), 7]))
    file.close()
    told = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]
    assert [line.get("n") for line in told] == [None, 2, 3] and file.dropped == 1
    # nothing may refer to the line that is not there
    assert "prefix" not in told[1] and told[2]["prefix"] == [told[1]["block_hashes"][0], 16]


def test_half_a_line_at_the_end_is_taken_back(tmp_path, monkeypatch):
    file = LogFile(tmp_path / "log", 1 << 20, lines)
    write = os.write

    def half(descriptor, data):
        if len(data) <= 20:
            raise OSError(28, "No space left on device")
        return write(descriptor, data[:-20])

    monkeypatch.setattr("cairn.engine.request_log.file.os.write", half)
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


def test_a_request_that_was_dropped_is_counted_in_the_next_line():
    sink = Sink()
    log = RequestLog(sink, ManualClock())
    for takes in (False, True):
        sink.takes = takes
        spec = Spec(request_id=RequestId("a"), prompt=np.arange(3), sampling=SamplingParams(), max_tokens=1)
        request = Request(spec, RequestStats(0.0, arrival=1))
        log.submitted(request)
        log.ended(request)
    assert [entry.fields["dropped"] for entry in sink.entries] == [1] and log.dropped == 1
    assert json.loads(lines().line(sink.entries[0]))["dropped"] == 1


def test_nothing_is_kept_of_requests_that_have_ended(tmp_path):
    server = LoggedServer(tmp_path / "log")
    for index in range(5):
        server.submit(f"r{index}", range(100), max_tokens=20)
    server.step()
    server.core.abort("r4")
    assert len(server.log._arrived_steps) == 4
    server.close()
    assert not server.log._arrived_steps
    told = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()[1:]]
    assert sorted(line["id"] for line in told) == [f"r{index}" for index in range(5)]
    # it never had pages: that is all that there is to tell
    (waited,) = [line for line in told if "scheduled" not in line]
    assert (
        waited["id"] == "r4" and waited["finish"] == "abort" and waited["finished_step"] == waited["arrived_step"] + 1
    )


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("none/log", "No such file or directory"),
        ("file/log", "Not a directory"),
        ("folder", "it is there, and no regular file"),
        ("link", "it is there, and no regular file"),
        ("rotated", "rotated.1 is a folder"),
        ("x" * 256, "File name too long"),
        ("x" * 254, "File name too long"),
    ],
)
def test_a_log_that_cannot_be_is_found_without_one(name, reason, tmp_path):
    for folder in ("folder", "rotated.1"):
        (tmp_path / folder).mkdir()
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to("file")
    before = sorted(path.name for path in tmp_path.iterdir())
    with pytest.raises(ConfigError, match=f"^--request-log {tmp_path / name}: cannot be written: .*{reason}"):
        check_log_file(tmp_path / name)
    assert sorted(path.name for path in tmp_path.iterdir()) == before


def test_looking_for_a_log_changes_nothing(tmp_path):
    path = tmp_path / "log"
    check_log_file(path)
    assert not path.exists()
    path.write_text("kept")
    check_log_file(path)
    assert path.read_text() == "kept" and [each.name for each in tmp_path.iterdir()] == ["log"]


def test_another_users_file_where_only_owners_rename(tmp_path, monkeypatch):
    path = tmp_path / "log"
    path.touch()
    monkeypatch.setattr("os.geteuid", lambda: os.getuid() + 12345)
    check_log_file(path)
    tmp_path.chmod(0o1777)
    with pytest.raises(ConfigError, match="it is another user's"):
        check_log_file(path)
