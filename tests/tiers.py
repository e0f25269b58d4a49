"""Which parts of a matrix `make test` runs, and which `make test-more` runs besides."""

from collections.abc import Iterable

import pytest

__all__ = ["first", "more"]


def more(*values):
    """A case that only `make test-more` runs."""
    return pytest.param(*values, marks=pytest.mark.more)


def first(count: int, cases: Iterable) -> list:
    """All cases, those behind the first `count` for `make test-more` alone."""
    return [
        case if index < count else more(*(case if isinstance(case, tuple) else (case,)))
        for index, case in enumerate(cases)
    ]
