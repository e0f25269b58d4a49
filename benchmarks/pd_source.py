"""The process that is read from in `pd_bandwidth`: an engine's transfer side around a pool, without a model.

Started by the benchmark. Prints one line of JSON that says where everything is; for each line `offer` on its input it
leases the pages once more and prints the reference; ends when its input does.
"""

import argparse
import json
import os
import sys

import numpy as np
from benchmarks.pd_pools import LAYOUTS, PLACEMENTS, Share, filled

from cairn.engine.contract import KvTransferConfig
from cairn.engine.transfers.kv_transfer import RankMemory, build_transfer
from cairn.transfer.contract import Offer
from cairn.transfer.links.nixl import NixlLink
from cairn.transfer.memory import PoolMemory
from cairn.types import SystemClock


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layout", choices=LAYOUTS, required=True)
    parser.add_argument("--placement", choices=PLACEMENTS, required=True)
    parser.add_argument("--seed", type=int, required=True)
    arguments = parser.parse_args()
    model = LAYOUTS[arguments.layout]
    share = Share.of(model, arguments.placement, arguments.seed)
    links: list[NixlLink] = []

    def make_link(host: str) -> NixlLink:
        links.append(NixlLink("source"))
        return links[-1]

    pool = filled(np.zeros((share.num_pages, model.layout.page_bytes), np.uint8))
    memory = RankMemory(PoolMemory(pool), model.layout, model.units)
    config = KvTransferConfig(host="127.0.0.1", port=0, lease_seconds=600.0, lease_share=1.0)
    transfer = build_transfer(config, memory, model.digest, SystemClock(), make_link=make_link)
    transfer.start(lambda: None)
    offer = Offer("bench", share.name, share.keys, model.parts(share.remote_pages), (share.held,))
    # While anything is leased the loop serves readers: the plain ways of reading need that to connect.
    transfer.loop.offer(offer)
    shared = os.memfd_create("cairn-bandwidth")
    os.truncate(shared, pool.nbytes)
    mapped = f"/proc/{os.getpid()}/fd/{shared}"
    np.memmap(mapped, np.uint8, "r+", shape=pool.shape)[:] = pool
    place = {
        "pid": os.getpid(),
        "address": pool.ctypes.data,
        "link": links[0].describe().hex(),
        "shared": mapped,
        "engine_id": transfer.engine_id,
        "host": transfer.host,
        "port": transfer.side_port,
    }
    print(json.dumps(place), flush=True)
    for line in sys.stdin:
        if line.strip() == "offer":
            print(transfer.loop.offer(offer), flush=True)
        transfer.loop.events()
    transfer.loop.stop()


if __name__ == "__main__":
    main()
