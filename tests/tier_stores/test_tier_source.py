"""Tiers keep the contract of page sources, whatever they are made of and however late their threads are."""

import pytest
from page_source_contract import PROMPT, PageSourceContract
from tier_world import SimulatedMemory, TierWorld

from cairn.tiers.context import TierContext
from cairn.tiers.promotion import TierSource


class TierContract(PageSourceContract):
    """`later`: what is submitted is carried out when time goes on."""

    later = False

    def stores(self) -> dict:
        """Of a `TierWorld`."""
        raise NotImplementedError

    @pytest.fixture(autouse=True)
    def servers(self, tmp_path):
        self.tmp_path = tmp_path
        first = TierWorld(**self.stores())
        first.answer(PROMPT)
        self.world = TierWorld(host_pages=1, immediate=not self.later)
        self.cache, self.runner = self.world.driver.cache, self.world.driver.runner
        context = self.world.context
        self.context = TierContext(
            context.layout,
            first.stores,
            context.names,
            SimulatedMemory(self.runner, context.layout),
            context.lanes,
            context.clock,
            context.speed,
        )

    def source(self):
        return TierSource(self.context)

    def peer(self):
        return None

    def look_further(self):
        self.world.lanes.names.run()

    def go_on(self, source):
        self.world.run_lanes()
        return source.events() + source.events()


class TestHostTier(TierContract):
    def stores(self):
        return {"host_pages": 200}


class TestDiskTier(TierContract):
    def stores(self):
        return {"folder": self.tmp_path}


class TestBothTiers(TierContract):
    """The host has room for a part of it."""

    def stores(self):
        return {"host_pages": 20, "folder": self.tmp_path}


class TestLateHostTier(TestHostTier):
    later = True


class TestLateDiskTier(TestDiskTier):
    later = True
