"""Prefill and decode in two processes on one GPU, over NIXL: the tokens of one server, at equal and unequal blocks; and
where there are two GPUs, with two ranks on either side."""

import os

import numpy as np
import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("there is no NVIDIA GPU", allow_module_level=True)
pytest.importorskip("nixl", reason="`make gpu-wheels` has it in nixl-cu13")
pytest.importorskip("zmq", reason="`make gpu-wheels` has it in serve")
pytest.importorskip("tokenizers", reason="`make gpu-wheels` has it in serve")

from nixl_process import REMOTE_DECODE, CoreProcess, Nursery

from cairn.engine.contract import EngineConfig, KvTransferConfig
from cairn.models.random_weights.make_model import make_model

DEVICE = "cuda"
TEXT = np.random.default_rng(7).integers(20, 4000, 3000).tolist()
BUILD_SECONDS, ANSWER_SECONDS = 240.0, 120.0


@pytest.fixture(scope="module")
def nursery():
    made = Nursery()
    yield made
    made.close()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("models") / "qwen3_5"
    make_model("qwen3_5", made)
    return made


TWO_GPUS = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="each rank has a GPU of its own")
SIZES = [
    ((1, 16), (1, 16)),
    ((1, 64), (1, 16)),
    ((1, 16), (1, 64)),
    pytest.param(((2, 16), (2, 16)), marks=TWO_GPUS),
    pytest.param(((1, 64), (2, 16)), marks=TWO_GPUS),
]
"""Ranks and blocks of either."""


@pytest.fixture(params=SIZES, ids=str)
def servers(request, nursery, folder):
    environ = {name: os.environ[name] for name in ("TRITON_CACHE_DIR",) if name in os.environ}
    made = [
        CoreProcess(
            nursery,
            name,
            EngineConfig(
                model=str(folder),
                device=DEVICE,
                dtype="float32",
                block_size=block,
                tensor_parallel_size=ranks,
                kv_cache_memory_bytes=64 << 20,
                max_num_seqs=4,
                kv_transfer=KvTransferConfig(host="127.0.0.1", port=0),
            ),
            environ,
        )
        for name, (ranks, block) in zip("pd", request.param, strict=True)
    ]
    try:
        for server in made:
            server.wait(lambda server=server: server.info is not None, "core", BUILD_SECONDS)
        yield made
    finally:
        for server in made:
            server.kill()


def answer(server: CoreProcess, prompt, max_tokens, params=None, **fields):
    """What was asked, when it has ended, and the other server has looked after its link."""
    asked = server.submit(prompt, max_tokens, params, **fields)
    server.wait(lambda: asked.is_over, "answer", ANSWER_SECONDS)
    assert asked.refusal is None and asked.end.finish_reason == "length", f"{asked.refusal} {asked.end}"
    return asked


def test_cuda_hands_over_between_processes(servers):
    p, d = servers
    num_fetched_back = 0
    for length in (17, 129, 3000):
        prompt = TEXT[:length]
        alone = answer(p, prompt, 8, cache_salt="alone").tokens
        reference = answer(p, prompt, 1, REMOTE_DECODE).params
        decoded = answer(d, prompt, 8, reference)
        assert decoded.tokens == alone
        cache = decoded.end.cache
        assert cache.computed_tokens == 0 and cache.received_tokens + cache.cached_tokens == length
        # With two steps in flight the state at an answer's end is there some steps later.
        answer(d, TEXT[-5:], 4, cache_salt="some steps")
        turn = prompt + decoded.tokens + TEXT[:5]
        back = answer(p, turn, 8, REMOTE_DECODE | decoded.params)
        assert back.tokens == answer(p, turn, 8, cache_salt="alone").tokens
        num_fetched_back += back.end.cache.received_tokens
    assert num_fetched_back > 0
    for server in servers:
        assert server.stats().transfers.num_failed == 0, server.tail()
        if DEVICE == "cuda":
            ranks = server.info.tensor_parallel_size
            assert all(f"pages lie in the memory of GPU {rank}," in server.log.read_text() for rank in range(ranks))
