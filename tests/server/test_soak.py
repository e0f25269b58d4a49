"""Some seconds of `make soak-server`: everything at once at a server that is too small for it."""

import asyncio

import pytest
from tests.server.soak import Server, Soak

SECONDS = 10
GROWTH = 200 << 20
"""The first seconds of any load take 160 to 170 MiB, the next forty 10 more."""


@pytest.fixture
def small(tiny_model, tmp_path):
    server = Server(tiny_model, tmp_path / "log")
    try:
        server.wait_ready()
        yield server
    finally:
        code = server.end()
    assert code == 0, server.log.read_text()[-2000:]


@pytest.mark.more
def test_everything_at_once(small):
    soak, before = Soak(small, seed=11), small.footprint()

    def enough():
        seen = soak.statuses
        return seen["200"] > 20 and seen["429"] > 0 and seen["left"] > 0 and len(soak.actions) == 9

    asyncio.run(soak.run(SECONDS, clients=10, enough=enough))
    rest = soak.at_rest()
    after = small.footprint()
    assert soak.wrong == []
    assert set(rest.values()) == {0}
    assert enough(), f"{soak.statuses}, {soak.actions}"
    assert after[0] - before[0] < GROWTH and after[1] - before[1] < 40
    assert small.http.post("/reset_prefix_cache").status_code == 200
    pages = small.http.get("/server_info").json()["engine"]["num_pages"]
    assert small.metric("cairn:free_pages") == pages
