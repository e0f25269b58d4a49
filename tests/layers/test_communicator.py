"""What every communicator does, and what it does when a rank stays away."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from cairn.errors import EngineDead
from cairn.layers.communicator import SINGLE_RANK, Communicator
from cairn.layers.process_ranks import join_ranks
from doubles.thread_ranks import thread_ranks

Ranks = list[Communicator]
HOST = torch.device("cpu")
KINDS = ["alone", "threads-2", "threads-4", "gloo-2", "gloo-4"]


@pytest.fixture
def make(tmp_path: Path) -> Callable[..., Ranks]:
    """Kind -> the communicators of all ranks. gloo's are as between processes, over sockets."""

    def made(kind: str, seconds: float = 30.0) -> Ranks:
        name, _, size = kind.partition("-")
        if name == "alone":
            return [SINGLE_RANK]
        if name == "threads":
            return list(thread_ranks(int(size), seconds))
        count = int(size)
        with ThreadPoolExecutor(count) as threads:
            return list(
                threads.map(
                    lambda rank: join_ranks(tmp_path / "meet", rank, count, HOST, join_seconds=30, seconds=seconds),
                    range(count),
                )
            )

    return made


@pytest.fixture(params=KINDS)
def ranks(request: pytest.FixtureRequest, make: Callable[..., Ranks]) -> Ranks:
    return make(request.param)


@pytest.fixture
def on_all(ranks: Ranks) -> Iterator[Callable]:
    """Runs a function of one communicator on all ranks at once; the results in rank order."""
    with ThreadPoolExecutor(len(ranks)) as threads:

        def run(function: Callable) -> list:
            with torch.inference_mode():
                pass
            return [each.result(60) for each in [threads.submit(function, rank) for rank in ranks]]

        yield run


def share(rank: int, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Numbers of very different size, so that another order of addition gives other bits."""
    generator = torch.Generator().manual_seed(rank)
    spread = torch.randint(-12, 12, shape, generator=generator).float().exp2()
    return (torch.randn(shape, generator=generator) * spread).to(dtype)


def test_ranks_know_their_place(ranks: Ranks) -> None:
    assert [(rank.rank, rank.size) for rank in ranks] == [(place, len(ranks)) for place in range(len(ranks))]


def test_partial_sums_are_added_in_rank_order(ranks: Ranks, on_all: Callable) -> None:
    shape = (48, 33)
    wanted = share(0, shape)
    backwards = share(len(ranks) - 1, shape)
    for rank in range(1, len(ranks)):
        wanted = wanted + share(rank, shape)
        backwards = backwards + share(len(ranks) - 1 - rank, shape)
    found = on_all(lambda rank: rank.all_reduce(share(rank.rank, shape)))
    assert all(torch.equal(each, wanted) for each in found)
    assert len(ranks) < 3 or not torch.equal(backwards, wanted), "the numbers do not tell the order"


def test_a_rows_sum_does_not_depend_on_its_place(ranks: Ranks, on_all: Callable) -> None:
    whole = on_all(lambda rank: rank.all_reduce(share(rank.rank, (50, 7))))[0]
    piece = on_all(lambda rank: rank.all_reduce(share(rank.rank, (50, 7))[23:24]))[0]
    assert torch.equal(piece, whole[23:24])


def test_narrow_numbers_are_added_wide(ranks: Ranks, on_all: Callable) -> None:
    parts = [share(rank, (64,), torch.bfloat16) for rank in range(len(ranks))]
    wanted = torch.zeros(64)
    for part in parts:
        wanted = wanted + part.float()
    for found in on_all(lambda rank: rank.all_reduce(parts[rank.rank].clone())):
        assert found.dtype == torch.bfloat16
        assert torch.equal(found, wanted.bfloat16())


def test_what_comes_back_belongs_to_the_caller(ranks: Ranks, on_all: Callable) -> None:
    """Everybody writes over what was given and what was got, again and again: nobody may see it."""

    def rounds(rank: Communicator) -> list[torch.Tensor]:
        found = []
        for number in range(100):
            mine = torch.full((8,), float(number + rank.rank))
            total = rank.all_reduce(mine)
            found.append(total.clone())
            total.fill_(-1e9)
            mine.fill_(1e9)
        return found

    size = len(ranks)
    for found in on_all(rounds):
        assert [each.tolist() for each in found] == [[float(n * size + size * (size - 1) // 2)] * 8 for n in range(100)]


def test_columns_stand_in_rank_order(ranks: Ranks, on_all: Callable) -> None:
    wanted = torch.cat([share(rank, (5, 6)) for rank in range(len(ranks))], dim=1)
    for found in on_all(lambda rank: rank.gather_columns(share(rank.rank, (5, 6)))):
        assert torch.equal(found, wanted)


def test_strided_tensors_and_inference_mode(ranks: Ranks, on_all: Callable) -> None:
    def both(rank: Communicator) -> tuple[torch.Tensor, torch.Tensor]:
        with torch.inference_mode():
            view = share(rank.rank, (6, 20))[:, 3:9]
            return rank.gather_columns(view), rank.all_reduce(view)

    columns = torch.cat([share(rank, (6, 20))[:, 3:9] for rank in range(len(ranks))], dim=1)
    for found, total in on_all(both):
        assert torch.equal(found, columns)
        assert total.shape == (6, 6)


def test_everybody_gets_rank_0s_numbers(ranks: Ranks, on_all: Callable) -> None:
    numbers = [torch.tensor(own) for own in ([7, -1, 1 << 62], *([0, 0, 0] for _ in ranks[1:]))]
    found = on_all(lambda rank: rank.broadcast(numbers[rank.rank]))
    assert [own.tolist() for own in found] == [[7, -1, 1 << 62]] * len(ranks)


@pytest.mark.parametrize("kind", ["threads-2", "threads-3", "gloo-2", "gloo-3"])
def test_a_rank_that_stays_away_ends_the_wait(make: Callable[..., Ranks], kind: str) -> None:
    ranks = make(kind, seconds=0.3)
    come = ranks[:-1]

    def call(rank: Communicator) -> None:
        with pytest.raises(EngineDead, match=f"rank {rank.rank} "):
            rank.all_reduce(torch.ones(4))

    for _ in range(2):  # also when it is asked again
        with ThreadPoolExecutor(len(come)) as threads:
            for each in [threads.submit(call, rank) for rank in come]:
                each.result(60)


def test_ranks_that_do_not_all_join_end_the_start(tmp_path: Path) -> None:
    with pytest.raises(EngineDead, match="rank 1 of 2 has not found the others"):
        join_ranks(tmp_path / "meet", 1, 2, HOST, join_seconds=0.3, seconds=1)
