"""Rules of the house that an AST scan can see. Each is shown to fail on an example that breaks it."""

import ast
import re

import pytest

from source_scan import ROOT, SRC, imports, source, sources, within
from test_surface import EXPORTED

MUTABLE_CALLS = frozenset(
    ("list", "dict", "set", "bytearray", "defaultdict", "OrderedDict", "Counter", "ChainMap", "deque")
)
IMMUTABLE_TYPES = frozenset(("Mapping", "MappingProxyType", "tuple", "frozenset"))
OTHER_HTTP_CLIENTS = ("aiohttp", "requests", "urllib.request", "urllib3", "httpx.Client", "httpx.AsyncClient")
UNSAFE_MODULES = ("pickle", "_pickle", "cPickle", "dill", "cloudpickle", "joblib", "shelve", "marshal")
UNSAFE_CALLS = frozenset(("eval", "exec", "torch.load", "yaml.load", "yaml.unsafe_load", "yaml.full_load"))
SHAPELESS = re.compile(r"(\w+_)?(utils?|common|helpers?|misc|managers?)|base(_\w*)?")
MOST_FIELDS = 15
NAMED_ELSEWHERE = frozenset(
    (
        *("ServeSettings", "ServerOptions", "ProxyOptions", "SharedFields", "SamplingFields", "_LogLine"),
        *("ResponsesRequest", "ResponsesResponse", "ResponsesEvent"),
        *(
            "NemotronHConfig",
            "Qwen35Config",
            "FalconH1Config",
            "Gemma2Config",
            "Gemma4Config",
            "Lfm3Config",
            "Llama4Config",
        ),
    )
)
MACHINE_PATH = re.compile(r"(?<![\w.])/(home|root|work|opt|Users|mnt)/")


def name_of(node):
    """`a.b.c` of a name or an attribute, else an empty string."""
    match node:
        case ast.Name():
            return node.id
        case ast.Attribute():
            return f"{name_of(node.value)}.{node.attr}"
    return ""


# -- globals ---------------------------------------------------------------------------------------------------------


def mutable_globals(modules):
    """Nothing that a module binds at its top can be changed in place, and no function rebinds it."""
    for module in modules:
        for name, annotation, value in bindings(module.tree):
            if is_mutable(value) and not (name == "__all__" or (name.isupper() and is_immutable_type(annotation))):
                yield f"{module.at(value)} binds {name} to something mutable"
        for node in module.nodes:
            if isinstance(node, ast.Global):
                yield f"{module.at(node)} rebinds {', '.join(node.names)}"


def bindings(block):
    """(name, annotation, value) of every assignment at a module's top, inside if, try, for and with, too."""
    for node in ast.iter_child_nodes(block):
        match node:
            case ast.Assign(targets=targets, value=value):
                for target in targets:
                    yield ast.unparse(target), None, value
            case ast.AnnAssign(target=target, annotation=annotation, value=ast.expr() as value):
                yield ast.unparse(target), annotation, value
            case ast.If() | ast.Try() | ast.For() | ast.While() | ast.With() | ast.ExceptHandler():
                yield from bindings(node)


def is_mutable(value):
    match value:
        case ast.List() | ast.Dict() | ast.Set() | ast.ListComp() | ast.DictComp() | ast.SetComp():
            return True
        case ast.Tuple(elts=parts):
            return any(map(is_mutable, parts))
        case ast.BinOp(left=left, right=right):
            return is_mutable(left) or is_mutable(right)
        case ast.IfExp(body=body, orelse=orelse):
            return is_mutable(body) or is_mutable(orelse)
        case ast.Call(func=func):
            return name_of(func).rpartition(".")[2] in MUTABLE_CALLS
    return False


def is_immutable_type(annotation):
    if isinstance(annotation, ast.Subscript):
        if name_of(annotation.value).rpartition(".")[2] == "Final":
            return is_immutable_type(annotation.slice)
        annotation = annotation.value
    return name_of(annotation).rpartition(".")[2] in IMMUTABLE_TYPES


