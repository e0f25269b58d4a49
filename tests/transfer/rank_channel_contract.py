"""What every way between two ranks must do. Subclasses give its two ends."""

from collections.abc import Callable

import pytest


class RankChannelContract:
    """`ends`: (rank 0's end, the other rank's). `wait`: calls its argument until it is true, within a deadline."""

    @pytest.fixture
    def ends(self):
        raise NotImplementedError

    def wait(self, done: Callable[[], bool]) -> None:
        assert done()

    def arrived(self, end, count):
        frames = []

        def enough():
            frames.extend(end.receive())
            return len(frames) >= count

        self.wait(enough)
        return frames

    def test_nothing_is_there_before_anything_was_sent(self, ends):
        assert [*ends[0].receive()] == [] == [*ends[1].receive()]

    def test_frames_arrive_whole_once_and_in_order_both_ways(self, ends):
        frames = [b"", b"\0", b"x" * 100_000, *(b"%d" % number for number in range(100))]
        for source, target in (ends, ends[::-1]):
            for frame in frames:
                source.send(frame)
            assert self.arrived(target, len(frames)) == frames
            assert [*target.receive()] == [] == [*source.receive()]

    def test_what_one_end_says_it_does_not_hear_itself(self, ends):
        ends[0].send(b"there")
        ends[1].send(b"back")
        assert self.arrived(ends[0], 1) == [b"back"] and self.arrived(ends[1], 1) == [b"there"]
