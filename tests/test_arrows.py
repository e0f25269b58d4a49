"""Who may import whom: rooms import downwards or within themselves, and each heavy library has its rooms.

Every rule is a function from modules to violations. It has to find none in the package, and one in each bad example.
"""

from types import MappingProxyType

import pytest

from source_scan import ROOT, Import, Source, imports, source, sources, within

FLOOR_0 = (
    "cairn.addresses",
    "cairn.errors",
    "cairn.paths",
    "cairn.types",
    "cairn.step",
    "cairn.keys",
    "cairn.machine",
    "cairn.cpu_isa",
    "cairn.trace_rows",
    "cairn.setting_types",
    "cairn.__version__",
)

# What the cache's door takes and gives; tree, pages, residents, eviction and audit stay behind it.
CACHE_DOOR = (
    "cairn.cache.prefix_cache",
    "cairn.cache.layout",
    "cairn.cache.awaited",
    "cairn.cache.view",
    "cairn.cache.group_pages",
    "cairn.cache.sequence_blocks",
    "cairn.cache.placement",
    "cairn.cache.checkpoint",
    "cairn.cache.reasons",
)

# How content is named.
CONTENT = ("cairn.transfer.contract", "cairn.transfer.digest")

# What a config.json says of a model, without torch.
MODEL_NUMBERS = (
    "cairn.kernels.state_encoding",
    "cairn.models.decoder_config",
    "cairn.models.families",
    "cairn.models.layer_sizes",
    "cairn.models.weights.tensor_headers",
)

ARROWS = MappingProxyType(
    {
        "": ("cairn.cpu_isa",),
        "addresses": (),
        "errors": (),
        "paths": (),
        "types": (),
        "step": (),
        "keys": (),
        "machine": (),
        "cpu_isa": (),
        "trace_rows": (),
        "setting_types": (),
        "cache": (),
        "transfer": ("cairn.cache.layout", "cairn.cache.group_pages"),
        "kernels": (),
        "layers": ("cairn.kernels",),
        "models": (
            "cairn.layers",
            "cairn.kernels.attention_rule",
            "cairn.kernels.contract",
            "cairn.kernels.batch",
            "cairn.kernels.fp8",
            "cairn.kernels.gpu_codes",
            "cairn.kernels.int4",
            "cairn.kernels.operations",
            "cairn.kernels.quantized",
            "cairn.kernels.state_encoding",
            "cairn.kernels.weight_rows",
            "cairn.cache.layout",
        ),
        "scheduler": (*CACHE_DOOR, "cairn.transfer.contract"),
        "runner": ("cairn.models", "cairn.layers", "cairn.kernels", "cairn.cache.layout", "cairn.transfer.contract"),
        "tiers": ("cairn.cache", "cairn.scheduler.page_source", "cairn.scheduler.transfers", *CONTENT),
        "engine": tuple(
            f"cairn.{room}"
            for room in ("cache", "transfer", "kernels", "layers", "models", "scheduler", "runner", "tiers")
        ),
        "check": ("cairn.engine", "cairn.models", "cairn.cache.layout"),
        "http": (),
        "server": ("cairn.engine.contract", "cairn.http"),
        "routing": ("cairn.cache.events",),
        "proxy": ("cairn.http", "cairn.routing"),
        "replay": (
            *("cairn.cache", "cairn.scheduler", "cairn.tiers", "cairn.transfer.contract", "cairn.bench.plots"),
            *("cairn.engine.request_log.header", "cairn.engine.request_log.lines"),
            *MODEL_NUMBERS,
        ),
        "bench": ("cairn.http.cookies",),
        "settings": ("cairn.engine.contract", "cairn.server.options", "cairn.proxy.options"),
        "cli": ("cairn",),
        "deploy": ("cairn",),
        "__main__": ("cairn.cli",),
    }
)


