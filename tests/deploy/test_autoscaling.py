"""How many replicas there should be, from what engines tell of themselves."""

from types import SimpleNamespace

import pytest

from cairn.deploy.ray.autoscaling import PRESSURE, PressurePolicy, engine_pressure
from cairn.engine.contract import EngineStats, PoolStats


def wanted(pressures, num_requests=1, silent=0, target=None):
    names = [f"r{i}" for i in range(len(pressures) + silent)]
    context = SimpleNamespace(
        aggregated_metrics={PRESSURE: dict(zip(names, pressures, strict=False))},
        total_num_requests=num_requests,
        running_replicas=names,
        target_num_replicas=len(names) if target is None else target,
    )
    return PressurePolicy(0.7)(context)[0]


def test_an_engine_is_as_full_as_its_places_or_its_pool():
    full_pool = PoolStats(num_pages=100, held_pages=90)
    assert engine_pressure(EngineStats(num_running=4, num_waiting=4), 16) == 0.5
    assert engine_pressure(EngineStats(num_running=4, pool=full_pool), 16) == 0.9
    assert engine_pressure(EngineStats(num_running=16, num_waiting=16, pool=full_pool), 16) == 2.0


@pytest.mark.parametrize(
    ("pressures", "replicas"),
    [([0.7], 1), ([0.71], 2), ([2.1], 3), ([0.7, 0.7], 2), ([0.3, 0.3], 1), ([0.0, 0.0], 1), ([0.1] * 7, 1)],
)
def test_as_many_as_keep_the_mean_at_the_target(pressures, replicas):
    assert wanted(pressures) == replicas


def test_none_where_nobody_asks_and_one_where_somebody_does():
    assert wanted([0.0], num_requests=0) == 0
    assert wanted([0.0], num_requests=1) == 1
    assert wanted([], num_requests=0, target=0) == 0


def test_those_that_have_just_been_started_are_not_given_up():
    assert wanted([1.4], silent=1) == 2
    assert wanted([0.3], silent=1) == 2
    assert wanted([0.0], num_requests=0, silent=1) == 0


def test_no_metrics_at_all():
    context = SimpleNamespace(aggregated_metrics=None, total_num_requests=0, running_replicas=[], target_num_replicas=0)
    assert PressurePolicy(0.7)(context) == (0, {})
