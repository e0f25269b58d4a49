"""The Grafana dashboard in deploy/ asks for nothing that no server tells."""

import json
import re

import pytest
from prometheus_client.parser import text_string_to_metric_families

from cairn.deploy.ray.fleet_metrics import merge_expositions
from cairn.engine.build import build_core
from cairn.engine.contract import KvTransferConfig
from cairn.engine.text.tokenizer import ModelTokenizer
from source_scan import ROOT

DASHBOARD = json.loads((ROOT / "deploy" / "grafana" / "cairn.json").read_text())
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
QUERIES = [target["expr"] for panel in PANELS for target in panel["targets"]]
NAME = re.compile(r"\b((?:vllm|cairn):\w+)")
REQUEST = {"prompt": [7] * 50, "max_tokens": 3, "temperature": 0}
OFFER = {"do_remote_decode": True, "do_remote_prefill": False}


@pytest.fixture(scope="module")
def told(running_server, served_real):
    """Names of samples, with their labels, of two servers that have answered requests: a real engine's, and one that
    takes part in transfers; and of a fleet of the former."""
    peers = [running_server(kv_transfer=KvTransferConfig(port=port)) for port in (5611, 5612)]
    try:
        handed = peers[0].post("/v1/completions", REQUEST | {"max_tokens": 1, "kv_transfer_params": OFFER}).json()
        taken = peers[1].post("/v1/completions", REQUEST | {"kv_transfer_params": handed["kv_transfer_params"]})
        assert taken.status_code == 200, taken.text
        texts = [peers[1].get("/metrics").text, served_real]
    finally:
        for peer in peers:
            peer.drain()
            peer.join()
    texts.append(merge_expositions({"a": served_real, "b": served_real}))
    families = [family for text in texts for family in text_string_to_metric_families(text)]
    labels = {}
    for family in families:
        for sample in family.samples:
            labels.setdefault(sample.name, set()).update(sample.labels)
    return labels


@pytest.fixture(scope="module")
def served_real(running_server, tiny_model):
    """What a real engine tells whose pool is too small for what it is asked."""
    server = running_server(
        build=build_core, model=str(tiny_model), tokenizer=ModelTokenizer(tiny_model), kv_cache_memory_bytes=2 << 20
    )
    try:
        for first in [*range(10, 18), 17]:
            asked = server.post("/v1/completions", REQUEST | {"prompt": [first] * 300})
            assert asked.status_code == 200, asked.text
        return server.get("/metrics").text
    finally:
        server.drain()
        server.join()


@pytest.mark.parametrize("query", QUERIES)
def test_every_query_names_a_metric_that_is_exported(told, query):
    names = set(NAME.findall(query))
    assert names and names <= told.keys()
    grouped = {label for group in re.findall(r"by \(([^)]*)\)", query) for label in re.split(r"\s*,\s*", group)}
    assert all(grouped <= told[name] for name in names), "no such label"


def test_every_metric_of_ours_has_a_panel(told):
    shown = set(NAME.findall(" ".join(QUERIES)))
    own = {name for name in told if name.startswith("cairn:") and not name.endswith("_created")}
    assert own - shown == set()


def test_variables_that_are_used_exist():
    declared = {variable["name"] for variable in DASHBOARD["templating"]["list"]} | {"__rate_interval"}
    assert set(re.findall(r"\$\{?(\w+)", json.dumps(DASHBOARD["panels"]))) <= declared


def test_the_fleets_panels_are_by_replica_and_fit_a_server_alone_too():
    fleet = [query for query in QUERIES if "replica" in query]
    assert len(fleet) == 7 and all('replica=~"$replica"' in query for query in fleet)
    (variable,) = (variable for variable in DASHBOARD["templating"]["list"] if variable["name"] == "replica")
    assert variable["allValue"] == ".*" and "replica" in variable["definition"]


def test_panels_do_not_lie_on_each_other():
    places = [panel["gridPos"] for panel in DASHBOARD["panels"]]
    cells = [
        (x, y) for at in places for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])
    ]
    assert len(cells) == len(set(cells)) and all(x < 24 for x, _ in cells)
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(places)
    assert all(panel["description"] and panel["datasource"]["uid"] == "${datasource}" for panel in PANELS)
