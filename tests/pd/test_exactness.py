"""Remote == local, with a real model: every logit of P -> D is that of one server, bit for bit, under `--exact`."""

import json

import numpy as np
import pytest
from real_servers import REMOTE_DECODE, RealServer, finish, hand_over, settle

from doubles.memory_link import MemoryFabric
from tiers import more

TEXT = np.random.default_rng(7).integers(20, 4000, 2100).tolist()
LENGTHS = (1, 15, 16, 17, 127, 128, 129, 400, 2000)


@pytest.fixture(scope="module")
def servers(tiny_model):
    fabric = MemoryFabric()
    made = [RealServer(tiny_model, fabric, name) for name in ("p", "d")]
    made.append(RealServer(tiny_model, None, "alone", enable_prefix_caching=False))
    yield made
    for server in made:
        server.close()


def alone(server, prompt, max_tokens=4):
    number = server.submit(prompt, max_tokens)
    tokens, _ = finish(server, number)
    return tokens, server.logits[number]


@pytest.mark.parametrize("warm", ["cold", "partly", "full"])
@pytest.mark.parametrize("length", [1, 16, 129, 400, *map(more, (15, 17, 127, 128, 2000))])
def test_every_logit_is_that_of_one_server(servers, length, warm):
    p, d, one = servers
    prompt = [length, ["cold", "partly", "full"].index(warm), *TEXT][:length]
    if warm == "partly":
        finish(d, d.submit(prompt[: max(1, length * 2 // 3)], 1))
    elif warm == "full":
        finish(d, d.submit(prompt, 1))
    before = d.core.stats()
    tokens, last, params = hand_over(p, d, prompt)
    expected, logits = alone(one, prompt)
    assert tokens == expected
    assert len(d.logits[d.count]) == len(logits)
    for found, wanted in zip(d.logits[d.count], logits, strict=True):
        assert np.array_equal(found, wanted)
    after = d.core.stats()
    assert after.tokens.computed_prompt == before.tokens.computed_prompt
    assert last.cache.cached_tokens + last.cache.received_tokens == length
    assert params["remote_num_tokens"] == length
    settle(p, d)


@pytest.mark.parametrize("longer", [0, 50])
@pytest.mark.parametrize("length", [67, 128, *map(more, (100, 130))])
def test_a_second_turn_begins_where_an_exact_one_may(servers, length, longer):
    """D has a state at the end of its prompt alone, and P has none any more: off the grid it serves that prompt."""
    p, d, one = servers
    prompt = [length, longer, 3, *TEXT][:length]
    tokens, last, _ = hand_over(p, d, prompt, 1)
    hint = json.loads(last.kv_transfer_params)
    settle(p, d)
    assert hint["cairn_decode_hint"]["num_tokens"] == length and p.core.reset_cache() == 0
    turn = [*prompt, *tokens, *TEXT[1000:]][: length + longer]
    number = p.submit(turn, 2, REMOTE_DECODE | hint)
    found, last = finish(p, number, d)
    expected, logits = alone(one, turn, 2)
    assert found == expected
    for own, wanted in zip(p.logits[number], logits, strict=True):
        assert np.array_equal(own, wanted)
    assert last.cache.received_tokens == (0 if longer and length % 64 else length)
    assert last.cache.received_tokens + last.cache.computed_tokens == len(turn)
    finish(d, d.submit(turn, 1, json.loads(last.kv_transfer_params)), p)
    settle(p, d)


@pytest.mark.parametrize(("told", "believed"), [(0, 0), (100, 100), (101, None), (1 << 26, None), (None, None)])
def test_no_more_was_cached_there_than_the_prompt_has(servers, told, believed):
    p, d, _ = servers
    prompt = [9, *TEXT][:100]
    _, prefilled = finish(p, p.submit(prompt, 1, REMOTE_DECODE))
    params = json.loads(prefilled.kv_transfer_params) | {"remote_prefill_cached_tokens": told}
    _, last = finish(d, d.submit(prompt, 1, params), p)
    assert last.cache.prefill_cached_tokens == believed and last.cache.computed_tokens == 0
    settle(p, d)