# What is imported inside functions, by module, and why: "optional" for packages that need not be installed, "start" for
# what would make a command that does not need it begin measurably later.
LATE = MappingProxyType(
    {
        "cairn.bench.plots": ("optional", "matplotlib"),
        "cairn.check.reference": ("start", "transformers"),
        "cairn.cli.command": (
            "start",
            "cairn.settings",
            "cairn.replay",
            "cairn.bench",
            "cairn.check",
            "cairn.models",
            "rich",
        ),
        "cairn.cli.run": (
            *("start", "cairn.engine", "cairn.server", "cairn.http.web_server", "cairn.proxy", "cairn.check"),
            *("cairn.models", "cairn.settings.kv", "cairn.settings.speculation", "cairn.transfer", "rich", "jinja2"),
        ),
        "cairn.deploy.ray": ("optional", "cairn.deploy.ray"),
        "cairn.engine.devices": ("optional", "cairn.kernels.cuda"),
        "cairn.engine.ranks.worker": ("start", "cairn.engine", "cairn.layers", "cairn.models"),
        "cairn.engine.transfers.kv_transfer": ("optional", "cairn.transfer.links.nixl"),
        "cairn.kernels.cuda_support": ("optional", "triton"),
        "cairn.layers.rotary": ("start", "transformers"),
        "cairn.models.qwen3_5_vision": ("start", "transformers"),
        "cairn.models.weights.gguf.header": ("start", "gguf"),
        "cairn.models.weights.gguf.source": ("start", "gguf"),
        "cairn.transfer.links.nixl": ("optional", "nixl"),
    }
)

TORCH = ("torch", "safetensors.torch")
TORCH_ROOMS = ("kernels", "layers", "models", "runner", "check")
TORCH_MODULES = (
    "cairn.engine.build",
    "cairn.engine.decode_capture",
    "cairn.engine.devices",
    "cairn.engine.gpu_memory",
    "cairn.engine.kernel_check",
    "cairn.engine.memory_plan",
    "cairn.engine.ranks.tiers",
    "cairn.engine.ranks.transfer",
    "cairn.engine.tier_memory",
    "cairn.engine.transfers.device_pool",
    "cairn.engine.worker",
)
NO_TORCH_MODULES = ("doubles.simulated_runner",)
WEB = ("fastapi", "starlette", "uvicorn")
WEB_ROOMS = ("http", "server", "proxy", "deploy")
TESTS = ("tests", *(path.stem for path in (ROOT / "tests").iterdir() if path.suffix in ("", ".py")))


def may_import_torch(module: Source) -> bool:
    if module.name in NO_TORCH_MODULES:
        return False
    return module.room in TORCH_ROOMS or module.name in TORCH_MODULES


def arrows(modules):
    """Imports go to floor 0, into the own room, or where the table points."""
    for module in modules:
        if module.room not in ARROWS:
            yield f"{module.name} is in no room of the table"
            continue
        own = f"cairn.{module.room}" if module.room else "cairn"
        floor = () if module.room in ("errors", "types") else FLOOR_0
        allowed = (own, *floor, *ARROWS[module.room])
        for found in imports(module):
            if within(found.target, "cairn") and not any(within(found.target, room) for room in allowed):
                yield f"{module.name}:{found.line} imports {found.target}"


def no_circle(modules):
    """The package can be read module by module: none imports one that imports it, for types alone, inside a function or
    otherwise."""
    for circle in circles(modules):
        yield f"imports go round in a circle: {', '.join(circle)}"


def circles(modules):
    """Modules that import each other, over others or directly: the strongly connected parts of the graph of imports
    (Tarjan 1972)."""
    names = {module.name for module in modules}
    below = {module.name: set() for module in modules}
    for module in modules:
        for found in imports(module):
            target = found.target
            while target and target not in names:
                target = target.rpartition(".")[0]
            if target and target != module.name:
                below[module.name].add(target)
    order, lowest, path, found = {}, {}, [], []

    def visit(name):
        order[name] = lowest[name] = len(order)
        path.append(name)
        for other in below[name]:
            if other not in order:
                visit(other)
            if other in path:
                lowest[name] = min(lowest[name], lowest[other])
        if lowest[name] == order[name]:
            begin = path.index(name)
            if len(path) - begin > 1:
                found.append(tuple(sorted(path[begin:])))
            del path[begin:]

    for name in sorted(below):
        if name not in order:
            visit(name)
    return sorted(found)


def no_late_import(modules):
    """What a module imports stands at its top, but for what the table knows."""
    for module in modules:
        _, *allowed = LATE.get(module.name, ("",))
        for found in imports(module):
            if found.late and not is_any(found, allowed):
                yield f"{module.name}:{found.line} imports {found.target} inside a function"


