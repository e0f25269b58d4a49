"""P and D on devices that write as late as they may, two steps in flight: what a step computes is in the pool when it
has been collected and not before. Whatever is leased must be there by then."""

import numpy as np
import pytest
from pd_world import World, alone, prefill
from pooled_runner import PooledRunner

TEXT = np.random.default_rng(5).integers(0, 50, 600).tolist()


class LateRunner(PooledRunner):
    """Keeps what the steps that are out write to itself, and that of `lag` steps that have been collected: a `collect`
    that does not wait for the device."""

    lag = 0

    def __init__(self, *arguments) -> None:
        super().__init__(*arguments)
        self._unwritten: list[tuple[np.ndarray, np.ndarray]] = []

    def launch(self, plan) -> None:
        flat, written = self.pool.reshape(-1), self.pool.reshape(-1).copy()
        for where, numbers in self._unwritten:
            flat[where] = numbers
        before = flat.copy()
        super().launch(plan)
        (where,) = np.nonzero(flat != before)
        self._unwritten.append((where, flat[where].copy()))
        flat[:] = written

    def collect(self, step):
        while len(self._unwritten) > len(self._out) - 1 + self.lag:
            where, numbers = self._unwritten.pop(0)
            self.pool.reshape(-1)[where] = numbers
        return super().collect(step)


class HastyRunner(LateRunner):
    lag = 4


def hand_over(length, monkeypatch, runner) -> bool:
    """Whether D answers as one server would, prompt after prompt, and without computing any."""
    monkeypatch.setattr("pd_world.PooledRunner", runner)
    world = World()
    p, d = (world.server(port, ahead=2, budget=68) for port in (1, 2))
    right = True
    for start in (0, 7):
        prompt = TEXT[start : start + length]
        name = d.submit(prompt, params=prefill(p, prompt))
        world.run()
        right &= d.answers[name] == alone(prompt)
    assert d.scheduler.state.counters.computed_prompt_tokens == 0 or not right
    return right


@pytest.mark.parametrize("length", [17, 64, 200])
def test_what_is_leased_has_been_written(length, monkeypatch):
    assert hand_over(length, monkeypatch, LateRunner)


def test_collecting_without_waiting_is_found(monkeypatch):
    with pytest.raises((AssertionError, LookupError)):
        assert hand_over(200, monkeypatch, HastyRunner)
