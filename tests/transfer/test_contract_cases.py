"""What moves for a hybrid model and what does not: asserted on the (page, offset, bytes) that the link recorded, with
offers and wants through the scheduler's door, at the block sizes 128 and 16."""

import numpy as np
import pytest

from cairn.transfer.contract import LeaseEnded, PagesFree, PullEnded
from transfer.ranked_world import CANARY, World, leased_spec_of, moves, offer_of
from transfer.world import keys

BLOCKS = pytest.mark.parametrize("block", [16, 128])


class Case:
    """P holds a prompt and checkpoints; D pulls what it lacks."""

    def __init__(self, block, num_tokens, positions):
        self.world = World((1, block), (1, block), kv_heads=1, state_units=2, sides={"num_pages": 96})
        self.p, self.d = self.world.p, self.world.d
        self.prompt, self.content = keys(num_tokens), self.world.content(num_tokens)
        count, k = self.p.pages_of(num_tokens), self.p.pages_per_file
        # Not in order, so that a page number is no position.
        numbers = [*self.world.some_pages(self.p, count + k * len(positions))]
        self.pages = numbers[:count]
        self.files = {position: numbers[count + k * at : count + k * (at + 1)] for at, position in enumerate(positions)}
        self.block, self.k = block, k
        offer = offer_of(self.p, self.content, self.prompt, self.pages, self.files)
        self.reference = self.p.door.offer(offer)

    def pull(self, *, first_page=None, checkpoint=True, release_only=False):
        """D lacks the pages from `first_page` on (None: none). Returns its outcome."""
        num_tokens, d = len(self.prompt), self.d
        start = num_tokens if first_page is None else first_page * self.block
        self.local = [*range(10, 10 + (0 if first_page is None else len(self.pages) - first_page))]
        self.file = [*range(2, 2 + self.k)] if checkpoint else None
        want = leased_spec_of(
            self.reference,
            self.p,
            self.prompt,
            self.local,
            start=start,
            checkpoint=self.file,
            release_only=release_only,
        )
        pull = d.door.pull(want)
        events = self.world.run(30)
        assert [type(event) for event in events["d"]] == [PullEnded, PagesFree]
        outcome = events["d"][0]
        assert (outcome.pull, outcome.failure, outcome.position) == (pull, None, num_tokens)
        self.lease = [event.state for event in events["p"] if isinstance(event, LeaseEnded)]
        rank = d.ranks[0]
        if self.local:
            rank.check_tokens(self.content, start, num_tokens, self.local, only_these=False)
        if self.file:
            rank.check_file(self.content, outcome.checkpoint_position, self.file)
        others = np.setdiff1d(np.arange(rank.num_pages), [*self.local, *(self.file or ())])
        assert (rank.memory[others] == CANARY).all()
        return outcome

    def whole(self, pages):
        return [(0, page, 0, self.p.geometry.page_bytes) for page in pages]


@BLOCKS
def test_mamba_align_only_the_deepest_usable_checkpoint_is_read(block):
    case = Case(block, 400, (128, 256, 384, 400))
    assert case.pull(first_page=0).checkpoint_position == 400
    assert moves(case.d) == case.whole(case.pages + case.files[400])


@BLOCKS
@pytest.mark.parametrize(("wanted", "deepest"), [(399, 384), (384, 384), (383, 256), (128, 128)])
def test_mamba_align_a_shorter_prompt_reads_the_deepest_checkpoint_below_its_end(block, wanted, deepest):
    case = Case(block, 400, (128, 256, 384, 400))
    case.prompt, num_pages = case.prompt[:wanted], -(-wanted // block)
    case.pages = case.pages[:num_pages]
    assert case.pull(first_page=0).checkpoint_position == deepest
    assert moves(case.d) == case.whole(case.pages + case.files[deepest])


@BLOCKS
def test_ssm_prefix_exactly_pages_six_to_nine_move(block):
    case = Case(block, 10 * block, ())
    case.pull(first_page=6, checkpoint=False)
    assert moves(case.d) == case.whole(case.pages[6:10]) and len(case.pages) == 10


@BLOCKS
def test_ssm_prefix_pages_six_to_nine_and_the_deepest_checkpoint_move(block):
    case = Case(block, 10 * block, (4 * block, 8 * block, 10 * block))
    assert case.pull(first_page=6).checkpoint_position == 10 * block
    assert moves(case.d) == case.whole(case.pages[6:10] + case.files[10 * block])


@BLOCKS
def test_mamba_align_pages_are_here_and_only_the_checkpoint_moves(block):
    case = Case(block, 400, (128, 256, 384, 400))
    assert case.pull().checkpoint_position == 400
    assert moves(case.d) == case.whole(case.files[400])
    assert case.lease == ["confirmed"]


@BLOCKS
def test_ssm_prefix_nothing_is_lacking_and_the_lease_is_released(block):
    case = Case(block, 400, (128, 256, 384, 400))
    assert case.pull(checkpoint=False, release_only=True).checkpoint_position is None
    assert moves(case.d) == [] and case.lease == ["released"]
    assert case.p.producer.leases.num_pages == 0 and case.p.door.is_idle


@BLOCKS
def test_ssm_prefix_zero_pages_and_no_checkpoint_are_an_ordinary_claim(block):
    case = Case(block, 400, ())
    case.pull(checkpoint=False)
    assert moves(case.d) == [] and case.lease == ["confirmed"]
