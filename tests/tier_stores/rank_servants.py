"""Several ranks of one process: their pools, and a memory that spans them, over real sockets and threads."""

import socket
import threading

import numpy as np

from cairn.tiers.memory import HostTierMemory
from cairn.tiers.ranks import COPY_SECONDS, RankedTierMemory, TierServant


class RankServants:
    """`memories`: by rank, made of the `pools`, uint8 [num_pages, page_bytes], by `make`. `memory` spans them."""

    def __init__(self, pools, make=HostTierMemory, seconds=COPY_SECONDS) -> None:
        self.pools = pools
        self.memories = [make(pool) for pool in pools]
        page_bytes, self.ends, self.servants, self.threads = pools[0].shape[1], [], [], []
        for rank, memory in enumerate(self.memories[1:], 1):
            ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            self.ends.append(ends)
            self.servants.append(TierServant(memory, page_bytes, rank, len(pools)))
            self.threads.append(threading.Thread(target=self.servants[-1].serve, args=(ends[1],), daemon=True))
            self.threads[-1].start()
        self.memory = RankedTierMemory(self.memories[0], page_bytes, [here for here, _ in self.ends], seconds)

    def rows(self) -> np.ndarray:
        """What the pages of a tier would be, of all pages."""
        return np.concatenate(self.pools, axis=1)

    def end_rank(self, rank: int) -> None:
        """As when its process has ended."""
        self.servants[rank - 1].close()
        self.ends[rank - 1][1].shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.memory.close()
        for servant, thread, (_, there) in zip(self.servants, self.threads, self.ends, strict=True):
            thread.join(10)
            assert not thread.is_alive()
            servant.close()
            there.close()
