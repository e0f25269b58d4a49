"""Exact mode on several ranks: the same bits, however a sequence came to be where it is.

The cases are those of one rank; the ranks are threads. Random batches have a long form.
"""

from collections.abc import Iterator
from typing import Any

import pytest

from runner import test_exactness as one_rank
from runner.harness import RanksDriver, parse, random_weights, ranks, raw_config
from runner.test_exactness import (  # noqa: F401
    test_a_saved_state_goes_on_as_its_source,
    test_full_hit_without_a_forward_pass,
    test_kept_state_equals_that_of_a_run_that_ends_there,
    test_preempted_and_replayed_equals_undisturbed,
    test_resumed_equals_uncached,
    test_snapshots_in_a_later_chunk_and_in_decode_rows,
    test_the_self_test_passes,
    test_tokens_fed_from_the_step_that_sampled_them,
)

# Two groups, shared by two ranks each at 4; one group, its heads dealt; one kv head for all, and one Mamba head for
# two; sizes that fill no vector.
MODELS: dict[str, tuple[int, str, dict[str, Any]]] = {
    "hybrid-2": (2, "M*-ME*", {}),
    "hybrid-4": (4, "M*-ME*", {}),
    "one-group-2": (
        2,
        "ME*-",
        {
            "n_groups": 1,
            "mamba_num_heads": 6,
            "mamba_head_dim": 7,
            "ssm_state_size": 9,
            "moe_latent_size": 20,
            "n_routed_experts": 6,
            "mlp_bias": True,
            "use_bias": True,
        },
    ),
    "one-of-each-4": (
        4,
        "M*",
        {"n_groups": 1, "mamba_num_heads": 2, "mamba_head_dim": 6, "num_key_value_heads": 1, "head_dim": 10},
    ),
}


SHORT = ("hybrid-2", "one-of-each-4")


@pytest.fixture(params=[*SHORT, *(pytest.param(name, marks=pytest.mark.long) for name in MODELS if name not in SHORT)])
def driver(request: pytest.FixtureRequest) -> Iterator[RanksDriver]:
    yield from _driver(request.param)


def _driver(name: str) -> Iterator[RanksDriver]:
    size, pattern, changes = MODELS[name]
    config = parse(raw_config(pattern, **changes))
    made = ranks(config, random_weights(config, 0), size, exact=True, num_pages=4096, num_slots=16)
    yield made
    made.runner.close()


@pytest.fixture(params=MODELS)
def every_driver(request: pytest.FixtureRequest) -> Iterator[RanksDriver]:
    yield from _driver(request.param)


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.long) for seed in range(1, 6))])
def test_batched_equals_alone(every_driver: RanksDriver, seed: int) -> None:
    one_rank.test_batched_equals_alone(every_driver, seed)


@pytest.mark.parametrize("length", [129, *(pytest.param(n, marks=pytest.mark.long) for n in (65, 128, 200, 323))])
def test_chunked_equals_whole(every_driver: RanksDriver, length: int) -> None:
    one_rank.test_chunked_equals_whole(every_driver, length)
