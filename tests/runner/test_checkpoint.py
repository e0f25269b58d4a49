"""A checkpoint's bytes against the layout's promise, and the round trip."""

import numpy as np
import pytest
import torch

from cairn.kernels.reference.checkpoint_files import encode_head
from cairn.kernels.state_encoding import ENCODINGS
from cairn.runner.checkpoint import CheckpointPages
from cairn.runner.launched_step import independent_copies
from cairn.runner.memory import LiveStates, torch_dtype
from cairn.step import PageCopy
from runner.harness import tiny

CASES = [
    pytest.param("MMM", {}, torch.float32, 16, id="two-groups"),
    pytest.param("M*M", {}, torch.bfloat16, 16, id="bfloat16"),
    pytest.param("M*", {"n_groups": 1}, torch.float32, 1, id="one-group-tiny-pages"),
    pytest.param("M*", {"n_groups": 1, "mamba_head_dim": 7, "ssm_state_size": 5}, torch.bfloat16, 3, id="odd-sizes"),
    pytest.param("M*", {"n_groups": 4}, torch.float32, 16, id="one-head-a-group"),
]


OWN_BYTES = [
    pytest.param("M*M", {"mamba_ssm_cache_dtype": "float16"}, torch.bfloat16, 16, id="states-in-float16"),
    pytest.param(
        "M*", {"mamba_ssm_cache_dtype": "bfloat16", "mamba_head_dim": 7, "ssm_state_size": 5}, torch.float32, 3,
        id="odd-states-in-bfloat16",
    ),
]  # fmt: skip
"""What runs in fewer bits is stored as it is."""


@pytest.mark.parametrize(("pattern", "changes", "dtype", "block_size"), [*CASES, *OWN_BYTES])
def test_bytes_follow_the_layout(pattern: str, changes: dict, dtype: torch.dtype, block_size: int) -> None:
    driver = tiny(pattern, exact=False, dtype=dtype, block_size=block_size, num_pages=400, **changes)
    spec, layout, config = driver.model.spec, driver.layout, driver.config
    recurrent = spec.recurrent
    assert recurrent is not None
    pool = torch.zeros(400, layout.page_bytes, dtype=torch.uint8)
    live, kernels = LiveStates(spec, 4), driver.model.kernels
    files = CheckpointPages(pool, spec, layout, live, kernels)
    pages = np.random.default_rng(0).permutation(400)[: layout.pages_per_checkpoint].astype(np.int32)
    hidden = torch.randn(spec.hidden_size).to(dtype)
    conv = torch.randn(recurrent.num_layers, recurrent.columns, recurrent.channels).to(dtype)
    state = torch.randn(recurrent.num_layers, *recurrent.state).to(torch_dtype(recurrent.state_dtype))
    assert layout.checkpoint_dtype == layout.state_dtype == changes.get("mamba_ssm_cache_dtype", "float32")
    # Among other files, which are written in one go and of which nothing may come into this one.
    spare = np.setdiff1d(np.arange(400), pages)[: 2 * layout.pages_per_checkpoint].reshape(2, -1)
    three = torch.from_numpy(np.stack([spare[0], pages, spare[1]]).astype(np.int64))
    rows = torch.stack([hidden * 3, hidden * 2, hidden * 5, hidden])
    files.write_hidden(three, rows, torch.tensor([1, 3, 0]))
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

    files.restore(three[[1, 0]], torch.tensor([3, 1]))
    assert torch.equal(live.hidden[[3, 1]], torch.stack([hidden, hidden * 2]))
    for layer, own in enumerate(live.recurrent):
        for found, part in zip((own.conv, own.state), (conv, state), strict=True):
            assert torch.equal(found[[3, 1]], torch.stack([part[layer], part[layer] + 1]))
    assert not any(part[[0, 2, 4]].any() for part in live.tensors)

    again = torch.zeros_like(pool)
    CheckpointPages(again, spec, layout, live, kernels).save(three[[2, 1]], torch.tensor([2, 3]))
    assert torch.equal(again[pages.tolist()], pool[pages.tolist()])
    assert again.count_nonzero() == again[pages.tolist()].count_nonzero(), "slot 2 has zeros"


