"""Two servers that prefill and decode for each other, in small pools and with several steps out at once: plain, handed
over and fetched requests, hints, references to a server that never answers, aborts and time that passes, all drawn by
a seed. Every request ends with the answer of a server that is alone, or is refused because what is held for other
servers leaves no room, and nobody holds a page in the end."""

import os
import random
from collections import Counter
from functools import cache

import pytest
from pd_world import REMOTE_DECODE, World, alone, silent

from cairn.errors import RequestError
from cairn.scheduler.request import Phase
from tiers import more

LIMIT = 20_000
EVENTFUL = (2, 3, 5, 9, 10, 13, 15, 18, 19, 34)
"""Seeds of mixes in which, taken together, everything that is counted below has happened."""
WITH_WINDOWS = (5, 15, 19)
"""The same, of a model with attention of limited reach."""


@cache
def expected(prompt, max_tokens, limited):
    return alone(list(prompt), max_tokens, limited=limited)


class Mix:
    """`references` and `hints`: what answers have said, with the tokens they are about. `shared_pages`: pages found
    in one lease more, summed over turns."""

    def __init__(self, seed: int, limited: bool = False) -> None:
        self.rng = rng = random.Random(seed)
        fabric = {"descriptors_per_poll": rng.choice([1, 2, 100]), "late_writes": rng.random() < 0.5}
        self.world = World(seed, limited=limited, **fabric)
        block_size = rng.choice([16, 16, 32])
        self.servers = [
            self.world.server(
                port,
                mode=rng.choice(["auto", "auto", "align", None]),
                block_size=block_size,
                num_pages=rng.choice([16, 20, 24, 32, 48, 120]),
                ahead=rng.choice([1, 2, 3]),
                max_num_seqs=rng.choice([1, 2, 4]),
                budget=rng.choice([68, 100, 256]),
                lease_share=rng.choice([0.25, 0.5, 1.0]),
                lease_seconds=rng.choice([8.0, 30.0]),
                wait_seconds=rng.choice([3.0, 8.0, 30.0]),
                max_leases=rng.choice([3, 1024]),
                max_leases_per_client=rng.choice([2, 64]),
            )
            for port in (1, 2)
        ]
        self.shared = [rng.randrange(50) for _ in range(200)]
        self.left = rng.randint(5, 40)
        self.wanted: dict = {}
        self.gone: set = set()
        self.heard: set = set()
        self.references: list = []
        self.hints: list = []
        self.shared_pages = 0

    def prompt(self) -> list[int]:
        count, rng = self.rng.randint(1, 150), self.rng
        known = rng.randint(0, count) if rng.random() < 0.6 else 0
        return self.shared[:known] + [rng.randrange(50) for _ in range(count - known)]

    def submit(self) -> None:
        rng, server, prompt, params = self.rng, self.rng.choice(self.servers), self.prompt(), None
        max_tokens, kind = rng.choice([1, 3, 20, 40, 120]), rng.random()
        if kind < 0.3:
            params, max_tokens = REMOTE_DECODE, rng.choice([1, 1, 1, 3, 20, 100])
            if self.hints and rng.random() < 0.6:
                hint, tokens = rng.choice(self.hints)
                params, prompt = params | hint, (tokens + prompt)[: rng.randint(1, 200)]
        elif kind < 0.7 and self.references:
            params, prompt = self.references.pop() if rng.random() < 0.8 else rng.choice(self.references)
        elif kind < 0.8:
            params = silent(self.left)
        try:
            name = server.submit(prompt, max_tokens=max_tokens, params=params, client=rng.choice("ab"))
        except RequestError:
            return  # more than the pool can hold, or than may be held for other servers
        self.wanted[name] = (server, tuple(prompt), max_tokens)

    def abort(self, server) -> None:
        requests = list(server.scheduler.state.requests.values())
        if requests:
            request = self.rng.choice(requests)
            stop = request.phase is Phase.RUNNING and request.output and self.rng.random() < 0.5
            self.gone.add(request.id)
            server.scheduler.finish(request, "stop" if stop else "abort")

    def hear(self, server) -> None:
        for name in [name for name in server.ended if name not in self.heard]:
            self.heard.add(name)
            said, (_, prompt, _) = server.params(name), self.wanted[name]
            if said is None:
                continue
            if "cairn_decode_hint" in said:
                self.hints.append((said, list(prompt) + server.answers[name]))
            else:
                self.references.append((said, list(prompt)))

    def turn(self) -> bool:
        if self.left and self.rng.random() < 0.4:
            self.left -= 1
            self.submit()
        moved = False
        for server in self.servers:
            moved |= server.turn() if self.rng.random() < 0.8 else True
            if self.rng.random() < 0.03:
                self.abort(server)
            self.hear(server)
            leased = [len(each.pin.pages) for each in server.scheduler.state.transfers.offers.values()]
            self.shared_pages += sum(leased) - server.producer.leases.num_pages
        if self.rng.random() < 0.02:
            self.world.clock.advance(self.rng.choice([0.5, 1.5, 6.0]))
        return moved or self.left > 0

    @property
    def is_over(self) -> bool:
        """Whether nothing is open any more, on either server."""
        return not self.left and not any(
            server.scheduler.state.requests or server.scheduler.state.transfers.is_open or server.consumer.num_open
            for server in self.servers
        )

    def play(self) -> None:
        quiet = 0
        for _ in range(LIMIT):
            quiet = 0 if self.turn() else quiet + 1
            if quiet > 8:
                if self.is_over:
                    break
                self.world.clock.advance(1.5)
        else:
            raise AssertionError("no end in sight")
        for server in self.servers:
            server.assert_clean()
        for name, (server, prompt, max_tokens) in self.wanted.items():
            if name in self.gone:
                continue
            request, answer = server.ended[name], expected(prompt, max_tokens, self.world.limited)
            assert (
                request.outcome.refused
                if request.outcome.finish_reason == "error"
                else request.outcome.finish_reason in ("stop", "length")
            )
            assert server.answers[name] == (answer[: len(request.output)] if request.outcome.refused else answer), name


