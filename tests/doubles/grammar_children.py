"""One child process that checks grammars for the cores of several tests."""

from collections.abc import Iterator
from contextlib import closing, contextmanager
from types import SimpleNamespace

import pytest

from cairn.engine.grammars import compiler

__all__ = ["shared_grammar_child"]


@contextmanager
def shared_grammar_child() -> Iterator[None]:
    """Cores that are built meanwhile share it: one of each core's own takes longer to start than a test to run."""
    with closing(compiler.GrammarChecker()) as checker, pytest.MonkeyPatch.context() as patch:
        lent = SimpleNamespace(check=checker.check, close=lambda: None)
        patch.setattr(compiler, "GrammarChecker", lambda: lent)
        yield
