"""Which ptxas is taken: Triton's knobs are stood in for."""

import ctypes
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="make test-kernels installs it")

from cairn.kernels.cuda.assembler import choose_ptxas, driver_version

OLD, NEW = (SimpleNamespace(path=f"bin/{version}", version=version) for version in ("12.8", "13.1"))


class Knobs:
    """As `triton.knobs.nvidia`: what is set is a path, what is read a tool."""

    def __init__(self, ptxas: SimpleNamespace, blackwell: SimpleNamespace | None) -> None:
        self._tools = {tool.path: tool for tool in (ptxas, blackwell) if tool is not None}
        self._path, self._blackwell = ptxas.path, blackwell

    @property
    def ptxas(self) -> SimpleNamespace:
        return self._tools[self._path]

    @ptxas.setter
    def ptxas(self, path: str) -> None:
        self._path = path

    @property
    def ptxas_blackwell(self) -> SimpleNamespace:
        if self._blackwell is None:
            raise RuntimeError("Cannot find ptxas-blackwell")
        return self._blackwell


@pytest.fixture(autouse=True)
def nothing_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_PTXAS_PATH", raising=False)


@pytest.mark.parametrize(
    ("knobs", "driver", "taken"),
    [
        (Knobs(OLD, NEW), 13_000, NEW),
        (Knobs(OLD, NEW), 13_020, NEW),
        (Knobs(OLD, NEW), None, NEW),
        (Knobs(OLD, NEW), 12_080, OLD),
        (Knobs(OLD, None), 13_000, OLD),
        (Knobs(OLD, OLD), 13_000, OLD),
        (Knobs(NEW, SimpleNamespace(path="bin/13.4", version="13.4")), 13_000, NEW),
    ],
    ids=["CUDA 13", "CUDA 13.2", "no GPU", "an older driver", "no other", "no newer", "right already"],
)
def test_the_newer_ptxas_is_taken_where_the_driver_runs_its_code(
    knobs: Knobs, driver: int | None, taken: SimpleNamespace
) -> None:
    choose_ptxas(knobs, driver)
    assert knobs.ptxas is taken


def test_what_the_user_names_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_PTXAS_PATH", "bin/12.8")
    knobs = Knobs(OLD, NEW)
    choose_ptxas(knobs, 13_000)
    assert knobs.ptxas is OLD


def give_13_1(version: Any) -> int:
    version._obj.value = 13_010
    return 0


@pytest.mark.parametrize(("functions", "found"), [({"cuDriverGetVersion": give_13_1}, 13_010), ({}, 0)])
def test_the_driver_says_its_version(
    monkeypatch: pytest.MonkeyPatch, functions: dict[str, Callable[[Any], int]], found: int
) -> None:
    assert driver_version() is None  # there is no GPU here
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(ctypes, "CDLL", lambda name: SimpleNamespace(**functions))
    assert driver_version() == found


def test_a_driver_that_is_not_found_counts_as_old(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)

    def missing(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(ctypes, "CDLL", missing)
    assert driver_version() == 0
