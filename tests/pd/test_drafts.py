"""Drafts on a decode server: what was computed elsewhere is drafted from at once, and what is handed on is folded.

Others' failures: the first step after a hand-over, which has no step before it (dynamo#12198); connectors that copy
states which drafts have been in (vllm#53505).
"""

import logging

import numpy as np
import pytest
from real_servers import RealServer, finish, hand_over, settle

from cairn.engine.transfers.kv_transfer import nixl_link
from cairn.scheduler.speculation import SpeculativeConfig
from doubles.drafters import KnowingDrafter, KnowingHead, LeftToTheHead
from doubles.memory_link import MemoryFabric
from tiers import first

TEXT = np.random.default_rng(11).integers(20, 4000, 600).tolist()
VOCAB = 4000
MTP = SpeculativeConfig(method="mtp")


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


@pytest.mark.parametrize("length", first(1, [130, 64]))
def test_a_head_drafts_at_once_from_what_was_handed_over(made_model, length):
    """From the hidden state that came with the state, over the head's keys and values that came with all others."""
    folder, fabric, prompt = made_model("qwen3_5+mtp"), MemoryFabric(), TEXT[:length]
    p, d = (RealServer(folder, fabric, name, speculative=MTP) for name in ("p", "d"))
    one = RealServer(folder, None, "alone", enable_prefix_caching=False, speculative=MTP)
    expected, logits = without_drafts(one, prompt, 16)
    runner = d.core._runner
    runner = getattr(runner, "_runner", runner)
    head = KnowingHead({f"r{d.count + 1}": expected}, 5, lambda proposal: 99, VOCAB, runner)
    d.core._scheduler.state.drafting.drafter = head
    before = d.core.stats()
    tokens, last, _ = hand_over(p, d, prompt, max_tokens=16)
    assert tokens == expected
    for found, wanted in zip(d.logits[d.count], logits, strict=True):
        assert np.array_equal(found, wanted)
    after = d.core.stats()
    assert after.steps.forward_passes - before.steps.forward_passes == 3
    assert after.tokens.computed_prompt == before.tokens.computed_prompt and last.cache.received_tokens == length
    assert [number for _, _, number in head.records] == [5, 5, 2] and head.num_made == 12
    # the drafts that the head itself would have made are those that it makes on one server
    assert heads_own_drafts(d, prompt) == heads_own_drafts(one, prompt)
    settle(p, d)
    for server in (p, d, one):
        server.close()


@pytest.mark.more
@pytest.mark.parametrize(("p_size", "d_size"), [(2, 2), (1, 2), (4, 2)])
def test_ranks_hand_over_to_ranks_that_draft_with_their_head(made_model, p_size, d_size):
    """At once, and of equal numbers of ranks what a head drafts that has computed the prompt here, bit for bit."""
    folder, prompt = made_model("qwen3_5+mtp"), TEXT[:130]
    p, d = (
        RealServer(folder, nixl_link, name, speculative=MTP, tensor_parallel_size=size, kv_cache_memory_bytes=16 << 20)
        for name, size in (("p", p_size), ("d", d_size))
    )
    try:
        d.core._scheduler.state.drafting.drafter = LeftToTheHead(4, only_first=True)
        seen, runner = [], d.core._runner
        drafts = runner.drafts

        def see(step):
            made = drafts(step)
            seen.append([tokens.tolist() for tokens in made.values()])
            return made

        runner.drafts = see
        before = d.core.stats().tokens.computed_prompt
        tokens, last, _ = hand_over(p, d, prompt, max_tokens=6)
        assert last.cache.received_tokens == len(prompt) and d.core.stats().tokens.computed_prompt == before
        remote = d.logits[d.count]
        again, _ = finish(d, d.submit(prompt, 6, cache_salt="another"))
        local = d.logits[d.count]
        assert tokens == again and len(seen) == 2 and len(seen[0][0]) == 4
        if p_size == d_size:
            assert seen[0] == seen[1]
            assert all(np.array_equal(one, other) for one, other in zip(remote, local, strict=True))
        assert d.core.stats().transfers.num_failed == 0
        settle(p, d)
    finally:
        p.close()
        d.close()


def heads_own_drafts(server, prompt):
    """What the head drafts after the first token of an answer, on a hit or not."""
    seen, runner = [], server.core._runner
    head, advance = runner._head, type(runner._head).advance

    def see(rows, depth):
        advance(head, rows, depth)
        seen.append(int(head.tokens[0]))

    head.advance = see
    server.core._scheduler.state.drafting.drafter = LeftToTheHead(4, only_first=True)
    finish(server, server.submit(prompt, 6))
    return seen


def test_a_server_that_drafts_with_a_head_and_one_that_does_not_do_not_pair(made_model, caplog):
    folder, fabric, prompt = made_model("qwen3_5+mtp"), MemoryFabric(), TEXT[:70]
    p = RealServer(folder, fabric, "p", {"lease_seconds": 1.0}, speculative=MTP)
    d = RealServer(folder, fabric, "d", speculative=SpeculativeConfig(method="suffix"))
    assert p.core.info.cache.bytes_per_token > d.core.info.cache.bytes_per_token
    with caplog.at_level(logging.WARNING):
        tokens, last, _ = hand_over(p, d, prompt)
    assert last.cache.received_tokens == 0 and len(tokens) == 4
    # one layer's keys and values of 64 numbers, and the head's, in float32
    said = "a kv head has 1024 bytes a token at the peer, 512 here: both sides must serve the same model, and both or "
    assert said in caplog.text
    settle(p, d)
    for server in (p, d):
        server.close()