def settings_only_in_the_cli(modules):
    """No room is given the whole configuration."""
    for module in modules:
        for found in imports(module):
            if module.room not in ("settings", "cli", "deploy") and within(found.target, "cairn.settings"):
                yield f"{module.name}:{found.line} imports the settings"


def torch_in_its_rooms(modules):
    for module in modules:
        for found in imports(module):
            if not may_import_torch(module) and is_any(found, TORCH):
                yield f"{module.name}:{found.line} imports torch"


def nothing_else_loads_torch(modules):
    """Importing a module without torch does not load it through another one either."""
    by_name = {module.name: module for module in modules}
    for module in modules:
        if not may_import_torch(module):
            for reached in eagerly_reached(module, by_name):
                if any(found.eager and is_any(found, TORCH) for found in imports(reached)):
                    yield f"{module.name} loads {reached.name}, which imports torch"


def web_framework_in_its_rooms(modules):
    for module in modules:
        for found in imports(module):
            if module.room not in WEB_ROOMS and is_any(found, WEB):
                yield f"{module.name}:{found.line} imports {found.target}"


def nixl_in_one_file(modules):
    users = sorted({module.name for module in modules for found in imports(module) if is_any(found, ("nixl",))})
    if len(users) > 1:
        yield f"nixl is imported by {', '.join(users)}"


def nothing_of_the_tests(modules):
    for module in modules:
        for found in imports(module):
            if is_any(found, TESTS):
                yield f"{module.name}:{found.line} imports {found.target}"


def is_any(found: Import, libraries) -> bool:
    return any(within(found.target, library) for library in libraries)


def eagerly_reached(module, by_name):
    """`module` and all modules that importing it imports, packages on the way included."""
    reached, stack = {module.name: module}, [module]
    while stack:
        for found in imports(stack.pop()):
            parts = found.target.split(".")
            names = [".".join(parts[:end]) for end in range(1, len(parts) + 1)] if found.eager else []
            for name in names:
                if name in by_name and name not in reached:
                    reached[name] = by_name[name]
                    stack.append(by_name[name])
    return reached.values()


RULES = (
    arrows,
    no_circle,
    no_late_import,
    settings_only_in_the_cli,
    torch_in_its_rooms,
    nothing_else_loads_torch,
    web_framework_in_its_rooms,
    nixl_in_one_file,
    nothing_of_the_tests,
)


@pytest.mark.parametrize("rule", RULES)
def test_the_package_keeps_the_rule(rule):
    assert list(rule(sources())) == []


