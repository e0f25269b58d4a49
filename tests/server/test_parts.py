"""A service is its parts, put together for the application; everybody else asks for the parts."""

from cairn.engine.contract import EngineConfig
from cairn.server.options import ServerLimits, ServerOptions
from cairn.server.service import Service
from doubles.byte_tokenizer import ByteTokenizer
from doubles.echo_core import build_echo_core
from source_scan import imports, source, sources, within
from test_house import MOST_FIELDS

TAKES_ALL = frozenset(("cairn.server.app", "cairn.server.dependencies", "cairn.server.run", "cairn.deploy.ray.replica"))
"""Whoever starts a server, and what hands the parts out."""


class Engine:
    info = build_echo_core(EngineConfig(model="echo")).info
    tokenizer = ByteTokenizer()
    dead = None


def takes_the_service(modules):
    return {
        module.name
        for module in modules
        if any(within(each.target, "cairn.server.service") for each in imports(module))
    }


def test_no_route_takes_the_whole_service():
    assert takes_the_service(sources()) == TAKES_ALL
    example = source("cairn.server.example", "from cairn.server.service import Service")
    assert takes_the_service([example]) == {"cairn.server.example"}


def test_no_part_is_as_wide_as_what_it_was():
    service = Service(Engine(), ServerOptions(model="m"), ServerLimits())
    parts = vars(service)
    assert 5 < len(parts) <= MOST_FIELDS
    for part in (parts["answers"], parts["renderer"], parts["queries"]):
        assert 0 < len(vars(part)) < MOST_FIELDS
