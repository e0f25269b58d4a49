"""docs/models.md is made of the lists that tests take their parameters from."""

import importlib.util
import re
import subprocess
import sys
from types import ModuleType

import pytest

from cairn.models.families import FAMILIES
from cairn.models.random_weights.make_model import RECIPES
from models import covered
from models.covered import FORMATS, WAYS, Coverage
from source_scan import ROOT

LISTS = {name: value for name, value in vars(covered).items() if isinstance(value, Coverage)}


def table() -> ModuleType:
    spec = importlib.util.spec_from_file_location("models_table", ROOT / "tools" / "models_table.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_is_what_the_tests_cover() -> None:
    assert (ROOT / "docs" / "models.md").read_text() == table().write_page(), "python tools/models_table.py writes it"


def test_every_family_has_a_row() -> None:
    made = table()
    served = [model_type for _, model_types in made.ROWS.values() for model_type in model_types]
    assert sorted(served) == sorted(FAMILIES)
    assert {*made.ROWS, *made.MADE_AS} == {*RECIPES}
    assert {*made.MADE_AS.values()} <= {*made.ROWS}


def test_every_list_is_in_a_table_and_has_known_families() -> None:
    assert {*FORMATS, *WAYS} == {*LISTS.values()}
    for name, coverage in LISTS.items():
        assert coverage.plain_families <= {*RECIPES}, name
        assert len({*coverage.families}) == len(coverage.families), name


@pytest.mark.parametrize("name", LISTS)
def test_the_tests_that_a_list_names_take_it(name: str) -> None:
    """A list that nobody takes parameters from would say what is not tested."""
    texts = [(ROOT / "tests" / file).read_text() for file in LISTS[name].tests]
    if name == "IMAGES":
        texts.append((ROOT / "tests" / "conftest.py").read_text())
    assert any(f"import {name}" in text or f", {name}\n" in text or f", {name} " in text for text in texts)
    assert sum(text.count(f"{name}.") for text in texts) > 0


TAKEN_OTHERWISE = ("LOGITS", "PACKED", "IMAGES")
"""Lists whose families are no parameters of tests: the tests look through them themselves."""


@pytest.mark.more
def test_a_family_that_is_listed_is_run() -> None:
    """By tests of the files that a list names, in the lane that the page says. Those of GPUs are collected there."""
    listed = {name: each for name, each in LISTS.items() if each.device == "CPU" and name not in TAKEN_OTHERWISE}
    files = sorted({f"tests/{file}" for each in listed.values() for file in each.tests})
    for lane, attribute in (("not long", "regular_families"), ("long", "long_families")):
        command = [sys.executable, "-m", "pytest", "--collect-only", "-n", "0", "-m", f"({lane}) and not ui", *files]
        found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200, check=True)
        run: dict[str, set[str]] = {}
        for test in found.stdout.split():
            file, _, words = test.partition("::")
            run.setdefault(file, set()).update(re.split(r"[-@\[\]]", words))
        for name, each in listed.items():
            seen = set().union(*(run.get(f"tests/{file}", set()) for file in each.tests))
            assert {*getattr(each, attribute)} <= seen, (name, lane)


def test_what_is_drawn_is_what_is_listed() -> None:
    """A mark for each family of each list, and no other one."""
    made = table()
    for coverage in (*FORMATS, *WAYS):
        marked = {name for name in made.ROWS if made._mark(name, coverage)}
        assert marked == {made.MADE_AS.get(name, name) for name in coverage.plain_families}
        heads = {name for name in made.ROWS if made._mark(name, coverage) == "yes, head"}
        assert heads == {name.removesuffix("+mtp") for name in coverage.families if name.endswith("+mtp")}
