"""The way of a prompt's pages in docs/pd.md is that of a real hand-over, over sockets; and pages have the forms on it
that are told."""

import ast
import re
import sys

import numpy as np
import pytest
from pd_world import World, alone, prefill

from cairn.engine.transfers.side_channel import SideChannel, create_listener
from cairn.transfer.credentials import derive_credentials
from server.test_hops import MOST_HOPS, Trace, hops, not_taken
from source_scan import ROOT, SRC

MOST_FORMS = 5
FORM = re.compile(r"^\| `(\w+)` \| `([\w/]+)` \|", re.MULTILINE)
HOLDS_PAGES = re.compile("pages|checkpoint$|remote|local")
CREDENTIALS = derive_credentials(b"a secret of twenty b")
TEXT = np.random.default_rng(3).integers(0, 50, 300).tolist()
DOCUMENT = (ROOT / "docs" / "pd.md").read_text()
PAGE_LISTS = (
    *("Offer", "OfferedCheckpoint", "PullSpec", "ReadOrder", "LeaseDemand"),
    *("Granted", "FetchTarget"),
)


class Sockets(SideChannel):
    """A real side channel, of a server that is turned by hand."""

    num_waiting, sent = 0, ()

    def look(self) -> None:
        """The event loop does."""


class SocketNetwork:
    def __init__(self) -> None:
        self.made = []

    def channel(self, host, port, event_loop):
        self.made.append(Sockets(create_listener(host, 0), CREDENTIALS, event_loop))
        return self.made[-1]


@pytest.fixture(scope="module")
def calls():
    """Of one hand-over between two servers over TLS."""
    world, trace = World(), Trace()
    world.network = SocketNetwork()
    p, d = world.server(1), world.server(2)
    try:
        sys.setprofile(trace)
        params = prefill(p, TEXT) | {"remote_port": p.channel.port}
        name = d.submit(TEXT, params=params)
        for _ in range(2000):
            if name in d.ended:
                break
            d.turn()
            p.turn()
    finally:
        sys.setprofile(None)
        for server in (p, d):
            server.channel.close()
            server.event_loop.spin()
            server.event_loop.close()
    assert d.answers[name] == alone(TEXT) and d.scheduler.state.counters.external_hits == len(TEXT)
    return trace.calls


@pytest.fixture(scope="module")
def way():
    return hops(DOCUMENT)


def test_pages_take_the_way_that_is_told(way, calls):
    assert 10 <= len(way) <= MOST_HOPS
    assert not_taken(way, calls) is None


def test_a_hop_that_is_left_out_moved_or_wrong_is_noticed(way, calls):
    for at, (module, function, record) in enumerate(way):
        wrong = (module, function, "Nothing")
        assert not_taken([*way[:at], wrong, *way[at + 1 :]], calls) == wrong, record
    assert not_taken([way[-1], way[0]], calls) == way[0]


def forms_in_use():
    """What the fields that hold pages are annotated with, in the records between the scheduler and the links."""
    found = set()
    for path in ("transfer", "scheduler"):
        for file in (SRC / "cairn" / path).glob("*.py"):
            for node in ast.walk(ast.parse(file.read_text())):
                if isinstance(node, ast.ClassDef) and node.name in PAGE_LISTS:
                    for field in node.body:
                        if isinstance(field, ast.AnnAssign) and HOLDS_PAGES.search(field.target.id):
                            found |= {name.id for name in ast.walk(field.annotation) if isinstance(name, ast.Name)}
    return found - {"tuple", "bool", "int", "field"}


def test_pages_have_the_forms_that_are_told():
    told = FORM.findall(DOCUMENT)
    assert 3 <= len(told) <= MOST_FORMS
    for name, module in told:
        assert re.search(rf"^(class )?{name}\b", (SRC / "cairn" / f"{module}.py").read_text(), re.MULTILINE), name
    assert forms_in_use() <= {name for name, _ in told}
