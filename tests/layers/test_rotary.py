"""Rotary positions against transformers', and their bits against themselves."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import Qwen3_5TextConfig
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5TextRotaryEmbedding, apply_rotary_pos_emb

from cairn.kernels import exact
from cairn.layers.rotary import Rotary, make_rotary

THETA = 10_000_000.0


def turned(rotary: Rotary, positions: Tensor, x: Tensor) -> Tensor:
    """x [rows, heads, dim] at positions [3, rows], by the kernels whose bits are promised."""
    return exact.rope(x, *rotary.at(positions))


def published(x: Tensor, positions: Tensor, dim: int, sections: list[int]) -> Tensor:
    """transformers' rotation of x [rows, heads, head_dim] at positions [3, rows], from float64 angles on."""
    rope = {
        "rope_type": "default",
        "rope_theta": THETA,
        "partial_rotary_factor": dim / x.shape[-1],
        "mrope_section": sections,
    }
    module = Qwen3_5TextRotaryEmbedding(Qwen3_5TextConfig(head_dim=x.shape[-1], rope_parameters=rope))
    angles = positions[..., None].double() * module.inv_freq.double()
    cos, sin = (module.recomposition_frequencies(part[:, None].clone())[0] for part in (angles.cos(), angles.sin()))
    wide = x.double().transpose(0, 1)[None]
    rotated, _ = apply_rotary_pos_emb(wide, wide, cos[None], sin[None])
    return rotated[0].transpose(0, 1)


@pytest.mark.parametrize(
    ("dim", "head_dim", "sections"), [(64, 256, (11, 11, 10)), (64, 64, (12, 10, 10)), (8, 16, (2, 1, 1))]
)
def test_three_positions_turn_as_published(dim: int, head_dim: int, sections: tuple[int, int, int]) -> None:
    generator = torch.manual_seed(1)
    positions = torch.randint(0, 200_000, (3, 50), generator=generator)
    x = torch.randn(50, 3, head_dim, generator=generator)
    found = turned(make_rotary(dim, THETA, sections), positions, x)
    wanted = published(x, positions, dim, list(sections))
    assert (found - wanted).abs().max() < 2e-6
    assert torch.equal(found[..., dim:], x[..., dim:])
    assert (found[..., :dim] - x[..., :dim]).abs().max() > 1


def test_one_position_is_three_equal_ones_and_the_others_are_not_looked_at() -> None:
    positions = torch.arange(100).expand(3, -1)
    x = torch.randn(100, 2, 16, generator=torch.manual_seed(2))
    plain = turned(make_rotary(8, THETA), positions, x)
    assert torch.equal(plain, turned(make_rotary(8, THETA, (2, 1, 1)), positions, x))
    other = torch.stack([positions[0], positions[1] + 5, positions[2] * 7])
    assert torch.equal(plain, turned(make_rotary(8, THETA), other, x))
    assert not torch.equal(plain, turned(make_rotary(8, THETA, (2, 1, 1)), other, x))


def test_scaling_and_dtype() -> None:
    positions = torch.arange(40).expand(3, -1)
    x = torch.randn(40, 2, 8, generator=torch.manual_seed(3))
    rotary = make_rotary(8, 100.0)
    plain, scaled = (turned(replace(rotary, scaling=scaling), positions, x) for scaling in (1.0, 1.5))
    torch.testing.assert_close(scaled, 1.5 * plain)
    narrow = turned(make_rotary(8, 100.0), positions, x.bfloat16())
    assert narrow.dtype == torch.bfloat16
    assert torch.equal(narrow, turned(make_rotary(8, 100.0), positions, x.bfloat16().float()).bfloat16())


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 1000), rows=st.integers(1, 70), pairs=st.integers(1, 20))
def test_a_rows_bits_do_not_depend_on_the_others(seed: int, rows: int, pairs: int) -> None:
    generator = torch.manual_seed(seed)
    positions = torch.randint(0, 100_000, (3, rows), generator=generator)
    x = torch.randn(rows, 3, 2 * pairs + 3, generator=generator)
    rotary = make_rotary(2 * pairs, 10_000.0)
    together = turned(rotary, positions, x)
    for row in range(rows):
        one = slice(row, row + 1)
        assert torch.equal(turned(rotary, positions[:, one], x[one])[0], together[row])


def test_sizes_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="even number of elements, not 7"):
        make_rotary(7, THETA)
    with pytest.raises(ValueError, match=r"mrope_section \[2, 2, 1\] must add up to 4"):
        make_rotary(8, THETA, (2, 2, 1))