@pytest.mark.parametrize("checkpoint_dtype", ["float16", "int8"])
@pytest.mark.parametrize(("pattern", "changes", "dtype", "block_size"), CASES)
def test_bytes_of_smaller_states_follow_the_layout(
    pattern: str, changes: dict, dtype: torch.dtype, block_size: int, checkpoint_dtype: str
) -> None:
    """Hidden states and convolutions lie where they would, and behind each unit's layers the scales; what a layer's
    snapshots are stored as is what all layers of a slot are stored as."""
    options = {"dtype": dtype, "block_size": block_size, "num_pages": 400, "checkpoint_dtype": checkpoint_dtype}
    driver = tiny(pattern, exact=False, **options, **changes)
    spec, layout = driver.model.spec, driver.layout
    recurrent, encoding = spec.recurrent, ENCODINGS[checkpoint_dtype]
    assert recurrent is not None and layout.checkpoint_dtype == checkpoint_dtype
    pool, again = (torch.zeros(400, layout.page_bytes, dtype=torch.uint8) for _ in range(2))
    live = LiveStates(spec, 4)
    files = CheckpointPages(pool, spec, layout, live, driver.model.kernels)
    order = np.random.default_rng(0).permutation(400)[: 2 * layout.pages_per_checkpoint]
    two = torch.from_numpy(order.reshape(2, -1).astype(np.int64))
    hidden = torch.randn(2, spec.hidden_size).to(dtype)
    conv = torch.randn(2, recurrent.num_layers, recurrent.columns, recurrent.channels).to(dtype)
    state = torch.randn(2, recurrent.num_layers, *recurrent.state)
    files.write_hidden(two, hidden, torch.arange(2))
    for layer in range(recurrent.num_layers):
        files.write_layer(two, layer, conv[:, layer].contiguous(), state[:, layer].contiguous())

    unit = recurrent.unit_bytes(dtype.itemsize, encoding)
    stored = pool[two[1].tolist()].flatten()
    assert layout.state_bytes == recurrent.units * unit.total and not stored[layout.checkpoint_bytes :].any()
    heads = recurrent.state[0] // recurrent.units
    for number in range(recurrent.units):
        own = stored[layout.header_bytes + number * unit.total :][: unit.total]
        for layer in range(recurrent.num_layers):
            values = own[layer * unit.layer + unit.conv :][: unit.values].clone()
            scales = own[unit.first_scales + layer * unit.scales :][: unit.scales].clone()
            for index in range(heads):
                head = state[1, layer, number * heads + index]
                wanted, wanted_scales = encode_head(head.flatten(0, -2), encoding)
                assert torch.equal(values.view(wanted.dtype).view(heads, *wanted.shape)[index], wanted)
                assert torch.equal(scales.view(torch.float32).view(heads, -1)[index], wanted_scales)

    files.restore(two, torch.tensor([2, 0]))
    assert torch.equal(live.hidden[[2, 0]], hidden)
    for layer, own in enumerate(live.recurrent):
        assert torch.equal(own.conv[[2, 0]], conv[:, layer])
        torch.testing.assert_close(own.state[[2, 0]], state[:, layer], rtol=0, atol=0.03)
    CheckpointPages(again, spec, layout, live, driver.model.kernels).save(two, torch.tensor([2, 0]))
    assert torch.equal(again, pool), "stored once more, what was restored is the same"


def test_no_file_at_all_is_no_work() -> None:
    driver = tiny("M*", exact=False)
    spec = driver.model.spec
    assert spec.recurrent is not None
    pool = torch.zeros(8, driver.layout.page_bytes, dtype=torch.uint8)
    live = LiveStates(spec, 2)
    files = CheckpointPages(pool, spec, driver.layout, live, driver.model.kernels)
    none, no_slots = torch.zeros(0, driver.layout.pages_per_checkpoint, dtype=torch.int64), torch.zeros(0).long()
    files.write_hidden(none, torch.zeros(3, spec.hidden_size), no_slots)
    conv = torch.zeros(0, spec.recurrent.columns, spec.recurrent.channels)
    files.write_layer(none, 0, conv, torch.zeros(0, *spec.recurrent.state))
    files.save(none, no_slots)
    files.restore(none, no_slots)
    assert not pool.any()


def test_copies_are_as_few_groups_as_their_order_allows() -> None:
    def groups(*pairs: tuple[int, int]) -> list[list[tuple[int, int]]]:
        found = independent_copies([PageCopy(*pair) for pair in pairs])
        return [list(zip(sources, targets, strict=True)) for targets, sources in found]

    assert groups() == []
    assert groups((1, 2), (1, 3), (4, 5)) == [[(1, 2), (1, 3), (4, 5)]]
    assert groups((1, 2), (2, 3), (4, 1)) == [[(1, 2)], [(2, 3), (4, 1)]], "what is copied on"
    assert groups((1, 2), (4, 1)) == [[(1, 2)], [(4, 1)]], "a source that is written"
    assert groups((1, 2), (3, 2)) == [[(1, 2)], [(3, 2)]], "a target twice"
