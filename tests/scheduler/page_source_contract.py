"""What every `PageSource` must do: a subclass says how one is made that has a prompt, and how time goes on for it."""

import numpy as np

from cairn.cache.prefix_cache import PrefixCache
from cairn.cache.sequence_blocks import Namespace, SequenceBlocks
from cairn.scheduler.page_source import FetchPlan, FetchRequest, FetchTarget, PageSource
from cairn.transfer.contract import ContentName, KvSource, PagesFree, PullEnded
from cairn.types import RequestId
from doubles.simulated_runner import SimulatedRunner, State, prefill_tags

PROMPT = [7 * i % 50 for i in range(200)]


class PageSourceContract:
    cache: PrefixCache
    runner: SimulatedRunner
    """Those of the server whose pages are filled, 16 tokens each."""

    def source(self) -> PageSource:
        """A new one that has all of `PROMPT`, for requests that name `peer`."""
        raise NotImplementedError

    def peer(self) -> KvSource | None:
        """What a request says of who has its prompt."""
        raise NotImplementedError

    def go_on(self, source: PageSource) -> list:
        """Let everything happen that can; the events."""
        raise NotImplementedError

    def look_further(self) -> None:
        """Let the source find out what it has, and nothing else."""
        raise AssertionError("it is always ready")

    def check(self, target: FetchTarget) -> None:
        """The target has the prompt's tokens and the state at its end."""
        tags, states = prefill_tags(PROMPT)
        assert self.content(target) == (tags[16 * target.pages[0].first_page :], states[-1])

    def content(self, target: FetchTarget) -> tuple[list[int], State]:
        """What the runner reads in the target's pages now: the tags of the tokens, and the state."""
        (part,) = target.pages
        first = part.first_page
        tags = [
            self.runner._read(part.group, part.pages[p // 16 - first], p % 16) for p in range(16 * first, len(PROMPT))
        ]
        return tags, self.runner._read_file(target.state_pages)

    # -- the test's own ------------------------------------------------------------------------------------------

    def request(self, tokens=PROMPT, name="r1") -> FetchRequest:
        return FetchRequest(RequestId(name), ContentName(), np.array(tokens, np.int64), self.peer())

    def look_up(self, tokens=PROMPT) -> SequenceBlocks:
        return self.cache.lookup(Namespace(), np.array(tokens, np.int64), "r1")

    def target(self, sequence: SequenceBlocks) -> FetchTarget:
        length = sequence.num_tokens
        assert self.cache.extend(sequence, length) is not None
        state_pages = self.cache.force_checkpoint(sequence, length)
        assert state_pages is not None
        return FetchTarget(sequence.blocks.span(sequence.matched, length), state_pages)

    def start(self, source, request: FetchRequest, target: FetchTarget):
        """As the scheduler does: nothing is begun that has not been planned."""
        self.get_ready(source, request)
        sequence = self.look_up(request.keys)
        assert source.plan(request, sequence) is not None
        self.cache.discard(sequence)
        return source.start(request, target)

    def get_ready(self, source, request: FetchRequest) -> None:
        """Until it may be asked for a plan."""
        assert source.may_have(request)
        while not source.is_ready(request):
            assert source.is_busy
            self.look_further()

    def test_a_plan_says_how_far_it_leads_and_what_it_costs(self):
        source, sequence = self.source(), self.look_up()
        self.get_ready(source, self.request())
        plan = source.plan(self.request(), sequence)
        assert isinstance(plan, FetchPlan) and plan.position == len(PROMPT) and plan.origin
        layout = self.cache.layout
        assert plan.num_bytes == (layout.pages_for(200) + layout.pages_per_checkpoint) * layout.page_bytes
        assert plan.seconds >= 0.0
        assert source.plan(self.request(), sequence) == plan, "asking changes nothing"
        assert not self.go_on(source)

    def test_what_is_fetched_lies_in_the_target_and_ends_once(self):
        source, sequence = self.source(), self.look_up()
        target = self.target(sequence)
        fetch = self.start(source, self.request(), target)
        ended, free = self.go_on(source)
        assert isinstance(ended, PullEnded) and (ended.pull, ended.failure) == (fetch, None)
        assert (ended.position, ended.checkpoint_position) == (len(PROMPT), len(PROMPT))
        assert free == PagesFree(fetch)
        self.check(target)
        source.abort(fetch)
        assert not self.go_on(source) and not source.events(), "it has ended"

    def test_an_aborted_fetch_frees_its_target_once_and_writes_nothing_after_that(self):
        source, sequence = self.source(), self.look_up()
        target = self.target(sequence)
        fetch = self.start(source, self.request(), target)
        source.abort(fetch)
        source.abort(fetch)
        events = self.go_on(source)
        assert [type(event) for event in events] == [PullEnded, PagesFree]
        assert {event.pull for event in events} == {fetch} and events[0].failure is not None
        self.rewrite(target)
        assert not self.go_on(source)
        assert self.content(target) == ([5] * len(PROMPT), (5, 5)), "somebody else's"

    def rewrite(self, target: FetchTarget) -> None:
        """The pages have another owner."""
        for page in target.pages[0].pages.tolist():
            for offset in range(16):
                self.runner._write(target.pages[0].group, page, offset, 5)
        self.runner._write_file(target.state_pages, (5, 5))

    def test_two_fetches_at_once_have_numbers_of_their_own(self):
        source = self.source()
        targets = [self.target(self.look_up()) for _ in range(2)]
        # a lease is for one: the second may fail, and must say so
        fetches = [self.start(source, self.request(name=f"r{i}"), target) for i, target in enumerate(targets)]
        assert len(set(fetches)) == 2
        events = self.go_on(source)
        for fetch in fetches:
            assert [type(event) for event in events if event.pull == fetch] == [PullEnded, PagesFree]
        good = [event.pull for event in events if isinstance(event, PullEnded) and event.failure is None]
        assert good
        for fetch in good:
            self.check(targets[fetches.index(fetch)])

    def test_nothing_comes_of_a_request_that_is_declined(self):
        source = self.source()
        source.decline(self.request())
        source.decline(self.request(name="other"))
        assert not self.go_on(source)

    def test_a_fetch_may_be_aborted_at_any_moment_and_again(self):
        source = self.source()
        fetch = self.start(source, self.request(), self.target(self.look_up()))
        events = source.events()
        source.abort(fetch)
        events += self.go_on(source)
        source.abort(fetch)
        assert [type(event) for event in events] == [PullEnded, PagesFree] and not self.go_on(source)
