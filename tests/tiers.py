"""Which parts of a matrix `make test` runs, which `make test-more` runs besides, and which `make test-long` alone."""

from collections.abc import Iterable
from itertools import product

import pytest

__all__ = ["by_run", "first", "first_of", "long", "more"]


def more(*values):
    """A case that only `make test-more` runs; where two parameters of a test say so, only `make test-long` does."""
    return pytest.param(*values, marks=pytest.mark.more)


def long(*values):
    """A case that only `make test-long` runs."""
    return pytest.param(*values, marks=pytest.mark.long)


def first(count: int, cases: Iterable) -> list:
    """All cases, those behind the first `count` for `make test-more` alone."""
    return [
        case if index < count else more(*(case if isinstance(case, tuple) else (case,)))
        for index, case in enumerate(cases)
    ]


def first_of(cases: Iterable[tuple], *factors: Iterable) -> list:
    """The product of the factors: these cases of it first, all others for `make test-more` alone."""
    cases, whole = list(cases), list(product(*factors))
    assert set(cases) <= set(whole), "a case that is in no product"
    return [*cases, *(more(*case) for case in whole if case not in cases)]


def by_run(regular: Iterable[tuple], rare: Iterable[tuple], whole: Iterable[tuple]) -> list:
    """The whole: the regular cases first, then the rare ones for `make test-more`, and all others for `make test-long`
    alone."""
    regular, rare, whole = list(regular), set(rare), list(whole)
    assert {*regular} | rare <= {*whole}, "a case that is not in the whole"
    return [*regular, *((more if case in rare else long)(*case) for case in whole if case not in regular)]
