"""Why no replica could be started, from the message of a deployment's status."""

import asyncio
import threading

from cairn.deploy.ray import start_failures
from cairn.deploy.ray.start_failures import StartFailures, find_failure, start_failure
from cairn.errors import ConfigError
from cairn.types import ManualClock

MESSAGE = """The deployment failed to start 3 times in a row. See controller logs for details. Error:
ray::ServeReplica:broken:replica.initialize_and_get_metadata() (pid=1, ip=127.0.0.1)
  File "replica.py", line 1, in __init__
    raise start_failure(error) from None
RuntimeError: {}
"""


def test_a_replicas_own_words_are_found_among_rays():
    text = f"RuntimeError: {start_failure(ConfigError('MODEL m: no weights' + chr(10) + 'here'))}\nand more"
    assert find_failure(MESSAGE.format("") + text) == "MODEL m: no weights here"


def test_of_any_other_error_it_is_the_last_line_and_of_none_nothing():
    assert find_failure(MESSAGE.format("out of luck")) == "RuntimeError: out of luck"
    assert find_failure("") == find_failure("\n") == ""


def test_the_text_is_bounded():
    assert len(find_failure("x" * 10_000)) == 400


def test_the_status_is_asked_for_once_for_many_and_again_after_a_while():
    asked, clock = [], ManualClock()

    def read():
        asked.append(1)
        return f"reason {len(asked)}"

    async def run():
        failures = StartFailures(read, clock)
        first = await asyncio.gather(*(failures.find() for _ in range(8)))
        clock.advance(6)
        return first, await failures.find()

    assert asyncio.run(run()) == (["reason 1"] * 8, "reason 2")


def test_a_status_that_cannot_be_had_is_no_reason(monkeypatch):
    monkeypatch.setattr(start_failures, "_ASK_SECONDS", 0.01)
    go = threading.Event()

    def fails():
        raise OSError("no controller")

    async def run():
        late = await StartFailures(go.wait).find()
        go.set()
        return late, await StartFailures(fails).find()

    assert asyncio.run(run()) == ("", "")