# -- names -----------------------------------------------------------------------------------------------------------


def shapeless_names(modules):
    """A module is called after what it holds."""
    for module in modules:
        for part in module.name.split("."):
            if SHAPELESS.fullmatch(part):
                yield f"{module.name}: {part!r} says nothing"


def lists_its_names(modules):
    """`__all__` belongs to those of the rooms' doors, whose names `test_surface` freezes, that have more public names
    than these. Elsewhere it would say again what a leading underscore says."""
    for module in modules:
        for name, _, value in bindings(module.tree):
            if name == "__all__" and module.name not in EXPORTED:
                yield f"{module.at(value)} lists its names"


# -- layer kinds -----------------------------------------------------------------------------------------------------


def asks_for_a_layer_kind(modules):
    """Nobody asks what kind of layer something is; the layout and the memory spec say what is to be known."""
    kinds = {
        node.name
        for module in modules
        if module.room in ("layers", "models")
        for node in module.nodes
        if isinstance(node, ast.ClassDef)
    }
    for module in modules:
        for node in module.nodes:
            asked = {name_of(part).rpartition(".")[2] for part in asked_kinds(node)} & kinds
            if asked:
                yield f"{module.at(asked_at(node))} asks whether something is a {', '.join(sorted(asked))}"


def asked_kinds(node):
    """The names that a type question has in it."""
    match node:
        case ast.Call(func=ast.Name(id="isinstance" | "issubclass"), args=[_, kinds]):
            return ast.walk(kinds)
        case ast.MatchClass(cls=kind):
            return [kind]
        case ast.Compare(left=left, comparators=comparators) if any(map(is_type_call, (left, *comparators))):
            return [left, *comparators]
        case ast.Subscript(slice=slice_) if is_type_call(slice_):
            return [node.value]
    return []


def asked_at(node):
    return node.cls if isinstance(node, ast.MatchClass) else node


def is_type_call(node):
    return isinstance(node, ast.Call) and name_of(node.func) == "type" and len(node.args) == 1


# -- code from data --------------------------------------------------------------------------------------------------


def runs_data(modules):
    """No file and no peer can have code of its own run."""
    for module in modules:
        for found in imports(module):
            if any(within(found.target, name) for name in (*UNSAFE_MODULES, "torch.load", "yaml.load")):
                yield f"{module.name}:{found.line} imports {found.target}"
        for node in module.nodes:
            if isinstance(node, ast.Call):
                if name_of(node.func).removeprefix("builtins.") in UNSAFE_CALLS:
                    yield f"{module.at(node)} calls {name_of(node.func)}"
                for keyword in node.keywords:
                    if keyword.arg in ("trust_remote_code", "allow_pickle") and not is_false(keyword.value):
                        yield f"{module.at(node)} may set {keyword.arg}"
            if isinstance(node, ast.Dict):
                for key, value in zip(node.keys, node.values, strict=True):
                    if isinstance(key, ast.Constant) and key.value == "trust_remote_code" and not is_false(value):
                        yield f"{module.at(node)} may set trust_remote_code"


def is_false(value):
    return isinstance(value, ast.Constant) and value.value is False


# -- HTTP clients ----------------------------------------------------------------------------------------------------


def http_client_keeps_state(modules):
    """No HTTP client keeps cookies, asks the environment for proxies and passwords, or follows redirects."""
    for module in modules:
        for found in imports(module):
            if any(within(found.target, name) for name in OTHER_HTTP_CLIENTS):
                yield f"{module.name}:{found.line} imports {found.target}"
        for node in module.nodes:
            if isinstance(node, ast.Call) and name_of(node.func) in ("httpx.Client", "httpx.AsyncClient"):
                given = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
                safe = {"cookies": "no_cookies()", "trust_env": "False", "follow_redirects": "False"}
                if {"follow_redirects": "False"} | given | safe != {"follow_redirects": "False"} | given:
                    yield f"{module.at(node)} makes a client without cookies=no_cookies(), trust_env=False"


