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
    # Among other files, which are written in one go and of which nothing may come into this one.
    spare = np.setdiff1d(np.arange(400), pages)[: 2 * layout.pages_per_checkpoint].reshape(2, -1)
    three = torch.from_numpy(np.stack([spare[0], pages, spare[1]]).astype(np.int64))
    files.write_hidden(three, torch.stack([hidden * 2, hidden, hidden * 3]))
    for layer in range(recurrent.num_layers):
        files.write_layer(
            three, layer, *(torch.stack([part[layer] + 1, part[layer], -part[layer]]) for part in (conv, state))
        )

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
    others = np.setdiff1d(np.arange(400), three)
    assert not pool[others.tolist()].any()

    assert torch.equal(files.read_hidden(three), torch.stack([hidden * 2, hidden, hidden * 3]))
    for layer in range(recurrent.num_layers):
        again = files.read_layer(three[[1, 0]], layer)
        for found, part in zip(again, (conv, state), strict=True):
            assert torch.equal(found, torch.stack([part[layer], part[layer] + 1]))


def test_no_file_at_all_is_no_work() -> None:
    driver = tiny("M*", exact=False)
    spec = driver.model.spec
    assert spec.recurrent is not None
    pool = torch.zeros(8, driver.layout.page_bytes, dtype=torch.uint8)
    files, none = (
        CheckpointFiles(pool, spec, driver.layout),
        torch.zeros(0, driver.layout.pages_per_checkpoint, dtype=torch.int64),
    )
    files.write_hidden(none, torch.zeros(0, spec.hidden_size))
    conv = torch.zeros(0, spec.recurrent.columns, spec.recurrent.channels)
    files.write_layer(none, 0, conv, torch.zeros(0, *spec.recurrent.state))
    assert not pool.any()
