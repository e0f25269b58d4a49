"""A process whose memory others read: prints the description of its link, ends when its input does."""

import select
import sys

from link_contract import pool

from cairn.transfer.links.contract import Region
from cairn.transfer.links.nixl import NixlLink


def main() -> None:
    memory = pool(7)
    link = NixlLink("source")
    link.register(Region.of(memory))
    print(link.describe().hex(), flush=True)
    while not select.select([sys.stdin], [], [], 0.001)[0]:
        link.progress()
    link.close()


if __name__ == "__main__":
    main()
