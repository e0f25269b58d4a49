"""Exact mode for the other families: the cases of Nemotron-H, on one rank and on several.

`DRIVERS` names what is run with all cases; what it marks long is run with a few of them otherwise.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest

from models.qwen3_5_truth import parse_qwen, qwen_weights, raw_qwen
from runner import test_exactness as nemotron_h
from runner.harness import Driver, build_tiny, ranks
from runner.test_exactness import (  # noqa: F401
    test_a_saved_state_goes_on_as_its_source,
    test_full_hit_without_a_forward_pass,
    test_preempted_and_replayed_equals_undisturbed,
    test_snapshots_in_a_later_chunk_and_in_decode_rows,
    test_the_self_test_passes,
    test_tokens_fed_from_the_step_that_sampled_them,
)
from tiers import first, long


def qwen(model_type: str, size: int = 1, **changes: Any) -> Driver:
    config = parse_qwen(raw_qwen(model_type, **changes))
    weights = qwen_weights(config, 0)
    if size > 1:
        return ranks(config, weights, size, exact=True, num_pages=4096, num_slots=16)
    return Driver(config, build_tiny(config, weights, exact=True), exact=True, num_pages=4096, num_slots=16)


ODD = {"linear_key_head_dim": 10, "linear_value_head_dim": 14, "linear_num_key_heads": 3, "linear_num_value_heads": 9}
DRIVERS: dict[str, Callable[[], Driver]] = {
    "qwen3_5": partial(qwen, "qwen3_5", layer_types=["linear_attention", "full_attention"] * 2, num_hidden_layers=4),
    "qwen3_5_moe": partial(qwen, "qwen3_5_moe"),
    "qwen3_5-states-in-bfloat16": partial(qwen, "qwen3_5", mamba_ssm_dtype="bfloat16"),
    "qwen3_5_moe-odd": partial(qwen, "qwen3_5_moe_text", **ODD),
    "qwen3_next": partial(qwen, "qwen3_next", mlp_only_layers=[0]),
    "qwen3_5-only-delta": partial(qwen, "qwen3_5_text", layer_types=["linear_attention"] * 2, num_hidden_layers=2),
    "qwen3_5-2": partial(qwen, "qwen3_5", 2),
    "qwen3_5_moe-2": partial(qwen, "qwen3_5_moe", 2),
    "qwen3_5_moe-4": partial(qwen, "qwen3_5_moe", 4),
    "qwen3_next-4": partial(qwen, "qwen3_next", 4),
}
SHORT = ("qwen3_5",)


def _driver(name: str) -> Iterator[Driver]:
    made = DRIVERS[name]()
    yield made
    made.runner.close()


@pytest.fixture(params=[name if name in SHORT else long(name) for name in DRIVERS])
def driver(request: pytest.FixtureRequest) -> Iterator[Driver]:
    yield from _driver(request.param)


@pytest.fixture(params=first(3, DRIVERS))
def every_driver(request: pytest.FixtureRequest) -> Iterator[Driver]:
    yield from _driver(request.param)


@pytest.mark.parametrize("length", [129, *(pytest.param(n, marks=pytest.mark.long) for n in (65, 128, 200, 323))])
def test_chunked_equals_whole(every_driver: Driver, length: int) -> None:
    nemotron_h.test_chunked_equals_whole(every_driver, length)


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.long) for seed in range(1, 6))])
def test_batched_equals_alone(every_driver: Driver, seed: int) -> None:
    nemotron_h.test_batched_equals_alone(every_driver, seed)


def test_kept_state_equals_that_of_a_run_that_ends_there(every_driver: Driver) -> None:
    nemotron_h.test_kept_state_equals_that_of_a_run_that_ends_there(every_driver)


@pytest.mark.parametrize("hit", [64, *(pytest.param(hit, marks=pytest.mark.long) for hit in (128, 192))])
def test_resumed_equals_uncached(every_driver: Driver, hit: int) -> None:
    nemotron_h.test_resumed_equals_uncached(every_driver, hit)


def test_the_machine_keeps_rows_apart(every_driver: Driver) -> None:
    every_driver.runner.get_ready()