# -- what a reader has to keep in the head ---------------------------------------------------------------------------


def large_records(modules):
    """No record has more than MOST_FIELDS fields, but those whose fields somebody else has named: settings,
    config.json, bodies and lines of files."""
    for module in modules:
        for node in module.nodes:
            if isinstance(node, ast.ClassDef) and node.name not in NAMED_ELSEWHERE:
                fields = [
                    one
                    for one in node.body
                    if isinstance(one, ast.AnnAssign) and "ClassVar" not in ast.dump(one.annotation)
                ]
                if len(fields) > MOST_FIELDS:
                    yield f"{module.at(node)} {node.name} has {len(fields)} fields"


def public_classes_of_one_name(modules):
    """A public class's name stands for one thing in the whole package."""
    places = {}
    for module in modules:
        for node in module.tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places.setdefault(node.name, []).append(module.at(node))
    yield from (f"{name} is more than one class: {', '.join(all_)}" for name, all_ in places.items() if len(all_) > 1)


RULES = (
    mutable_globals,
    shapeless_names,
    lists_its_names,
    asks_for_a_layer_kind,
    runs_data,
    http_client_keeps_state,
    large_records,
    public_classes_of_one_name,
)


@pytest.mark.parametrize("rule", RULES)
def test_the_package_keeps_the_rule(rule):
    assert list(rule(sources())) == []


def test_no_http_client_beside_the_package_keeps_state_either():
    paths = [path for folder in ("demo", "benchmarks") for path in sorted((ROOT / folder).rglob("*.py"))]
    modules = [source(f"{path.parent.name}.{path.stem}", path.read_text()) for path in paths]
    assert list(http_client_keeps_state(modules)) == [] and len(modules) > 8


@pytest.mark.parametrize(
    ("rule", "name", "text"),
    [
        (mutable_globals, "cairn.cache.tree", "seen = []"),
        (mutable_globals, "cairn.cache.tree", "SEEN = {}"),
        (mutable_globals, "cairn.cache.tree", "SEEN: dict[str, int] = {}"),
        (mutable_globals, "cairn.cache.tree", "seen: Mapping[str, int] = {}"),
        (mutable_globals, "cairn.cache.tree", "seen = 1, {2}"),
        (
            mutable_globals,
            "cairn.cache.tree",
            "if True:\n    try:\n        SEEN = list()\n    except OSError:\n        pass",
        ),
        (mutable_globals, "cairn.cache.tree", "SEEN = collections.defaultdict(list)"),
        (mutable_globals, "cairn.cache.tree", "SEEN = {1: 2} | OTHERS"),
        (mutable_globals, "cairn.cache.tree", "NAMES = [name for name in OTHERS]"),
        (mutable_globals, "cairn.cache.tree", "PAIR = (1, [])"),
        (mutable_globals, "cairn.cache.tree", "COUNT = 0\ndef count():\n    global COUNT\n    COUNT += 1"),
        (shapeless_names, "cairn.cache.utils", ""),
        (shapeless_names, "cairn.cache.tree_utils", ""),
        (shapeless_names, "cairn.common.tree", ""),
        (shapeless_names, "cairn.cache.base_policy", ""),
        (shapeless_names, "cairn.cache.manager", ""),
        (shapeless_names, "cairn.cache.cache_manager", ""),
        (lists_its_names, "cairn.cache.tree", '__all__ = ["A"]\nclass A:\n    pass'),
        (runs_data, "cairn.models.weights.loader", "import pickle"),
        (runs_data, "cairn.models.weights.loader", "def load():\n    from pickle import loads"),
        (runs_data, "cairn.models.weights.loader", "eval('1')"),
        (runs_data, "cairn.models.weights.loader", "weights = torch.load(path, weights_only=True)"),
        (runs_data, "cairn.models.weights.loader", "from torch import load"),
        (runs_data, "cairn.models.weights.loader", "tokenizer = load(path, trust_remote_code=True)"),
        (runs_data, "cairn.models.weights.loader", "tokenizer = load(path, trust_remote_code=settings.trust)"),
        (runs_data, "cairn.models.weights.loader", "options = {'trust_remote_code': True}"),
        (runs_data, "cairn.models.weights.loader", "array = np.load(path, allow_pickle=True)"),
        (runs_data, "cairn.models.weights.loader", "settings = yaml.load(text, yaml.Loader)"),
        (http_client_keeps_state, "cairn.proxy.upstream", "httpx.AsyncClient(trust_env=False)"),
        (http_client_keeps_state, "cairn.proxy.upstream", "httpx.Client(trust_env=False, cookies=jar)"),
        (http_client_keeps_state, "cairn.proxy.upstream", "httpx.AsyncClient(cookies=no_cookies())"),
        (
            http_client_keeps_state,
            "cairn.proxy.upstream",
            "httpx.AsyncClient(cookies=no_cookies(), trust_env=False, follow_redirects=True)",
        ),
        (http_client_keeps_state, "cairn.proxy.upstream", "from httpx import AsyncClient"),
        (large_records, "cairn.step", "class Plan:\n" + "".join(f"    field_{i}: int\n" for i in range(16))),
        (public_classes_of_one_name, "cairn.step", "class Plan: ...\nif True:\n    pass\nclass Plan: ..."),
        (http_client_keeps_state, "cairn.proxy.upstream", "def ask():\n    import urllib.request"),
    ],
)
def test_the_rule_finds_what_breaks_it(rule, name, text):
    assert len(list(rule([source(name, text)]))) == 1


