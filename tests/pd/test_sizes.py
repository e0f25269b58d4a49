"""P and D of different sizes, over real processes and NIXL: tensor-parallel ranks and block sizes, both at once."""

import numpy as np
import pytest
from real_servers import RealServer, finish, hand_over, settle

from cairn.engine.transfers.kv_transfer import nixl_link
from tiers import first

TEXT = np.random.default_rng(7).integers(20, 4000, 500).tolist()
PAIRS = (((1, 16), (2, 64)), ((2, 16), (2, 16)), ((2, 128), (1, 16)), ((2, 32), (4, 32)), ((4, 16), (2, 128)))


def close_enough(found, wanted) -> bool:
    return all(
        np.allclose(a, b, rtol=0, atol=1e-5 * max(1.0, np.abs(b).max())) for a, b in zip(found, wanted, strict=True)
    )


@pytest.mark.parametrize(("p_size", "d_size"), first(1, PAIRS), ids=str)
def test_any_sizes_hand_over(tiny_model, p_size, d_size):
    servers = [
        RealServer(
            tiny_model, nixl_link, name, tensor_parallel_size=tp, block_size=block, kv_cache_memory_bytes=16 << 20
        )
        for name, (tp, block) in (("p", p_size), ("d", d_size))
    ]
    p, d = servers
    try:
        for length in (17, 129, 400):
            tokens, last, _ = hand_over(p, d, TEXT[:length])
            assert last.cache.received_tokens == length - last.cache.cached_tokens
            remote = d.logits[d.count]
            again, _ = finish(d, d.submit(TEXT[:length], 4, cache_salt="another"))
            local = d.logits[d.count]
            if p_size[0] == d_size[0]:
                assert all(np.array_equal(a, b) for a, b in zip(remote, local, strict=True))
            else:
                assert close_enough(remote, local)
            assert tokens == again
        assert d.core.stats().transfers.num_failed == 0
        settle(p, d)
    finally:
        for server in servers:
            server.close()


@pytest.mark.more
@pytest.mark.parametrize(
    ("p_size", "d_size", "family"),
    [((1, 16), (2, 64), "gpt_oss"), ((2, 64), (1, 16), "gemma3"), ((2, 16), (2, 16), "gpt_oss")],
    ids=str,
)
def test_windows_go_to_any_sizes(made_model, family, p_size, d_size):
    p, d = (
        RealServer(
            made_model(family),
            nixl_link,
            name,
            tensor_parallel_size=tp,
            block_size=block,
            kv_cache_memory_bytes=16 << 20,
        )
        for name, (tp, block) in (("p", p_size), ("d", d_size))
    )
    try:
        for length in (17, 129, 400):
            tokens, last, _ = hand_over(p, d, TEXT[:length])
            assert last.cache.received_tokens == length - last.cache.cached_tokens
            remote = d.logits[d.count]
            again, _ = finish(d, d.submit(TEXT[:length], 4, cache_salt="another"))
            assert close_enough(remote, d.logits[d.count]) and tokens == again
        assert d.core.stats().transfers.num_failed == 0
        settle(p, d)
    finally:
        p.close()
        d.close()


SMALL = [("float16", 2e-3, (1, 16), (2, 64)), ("int8", 0.05, (2, 64), (1, 16)), ("int8", 0.05, (2, 16), (4, 32))]


@pytest.mark.more
@pytest.mark.parametrize(("dtype", "error", "p_size", "d_size"), SMALL, ids=str)
def test_states_in_small_forms_go_to_other_numbers_of_ranks(tiny_model, dtype, error, p_size, d_size):
    p, d = (
        RealServer(
            tiny_model,
            nixl_link,
            name,
            exact=False,
            checkpoint_dtype=dtype,
            tensor_parallel_size=tp,
            block_size=block,
            kv_cache_memory_bytes=16 << 20,
        )
        for name, (tp, block) in (("p", p_size), ("d", d_size))
    )
    try:
        for length in (129, 400):
            _, last, _ = hand_over(p, d, TEXT[:length])
            assert last.cache.received_tokens == length - last.cache.cached_tokens > 0
            remote = d.logits[d.count]
            finish(d, d.submit(TEXT[:length], 4, cache_salt="another"))
            local = d.logits[d.count]
            # each head's or row's scale has come along with its numbers: the forms' own errors are all there is
            assert all(np.abs(a - b).max() <= error * np.abs(b).max() for a, b in zip(remote, local, strict=True))
            assert not all(np.array_equal(a, b) for a, b in zip(remote, local, strict=True))
        assert d.core.stats().transfers.num_failed == 0
        settle(p, d)
    finally:
        p.close()
        d.close()
