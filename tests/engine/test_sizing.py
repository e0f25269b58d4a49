"""Threads, pool and running requests that fit a machine, and what is refused because it does not."""

import logging

import pytest

from cairn.cache.layout import AttentionGroup, CacheLayout
from cairn.engine.contract import EngineConfig
from cairn.engine.cpu_threads import choose_cpu_threads, thread_variables
from cairn.engine.memory_plan import MemoryPlan, divide_memory
from cairn.errors import ConfigError

GIB = 1 << 30
PAGE, STATE = 1 << 16, 1 << 20
# A checkpoint has 16 pages, and so have 1,024 tokens; 64 tokens have one.
LAYOUT = CacheLayout(
    block_size=64,
    page_bytes=PAGE,
    page_units=1,
    groups=(AttentionGroup("full", 64),),
    header_bytes=0,
    state_bytes=STATE,
    state_units=1,
)
LEAST = (16 + 1 + 1) * PAGE
OPEN = EngineConfig(model="m", kv_cache_memory_bytes=None, max_num_seqs=None)


class FakeMachine:
    """A Machine of which everything is known."""

    def __init__(self, num_cores=2, available=10 * GIB):
        self._num_cores = num_cores
        self._available = available

    def num_cores(self):
        return self._num_cores

    def available_memory(self):
        return self._available


def sizes(config=OPEN, available=10 * GIB, weights=0, layout=LAYOUT):
    found = divide_memory(MemoryPlan(on_gpu=False, usable=available, weights=weights, slot=STATE), config, layout)
    return found.pool, found.num_slots


# -- threads ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("num_cores", "num_ranks", "num_threads"),
    [(1, 1, 1), (2, 1, 2), (3, 1, 2), (4, 1, 3), (64, 1, 63), (2, 2, 1), (4, 2, 1), (9, 2, 4), (2, 4, 1), (16, 4, 3)],
)
def test_threads_unless_asked(num_cores, num_ranks, num_threads):
    assert choose_cpu_threads(None, num_ranks, {}, FakeMachine(num_cores)) == num_threads


@pytest.mark.parametrize(
    ("variable", "num_threads"), [("1", 1), ("3", 3), ("3,2", 3), ("99", 7), ("0", 7), ("-2", 7), ("many", 7), ("", 7)]
)
def test_a_variable_makes_threads_fewer_and_never_more(variable, num_threads):
    assert choose_cpu_threads(None, 1, {"OMP_NUM_THREADS": variable}, FakeMachine(8)) == num_threads


@pytest.mark.parametrize(("asked", "num_ranks"), [(1, 1), (4, 1), (2, 2), (1, 4), (1, 9)])
def test_threads_that_are_asked_for(asked, num_ranks):
    assert choose_cpu_threads(asked, num_ranks, {"OMP_NUM_THREADS": "3"}, FakeMachine(4)) == asked


@pytest.mark.parametrize(("asked", "num_ranks", "most"), [(5, 1, 4), (3, 2, 2), (2, 9, 1)])
def test_more_threads_than_cores_are_refused(asked, num_ranks, most):
    with pytest.raises(ConfigError, match=rf"--cpu-threads {asked}.* there are 4 cores .*: set at most {most}$"):
        choose_cpu_threads(asked, num_ranks, {}, FakeMachine(4))


def test_threads_wait_asleep_unless_the_environment_says_otherwise():
    threads = {"OMP_NUM_THREADS": "3", "MKL_NUM_THREADS": "3"}
    assert thread_variables(3, {}) == threads | {"OMP_WAIT_POLICY": "passive", "GOMP_SPINCOUNT": "10000"}
    assert thread_variables(3, {"OMP_NUM_THREADS": "9"}) == thread_variables(3, {})
    assert thread_variables(3, {"OMP_WAIT_POLICY": "active"}) == threads
    assert thread_variables(3, {"GOMP_SPINCOUNT": "7"}) == threads


# -- memory ----------------------------------------------------------------------------------------------------------


def test_the_pool_is_two_fifths_of_what_the_weights_and_two_slots_leave():
    """Of one request, and of rows that are nobody's."""
    pool, num_seqs = sizes(weights=2 * GIB)
    assert (pool, num_seqs) == (int(0.4 * (8 * GIB - 2 * STATE)), 64)


def test_the_pool_has_a_bound():
    assert sizes(available=100 * GIB) == (8 * GIB, 64)


