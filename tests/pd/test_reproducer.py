"""The published reproducer as it stands: two servers, a proxy, one request twice, all of them real processes."""

import contextlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(importlib.util.find_spec("nixl") is None, reason="the extra nixl is not installed")

ROOT = Path(__file__).parents[2]
TOKENS = 400
SECONDS = 400


def run(command, log):
    """In a session of its own, so that no server outlives the script."""
    with log.open("wb") as out:
        script = subprocess.Popen(command, cwd=ROOT, stdout=out, stderr=out, start_new_session=True)
    try:
        assert script.wait(SECONDS) == 0, log.read_text()
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(script.pid, signal.SIGKILL)
        script.wait()


@pytest.mark.timeout(SECONDS + 60)
@pytest.mark.more
def test_the_second_send_hits_on_the_decode_side(tiny_model, tmp_path):
    result = tmp_path / "result.json"
    command = [sys.executable, "-m", "benchmarks.pd_reproducer", "--model", str(tiny_model), "--tokens", str(TOKENS)]
    command += ["--modes", "align", "auto", "--json", str(result), "--logs", str(tmp_path / "logs")]
    run(command, tmp_path / "said")
    sends = {(row["mode"], row["number"]): row for row in json.loads(result.read_text())["rows"]}
    assert set(sends) == {("align", 1), ("align", 2), ("auto", 1), ("auto", 2)}
    for mode, least in (("align", 384), ("auto", TOKENS)):
        first, second = sends[mode, 1], sends[mode, 2]
        # D had nothing, and computed nothing all the same: P did
        assert (first["hit"], first["received"], first["computed"]) == (0, TOKENS, 0)
        assert least <= second["hit"] <= TOKENS
        assert second["hit"] + second["received"] + second["computed"] == TOKENS
        assert second["usage"] >= least
        assert second["text"] == first["text"] != ""
