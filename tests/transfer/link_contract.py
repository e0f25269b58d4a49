"""What every link must do, whatever moves its bytes. Subclasses give two links that can reach each other."""

import numpy as np
import pytest

from cairn.transfer.links.contract import Descriptors, LinkError, ReadState, Region

NUM_PAGES = 12
PAGE_BYTES = 256
MAX_POLLS = 2_000_000


def pool(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (NUM_PAGES, PAGE_BYTES)).astype(np.uint8)


def ranges(*rows: tuple[int, int, int, int, int]) -> Descriptors:
    """From (remote page, remote offset, local page, local offset, bytes)."""
    return Descriptors(*np.array(rows, np.int64).reshape(-1, 5).T)


def pages(remote, local) -> Descriptors:
    return ranges(*[(r, 0, mine, 0, PAGE_BYTES) for r, mine in zip(remote, local, strict=True)])


class LinkContract:
    """`sides`: (reader, its pool, source, its pool), both registered."""

    @pytest.fixture
    def sides(self):
        raise NotImplementedError

    def finish(self, reader, source, handle) -> ReadState:
        for _ in range(MAX_POLLS):
            state = reader.poll(handle)
            if state is not ReadState.READING:
                return state
            source.progress()
        raise AssertionError("the read does not end")

    def test_whole_pages_arrive_where_they_belong_and_nothing_else_changes(self, sides):
        reader, mine, source, theirs = sides
        expected = mine.copy()
        expected[[4, 0, 7]] = theirs[[1, 9, 11]]
        peer = reader.connect(source.describe())
        assert self.finish(reader, source, reader.read(peer, pages([1, 9, 11], [4, 0, 7]))) is ReadState.DONE
        assert np.array_equal(mine, expected)

    def test_byte_ranges_arrive_where_they_belong(self, sides):
        reader, mine, source, theirs = sides
        expected = mine.copy()
        expected[2, 5:12] = theirs[3, 100:107]
        expected[2, 255] = theirs[0, 0]
        expected[6] = theirs[6]
        peer = reader.connect(source.describe())
        handle = reader.read(peer, ranges((3, 100, 2, 5, 7), (0, 0, 2, 255, 1), (6, 0, 6, 0, PAGE_BYTES)))
        assert self.finish(reader, source, handle) is ReadState.DONE
        assert np.array_equal(mine, expected)

    def test_many_reads_are_open_at_once(self, sides):
        reader, mine, source, theirs = sides
        peer = reader.connect(source.describe())
        handles = [reader.read(peer, pages([page], [NUM_PAGES - 1 - page])) for page in range(NUM_PAGES)]
        assert len(set(handles)) == NUM_PAGES
        assert {self.finish(reader, source, handle) for handle in handles} == {ReadState.DONE}
        assert np.array_equal(mine, theirs[::-1])

    def test_both_directions(self, sides):
        reader, mine, source, theirs = sides
        to, back = reader.connect(source.describe()), source.connect(reader.describe())
        assert self.finish(reader, source, reader.read(to, pages([5], [5]))) is ReadState.DONE
        mine[1] = 42
        assert self.finish(source, reader, source.read(back, pages([1], [2]))) is ReadState.DONE
        assert (theirs[2] == 42).all() and np.array_equal(mine[5], theirs[5])

    def test_a_cancelled_read_ends_and_is_forgotten(self, sides):
        reader, _, source, _ = sides
        handle = reader.read(reader.connect(source.describe()), pages([1, 2], [1, 2]))
        reader.cancel(handle)
        assert self.finish(reader, source, handle) in (ReadState.CANCELLED, ReadState.DONE)
        assert reader.num_open == 0
        reader.cancel(handle)
        with pytest.raises(LinkError, match="no read"):
            reader.poll(handle)

    def test_connecting_again_is_the_same_peer(self, sides):
        reader, _, source, _ = sides
        assert reader.connect(source.describe()) == reader.connect(source.describe())

    def test_a_peer_that_was_disconnected_is_not_read(self, sides):
        reader, mine, source, _ = sides
        peer, before = reader.connect(source.describe()), mine.copy()
        reader.disconnect(peer)
        with pytest.raises(LinkError, match="not connected"):
            reader.read(peer, pages([0], [0]))
        assert np.array_equal(mine, before)
        reader.disconnect(peer)

    def test_disconnecting_lets_an_open_read_end(self, sides):
        reader, _, source, _ = sides
        peer = reader.connect(source.describe())
        handle = reader.read(peer, pages([1, 2], [1, 2]))
        reader.disconnect(peer)
        assert self.finish(reader, source, handle) is not ReadState.READING
        assert reader.num_open == 0

    @pytest.mark.parametrize(
        "row",
        [
            (NUM_PAGES, 0, 0, 0, 1),
            (-1, 0, 0, 0, 1),
            (0, 0, NUM_PAGES, 0, 1),
            (0, 0, -1, 0, 1),
            (0, PAGE_BYTES, 0, 0, 1),
            (0, 1, 0, 0, PAGE_BYTES),
            (0, 0, 0, 1, PAGE_BYTES),
            (0, -1, 0, 0, 2),
            (0, 0, 0, 0, 0),
            (0, 0, 0, 0, -1),
            (0, 0, 0, 0, 2**62),
            (2**62, 2**62, 0, 0, 2**62),
        ],
    )
    def test_ranges_outside_a_page_are_refused_before_anything_moves(self, sides, row):
        reader, mine, source, _ = sides
        peer, before = reader.connect(source.describe()), mine.copy()
        with pytest.raises(LinkError, match="outside its page"):
            reader.read(peer, ranges((1, 0, 1, 0, PAGE_BYTES), row))
        assert np.array_equal(mine, before) and reader.num_open == 0
        assert self.finish(reader, source, reader.read(peer, pages([1], [1]))) is ReadState.DONE

    def test_a_read_of_nothing_is_refused(self, sides):
        reader, _, source, _ = sides
        with pytest.raises(LinkError, match="at least one"):
            reader.read(reader.connect(source.describe()), ranges())

    @pytest.mark.parametrize("description", [b"", b"\xff\x00", b"nobody", b"\x80\x04K\x01."])
    def test_a_broken_description_is_refused(self, sides, description):
        with pytest.raises(LinkError):
            sides[0].connect(description)

    def test_a_second_region_is_refused(self, sides):
        with pytest.raises(LinkError, match="one region"):
            sides[0].register(Region.of(pool(9)))

    def test_closing_leaves_nothing_open(self, sides):
        reader, _, source, _ = sides
        peer = reader.connect(source.describe())
        self.finish(reader, source, reader.read(peer, pages([1], [1])))
        assert reader.close() == 0
        assert reader.num_open == 0
