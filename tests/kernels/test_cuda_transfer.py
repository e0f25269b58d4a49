"""The engine on the CUDA backend as P and as D: the tokens of one server, from pages of equal and unequal sizes."""

import json
import os
import sys
import time
from types import ModuleType

import numpy as np
import pytest

from kernels.backends import BACKENDS, INTERPRETED

CUDA = next((backend for backend in BACKENDS if backend.__name__ == "cairn.kernels.cuda"), ModuleType("none"))

pytestmark = [
    pytest.mark.skipif(CUDA not in BACKENDS or not INTERPRETED, reason="there is no interpreter that stands in for it"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # numpy computes for Triton's interpreter
]

TEXT = np.random.default_rng(7).integers(20, 4000, 500).tolist()
ANSWER = 3


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    from cairn.models.random_weights.make_model import make_model

    made = tmp_path_factory.mktemp("models") / "qwen3_5"
    make_model("qwen3_5", made)
    return made


class Servers:
    """P and D, and what one server on the CPU answers."""

    def __init__(self, folder, p, d) -> None:
        from doubles.memory_link import MemoryFabric
        from pd.real_servers import RealServer

        self.fabric = MemoryFabric(descriptors_per_poll=3)
        self.p, self.d = (
            RealServer(
                folder, self.fabric, name, device=device, block_size=block, exact=False, dtype="float32",
                kv_cache_memory_bytes=16 << 20, max_num_seqs=3, transfer={"lease_seconds": 20.0},
            )
            for name, (device, block) in (("p", p), ("d", d))
        )  # fmt: skip

    def close(self) -> None:
        self.p.close()
        self.d.close()


@pytest.fixture(scope="module")
def alone(folder):
    from pd.real_servers import RealServer, finish

    server = RealServer(folder, None, "alone", exact=False, dtype="float32", kv_cache_memory_bytes=16 << 20)
    yield lambda prompt: finish(server, server.submit(prompt, ANSWER))[0]
    server.close()


# The next turn goes the other way, so with the second pair a CPU reads a GPU's pages, too.
@pytest.fixture(params=[(("cuda", 16), ("cuda", 16)), (("cpu", 64), ("cuda", 16))], ids=str)
def servers(request, folder):
    made = Servers(folder, *request.param)
    yield made
    made.close()


def test_cuda_hands_over_and_fetches_the_next_turn_back(servers, alone):
    from pd.real_servers import finish, hand_over, settle

    p, d, prompt = servers.p, servers.d, TEXT[:70]
    tokens, last, _ = hand_over(p, d, prompt, ANSWER)
    assert tokens == alone(prompt) and last.cache.received_tokens == len(prompt)
    settle(p, d)  # a step is slow here, and D has to answer P within two seconds
    # P is told where the answer is, and fetches what it lacks of it
    hint = json.loads(last.kv_transfer_params)
    turn = prompt + tokens + TEXT[200:210]
    again, ended = finish(p, p.submit(turn, ANSWER, {"do_remote_decode": True} | hint), d)
    assert again == alone(turn) and ended.cache.received_tokens == len(tokens) - 1
    assert p.core.stats().transfers.num_failed == d.core.stats().transfers.num_failed == 0


def test_ranks_read_and_offer_their_shares(folder, alone, monkeypatch):
    """D is two processes, each with pages and a link of its own, and reads what P has in blocks of another size;
    then P reads the next turn from both."""
    pytest.importorskip("nixl", reason="the ranks' processes have no other link")
    from cairn.engine.transfers.kv_transfer import nixl_link
    from pd.real_servers import RealServer, finish, hand_over, settle

    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    settings = {"exact": False, "dtype": "float32", "kv_cache_memory_bytes": 16 << 20, "max_num_seqs": 3}
    settings["transfer"] = {"lease_seconds": 60.0}
    p = RealServer(folder, nixl_link, "p", device="cpu", block_size=64, **settings)
    d = RealServer(folder, nixl_link, "d", device="cuda", block_size=16, tensor_parallel_size=2, **settings)
    try:
        prompt = TEXT[:70]
        tokens, last, _ = hand_over(p, d, prompt, ANSWER)
        assert tokens == alone(prompt) and last.cache.received_tokens == len(prompt)
        assert last.cache.computed_tokens == 0
        settle(p, d)
        turn = prompt + tokens + TEXT[200:210]
        hint = {"do_remote_decode": True} | json.loads(last.kv_transfer_params)
        again, ended = finish(p, p.submit(turn, ANSWER, hint), d)
        assert again == alone(turn) and ended.cache.received_tokens == len(tokens) - 1
        assert p.core.stats().transfers.num_failed == d.core.stats().transfers.num_failed == 0
    finally:
        p.close()
        d.close()


@pytest.mark.parametrize("servers", [(("cuda", 32), ("cuda", 16))], indirect=True, ids=str)
def test_cuda_gives_pages_back_when_a_client_goes_and_computes_what_has_lapsed(servers, alone):
    from doubles.memory_link import Fault
    from pd.real_servers import DEADLINE, REMOTE_DECODE, finish, settle

    p, d, prompt = servers.p, servers.d, TEXT[100:120]
    _, prefilled = finish(p, p.submit(prompt, 1, REMOTE_DECODE))
    params = json.loads(prefilled.kv_transfer_params)
    servers.fabric.inject("p", Fault.FROZEN)
    number, until = d.submit(prompt, ANSWER, params), time.monotonic() + DEADLINE
    while not d.links[0].num_open:
        assert time.monotonic() < until
        d.turn()
    d.core.abort(f"r{number}")
    servers.fabric.inject("p", Fault.NONE)
    settle(p, d)
    assert finish(d, d.submit(prompt, ANSWER, params))[0] == alone(prompt), "the lease is used up"
    assert d.core.stats().transfers.num_failed >= 1
