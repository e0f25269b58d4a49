"""Engine cores with a real model, joined by real sockets and the memory link, in one process."""

import json
import time
from functools import cached_property

import numpy as np

from cairn.engine.build import build_core
from cairn.engine.contract import EngineConfig, GenerateOutput, KvTransferConfig
from cairn.engine.text.tokenizer import ModelTokenizer
from cairn.engine.transfers.kv_transfer import MakeLink
from doubles.engine_requests import generate_request
from doubles.memory_link import MemoryFabric

REMOTE_DECODE = {"do_remote_decode": True, "do_remote_prefill": False}
DEADLINE = 60.0


class RealServer:
    """One core. `fabric`: what joins it to others, a memory fabric or a maker of links. `logits` collects those of
    every sampled row, by the seed that names the request."""

    def __init__(self, folder, fabric: MemoryFabric | MakeLink | None, name: str, transfer=None, **config) -> None:
        config.setdefault("kv_cache_memory_bytes", 64 << 20)
        config.setdefault("exact", True)
        if fabric is not None:
            config["kv_transfer"] = KvTransferConfig(port=0, **(transfer or {}))
        self.folder = folder
        self.logits: dict[int, list[np.ndarray]] = {}
        self.links = []

        def make_link(host):
            self.links.append(fabric.link(name) if isinstance(fabric, MemoryFabric) else fabric(host))
            return self.links[-1]

        self.core = build_core(EngineConfig(model=str(folder), **config), observe=self._observe, make_link=make_link)
        self.core.start(lambda: None)
        self.count = 0

    @cached_property
    def tokenizer(self) -> ModelTokenizer:
        """A client's own: the model's, as the core has one."""
        return ModelTokenizer(self.folder)

    def _observe(self, sample, logits) -> None:
        self.logits.setdefault(sample.params.seed, []).append(logits.clone().numpy())

    def submit(self, prompt, max_tokens=4, params=None, **fields) -> int:
        self.count += 1
        request = generate_request(
            request_id=f"r{self.count}",
            prompt=np.array(prompt, "<i8").tobytes(),
            max_tokens=max_tokens,
            temperature=0.0,
            seed=self.count,
            ignore_eos=True,
            kv_transfer_params=None if params is None else json.dumps(params).encode(),
            **fields,
        )
        self.core.submit(request)
        return self.count

    def turn(self) -> list[GenerateOutput]:
        assert not self.core.poll_ready(), "a request was refused for its form"
        outputs = self.core.poll()
        if self.core.has_work:
            outputs += self.core.step()
        return outputs

    def close(self) -> None:
        self.core.close()


def finish(server: RealServer, number: int, *others: RealServer) -> tuple[list[int], GenerateOutput]:
    """Turn the servers until a request has ended: its tokens, and its last output."""
    tokens: list[int] = []
    until = time.monotonic() + DEADLINE
    while time.monotonic() < until:
        for other in others:
            other.turn()
        outputs = server.turn()
        for output in outputs:
            if output.request_id == f"r{number}":
                tokens += output.token_ids
                if output.finish_reason is not None:
                    return tokens, output
        if not outputs:
            time.sleep(0.0005)
    raise AssertionError(f"request {number} has not ended within {DEADLINE} s")


def settle(*servers: RealServer) -> None:
    """Turn until nothing is open between the servers, then have their books recounted."""
    until = time.monotonic() + DEADLINE
    while any(
        server.core.stats().transfers.leased_pages or server.core.stats().transfers.quarantined_pages
        for server in servers
    ):
        assert time.monotonic() < until, "something is held for ever"
        for server in servers:
            server.turn()
        time.sleep(0.0005)
    for server in servers:
        server.core.idle()


def hand_over(p: RealServer, d: RealServer, prompt, max_tokens=4, **fields):
    """Prefill on `p`, decode on `d`: D's tokens, D's last output, P's reference."""
    _, prefilled = finish(p, p.submit(prompt, 1, REMOTE_DECODE, **fields))
    params = json.loads(prefilled.kv_transfer_params)
    tokens, last = finish(d, d.submit(prompt, max_tokens, params, **fields))
    return tokens, last, params
