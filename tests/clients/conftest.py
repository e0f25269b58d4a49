"""A `cairn serve` process for the clients: CAIRN is the command, CAIRN_MODEL a tiny checkpoint's folder."""

import contextlib
import os
import signal
import socket
import subprocess
import time
import urllib.request
from pathlib import Path
from typing import Literal

import openai
import pytest
from agent_server import FORMS, KNOWN_NAMES, AgentServer, agent_model
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


@contextlib.contextmanager
def _serve(command, log, names=(MODEL,), **environment):
    """A server of its own, from when it is ready on; `command` says all but its names and the port."""
    running = Server(_free_port())
    words = [*command, "--served-model-name", *names, "--port", running.root.rpartition(":")[2]]
    environment = os.environ | {"CAIRN_API_KEY": KEY} | environment
    with open(log, "w") as out:
        process = subprocess.Popen(words, stdout=out, stderr=out, env=environment, start_new_session=True)
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


@pytest.fixture(scope="session")
def server(tmp_path_factory):
    log = tmp_path_factory.mktemp("server") / "log"
    command = [os.environ["CAIRN"], "serve", os.environ["CAIRN_MODEL"], "--kv-cache-memory-bytes", "64MiB"]
    with _serve(command, log) as running:
        yield running


@pytest.fixture(scope="session", params=FORMS)
def agent_server(request, tmp_path_factory):
    folder, here = tmp_path_factory.mktemp("agents"), Path(__file__).parent
    python = Path(os.environ["CAIRN"]).with_name("python")
    model = agent_model(Path(os.environ["CAIRN_MODEL"]), folder)
    command = [python, here / "scripted_serve.py", request.param, model, "--kv-cache-memory-bytes", "512MiB"]
    files = {"SCRIPTS": str(folder / "scripts"), "REQUESTS": str(folder / "requests")}
    paths = os.pathsep.join([str(here), str(here.parent), os.environ.get("PYTHONPATH", "")])
    command += ["--request-log", folder / "log.jsonl"]
    with _serve(command, folder / "log", (MODEL, *KNOWN_NAMES), PYTHONPATH=paths, **files) as running:
        yield AgentServer(running, request.param, folder)


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