@pytest.mark.parametrize(
    ("rule", "name", "text"),
    [
        (arrows, "cairn.cache.tree", "from cairn.scheduler.request import Request"),
        (arrows, "cairn.cache.tree", "import cairn.kernels"),
        (arrows, "cairn.cache.tree", "from cairn import engine"),
        (arrows, "cairn.cache.tree", "from ..runner import runner"),
        (arrows, "cairn.cache.tree", "def late():\n    from cairn.models import registry"),
        (arrows, "cairn.errors", "from cairn.step import Row"),
        (arrows, "cairn.kernels.cpu.conv", "from cairn.layers.memory import Memory"),
        (arrows, "cairn.models.weights.loader", "from cairn.cache.prefix_cache import PrefixCache"),
        (arrows, "cairn.scheduler.admit", "from cairn.cache.tree import Node"),
        (arrows, "cairn.scheduler.admit", "from cairn.runner.runner import Runner"),
        (arrows, "cairn.runner.runner", "from cairn.scheduler.scheduler import Scheduler"),
        (arrows, "cairn.engine.core", "from cairn.server.app import create_app"),
        (arrows, "cairn.server.app", "from cairn.engine.core import Core"),
        (arrows, "cairn.server.app", "from cairn.engine import contract_of_another_kind"),
        (arrows, "cairn.server.app", "if True:\n    import cairn"),
        (arrows, "cairn.bench.stream", "from cairn.http.error_responses import make_error"),
        (arrows, "cairn.bench.datasets", "from cairn.replay.traces import read_trace"),
        (arrows, "cairn.replay.layouts", "from cairn.models.weights.loader import read_config"),
        (arrows, "cairn.attic", "import os"),
        (no_late_import, "cairn.cache.tree", "def late():\n    import numpy"),
        (
            no_late_import,
            "cairn.models.attention",
            "class A:\n    async def late(self):\n        from cairn import step",
        ),
        (no_late_import, "cairn.bench.plots", "def late():\n    if True:\n        import numpy"),
        (settings_only_in_the_cli, "cairn.engine.build", "from cairn.settings.serve import ServeSettings"),
        (torch_in_its_rooms, "cairn.cache.pages", "import torch"),
        (torch_in_its_rooms, "cairn.scheduler.plan", "from torch.nn import functional"),
        (torch_in_its_rooms, "cairn.engine.core", "def step():\n    import torch.nn as nn"),
        (torch_in_its_rooms, "doubles.simulated_runner", "import torch"),
        (torch_in_its_rooms, "cairn.cli", "from safetensors.torch import save_file"),
        (web_framework_in_its_rooms, "cairn.engine.client", "from starlette.requests import Request"),
        (web_framework_in_its_rooms, "cairn.cli", "def serve():\n    import uvicorn"),
        (web_framework_in_its_rooms, "cairn.settings.serve", "import fastapi.params"),
        (nothing_of_the_tests, "cairn.engine.build", "from doubles.echo_core import EchoCore"),
        (nothing_of_the_tests, "cairn.engine.build", "def late():\n    import tests.source_scan"),
    ],
)
def test_the_rule_finds_what_breaks_it(rule, name, text):
    assert len(list(rule([source(name, text)]))) == 1


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("cairn.cache.tree", "from cairn.errors import AuditError\nfrom . import pages\nimport numpy"),
        ("cairn.server.app", "from cairn.engine.contract import EngineClient"),
        ("cairn.models.contract", "from cairn.cache.layout import CacheLayout\nimport torchvision"),
        ("cairn.engine.build", "import torch\nfrom cairn.runner.runner import Runner"),
        ("cairn.cli", "import cairn\nfrom cairn.server.run import HttpServer"),
    ],
)
def test_what_is_allowed_passes(name, text):
    assert [found for rule in RULES for found in rule([source(name, text)])] == []


@pytest.mark.parametrize(
    "text",
    [
        "from cairn.models.tree import Node",
        "from . import tree",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from cairn.models import tree",
        "def late():\n    from cairn.models.tree import Node",
        "class Late:\n    def late(self):\n        import cairn.models.tree",
    ],
)
def test_a_circle_is_found(text):
    modules = [
        source("cairn.models.tree", "from cairn.models.store import Store"),
        source("cairn.models.store", "import cairn.models.reuse"),
        source("cairn.models.reader", "from cairn.models import tree"),
    ]
    found = list(no_circle([*modules, source("cairn.models.reuse", text)]))
    assert found == ["imports go round in a circle: cairn.models.reuse, cairn.models.store, cairn.models.tree"]
    assert list(no_circle([*modules, source("cairn.models.reuse", "import numpy")])) == []


def test_every_late_import_of_the_table_is_still_there():
    late = [(module.name, found) for module in sources() for found in imports(module) if found.late]
    for name, (reason, *targets) in LATE.items():
        assert reason in ("optional", "start")
        unused = [each for each in targets if not any(of == name and is_any(found, (each,)) for of, found in late)]
        assert unused == [], name


def test_torch_is_found_behind_another_module():
    modules = [
        source("cairn.cli", "def check():\n    from cairn.models.check import check"),
        source("cairn.models.check", "import torch"),
        source("cairn.engine.core", "from cairn.models import check"),
        source(
            "cairn.cache.tree", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import cairn.models.check"
        ),
    ]
    assert list(nothing_else_loads_torch(modules)) == [
        "cairn.engine.core loads cairn.models.check, which imports torch"
    ]


def test_nixl_is_found_in_a_second_file():
    one = source("cairn.transfer.links.nixl", "from nixl._api import nixl_agent")
    two = source("cairn.engine.build", "def link():\n    import nixl")
    assert list(nixl_in_one_file([one])) == []
    assert len(list(nixl_in_one_file([one, two]))) == 1
