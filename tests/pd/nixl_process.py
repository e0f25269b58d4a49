"""Engine cores as processes that may be killed and frozen, and what they are asked and answer."""

import contextlib
import itertools
import json
import mmap
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import nixl_nursery
import numpy as np
import zmq

from cairn.engine.contract import EngineConfig, EngineInfo, EngineStats, GenerateOutput
from cairn.engine.wire import (
    Abort,
    BuildRefused,
    Fatal,
    Outputs,
    Ready,
    Refusal,
    StatsQuery,
    StatsReply,
    Submit,
    encode_config,
    frames_from_core,
    frames_to_core,
)
from doubles.engine_requests import generate_request

START_SECONDS, ANSWER_SECONDS = 240.0, 20.0
REMOTE_DECODE = {"do_remote_decode": True, "do_remote_prefill": False}


class Nursery:
    """See `nixl_nursery`. Its folder keeps sockets, logs and clocks."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="cairn-nixl-"))
        ours, theirs = socket.socketpair()
        ours.settimeout(START_SECONDS)
        environ = os.environ | {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        self._process = subprocess.Popen([sys.executable, nixl_nursery.__file__], stdin=theirs, env=environ)
        theirs.close()
        self._line = ours
        self._ready = False

    def bear(self, order: dict, files: list[int]) -> int:
        """A child's process id; the files become its standard input, output and error."""
        if not self._ready:
            assert self._line.recv(5) == b"ready"
            self._ready = True
        socket.send_fds(self._line, [json.dumps(order).encode()], files)
        return int.from_bytes(self._line.recv(4), "little")

    def close(self) -> None:
        self._line.close()
        self._process.wait(ANSWER_SECONDS)
        shutil.rmtree(self.folder, ignore_errors=True)


class Asked:
    """One request, and what has been said about it. `end`: its last output. `refusal`: why it was not taken."""

    def __init__(self, name: str, prompt: list[int]) -> None:
        self.name, self.prompt = name, prompt
        self.tokens: list[int] = []
        self.end: GenerateOutput | None = None
        self.refusal: str | None = None
        self.aborted = False

    @property
    def is_over(self) -> bool:
        return self.end is not None or self.refusal is not None or self.aborted

    @property
    def params(self) -> dict:
        """`kv_transfer_params` of the answer."""
        assert self.end is not None and self.end.kv_transfer_params is not None, f"{self.name}: {self.end}"
        return json.loads(self.end.kv_transfer_params)


