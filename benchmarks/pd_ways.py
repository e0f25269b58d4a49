"""Five ways to get the same pages from another process, for `pd_bandwidth`. Each moves all of them in one call."""

import ctypes
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import msgspec
import numpy as np
from benchmarks.pd_pools import Model, Placement, Share
from numpy.typing import NDArray

from cairn.engine.contract import KvTransferConfig
from cairn.engine.transfers.kv_transfer import KvTransfer, RankMemory, build_transfer, parse_role, rank_worker
from cairn.transfer.contract import Peer, PullEnded, PullId, PullSpec, ReadOrder
from cairn.transfer.links.contract import ReadState
from cairn.transfer.links.nixl import NixlLink
from cairn.transfer.memory import PoolMemory
from cairn.transfer.worker import CHUNK_BYTES
from cairn.types import SystemClock

__all__ = ["Source", "chunk_bounds", "pull", "raw_nixl", "shared_memory", "vm_readv", "worker"]

Move = Callable[[], None]
SECONDS = 60.0
MOST_IOVECS = 1024


class Source:
    """The other process: where its memory is, and one more reference whenever it is asked for one."""

    def __init__(self, layout: str, placement: Placement, seed: int) -> None:
        command = [sys.executable, "-m", "benchmarks.pd_source"]
        command += ["--layout", layout, "--placement", placement, "--seed", str(seed)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.place: dict[str, Any] = json.loads(self._line())

    def reference(self) -> str:
        assert self._process.stdin is not None
        self._process.stdin.write("offer\n")
        self._process.stdin.flush()
        return self._line().strip()

    def close(self) -> None:
        self._process.communicate(timeout=SECONDS)

    def _line(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the source ended with exit code {self._process.wait(SECONDS)}")
        return line


def chunk_bounds(num_pages: int, page_bytes: int) -> list[tuple[int, int]]:
    """Runs of the list of at most CHUNK_BYTES: what one handle takes."""
    step = CHUNK_BYTES // page_bytes
    return list(pairwise([*range(0, num_pages, step), num_pages]))


def worker(model: Model, share: Share, pool: NDArray[np.uint8], source: Source) -> Move:
    """The engine's own: an order to a LinkWorker on a NixlLink, turned until it is read."""
    hands = rank_worker(NixlLink("worker"), RankMemory(PoolMemory(pool), model.layout, model.units))
    peer = Peer("bench", model.layout, (bytes.fromhex(source.place["link"]),))
    order = ReadOrder(
        pull=PullId(1),
        peer=peer,
        end=len(share.keys),
        remote=model.parts(share.remote_pages),
        local=model.parts(share.local_pages),
        remote_checkpoint=share.remote_file,
        local_checkpoint=share.local_file,
    )

    def move() -> None:
        hands.start(order)
        while (ended := hands.poll(order.pull)) is None:
            pass
        assert ended.state is ReadState.DONE, ended

    return move


def raw_nixl(model: Model, share: Share, pool: NDArray[np.uint8], source: Source) -> Move:
    """NIXL's own calls, an agent of its own, both page tables prepared, the index lists ready."""
    from nixl._api import nixl_agent, nixl_agent_config

    agent = nixl_agent("raw", nixl_agent_config(enable_prog_thread=False, backends=["UCX"]))
    agent.register_memory([(pool.ctypes.data, pool.nbytes, 0, "")], "DRAM")
    about = msgspec.msgpack.decode(bytes.fromhex(source.place["link"]))
    peer = agent.add_remote_agent(about["metadata"]).decode()
    agent.make_connection(peer)
    size = model.layout.page_bytes
    tables = (("NIXL_INIT_AGENT", pool.ctypes.data, len(pool)), (peer, about["address"], about["num_pages"]))
    mine, theirs = (
        agent.prep_xfer_dlist(name, np.array([[address, size, 0, size, count]], np.uint64), "DRAM")
        for name, address, count in tables
    )
    lists = [(share.local[a:b].copy(), share.remote[a:b].copy()) for a, b in chunk_bounds(len(share.local), size)]

    def move() -> None:
        for local, remote in lists:
            handle = agent.make_prepped_xfer("READ", mine, local, theirs, remote)
            state = agent.transfer(handle)
            while state == "PROC":
                state = agent.check_xfer_state(handle)
            agent.release_xfer_handle(handle)

    return move


def vm_readv(model: Model, share: Share, pool: NDArray[np.uint8], source: Source) -> Move:
    """The system call beneath, on ready iovecs: one a page, as many a call as the kernel takes."""
    library = ctypes.CDLL(None, use_errno=True)
    library.process_vm_readv.restype = ctypes.c_ssize_t
    size, pid = model.layout.page_bytes, source.place["pid"]
    local, remote = (
        np.stack([base + pages.astype(np.uint64) * np.uint64(size), np.full(len(pages), size, np.uint64)], axis=1)
        for base, pages in ((pool.ctypes.data, share.local), (source.place["address"], share.remote))
    )
    calls = []
    for first in range(0, len(local), MOST_IOVECS):
        pair = [np.ascontiguousarray(part[first : first + MOST_IOVECS]) for part in (local, remote)]
        count = ctypes.c_ulong(len(pair[0]))
        calls.append((pair, [ctypes.c_void_p(part.ctypes.data) for part in pair], count, int(pair[0][:, 1].sum())))

    def move() -> None:
        for _, (mine, theirs), count, expected in calls:
            done = library.process_vm_readv(pid, mine, count, theirs, count, ctypes.c_ulong(0))
            if done != expected:
                raise OSError(ctypes.get_errno(), f"process_vm_readv moved {done} of {expected} bytes")

    return move


def shared_memory(model: Model, share: Share, pool: NDArray[np.uint8], source: Source) -> Move:
    """A copy of each page out of memory that both processes have mapped: what could be had on one host at most."""
    theirs = np.memmap(source.place["shared"], np.uint8, "r", shape=(share.num_pages, model.layout.page_bytes))
    pairs = list(zip(share.local.tolist(), share.remote.tolist(), strict=True))

    def move() -> None:
        for local, remote in pairs:
            pool[local] = theirs[remote]

    return move


class _Puller:
    """A decode server's transfer side: claims, reads, has it confirmed."""

    def __init__(self, model: Model, share: Share, pool: NDArray[np.uint8], source: Source) -> None:
        memory = RankMemory(PoolMemory(pool), model.layout, model.units)
        config = KvTransferConfig(host="127.0.0.1", port=0)
        self._share, self._source, self._parts = share, source, model.parts(share.local_pages)
        self._happened = threading.Event()
        self.transfer: KvTransfer = build_transfer(
            config, memory, model.digest, SystemClock(), make_link=lambda host: NixlLink("puller")
        )
        self.transfer.start(self._happened.set)
        self.spec = self._next_spec()

    def move(self) -> None:
        """One pull; exactly one PullEnded comes of it."""
        mine = self.transfer.loop.pull(self.spec)
        until = time.monotonic() + SECONDS
        while time.monotonic() < until:
            self._happened.wait(until - time.monotonic())
            self._happened.clear()
            self.transfer.check()
            for event in self.transfer.loop.events():
                if isinstance(event, PullEnded) and event.pull == mine:
                    assert event.failure is None, event.failure
                    return
        raise TimeoutError(f"the pull has not ended within {SECONDS} s")

    def renew(self) -> None:
        """A reference is good for one use."""
        self.spec = self._next_spec()

    def _next_spec(self) -> PullSpec:
        place, share = self._source.place, self._share
        reference = {
            "do_remote_prefill": True,
            "remote_engine_id": place["engine_id"],
            "remote_request_id": self._source.reference(),
            "remote_host": place["host"],
            "remote_port": place["port"],
            "remote_block_ids": [[0]],
        }
        found = parse_role(reference, self.transfer).source
        assert found is not None and found.nonce is not None
        return PullSpec("pull", found, share.name, share.keys, 0, self._parts, share.local_file)


def pull(model: Model, share: Share, pool: NDArray[np.uint8], source: Source) -> tuple[Move, Move]:
    """A whole pull through transfer thread and side channel, and what is to be called, untimed, after each."""
    puller = _Puller(model, share, pool, source)
    return puller.move, puller.renew


# On loopback UCX is to look at no other network, and raw NIXL gets what NixlLink gives its agents.
os.environ.setdefault("UCX_NET_DEVICES", "lo")
os.environ.setdefault("UCX_CMA_TX_QUOTA", "64")
