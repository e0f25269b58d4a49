"""Copies between states and checkpoint files, of pages and of tokens: the bytes that the reference moves, and no other
one, whatever lay there before."""

from dataclasses import replace

import pytest
import torch

from cairn.kernels.checkpoint_files import StateSpan
from cairn.kernels.contract import Kernels
from kernels.backends import DEVICES, every_backend
from kernels.file_copies import CASES, ENCODED, SMALL, FileCopy, any_bytes, check_page_copies
from kernels.kernel_calls import CPU
from tiers import first

every_direction = pytest.mark.parametrize("name", ["store_states", "load_states"])


@every_backend
@every_direction
@pytest.mark.parametrize("case", CASES)
def test_states_to_and_from_files(kernels: Kernels, name: str, case: str) -> None:
    states, page_bytes = CASES[case]
    FileCopy(states, page_bytes, (4, 0, 2)).check(kernels, name)


@every_backend
@every_direction
@pytest.mark.parametrize("case", first(7, ENCODED))
def test_states_that_files_have_in_another_form(kernels: Kernels, name: str, case: str) -> None:
    states, page_bytes = ENCODED[case]
    FileCopy(states, page_bytes, (4, 0, 2)).check(kernels, name)


@every_backend
@every_direction
@pytest.mark.parametrize("encoding", ["float16", "int8"])
@pytest.mark.parametrize("entries", [(), (3,), None], ids=["no entry", "one", "all in their order"])
def test_which_entries_are_encoded(kernels: Kernels, name: str, encoding: str, entries: tuple[int, ...] | None) -> None:
    FileCopy(replace(SMALL, encoding=encoding, head=(2, 8)), 256, entries).check(kernels, name)


@every_backend
@every_direction
@pytest.mark.parametrize("entries", [(), (3,), None], ids=["no entry", "one", "all in their order"])
def test_which_entries_there_are(kernels: Kernels, name: str, entries: tuple[int, ...] | None) -> None:
    FileCopy(SMALL, 256, entries).check(kernels, name)


@every_backend
def test_a_file_may_be_loaded_into_several_slots(kernels: Kernels) -> None:
    FileCopy(SMALL, 256, (1, 3, 0), files=(2, 0, 2)).check(kernels, "load_states")


@every_backend
def test_an_entry_may_be_stored_in_several_files(kernels: Kernels) -> None:
    FileCopy(SMALL, 256, (1, 3, 1)).check(kernels, "store_states")


@every_backend
@every_direction
def test_a_page_may_lie_behind_two_thousand_million_bytes(kernels: Kernels, name: str) -> None:
    """Memory that nobody touches is none."""
    page_bytes, num_pages = 65_537, 32_770
    device = DEVICES.get(kernels, CPU)
    pool = torch.empty(num_pages, page_bytes, dtype=torch.uint8, device=device)
    files = torch.tensor([[num_pages - 1], [num_pages - 2]], device=device)
    pool[-2:] = any_bytes(1, 2, page_bytes).to(device)
    entry = any_bytes(2, 2, 9).to(device)
    packed = kernels.pack_state_spans([StateSpan(0, 0, page_bytes - 9, 9)], [9], pool)
    getattr(kernels, name)(pool, files, [entry], None, packed)
    stored, loaded = any_bytes(1, 2, page_bytes), any_bytes(2, 2, 9)
    if name == "store_states":
        stored[:, -9:] = loaded.flip(0)
    else:
        loaded = stored.flip(0)[:, -9:]
    assert torch.equal(entry.to(CPU), loaded) and torch.equal(pool[-2:].to(CPU), stored)


@every_backend
@pytest.mark.parametrize("page_bytes", [8192 + 256, 256, 24, 20, 6, 5])
@pytest.mark.parametrize("pairs", [((4, 0),), ((0, 4), (6, 4), (2, 5))], ids=["one page", "one source twice"])
def test_pages_are_copied(kernels: Kernels, page_bytes: int, pairs: tuple[tuple[int, int], ...]) -> None:
    check_page_copies(kernels, page_bytes, pairs)
