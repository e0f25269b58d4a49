"""Who asks the engine something: a deadline for each, a bound for all, and an engine that never answers."""

import asyncio
import itertools

import pytest

from cairn.engine.contract import EngineConfig
from cairn.errors import EngineDead, Overloaded
from cairn.server import status_routes
from cairn.server.cache_routes import CacheViews
from cairn.server.operator_queries import BoundedQueries
from cairn.server.options import ServerLimits, ServerOptions
from cairn.server.service import Service
from doubles.byte_tokenizer import ByteTokenizer
from doubles.echo_core import build_echo_core
from virtual_time import run

STATS_SECONDS, VIEW_SECONDS = 5.0, 60.0


class Hanging:
    """An engine that takes every question and answers none until it is told to."""

    def __init__(self):
        self.info = build_echo_core(EngineConfig(model="echo")).info
        self.tokenizer = ByteTokenizer()
        self.dead = None
        self.asked = []
        self.answers = None

    async def _hang(self, what):
        self.asked.append(what)
        if self.answers is None:
            await asyncio.get_running_loop().create_future()
        return self.answers

    async def stats(self):
        return await self._hang("stats")

    async def cache_view(self, max_paths):
        return await self._hang(f"view {max_paths}")

    async def reset_cache(self):
        return await self._hang("reset")


def service_of(engine):
    return Service(engine, ServerOptions(model="m"), ServerLimits())


def views_of(service):
    return CacheViews(service.engine, service.queries.views, "m", service.stamps.clock)


async def outcome_of(asking, starts_at):
    """What came of it, and when."""
    await asyncio.sleep(starts_at)
    try:
        result = await asking()
    except (Overloaded, EngineDead) as error:
        result = error
    return asyncio.get_running_loop().time(), result


def outcomes(askings):
    async def all_of_them():
        return await asyncio.gather(*(outcome_of(asking, at) for at, asking in askings))

    return run(all_of_them())


def test_everybody_who_looks_has_a_deadline_of_his_own():
    """They wait one behind the other for one engine that hangs, and none for another one's sake."""
    engine = Hanging()
    views = views_of(service_of(engine))
    starts = [0.0, 0.0, 10.0, 59.0, 60.0, 61.0]
    sizes = [500, 7, 500, 7, 500, 500]
    found = outcomes([(at, lambda size=size: views.get(size)) for at, size in zip(starts, sizes, strict=True)])
    assert [at for at, _ in found] == [at + VIEW_SECONDS for at in starts]
    assert all(isinstance(error, Overloaded) and error.status == 503 for _, error in found)
    assert {str(error) for _, error in found} == {"the engine did not show its cache within 60 s: try again later"}
    # one question at a time, asked again by whoever is next and still there
    assert len(engine.asked) <= len(starts)


def test_a_reset_and_a_probe_have_one_as_well():
    engine = Hanging()
    service = service_of(engine)
    resets = [(at, lambda: status_routes.reset_prefix_cache(service.queries)) for at in (0.0, 1.0, 2.0)]
    probes = [(at, lambda: status_routes.ready(engine, service.gate, service.queries)) for at in (0.0, 3.0)]
    meters = [(at, lambda: status_routes.metrics(service.metrics, service.queries)) for at in (0.0, 4.0)]
    found = outcomes(resets + probes + meters)
    assert [at for at, _ in found] == [60.0, 61.0, 62.0, 5.0, 8.0, 5.0, 9.0]
    assert all("did not empty its cache within 60 s" in str(error) for _, error in found[:3])
    for _, answer in found[3:5]:
        assert answer.status_code == 503 and b"did not tell its counters within 5 s" in answer.body
    # what was known last is told, and the server is not given up for it
    assert all(answer.status_code == 200 for _, answer in found[5:])


@pytest.mark.parametrize(
    ("ask", "most", "kind"),
    [
        (lambda service, views: views.get(9), 256, "view 9"),
        (lambda service, views: status_routes.reset_prefix_cache(service.queries), 24, "reset"),
        (lambda service, views: service.queries.fetch_stats(), 24, "stats"),
    ],
)
def test_only_so_many_wait(ask, most, kind):
    engine = Hanging()
    service = service_of(engine)
    views = views_of(service)
    found = outcomes([(0.0, lambda: ask(service, views))] * (most + 3) + [(100.0, lambda: ask(service, views))] * most)
    turned_away = [error for at, error in found if at in (0.0, 100.0)]
    # three, and later all places are free again
    assert len(turned_away) == 3 and all(f"{most} callers wait" in str(error) for error in turned_away)
    assert all(error.status == 503 and error.retry_after for error in turned_away)
    assert set(engine.asked) == {kind} and len(engine.asked) <= 2 * most


def test_who_waits_gets_the_answer_once_there_is_one():
    engine = Hanging()
    service = service_of(engine)

    async def scenario():
        waiting = [asyncio.create_task(service.queries.reset_cache()) for _ in range(3)]
        await asyncio.sleep(59.0)
        engine.answers = 0
        return await service.queries.reset_cache(), await asyncio.gather(*waiting, return_exceptions=True)

    answered, given_up = run(scenario())
    assert answered == 0 and all(isinstance(error, Overloaded) for error in given_up)


def test_an_engine_that_lives_is_not_said_to_have_ended():
    async def refuse():
        raise EngineDead("64 questions to the engine are open already")

    async def scenario(dead):
        await BoundedQueries("count", seconds=1.0, max_waiting=1, get_death=lambda: dead).run(refuse)

    with pytest.raises(Overloaded, match=r"64 questions .*: try again later"):
        run(scenario(None))
    with pytest.raises(EngineDead, match="64 questions"):
        run(scenario("killed by SIGKILL"))


def test_over_http(serve):
    """A core that goes on computing but never shows its cache; nothing else suffers."""
    server = serve(options={"view_seconds": 0.2})
    server.core.cache_view = lambda most: itertools.repeat(None)
    answer = server.get("/cache")
    assert answer.status_code == 503 and answer.headers["retry-after"] == "1"
    error = answer.json()["error"]
    assert error["message"] == "the engine did not show its cache within 0.2 s: try again later"
    assert (error["type"], error["code"]) == ("Service Unavailable", 503)
    assert server.get("/ready").status_code == 200
    assert server.post("/v1/completions", {"prompt": "still here"}).json()["choices"][0]["text"] == "still here"
