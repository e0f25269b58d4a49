"""A real cairn server around the echoing engine, in processes of its own."""

import os
import re
import subprocess
import sys
import threading
import time

import pytest

ECHO_CAIRN = (
    "import sys; from cairn.cli import main; from doubles.byte_tokenizer import load_byte_tokenizer; "
    "sys.exit(main(core='doubles.echo_core:build_echo_core', load_tokenizer=load_byte_tokenizer, "
    "find_model=lambda settings: settings.model))"
)
KEY = "sk-test-1234"
SECONDS = 30


@pytest.fixture(scope="session")
def echo_server():
    """Its URL; it wants KEY and calls its model `echo`."""
    command = [sys.executable, "-c", ECHO_CAIRN, "serve", "echo", "--port", "0", "--served-model-name", "echo"]
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("CAIRN_", "VLLM_"))}
    process = subprocess.Popen([*command, "--api-key", KEY], stderr=subprocess.PIPE, text=True, env=environ)
    lines: list[str] = []
    reader = threading.Thread(target=lambda: lines.extend(iter(process.stderr.readline, "")))
    reader.start()
    try:
        deadline = time.monotonic() + SECONDS
        while not (found := re.search(r"serving .* on (http://127\.0\.0\.1:\d+)", "".join(lines))):
            assert time.monotonic() < deadline and process.poll() is None, "".join(lines)
            time.sleep(0.02)
        yield found.group(1)
    finally:
        process.terminate()
        try:
            process.wait(SECONDS)
        finally:
            process.kill()
            process.wait()
            reader.join(SECONDS)
            process.stderr.close()
