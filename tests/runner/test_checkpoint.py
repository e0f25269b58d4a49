"""A checkpoint's bytes against the layout's promise, and the round trip."""

import numpy as np
import pytest
import torch

from cairn.runner.checkpoint import CheckpointFiles
from runner.harness import tiny

CASES = [
    pytest.param("MMM", {}, torch.float32, 16, id="two-groups"),
    pytest.param("M*M", {}, torch.bfloat16, 16, id="bfloat16"),
    pytest.param("M*", {"n_groups": 1}, torch.float32, 1, id="one-group-tiny-pages"),
    pytest.param("M*", {"n_groups": 1, "mamba_head_dim": 7, "ssm_state_size": 5}, torch.bfloat16, 3, id="odd-sizes"),
    pytest.param("M*", {"n_groups": 4}, torch.float32, 16, id="one-head-a-group"),
]


@pytest.mark.parametrize(("pattern", "changes", "dtype", "block_size"), CASES)
def test_bytes_follow_the_layout(pattern: str, changes: dict, dtype: torch.dtype, block_size: int) -> None:
    driver = tiny(pattern, exact=False, dtype=dtype, block_size=block_size, num_pages=400, **changes)
    spec, layout, config = driver.model.spec, driver.layout, driver.config
    recurrent = spec.recurrent
    assert recurrent is not None
    pool = torch.zeros(400, layout.page_bytes, dtype=torch.uint8)
    files = CheckpointFiles(pool, spec, layout)
    pages = np.random.default_rng(0).permutation(400)[: layout.pages_per_checkpoint].astype(np.int32)
    hidden = torch.randn(spec.hidden_size).to(dtype)
    conv = torch.randn(recurrent.num_layers, recurrent.columns, recurrent.channels).to(dtype)
    state = torch.randn(recurrent.num_layers, *recurrent.state)
    files.write_hidden(pages, hidden)
    for layer in range(recurrent.num_layers):
        files.write_layer(pages, layer, conv[layer], state[layer])

    # The same bytes, put together as the layout's words say.
    inner, groups = config.mamba2.inner, config.n_groups
    x, b, c = conv.split([inner, groups * config.ssm_state_size, groups * config.ssm_state_size], dim=-1)
    parts = [hidden]
    if groups == 1:
        parts.append(torch.cat([b, c], dim=-1))
    units = groups if groups > 1 else config.mamba_num_heads
    for unit in range(units):
        for layer in range(recurrent.num_layers):
            own = [part[layer].chunk(units, dim=-1)[unit] for part in ((x, b, c) if groups > 1 else (x,))]
            parts += [torch.cat(own, dim=-1), state[layer].chunk(units)[unit]]
    wanted = torch.cat([part.contiguous().flatten().view(torch.uint8) for part in parts])
    assert len(wanted) == layout.checkpoint_bytes
    stored = pool[pages.tolist()].flatten()
    assert torch.equal(stored[: layout.checkpoint_bytes], wanted)
    assert not stored[layout.checkpoint_bytes :].any()
    others = np.setdiff1d(np.arange(400), pages)
    assert not pool[others.tolist()].any()

    again_hidden, again_conv, again_state = (torch.full_like(t, 7) for t in (hidden, conv, state))
    files.read_hidden(pages, again_hidden)
    for layer in range(recurrent.num_layers):
        files.read_layer(pages, layer, again_conv[layer], again_state[layer])
    assert torch.equal(again_hidden, hidden)
    assert torch.equal(again_conv, conv)
    assert torch.equal(again_state, state)
