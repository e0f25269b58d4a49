"""Servers with and without `--quantization int8`: keys, values and states of one are not those of the other."""

import logging
import math

import numpy as np
import pytest
from real_servers import RealServer, finish, hand_over, settle

from doubles.memory_link import MemoryFabric
from kernels.int8_products import NEEDS_INT8
from tiers import first

TEXT = np.random.default_rng(7).integers(20, 4000, 200).tolist()
PREFILL = {"exact": False, "dtype": "bfloat16", "quantization": "int8", "checkpoint_dtype": "float32"}
OTHERS = [
    ({"quantization": "int8"}, True),
    ({"quantization": None}, False),
    ({"quantization": "int8", "dtype": "float32"}, False),
]


@NEEDS_INT8
@pytest.mark.parametrize(("other", "paired"), first(2, OTHERS))
def test_only_servers_with_the_same_quantization_exchange_pages(made_model, caplog, other, paired):
    folder, fabric, length = made_model("qwen3_5"), MemoryFabric(), 128
    # what is not fetched is held to the lease's end
    p = RealServer(folder, fabric, "p", {"lease_seconds": 3.0 if paired else 1.0}, **PREFILL)
    d = RealServer(folder, fabric, "d", **PREFILL | other)
    one = RealServer(folder, None, "alone", enable_prefix_caching=False, **PREFILL | other)
    with caplog.at_level(logging.WARNING):
        tokens, last, _ = hand_over(p, d, TEXT[:length])
    assert (last.cache.received_tokens, last.cache.computed_tokens) == ((length, 0) if paired else (0, length))
    assert ("the layouts differ" in caplog.text) != paired
    # without the other's pages D computes what it would have computed alone
    assert tokens == finish(one, one.submit(TEXT[:length], 4))[0]
    settle(p, d)
    for server in (p, d, one):
        server.close()


@NEEDS_INT8
@pytest.mark.more
def test_a_server_says_what_its_weights_are_in(made_model):
    server = RealServer(made_model("lfm2"), None, "alone", **PREFILL)
    info = server.core.info
    assert (info.dtype, info.quantization) == ("bfloat16", "int8") and math.isfinite(info.cache.bytes_per_token)
    server.close()