def check(seeds, limited=False) -> Counter:
    """What has occurred. `limited`: of a model with attention of limited reach."""
    seen = Counter()
    for seed in seeds:
        mix = Mix(seed, limited)
        try:
            mix.play()
        except Exception as error:
            raise AssertionError(f"seed {seed}: {error}") from error
        finally:
            mix.world.close()
        counters = [server.scheduler.state.counters for server in mix.servers]
        for each in counters:
            seen.update(hits=each.external_hits, preemptions=each.preemptions, failed=each.failed_pulls)
            seen.update(each.refused_kv_exports)
        seen.update(shared=mix.shared_pages)
    return seen


@pytest.mark.parametrize("seeds", [EVENTFUL, more(range(40))], ids=lambda seeds: f"{len(seeds)} mixes")
def test_every_answer_is_right_whatever_the_two_are_doing(seeds):
    seen = check(seeds)
    assert seen["hits"] > 1000 and seen["preemptions"] >= 3 and seen["failed"] > 20
    assert min(seen[why] for why in ("total", "client", "timeout")) >= 1
    assert seen["shared"] > 100, "no leases have shared a page"


@pytest.mark.parametrize("seeds", [WITH_WINDOWS, more(range(40))], ids=lambda seeds: f"{len(seeds)} mixes")
def test_so_is_every_answer_of_a_model_with_windows(seeds):
    seen = check(seeds, limited=True)
    assert seen["hits"] > 500 and seen["preemptions"] >= 2 and seen["failed"] > 20 and seen["client"] >= 5


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_many_more_mixes():
    seeds = range(1000, 1000 + int(os.environ.get("CAIRN_LONG_EXAMPLES", "5000")))
    for limited in (False, True):
        check(seeds, limited)
