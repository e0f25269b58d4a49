"""Reads over TCP from a peer that is stopped in the middle, gives up, and lets it go on. Arguments: process id and
description of the peer. Prints what the link says, step by step."""

import os
import signal
import sys
import time

import numpy as np
from link_contract import NUM_PAGES, PAGE_BYTES, pages

from cairn.transfer.links.contract import ReadState, Region
from cairn.transfer.links.nixl import NixlLink

WAIT_SECONDS = 60


def finish(link: NixlLink, handle) -> ReadState:
    until = time.monotonic() + WAIT_SECONDS
    while (state := link.poll(handle)) is ReadState.READING and time.monotonic() < until:
        time.sleep(0.001)
    return state


def main(peer_process: int, description: bytes) -> None:
    memory = np.zeros((NUM_PAGES, PAGE_BYTES), np.uint8)
    link = NixlLink("reader")
    link.register(Region.of(memory))
    peer = link.connect(description)
    print("warm", finish(link, link.read(peer, pages([0], [0]))).value)
    os.kill(peer_process, signal.SIGSTOP)
    handle = link.read(peer, pages([3], [1]))
    link.cancel(handle)
    states = {link.poll(handle) for _ in range(1000)}
    print("frozen", *(state.value for state in states), memory[1].any())
    link.disconnect(peer)
    print("close", link.close(), link.num_open)
    os.kill(peer_process, signal.SIGCONT)
    print("resumed", finish(link, handle).value, memory[1].any(), link.close())


if __name__ == "__main__":
    main(int(sys.argv[1]), bytes.fromhex(sys.argv[2]))
