"""One /metrics for all replicas: every sample once, by replica, in a form that Prometheus reads."""

import asyncio

import httpx
import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from starlette.responses import PlainTextResponse

from cairn.deploy.ray.fleet_metrics import FleetMetrics, ReplicaNames, gather_expositions, merge_expositions


def exposition(number: int) -> str:
    """Of a replica whose figures are its number. Not every one has the metric `cairn:rare`."""
    registry = CollectorRegistry()
    Gauge("cairn:pages", "Pages, {held} or not", registry=registry).set(number)
    Counter("vllm:ended", "Ended", ["reason"], registry=registry).labels('a "b", {c}').inc(number)
    Histogram("vllm:seconds", "Seconds", ["model"], buckets=[1, 2], registry=registry).labels("m").observe(number)
    if number == 2:
        Gauge("cairn:rare", "Rare", registry=registry).set(9)
    return generate_latest(registry).decode()


def samples(text: str) -> dict:
    """By name and labels, the value. Raises AssertionError for a metric that comes twice."""
    families = list(text_string_to_metric_families(text))
    assert len({family.name for family in families}) == len(families)
    return {
        (sample.name, *sorted(sample.labels.items())): sample.value for family in families for sample in family.samples
    }


def test_every_sample_is_there_with_its_replica():
    told = {"a": exposition(1), "b": exposition(2), "c": exposition(1)}
    own = {name: samples(text) for name, text in told.items()}
    merged = merge_expositions(told)
    expected = {
        (name, *sorted([*labels, ("replica", replica)])): value
        for replica, told in own.items()
        for (name, *labels), value in told.items()
    }
    expected |= {("cairn:replica_up", ("replica", replica)): 1.0 for replica in told}
    assert samples(merged) == expected and len(expected) > 20


def test_what_a_metric_is_is_said_once():
    lines = merge_expositions({"a": exposition(1), "b": exposition(2)}).splitlines()
    heads = [line for line in lines if line.startswith("# ")]
    assert len(set(heads)) == len(heads) and "# TYPE vllm:seconds histogram" in heads


def test_without_replicas_there_are_no_samples():
    assert merge_expositions({}) == ""


def ask(path, ask_replicas, method="GET"):
    app = FleetMetrics(PlainTextResponse("the server's"), ask_replicas)

    async def send():
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://fleet") as http:
            return await http.request(method, path)

    return asyncio.run(send())


async def two():
    return {"a": exposition(1), "b": exposition(2)}


def test_metrics_are_the_fleets_and_all_else_is_a_replicas():
    told = ask("/metrics", two)
    assert (
        told.headers["content-type"].startswith("text/plain; version=") and 'cairn:pages{replica="b"} 2.0' in told.text
    )
    assert ask("/metrics/", two).text == ask("/metrics", two, "POST").text == "the server's"


def test_one_that_tells_nothing_is_down_and_costs_the_others_nothing():
    asked = []

    async def frozen():
        await asyncio.Event().wait()

    async def fails():
        raise OSError("the actor has died")

    async def tells(name, number):
        return name, exposition(number)

    names = ReplicaNames()

    async def ask_replicas():
        asked.append(1)
        second = tells("b", 2) if len(asked) == 1 else frozen()
        third = tells("c", 1) if len(asked) == 1 else fails()
        return names.add_missing(await gather_expositions([tells("a", 1), second, third], 0.05), 3)

    async def up():
        async with httpx.AsyncClient(
            transport=httpx.ASGITransport(FleetMetrics(PlainTextResponse(""), ask_replicas)), base_url="http://fleet"
        ) as http:
            answer = await http.get("/metrics")
        found = samples(answer.raise_for_status().text)
        return {name[1][1]: value for name, value in found.items() if name[0] == "cairn:replica_up"}, found

    async def run():
        return await up(), await up(), await up()

    first, *later = asyncio.run(run())
    assert first[0] == {"a": 1.0, "b": 1.0, "c": 1.0}
    for is_up, found in later:
        assert is_up == {"a": 1.0, "b": 0.0, "c": 0.0}
        assert {key[1][1] for key in found if key[0] == "cairn:pages"} == {"a"}


def test_one_that_is_gone_is_forgotten_and_one_that_never_told_is_unknown():
    names = ReplicaNames()
    assert names.add_missing({"a": "", "b": ""}, 3) == {"a": "", "b": ""}
    assert names.add_missing({"a": ""}, 2) == {"a": "", "b": None}
    assert names.add_missing({"a": ""}, 1) == {"a": ""}
    assert names.add_missing({}, 1) == {"a": None}


@pytest.mark.parametrize("line", ["vllm:x 1.0", 'vllm:x{a="1"} 1.0', "vllm:x{} 1.0"])
def test_a_sample_gets_its_label_whether_it_had_some_or_not(line):
    (_, (key, value)) = samples(merge_expositions({"r1": f"# TYPE vllm:x gauge\n{line}\n"})).items()
    assert key[0] == "vllm:x" and ("replica", "r1") in key and value == 1.0