def test_running_states_that_are_asked_for_go_first():
    config = OPEN.model_copy(update={"max_num_seqs": 2048})
    assert sizes(config) == (int(0.4 * (10 * GIB - 2049 * STATE)), 2048)


def test_ranks_share_the_budget():
    ranked = OPEN.model_copy(update={"tensor_parallel_size": 4})
    assert sizes(ranked, available=100 * GIB) == (2 * GIB, 64)
    assert sizes(ranked, weights=2 * GIB) == (int(0.4 * (8 * GIB - 4 * 2 * STATE)) // 4, 64)


def test_the_pool_is_at_least_the_smallest_that_serves():
    pool, num_seqs = sizes(available=2 * STATE + LEAST)
    assert (pool, num_seqs) == (LEAST, 1)
    with pytest.raises(ConfigError, match=r"smallest pool, 1\.125 MiB .* does not fit into memory .*free some"):
        sizes(available=2 * STATE + LEAST - 1)


@pytest.mark.parametrize(
    ("asked", "num_ranks", "most"),
    [
        (1, 1, 9 * GIB - 9 * STATE),
        (9 * GIB - 9 * STATE, 1, 9 * GIB - 9 * STATE),
        (9 * GIB - 9 * STATE + 1, 1, 9 * GIB - 9 * STATE),
        ((9 * GIB - 18 * STATE) // 2, 2, (9 * GIB - 18 * STATE) // 2),
        (5 * GIB, 2, (9 * GIB - 18 * STATE) // 2),
    ],
)
def test_a_pool_that_is_asked_for_is_taken_or_refused(asked, num_ranks, most):
    config = OPEN.model_copy(
        update={"kv_cache_memory_bytes": asked, "max_num_seqs": 8, "tensor_parallel_size": num_ranks}
    )
    if asked <= most:
        assert sizes(config, weights=GIB) == (asked, 8)
    else:
        with pytest.raises(ConfigError, match=f"^--kv-cache-memory-bytes {asked}: .*lower it to at most {most} "):
            sizes(config, weights=GIB)


def test_weights_that_leave_nothing_are_refused():
    for config in (OPEN, OPEN.model_copy(update={"kv_cache_memory_bytes": GIB, "max_num_seqs": 1})):
        with pytest.raises(ConfigError, match=r"10 GiB available, 11 GiB of weights"):
            sizes(config, weights=11 * GIB)


@pytest.mark.parametrize(
    ("config", "available", "num_seqs"),
    [
        (OPEN, 10 * GIB, 64),
        # a tenth of the memory has this many states, and one more
        (OPEN, 412 * STATE, 40),
        (OPEN.model_copy(update={"max_num_batched_tokens": 100}), 10 * GIB, 36),
        (OPEN.model_copy(update={"max_num_batched_tokens": 10}), 10 * GIB, 1),
        # 32 pages for a checkpoint and 1,024 tokens of each
        (OPEN.model_copy(update={"kv_cache_memory_bytes": 5 * 32 * PAGE}), 10 * GIB, 5),
        (OPEN.model_copy(update={"kv_cache_memory_bytes": LEAST}), 10 * GIB, 1),
        (OPEN.model_copy(update={"tensor_parallel_size": 2}), 424 * STATE, 20),
    ],
)
def test_requests_computed_at_once(config, available, num_seqs):
    assert sizes(config, available=available)[1] == num_seqs


def test_a_machine_that_tells_nothing():
    with pytest.raises(ConfigError, match=r"^--kv-cache-memory-bytes: .*: set it$"):
        sizes(available=None)
    assert sizes(OPEN.model_copy(update={"kv_cache_memory_bytes": GIB}), available=None) == (GIB, 64)
    assert sizes(OPEN.model_copy(update={"kv_cache_memory_bytes": GIB, "max_num_seqs": 3}), available=None) == (GIB, 3)


@pytest.mark.parametrize("config", [OPEN, EngineConfig(model="m", kv_cache_memory_bytes=GIB, max_num_seqs=7)])
def test_every_size_has_one_line_in_the_log(config, caplog):
    caplog.set_level(logging.INFO)
    pool, num_seqs = sizes(config, weights=GIB)
    num_threads = choose_cpu_threads(None, 1, {}, FakeMachine(8))
    lines = [record.getMessage() for record in caplog.records]
    starts = (f"--kv-cache-memory-bytes {pool} ", f"--max-num-seqs {num_seqs}: ", f"--cpu-threads {num_threads}: ")
    assert len(lines) == 3 and all(line.startswith(start) for line, start in zip(lines, starts, strict=True))
