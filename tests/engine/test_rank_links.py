"""What the other ranks of a server tell rank 0 of their links, as long as they serve."""

from contextlib import ExitStack
from functools import partial
from types import SimpleNamespace

import torch

from cairn.cache.layout import AttentionGroup, CacheLayout
from cairn.engine.ranks.transfer import RankSockets, rank_service, serve_rank
from cairn.engine.ranks.worker import RankPlace
from cairn.transfer.geometry import AttentionUnits, ModelUnits
from doubles.memory_link import MemoryFabric

UNITS = ModelUnits((AttentionUnits(3, 1, 2),), 0)
LAYOUT = CacheLayout(16, 64, 1, (AttentionGroup("full", 16),), 8, 0, 0, tp_size=3)


def test_links_are_described_in_the_order_of_ranks_before_any_serves(tmp_path_factory):
    folder, fabric = tmp_path_factory.mktemp("r"), MemoryFabric()
    settings = rank_service("127.0.0.1", UNITS).settings
    with ExitStack() as serving:
        for rank in (2, 1):
            runner = SimpleNamespace(pool=torch.zeros((4, 64), dtype=torch.uint8), layout=LAYOUT)
            place = RankPlace(rank, 3, folder, runner, computes_on_host=True)
            link = fabric.link(f"rank {rank}")
            serving.enter_context(serve_rank(place, settings, partial(_same, link)))
        sockets = RankSockets(folder, 3)
        assert [description for _, description in sockets.others] == [b"rank 1", b"rank 2"]
        sockets.close()


def _same(link, _host):
    return link
