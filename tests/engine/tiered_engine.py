"""Engines with tiers that a test turns by hand, and prompts."""

import time

import numpy as np
from turned_engine import Engine

from cairn.scheduler.transfers import PrefillSpeed

TEXT = tuple(np.random.default_rng(7).integers(20, 4000, 400).tolist())
OTHER = tuple(np.random.default_rng(8).integers(20, 4000, 400).tolist())


class TieredEngine(Engine):
    """Turned until everything is written that is going to be."""

    def run(self) -> None:
        until = time.monotonic() + 60
        while time.monotonic() < until:
            for output in self.core.poll():
                self.outputs[output.request_id].append(output)
            if self.core.has_work:
                self.step()
            elif not self.state.requests and self.tiers.demoter.is_idle:
                return self.core.idle()
            else:
                time.sleep(0.0005)
        raise AssertionError("no end in sight")

    @property
    def tiers(self):
        return self.core._tiers

    def end(self) -> None:
        """As at the end of a server."""
        self.core.write_back()
        self.core.close()


def tiered_engines(monkeypatch):
    """A fixture that makes engines, for which computing takes a second a token, and ends those that are left."""
    engines = []
    monkeypatch.setattr(PrefillSpeed, "learn", lambda self, stats: None)

    def make(folder, **config):
        config = {"exact": False} | config
        engines.append(TieredEngine(folder, **config))
        engines[-1].state.transfers.prefill_speed.seconds_per_token = 1.0
        return engines[-1]

    yield make
    for each in engines:
        each.core.close()


def cached(outputs) -> tuple[int, int]:
    """Cached tokens, and those of them that came from below."""
    report = outputs[-1].cache
    return report.cached_tokens, report.tier_tokens