class CoreProcess:
    """One incarnation of an engine core; those of the same `kind` take each other's place.

    `info` is None until it has been built. Call `turn` to hear of it."""

    _numbers = itertools.count()

    def __init__(self, nursery: Nursery, name: str, config: EngineConfig, environ: dict[str, str]) -> None:
        self.kind, self.name = name, f"{name}-{next(self._numbers)}"
        self.log = nursery.folder / f"{self.name}.log"
        self.alive, self.frozen = True, False
        self.info: EngineInfo | None = None
        self.asked: dict[str, Asked] = {}
        self._stats: dict[int, EngineStats] = {}
        self._outgoing, self._incoming = frames_to_core(), frames_from_core()
        self._counts = itertools.count(1)
        clock = nursery.folder / f"{self.name}.clock"
        clock.write_bytes(bytes(8))
        with clock.open("r+b") as file:
            self._ahead = memoryview(mmap.mmap(file.fileno(), 8)).cast("d")
        self._context = zmq.Context()
        self.socket = self._context.socket(zmq.PAIR)
        address = f"ipc://{nursery.folder}/{self.name}.sock"
        self.socket.bind(address)
        theirs, self._holds = os.pipe()
        with self.log.open("wb") as log:
            order = {"address": address, "level": "INFO", "environ": {nixl_nursery.CLOCK: str(clock)} | environ}
            self.pid = nursery.bear(order, [theirs, log.fileno(), log.fileno()])
        os.close(theirs)
        self._pidfd = os.pidfd_open(self.pid)
        self.socket.setsockopt(zmq.SNDTIMEO, int(START_SECONDS * 1000))
        self.socket.send(encode_config(config))

    @property
    def side_port(self) -> int:
        assert self.info is not None and self.info.side_channel is not None
        return int(self.info.side_channel.rpartition(":")[2])

    # -- what it is asked ------------------------------------------------------------------------------------------

    def submit(self, prompt, max_tokens=3, params=None, **fields) -> Asked:
        asked = Asked(f"{self.name}-r{next(self._counts)}", list(prompt))
        request = generate_request(
            request_id=asked.name,
            prompt=np.array(prompt, "<i8").tobytes(),
            max_tokens=max_tokens,
            temperature=0.0,
            ignore_eos=True,
            kv_transfer_params=None if params is None else json.dumps(params).encode(),
            **fields,
        )
        self.asked[asked.name] = asked
        self._send(Submit([request]))
        return asked

    def abort(self, asked: Asked) -> None:
        asked.aborted = True
        self._send(Abort(asked.name))

    def stats(self) -> EngineStats:
        number = next(self._counts)
        self._send(StatsQuery(number))
        self.wait(lambda: number in self._stats, "its counters")
        return self._stats.pop(number)

    def _send(self, message) -> None:
        self.socket.send(self._outgoing.encode(message), zmq.NOBLOCK)

    # -- what it says ----------------------------------------------------------------------------------------------

    def turn(self) -> None:
        """Take what it has said. Raises AssertionError when it has ended by itself."""
        while self.alive:
            try:
                message = self._incoming.decode(self.socket.recv(zmq.NOBLOCK))
            except zmq.Again:
                break
            self._take(message)
        if self.alive and self._has_ended(0):
            raise AssertionError(f"{self.name} has ended: {self.log.read_text()[-3000:]}")

    def wait(self, reached, what: str, seconds: float = ANSWER_SECONDS) -> None:
        until = time.monotonic() + seconds
        while not reached():
            assert time.monotonic() < until, f"{self.name}: no {what} within {seconds:g} s: {self.tail()}"
            self.socket.poll(20)
            self.turn()

    def _has_ended(self, seconds: float) -> bool:
        """Waits for at most `seconds`."""
        ended = select.poll()
        ended.register(self._pidfd, select.POLLIN)
        return bool(ended.poll(seconds * 1000))

    def tail(self) -> str:
        return self.log.read_text()[-2000:]

    def _take(self, message) -> None:
        match message:
            case Ready(info):
                self.info = info
            case Outputs(outputs):
                for output in outputs:
                    self._output(output)
            case Refusal(request_id):
                self.asked[request_id].refusal = message.message
            case StatsReply(number, stats):
                self._stats[number] = stats
            case Fatal() | BuildRefused():
                raise AssertionError(f"{self.name}: {message.text}: {self.tail()}")

    def _output(self, output: GenerateOutput) -> None:
        asked = self.asked[output.request_id]
        asked.tokens += output.token_ids
        if output.finish_reason is not None:
            assert asked.end is None, f"{asked.name} has ended twice"
            asked.end = output

    # -- what becomes of it ----------------------------------------------------------------------------------------

    def advance(self, seconds: float) -> None:
        """Its clock, not ours."""
        self._ahead[0] += seconds

    def freeze(self) -> None:
        """Returns when it stands still."""
        self.frozen = True
        signal.pidfd_send_signal(self._pidfd, signal.SIGSTOP)
        until = time.monotonic() + ANSWER_SECONDS
        while Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0] != "T":
            assert time.monotonic() < until, f"{self.name} does not stop"

    def resume(self) -> None:
        self.frozen = False
        signal.pidfd_send_signal(self._pidfd, signal.SIGCONT)

    def kill(self) -> None:
        """Returns when it is gone."""
        if self.alive:
            self.alive = False
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
            assert self._has_ended(ANSWER_SECONDS), f"{self.name} does not die"
            os.close(self._pidfd)
            os.close(self._holds)
            self._context.destroy(linger=0)
