"""Every page source keeps the contract: other servers by real pulls, and the double of a store, however it behaves."""

import pytest
from driver import Driver
from page_source_contract import PROMPT, PageSourceContract
from pd_world import World, prefill

from cairn.engine.transfers.kv_transfer import parse_role
from doubles.page_source import Behaviour, ScriptedSource


class TestPeers(PageSourceContract):
    @pytest.fixture(autouse=True)
    def servers(self):
        self.world = World()
        self.p, self.d = self.world.server(1), self.world.server(2)
        self.cache, self.runner = self.d.cache, self.d.runner
        self.lease = parse_role(prefill(self.p, PROMPT), self.d.kv).source

    def source(self):
        return self.d.scheduler.state.transfers.peers

    def peer(self):
        return self.lease

    def go_on(self, source):
        events = []
        for _ in range(100):
            for server in (self.p, self.d):
                server.turn_transfers()
            self.p.scheduler.poll()
            for event in self.d.port.events():
                source.receive(event)
            events += source.events()
        return events


class TestDouble(PageSourceContract):
    behaviours = (Behaviour(),) * 2

    @pytest.fixture(autouse=True)
    def server(self):
        driver = Driver()
        self.cache, self.runner, self.layout = driver.cache, driver.runner, driver.layout

    def source(self):
        source = ScriptedSource(self.runner, self.layout)
        source.add(PROMPT)
        source.script.extend(self.behaviours)
        return source

    def peer(self):
        return None

    def go_on(self, source):
        return [event for _ in range(20) for event in source.events()]


class TestSlowDouble(TestDouble):
    behaviours = (Behaviour(looks=3, late=4), Behaviour(looks=5, late=2))
