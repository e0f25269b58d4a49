"""What is left of a state that was stored in a smaller form, on every backend: how far off its numbers are, and that
nothing is lost a second time."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from cairn.kernels.checkpoint_files import StateSpan
from cairn.kernels.contract import Kernels
from cairn.kernels.state_encoding import ENCODINGS, FLOAT32, EncodedStates, HeadSpan
from kernels.backends import BACKENDS, DEVICES, INTERPRETED, every_backend, name_of
from kernels.file_copies import F32_MAX

PAGE_BYTES, HEAD = 64, (4, 6)
LEAST = 2.0**-126
every_encoding = pytest.mark.parametrize("encoding", ["float16", "int8"])


def random_heads(count: int, size: float = 1.0) -> Tensor:
    """float32 [count, *HEAD], of which the largest number of each is about `size`, and others far below it."""
    generator = torch.Generator().manual_seed(count)
    heads = torch.randn(count, *HEAD, generator=generator, dtype=torch.float64)
    heads *= torch.exp2(-torch.randint(20, heads.shape, generator=generator))
    return (heads / heads.abs().amax((1, 2), keepdim=True) * size).float()


def below_powers(count: int) -> Tensor:
    """Heads whose largest numbers are so close to a power of two that they may be rounded to it."""
    generator = torch.Generator().manual_seed(count)
    exponents = torch.randint(16, 254, (count, 1, 1), generator=generator)
    return ((exponents << 23) - torch.randint(0x2100, (count, *HEAD), generator=generator)).int().view(torch.float32)


NUM_HEADS = 3 if INTERPRETED else 40
STATES: dict[str, Callable[[], Tensor]] = {
    "of usual size": lambda: random_heads(NUM_HEADS),
    "zeros": lambda: torch.zeros(NUM_HEADS, *HEAD),
    "some rows of zeros": lambda: random_heads(NUM_HEADS) * torch.tensor([1.0, 0.0, 1.0, 0.0])[:, None],
    "huge": lambda: random_heads(NUM_HEADS, F32_MAX),
    "nothing but the largest number": lambda: torch.full((NUM_HEADS, *HEAD), F32_MAX),
    "tiny": lambda: random_heads(NUM_HEADS, 2.0**-112),
    "close to having fewer bits": lambda: random_heads(NUM_HEADS, LEAST * 1.5),
    "of fewer bits": lambda: random_heads(NUM_HEADS, 2.0**-135),
    "close to powers of two": lambda: below_powers(NUM_HEADS),
}
every_state = pytest.mark.parametrize("state", STATES)


class File:
    """A file of one entry with these heads, and behind its numbers the scales. `values`, `scales`: its bytes."""

    def __init__(self, kernels: Kernels, encoding: str, num_heads: int) -> None:
        self._kernels, device = kernels, DEVICES.get(kernels, torch.device("cpu"))
        self._num_heads = num_heads
        states = EncodedStates(1, ENCODINGS[encoding], *HEAD, ())
        self._first, self._end = (
            2 + num_heads * states.value_bytes,
            2 + num_heads * (states.value_bytes + states.scale_bytes),
        )
        span = HeadSpan(0, num_heads, 2, self._first)
        states = EncodedStates(1, ENCODINGS[encoding], *HEAD, (span,))
        num_pages = -(-self._end // PAGE_BYTES)
        self._pool = torch.zeros(num_pages, PAGE_BYTES, dtype=torch.uint8, device=device)
        self._files = torch.arange(num_pages, device=device)[None]
        entry_bytes = [2, num_heads * states.head_bytes]
        self._packed = kernels.pack_state_spans([StateSpan(0, 0, 0, 2)], entry_bytes, self._pool, states)

    def store(self, heads: Tensor) -> None:
        self._kernels.store_states(self._pool, self._files, self._entry(heads), None, self._packed)

    def load(self) -> Tensor:
        entry = self._entry(torch.full((self._num_heads, *HEAD), 7.0))
        self._kernels.load_states(self._pool, self._files, entry, None, self._packed)
        return entry[1].view(-1, *HEAD).cpu()

    def _entry(self, heads: Tensor) -> tuple[Tensor, Tensor]:
        device = self._pool.device
        return torch.zeros(1, 2, dtype=torch.uint8, device=device), heads.to(device).view(1, -1)

    @property
    def all_bytes(self) -> Tensor:
        return self._pool.flatten()[: self._end].cpu()

    @property
    def scales(self) -> Tensor:
        return self._pool.flatten()[self._first : self._end].cpu().clone().view(torch.float32).view(self._num_heads, -1)


def most_error(encoding: str, heads: Tensor) -> Tensor:
    """How far off a number may be: half a unit in the last place of the 11 bits, or half a step, of the largest one.
    Where all are below LEAST they are 0 afterwards."""
    if encoding == "float16":
        most = heads.double().abs().amax((1, 2), keepdim=True)
        return torch.where(most < LEAST, LEAST, 2.0**-11 * most)
    most = heads.double().abs().amax(2, keepdim=True)
    # The quotient that is rounded has been rounded once, and so has the scale.
    return torch.where(most < LEAST, LEAST, (most / 127).clamp(min=LEAST) / 2 * (1 + 2.0**-16))


@every_backend
@every_encoding
@every_state
def test_a_number_is_no_further_off_than_the_form_says(kernels: Kernels, encoding: str, state: str) -> None:
    heads = STATES[state]()
    file = File(kernels, encoding, len(heads))
    file.store(heads)
    found = file.load()
    assert found.isfinite().all()
    assert ((found.double() - heads.double()).abs() <= most_error(encoding, heads)).all()
    if heads.abs().max() >= LEAST:
        assert file.scales.isfinite().all() and found.any()
    else:
        assert (file.scales == 1).all() and not found.any()


@every_backend
@every_encoding
@every_state
def test_what_was_read_back_is_stored_as_the_same_bytes(kernels: Kernels, encoding: str, state: str) -> None:
    file = File(kernels, encoding, NUM_HEADS)
    file.store(STATES[state]())
    first, loaded = file.all_bytes, file.load()
    file.store(loaded)
    assert torch.equal(file.all_bytes, first) and torch.equal(file.load(), loaded)


@every_backend
def test_numbers_far_below_the_largest_one_keep_their_bits_in_float16(kernels: Kernels) -> None:
    """As they would not in int8, nor with one scale for all heads."""
    heads = random_heads(NUM_HEADS) * torch.exp2(torch.arange(NUM_HEADS) * 2.0)[:, None, None]
    file = File(kernels, "float16", NUM_HEADS)
    file.store(heads)
    kept = heads.abs() >= 2.0**-28 * heads.abs().amax((1, 2), keepdim=True)
    error = (file.load().double() - heads.double()).abs()
    assert kept.float().mean() > 0.9 and (error <= 2.0**-11 * heads.double().abs())[kept].all()
    mantissas, _ = torch.frexp(file.scales)
    assert (mantissas == 0.5).all(), "a scale is a power of two"


@every_backend
@every_encoding
@pytest.mark.parametrize("broken", [math.nan, -math.nan, math.inf, -math.inf])
def test_what_is_no_number_does_not_look_like_one(kernels: Kernels, encoding: str, broken: float) -> None:
    heads = random_heads(NUM_HEADS)
    heads[1, 2, 3] = broken
    file = File(kernels, encoding, NUM_HEADS)
    file.store(heads)
    found = file.load()
    lost = found[1] if encoding == "float16" else found[1, 2]
    assert lost.isnan().all() and found.isnan().sum() == lost.numel()


@every_encoding
def test_all_backends_make_the_same_bytes(encoding: str) -> None:
    heads = torch.cat([make() for make in STATES.values()])
    heads[1, 2, 3], heads[-1, 0, 0] = math.nan, -math.inf
    found = {}
    for kernels in BACKENDS:
        file = File(kernels, encoding, len(heads))
        file.store(heads)
        found[name_of(kernels)] = file.all_bytes
    assert all(torch.equal(each, next(iter(found.values()))) for each in found.values())


@pytest.mark.parametrize(("num_heads", "head", "conv"), [(8, (64, 128), 6144), (3, (7, 5), 34), (1, (1, 1), 0)])
def test_a_unit_is_as_aligned_as_without_scales(num_heads: int, head: tuple[int, ...], conv: int) -> None:
    plain = FLOAT32.unit_bytes(5, conv, num_heads, head)
    assert plain.total == 5 * (conv + 4 * num_heads * math.prod(head)) and plain.scales == 0
    for name, share, num_scales in (("float16", 2, 1), ("int8", 4, math.prod(head[:-1]))):
        unit = ENCODINGS[name].unit_bytes(5, conv, num_heads, head)
        assert unit.values * share == plain.values and unit.scales == 4 * num_heads * num_scales
        assert 5 * unit.layer <= unit.first_scales and unit.first_scales % 4 == (unit.layer - conv) % 4 == 0
        assert unit.first_scales + 5 * unit.scales <= unit.total < unit.first_scales + 5 * unit.scales + 64
        assert unit.total % 64 == 0


def test_a_unit_without_numbers_has_no_scales() -> None:
    for encoding in ENCODINGS.values():
        assert encoding.unit_bytes(3, 96, 2, (0,)).total == 3 * 96
