"""A scheduler with a simulated runner, turned by hand."""

from dataclasses import replace

import numpy as np

from cairn.cache.audit import audit
from cairn.cache.eviction import ValuePerByte
from cairn.cache.layout import AttentionGroup, CacheLayout
from cairn.cache.placement import PlacementPolicy, placement_for
from cairn.cache.prefix_cache import CachePolicy, PrefixCache
from cairn.cache.sequence_blocks import Namespace
from cairn.engine.step_pipeline import StepPipeline
from cairn.scheduler.request import Request, Spec
from cairn.scheduler.scheduler import Progress, Scheduler
from cairn.scheduler.state import SchedulerConfig
from cairn.scheduler.transfers import Transfers
from cairn.transfer.contract import TransferRole
from cairn.types import Boundary, ManualClock, RequestId, SamplingParams
from doubles.simulated_runner import SimulatedRunner

PLAIN = Namespace()


def layout(
    block_size: int = 16,
    pages_per_checkpoint: int = 3,
    limited: tuple[AttentionGroup, ...] = (),
    unlimited: bool = True,
) -> CacheLayout:
    """`limited`: attention groups besides the one without a limit, or instead of it."""
    full = (AttentionGroup("full", block_size),) if unlimited else ()
    return CacheLayout(
        block_size=block_size,
        page_bytes=64,
        page_units=1,
        groups=(*full, *limited),
        header_bytes=8,
        state_bytes=max(0, 64 * pages_per_checkpoint - 8),
        state_units=1,
    )


class ForgetfulRunner(SimulatedRunner):
    """What a slot's last request has left there does not stand for what is not told of."""

    def launch(self, plan):
        for admit in plan.admits:
            for table in self.tables.tables:
                table[admit.slot] = -1
        super().launch(plan)


class Driver:
    """`mode` None: the cache is off. `side`: the way to other servers, `sources` to others that may have pages.
    `drafter`: as of a `Scheduler`."""

    def __init__(
        self,
        mode: str | None = "auto",
        num_pages: int = 1000,
        block_size: int = 16,
        side=None,
        sources=(),
        drafter=None,
        limited: tuple[AttentionGroup, ...] = (),
        pages_per_checkpoint: int = 3,
        **config,
    ) -> None:
        config.setdefault("max_num_seqs", 4)
        config.setdefault("max_num_batched_tokens", 256)
        self.config = SchedulerConfig(**config)
        self.layout = layout(block_size, pages_per_checkpoint, limited)
        placement: PlacementPolicy | None = None
        if mode is not None:
            placement = placement_for(mode, block_size, self.config.exact)
        self.clock = ManualClock()
        self.cache = PrefixCache(
            self.layout, num_pages, CachePolicy(placement, ValuePerByte(), self.config.exact), clock=self.clock
        )
        transfers = Transfers(side, sources=tuple(sources))
        self.scheduler = Scheduler(self.config, self.cache, self.clock, transfers, drafter=drafter)
        self.runner = ForgetfulRunner(self.layout, num_pages, self.config.max_num_seqs, 50, numerics=self.config.exact)
        self.pipeline = StepPipeline(self.scheduler, self.runner)
        self.requests: dict[str, Request] = {}
        self.plans: list = []
        self.count = 0

    def submit(
        self,
        prompt,
        max_tokens=4,
        seed=0,
        namespace=PLAIN,
        boundaries=(),
        name=None,
        stop=(),
        n=1,
        sampling=SamplingParams(),  # noqa: B008 - frozen
        source=None,
        **fields,
    ) -> str:
        """With `n` answers those behind the first are called NAME.1, NAME.2, ..., and their seeds count up."""
        self.count += 1
        name = name or f"r{self.count}"
        spec = Spec(
            request_id=RequestId(name),
            prompt=np.array(prompt, np.int64),
            sampling=replace(sampling, seed=seed),
            max_tokens=max_tokens,
            stop_token_ids=frozenset(stop),
            namespace=namespace,
            boundaries=tuple(end if isinstance(end, Boundary) else Boundary(end) for end in boundaries),
            role=TransferRole(source),
            **fields,
        )
        names = [name, *(f"{name}.{i}" for i in range(1, n))]
        branches = [
            replace(spec, request_id=RequestId(own), sampling=replace(sampling, seed=seed + i), prompt_logprobs=None)
            for i, own in enumerate(names)
        ]
        self.scheduler.submit(spec, branches[1:])
        for own in names:
            self.requests[own] = self.scheduler.state.requests[RequestId(own)]
        return name

    def step(self) -> list[Progress]:
        """Launch as many steps as may be out, then take in the oldest one."""
        while self.pipeline.can_launch:
            self.plans.append(self.pipeline.launch())
            self.check_tables(self.pages())
        progress = self.pipeline.collect()
        audit(self.cache)
        return progress

    def pages(self) -> dict[int, list]:
        """By slot, the pages of those that run: for each group the place of the first one, and a list."""
        return {
            request.slot: [(table.first_page, table.pages.tolist()) for table in request.sequence.tables]
            for request in self.scheduler.state.running
        }

    def check_tables(self, pages: dict[int, list]) -> None:
        """What the runner has been told of pages is what the requests have."""
        for slot, lists in pages.items():
            for group, (table, (first, wanted)) in enumerate(zip(self.runner.tables.tables, lists, strict=True)):
                assert table[slot, first : first + len(wanted)].tolist() == wanted, f"slot {slot}, group {group}"

    def run(self, limit: int = 3000) -> None:
        """Until nothing is left to do."""
        while self.scheduler.has_work:
            limit -= 1
            assert limit, "no end in sight"
            self.step()
        state = self.scheduler.state
        assert (
            not self.cache.pinned.sequences
            and not self.cache.pinned.steps
            and not self.cache.pinned.pins
            and not state.requests
        )
        assert sorted(state.slots.free) == list(range(self.config.max_num_seqs))

    def output(self, name: str) -> list[int]:
        return self.requests[name].output

    def ask(self, prompt, **arguments) -> Request:
        """Submit and run to the end."""
        name = self.submit(prompt, **arguments)
        self.run()
        return self.requests[name]


def alone(prompt, exact: bool, limited: tuple[AttentionGroup, ...] = (), **arguments) -> list[int]:
    """The answer of a server that does nothing else and caches nothing."""
    return Driver(None, num_pages=4000, limited=limited, exact=exact).ask(prompt, **arguments).output
