"""Remote == local for every family: each logit of P -> D is that of one server, bit for bit, under `--exact`."""

import numpy as np
import pytest
from real_servers import RealServer, finish, hand_over, settle

from cairn.transfer.links.memory import MemoryFabric

FAMILIES = ("qwen3_5", "qwen3_5_moe", "granitemoehybrid", "falcon_h1", "lfm2", "qwen3")
TEXT = np.random.default_rng(7).integers(20, 4000, 500).tolist()


@pytest.fixture(scope="module", params=FAMILIES)
def servers(request, made_model):
    folder, fabric = made_model(request.param), MemoryFabric()
    made = [RealServer(folder, fabric, name) for name in ("p", "d")]
    made.append(RealServer(folder, None, "alone", enable_prefix_caching=False))
    yield made
    for server in made:
        server.close()


@pytest.mark.parametrize("warm", [0, 100])
@pytest.mark.parametrize("length", [1, 65, 128, 333])
def test_every_logit_is_that_of_one_server(servers, length, warm):
    p, d, one = servers
    prompt = [length, warm, *TEXT][:length]
    if warm:
        finish(d, d.submit(prompt[:warm], 1))
    before = d.core.stats()
    tokens, last, params = hand_over(p, d, prompt)
    number = one.submit(prompt, 4)
    expected, _ = finish(one, number)
    assert tokens == expected
    assert len(d.logits[d.count]) == len(one.logits[number])
    for found, wanted in zip(d.logits[d.count], one.logits[number], strict=True):
        assert np.array_equal(found, wanted)
    assert d.core.stats().computed_prompt_tokens == before.computed_prompt_tokens
    assert last.cache.cached_tokens + last.cache.received_tokens == length
    assert params["remote_num_tokens"] == length
    settle(p, d)
