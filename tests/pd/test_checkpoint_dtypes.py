"""Servers whose states run in smaller dtypes, or are in smaller forms in checkpoints: the same pairs, others say so and
go on without."""

import logging

import numpy as np
import pytest
from real_servers import RealServer, finish, hand_over, settle

from doubles.memory_link import MemoryFabric
from tiers import first

TEXT = np.random.default_rng(7).integers(20, 4000, 200).tolist()
LENGTH = 130
FORM, RUNNING = "checkpoint_dtype", "mamba_ssm_cache_dtype"
CASES = [("nemotron_h", RUNNING, "float16", "float16"), ("qwen3_5", FORM, "float16", "float32")]
CASES += [("qwen3_5", FORM, "float16", "float16"), ("qwen3_5", RUNNING, "float16", "float32")]
CASES += [("nemotron_h", RUNNING, "bfloat16", "float16"), ("lfm2", RUNNING, "float16", "float32")]
CASES += [("nemotron_h", FORM, "int8", "int8"), ("nemotron_h", FORM, "float32", "int8")]
CASES += [("lfm2", FORM, "float16", "int8")]


@pytest.mark.parametrize(("family", "flag", "prefill", "decode"), first(2, CASES))
def test_only_states_of_one_form_are_exchanged(made_model, caplog, family, flag, prefill, decode):
    folder, fabric, paired = made_model(family), MemoryFabric(), prefill == decode or family == "lfm2"
    # what is not fetched is held to the lease's end
    p = RealServer(folder, fabric, "p", {"lease_seconds": 3.0 if paired else 1.0}, exact=False, **{flag: prefill})
    d = RealServer(folder, fabric, "d", exact=False, **{flag: decode})
    with caplog.at_level(logging.WARNING):
        tokens, last, _ = hand_over(p, d, TEXT[:LENGTH])
    assert (last.cache.received_tokens, last.cache.computed_tokens) == ((LENGTH, 0) if paired else (0, LENGTH))
    told = "state_dtype" if flag == RUNNING else flag
    assert (f"{told}: {prefill} at the peer, {decode} here; start both with the same --" in caplog.text) != paired
    # What came from the other server is what is restored there.
    one = p if paired else RealServer(folder, None, "alone", exact=False, enable_prefix_caching=False, **{flag: decode})
    number = one.submit(TEXT[:LENGTH], 4)
    assert tokens == finish(one, number)[0]
    for found, wanted in zip(d.logits[d.count], one.logits[number], strict=True):
        assert np.array_equal(found, wanted)
    settle(p, d)
    for server in {p, d, one}:
        server.close()
