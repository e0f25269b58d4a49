"""Drafts on a decode server: what was computed elsewhere is drafted from at once, and what is handed on is folded.

Others' failures: the first step after a hand-over, which has no step before it (dynamo#12198); connectors that copy
states which drafts have been in (vllm#53505).
"""

import numpy as np
import pytest
from real_servers import RealServer, finish, hand_over, settle

from doubles.drafters import KnowingDrafter
from doubles.memory_link import MemoryFabric

TEXT = np.random.default_rng(11).integers(20, 4000, 600).tolist()
VOCAB = 4000


@pytest.fixture(scope="module")
def servers(tiny_model):
    fabric = MemoryFabric()
    made = [RealServer(tiny_model, fabric, name) for name in ("p", "d")]
    made.append(RealServer(tiny_model, None, "alone", enable_prefix_caching=False))
    yield made
    for server in made:
        server.close()


def draft(server, answers, num_right=lambda proposal: 99):
    drafter = KnowingDrafter(answers, 5, num_right, VOCAB)
    server.core._scheduler.state.drafting.drafter = drafter
    return drafter


def without_drafts(server, prompt, max_tokens):
    server.core._scheduler.state.drafting.drafter = None
    number = server.submit(prompt, max_tokens)
    tokens, _ = finish(server, number)
    return tokens, server.logits[number]


@pytest.mark.parametrize("length", [1, 64, 130])
def test_the_first_step_after_a_hand_over_drafts(servers, length):
    p, d, one = servers
    prompt = [length, *TEXT][:length]
    expected, logits = without_drafts(one, prompt, 16)
    drafter = draft(d, {f"r{d.count + 1}": expected})
    before = d.core.stats()
    tokens, last, _ = hand_over(p, d, prompt, max_tokens=16)
    assert tokens == expected
    for found, wanted in zip(d.logits[d.count], logits, strict=True):
        assert np.array_equal(found, wanted)
    after = d.core.stats()
    # the first token from what came, then three rows of six tokens
    assert after.steps.forward_passes - before.steps.forward_passes == 3
    assert [number for _, _, number in drafter.records] == [5, 5, 2]
    assert after.tokens.computed_prompt == before.tokens.computed_prompt
    assert last.cache.received_tokens == length
    settle(p, d)


def test_the_next_turn_goes_on_from_what_drafts_have_left_on_both(servers):
    """The answer's end on D is that of its last fold; P computes what it has not, and hands over the rest."""
    p, d, one = servers
    prompt = TEXT[200:330]
    for turn in range(3):
        expected, logits = without_drafts(one, prompt, 12)
        draft(d, {f"r{d.count + 1}": expected}, lambda proposal: [99, 2, 0][proposal % 3])
        draft(p, {f"r{p.count + 1}": expected})
        tokens, _, _ = hand_over(p, d, prompt, max_tokens=12)
        assert tokens == expected
        for found, wanted in zip(d.logits[d.count], logits, strict=True):
            assert np.array_equal(found, wanted)
        prompt = [*prompt, *tokens, *TEXT[40 * turn :][:20]]
    settle(p, d)
    assert d.core.stats().transfers.num_failed == 0
