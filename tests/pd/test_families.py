"""Remote == local for every family: each logit of P -> D is that of one server, bit for bit, under `--exact`."""

import json

import numpy as np
import pytest
from real_servers import REMOTE_DECODE, RealServer, finish, hand_over, settle

from cairn.models.registry import open_model
from doubles.memory_link import MemoryFabric
from models.covered import HAND_OVERS
from tiers import first, more

TEXT = np.random.default_rng(7).integers(20, 4000, 500).tolist()


@pytest.fixture(scope="module", params=first(1, HAND_OVERS.families))
def servers(request, made_model):
    folder, fabric = made_model(request.param), MemoryFabric()
    made = [RealServer(folder, fabric, name) for name in ("p", "d")]
    made.append(RealServer(folder, None, "alone", enable_prefix_caching=False))
    yield made
    for server in made:
        server.close()


@pytest.mark.parametrize("warm", [0, 100])
@pytest.mark.parametrize("length", [1, 65, 128, more(333)])
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
    assert d.core.stats().tokens.computed_prompt == before.tokens.computed_prompt
    assert last.cache.cached_tokens + last.cache.received_tokens == length
    assert params["remote_num_tokens"] == length
    settle(p, d)


@pytest.mark.more
@pytest.mark.parametrize("family", ["qwen3", more("lfm2")])
def test_the_second_turn_comes_back_for_the_answer(made_model, family):
    """Also that of a model without states, of which keys and values are all there is: it computes the last token."""
    fabric, folder = MemoryFabric(), made_model(family)
    # what is not fetched here is held for no longer
    p, d = (RealServer(folder, fabric, name, {"lease_seconds": 3.0}, exact=False) for name in ("p", "d"))
    one = RealServer(folder, None, "alone", exact=False, enable_prefix_caching=False)
    tokens, last, _ = hand_over(p, d, TEXT[:100], 150)
    hint = json.loads(last.kv_transfer_params)
    turn = [*TEXT[:100], *tokens, *TEXT[300:350]]
    for length, cached, received in ((300, 100, 149), (250, 0, 249), (249, 0, 249 - (family == "qwen3"))):
        settle(p, d)
        assert cached or p.core.reset_cache() == 0
        asked, number = p.submit(turn[:length], 1, REMOTE_DECODE | hint), one.submit(turn[:length], 1)
        found, last = finish(p, asked, d)
        assert found == finish(one, number)[0]
        assert np.allclose(p.logits[asked][0], one.logits[number][0], atol=1e-4)
        assert (last.cache.cached_tokens, last.cache.received_tokens) == (cached, received)
        assert last.cache.computed_tokens == length - cached - received
    finish(d, d.submit(turn[:249], 1, json.loads(last.kv_transfer_params)), p)
    settle(p, d)
    for server in (p, d, one):
        server.close()


def window_of(server) -> int:
    """The smallest reach of the model's layers."""
    groups = open_model(server.folder).layout(16).groups
    return min(group.reach for group in groups if group.reach is not None)


@pytest.mark.parametrize("longest", [400, more(2001)])
@pytest.mark.parametrize(("p_block", "d_block"), first(1, [(16, 64), (16, 16), (64, 16)]))
@pytest.mark.parametrize("family", first(1, ["gpt_oss", "gemma3", "lfm3", "llama4"]))
def test_a_prompt_of_any_length_goes_with_its_window_alone(made_model, family, p_block, d_block, longest):
    fabric, folder = MemoryFabric(), made_model(family)
    p, d = (RealServer(folder, fabric, name, block_size=size) for name, size in (("p", p_block), ("d", d_block)))
    one, w = RealServer(folder, None, "alone", enable_prefix_caching=False), window_of(p)
    for length in (1, w - 1, w, w + 1, longest):
        prompt = [length, *TEXT, *TEXT[::-1], *TEXT[::2], *TEXT[::3], *TEXT, *TEXT[::-1]][:length]
        before = d.core.stats().tokens.computed_prompt
        tokens, last, _ = hand_over(p, d, prompt)
        number = one.submit(prompt, 4)
        assert tokens == finish(one, number)[0]
        for found, wanted in zip(d.logits[d.count], one.logits[number], strict=True):
            assert np.array_equal(found, wanted)
        assert last.cache.cached_tokens + last.cache.received_tokens == length
        # what came is in D's tree: the same again hits whole, bit for bit
        number = d.submit(prompt, 4)
        again, last = finish(d, number)
        assert again == tokens and last.cache.cached_tokens == length
        for found, wanted in zip(d.logits[number], one.logits[one.count], strict=True):
            assert np.array_equal(found, wanted)
        assert d.core.stats().tokens.computed_prompt == before
        settle(p, d)
    for server in (p, d, one):
        server.close()
