"""docs/models.md is made of the lists that tests take their parameters from."""

import importlib.util
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


def test_what_is_drawn_is_what_is_listed() -> None:
    """A mark for each family of each list, and no other one."""
    made = table()
    for coverage in (*FORMATS, *WAYS):
        marked = {name for name in made.ROWS if made._mark(name, coverage)}
        assert marked == {made.MADE_AS.get(name, name) for name in coverage.plain_families}
        heads = {name for name in made.ROWS if made._mark(name, coverage) == "yes, head"}
        assert heads == {name.removesuffix("+mtp") for name in coverage.families if name.endswith("+mtp")}
