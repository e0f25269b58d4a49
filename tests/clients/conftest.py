"""A `cairn serve` process for the clients: CAIRN is the command, CAIRN_MODEL a tiny checkpoint's folder."""

import contextlib
import os
import signal
import socket
import subprocess
import time
import urllib.request
from typing import Literal

import openai
import pytest
from pydantic import BaseModel

# litellm would ask the network for the prices of models
os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"

MODEL = "tiny"
KEY = "a-key"
SECONDS_TO_START = 180

# A tool whose calls, and a form whose answers, end: random weights write what the grammar allows, blanks included.
ENOUGH = 600
CITIES = {"type": "string", "enum": ["Oslo", "Rome"]}
PARAMETERS = {"type": "object", "properties": {"city": CITIES}, "required": ["city"], "additionalProperties": False}


class Place(BaseModel):
    """The form of an answer."""

    city: Literal["Oslo", "Rome"]
    warm: bool


class Server:
    """Where it listens, and the key that it wants."""

    model, key = MODEL, KEY

    def __init__(self, port: int) -> None:
        self.root = f"http://127.0.0.1:{port}"
        self.url = f"{self.root}/v1"


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


@pytest.fixture(scope="session")
def server(tmp_path_factory):
    log = tmp_path_factory.mktemp("server") / "log"
    running = Server(_free_port())
    command = [os.environ["CAIRN"], "serve", os.environ["CAIRN_MODEL"], "--served-model-name", MODEL]
    command += ["--port", running.root.rpartition(":")[2], "--kv-cache-memory-bytes", "64MiB"]
    with open(log, "w") as out:
        process = subprocess.Popen(
            command, stdout=out, stderr=out, env=os.environ | {"CAIRN_API_KEY": KEY}, start_new_session=True
        )
    try:
        end = time.monotonic() + SECONDS_TO_START
        while not _is_ready(running.root):
            assert process.poll() is None and time.monotonic() < end, log.read_text()
            time.sleep(0.1)
        yield running
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait(20)


def _is_ready(root: str) -> bool:
    try:
        with urllib.request.urlopen(f"{root}/health", timeout=5) as answer:
            return answer.status == 200
    except OSError:
        return False


@pytest.fixture
def client(server):
    """openai's; the files of other clients have their own."""
    with openai.OpenAI(base_url=server.url, api_key=server.key, max_retries=0) as client:
        yield client
