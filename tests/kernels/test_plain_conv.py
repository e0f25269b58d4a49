"""The convolution without silu behind it, as LFM2 has it: against the reference, and prefill against single steps."""

import pytest
import torch

from cairn.kernels import cpu, reference


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("width", [2, 3, 5])
def test_against_the_reference_and_step_by_step(width: int, bias: bool) -> None:
    generator = torch.Generator().manual_seed(width)
    x, weight, offset, state = (
        torch.randn(shape, generator=generator) for shape in ((150, 16), (width, 16), (16,), (1, width - 1, 16))
    )
    added = offset if bias else None
    wanted, whole, with_silu = x.clone(), x.clone(), x.clone()
    kept_wanted = reference.conv_prefill(wanted, weight, added, state[0], 10, [1, 64, 150], silu=False)
    kept = cpu.conv_prefill(whole, weight, added, state[0], 10, [1, 64, 150], silu=False)
    torch.testing.assert_close(whole, wanted, rtol=0, atol=1e-5)
    assert all(torch.equal(one, other) for one, other in zip(kept, kept_wanted, strict=True))
    cpu.conv_prefill(with_silu, weight, added, state[0], 10, [150])
    torch.testing.assert_close(with_silu, whole * whole.sigmoid(), rtol=0, atol=1e-5)
    stepped, slow_states, slots = x.clone(), state.clone(), torch.tensor([0])
    for token in range(150):
        slow = x[token : token + 1].clone()
        reference.conv_update(slow, weight, added, slow_states, slots, silu=False)
        cpu.conv_update(stepped[token : token + 1], weight, added, state, slots, silu=False)
        torch.testing.assert_close(slow, stepped[token : token + 1], rtol=0, atol=1e-5)
    assert torch.equal(stepped, whole)
    assert torch.equal(state[0], kept[-1])
