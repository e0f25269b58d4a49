"""One Ray for all tests, on it two replicas of a tiny model, and beside it the same server alone."""

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from demo.local_ray import local_ray
from demo.server import running, serve_command
from exchanges import EXCHANGES, KEY, MAX_BODY_BYTES, MODEL
from fleet import Fleet

from doubles.api_contract import ApiContract

MODEL_FOLDER = Path(__file__).parents[2] / "build" / "model"
SETTINGS = {
    "served_model_name": MODEL,
    "api_key": KEY,
    "dtype": "float32",
    "exact": True,
    "kv_cache_memory_bytes": "64MiB",
    "max_body_bytes": str(MAX_BODY_BYTES),
    "max_model_len": 8192,
}
"""Of every server here. The same bits in any batch, and nothing that this machine decides."""


@pytest.fixture(scope="session")
def address() -> Iterator[str]:
    """Where Ray's proxy listens. Ray is ended with the session, and its processes with it."""
    with local_ray() as url:
        yield url


@pytest.fixture(scope="session")
def deploy(address, tmp_path_factory):
    """Start or change an application: `deploy(name, prefix, **settings)`. All are gone with the session."""
    fleets = {}

    def start(name: str, prefix: str, wait: bool = True, **settings) -> Fleet:
        if name not in fleets:
            fleets[name] = Fleet(name, f"{address}{prefix}".rstrip("/"), KEY)
        fleets[name].deploy(prefix, {"model": str(MODEL_FOLDER), "num_cpus": 0} | SETTINGS | settings, wait)
        return fleets[name]

    yield start
    for fleet in fleets.values():
        fleet.close()


@pytest.fixture(scope="session")
def two_replicas(deploy) -> Fleet:
    return deploy("cairn", "/fleet", num_replicas=2)


@pytest.fixture(scope="session")
def one_replica(deploy) -> Fleet:
    """What it has cached is what a server alone has that is asked the same."""
    return deploy("one", "/", num_replicas=1)


@pytest.fixture
def fleet(two_replicas) -> Iterator[Fleet]:
    """Two replicas, whatever the test before has done to them, and afterwards nothing held by anybody."""
    two_replicas.wait_replicas(2)
    yield two_replicas
    two_replicas.wait_replicas(2)
    two_replicas.assert_nothing_is_held()


@pytest.fixture(scope="session")
def alone(tmp_path_factory) -> Iterator[httpx.Client]:
    """`cairn serve` with the same settings."""
    variables = {f"CAIRN_{name.upper()}": str(value) for name, value in SETTINGS.items()}
    log = tmp_path_factory.mktemp("alone") / "log"
    with (
        running(serve_command(MODEL_FOLDER), log, variables) as server,
        httpx.Client(base_url=server.url, timeout=60, trust_env=False) as http,
    ):
        yield http


@pytest.fixture(scope="session")
def expected(alone) -> dict[str, httpx.Response]:
    """By the name of an exchange, what the server alone answers."""
    return {exchange.name: exchange.send(alone) for exchange in EXCHANGES}


@pytest.fixture(scope="session")
def contract(alone) -> ApiContract:
    """What the server alone says of itself."""
    document = alone.get("/openapi.json", headers={"Authorization": f"Bearer {KEY}"})
    return ApiContract(document.raise_for_status().json())