@pytest.mark.parametrize(
    "text",
    [
        "isinstance(layer, Mamba2)",
        "issubclass(kind, (int, layers.Mamba2))",
        "isinstance(layer, Mamba2 | None)",
        "type(layer) is Mamba2",
        "Mamba2 == type(layer)",
        "match layer:\n    case Mamba2():\n        pass",
    ],
)
def test_asking_for_a_layer_kind_is_found(text):
    layers = source("cairn.layers.mamba2", "class Mamba2:\n    pass")
    assert (
        list(asks_for_a_layer_kind([layers, source("cairn.runner.runner", "isinstance(row.tokens, FromStep)")])) == []
    )
    assert len(list(asks_for_a_layer_kind([layers, source("cairn.runner.runner", text)]))) == 1


@pytest.mark.parametrize(
    "text",
    [
        'A: Mapping[str, int] = {"a": 1}',
        'A: Final[frozenset[str]] = frozenset({"a"})',
        'A = MappingProxyType({"a": 1})\nB = tuple([1, 2])\nlogger = logging.getLogger(__name__)',
        "class A:\n    def seen(self):\n        seen = []",
        "",
        '"""Words alone."""',
        "def load(path):\n    return from_pretrained(path, trust_remote_code=False)",
        "word = re.compile('evaluate')",
    ],
)
def test_what_is_allowed_passes(text):
    assert [found for rule in RULES for found in rule([source("cairn.cache.tree", text)])] == []


def test_no_text_names_a_place_of_one_machine():
    texts = [path for folder in ("demo", "docs", "benchmarks", "tests") for path in (ROOT / folder).rglob("*.*")]
    texts += [*SRC.rglob("*.py"), *ROOT.glob("*.md"), *ROOT.glob("*.toml"), ROOT / "Makefile"]
    found = [
        f"{path.relative_to(ROOT)}:{number}"
        for path in texts
        if path.suffix in (".py", ".md", ".svg", ".toml", "") and path.name != "test_house.py"
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if MACHINE_PATH.search(line)
    ]
    assert found == []
    assert MACHINE_PATH.search("see /home/someone/model") and not MACHINE_PATH.search("GET /v1/models of ./home/x")
