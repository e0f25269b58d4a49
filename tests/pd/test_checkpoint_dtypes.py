"""Servers whose checkpoints have states in smaller forms: the same form pairs, others say so and go on without."""

import logging

import numpy as np
import pytest
from real_servers import RealServer, finish, hand_over, settle

from doubles.memory_link import MemoryFabric
from tiers import first

TEXT = np.random.default_rng(7).integers(20, 4000, 200).tolist()
LENGTH = 130
PAIRS = [("qwen3_5", "float16", "float16"), ("qwen3_5", "float16", "float32"), ("nemotron_h", "int8", "int8")]
PAIRS += [("nemotron_h", "float32", "int8"), ("lfm2", "float16", "int8")]


@pytest.mark.parametrize(("family", "prefill", "decode"), first(2, PAIRS))
def test_only_checkpoints_of_one_form_are_exchanged(made_model, caplog, family, prefill, decode):
    folder, fabric = made_model(family), MemoryFabric()
    p = RealServer(folder, fabric, "p", {"lease_seconds": 3.0}, exact=False, checkpoint_dtype=prefill)
    d = RealServer(folder, fabric, "d", exact=False, checkpoint_dtype=decode)
    paired = prefill == decode or family == "lfm2"
    with caplog.at_level(logging.WARNING):
        tokens, last, _ = hand_over(p, d, TEXT[:LENGTH])
    assert (last.cache.received_tokens, last.cache.computed_tokens) == ((LENGTH, 0) if paired else (0, LENGTH))
    assert (f"checkpoint_dtype: {prefill} at the peer, {decode} here" in caplog.text) != paired
    # What came from the other server is what is restored there.
    one = p if paired else RealServer(folder, None, "alone", exact=False, enable_prefix_caching=False)
    number = one.submit(TEXT[:LENGTH], 4)
    assert tokens == finish(one, number)[0]
    for found, wanted in zip(d.logits[d.count], one.logits[number], strict=True):
        assert np.array_equal(found, wanted)
    settle(p, d)
    for server in {p, d, one}:
        server.close()
