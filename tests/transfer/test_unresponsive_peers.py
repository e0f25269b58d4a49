"""Which peers are not worth a wait now."""

from cairn.transfer.peers import UnresponsivePeers
from cairn.types import ManualClock

A, B = ("127.0.0.1", 1), ("127.0.0.1", 2)


def test_only_the_silent_address_is_refused_and_only_for_a_while():
    clock = ManualClock()
    peers = UnresponsivePeers(clock, 10.0)
    peers.add(A, "p")
    assert "did not answer" in peers.refuse(A, "p") and peers.refuse(B, "p") is None
    clock.advance(9.99)
    assert peers.refuse(A, "p") is not None and peers.num_skipped == 2
    clock.advance(0.01)
    assert peers.refuse(A, "p") is None, "the probe"
    assert peers.refuse(A, "p") is not None, "no second one meanwhile"
    clock.advance(10.0)
    assert peers.refuse(A, "p") is None, "a probe that never ended is followed by another"


def test_another_engine_at_the_address_is_another_peer():
    clock = ManualClock()
    peers = UnresponsivePeers(clock, 10.0)
    for name in ("first", "second", "third"):
        assert peers.refuse(A, name) is None
        peers.add(A, name)
        clock.advance(1.0)
    assert peers.refuse(A, "fourth") is None
    assert all(peers.refuse(A, name) is not None for name in ("first", "second", "third"))


def test_an_answer_ends_it():
    peers = UnresponsivePeers(ManualClock(), 10.0)
    for name in ("before", "after"):
        peers.add(A, name)
    peers.add(B, "p")
    peers.remove(A)
    peers.remove(A)
    assert peers.refuse(A, "before") is None and peers.refuse(A, "after") is None and peers.num_skipped == 0
    assert peers.refuse(B, "p") is not None and len(peers._retry_at) == 1


def test_peers_are_bounded_and_the_oldest_goes():
    peers = UnresponsivePeers(ManualClock(), 10.0)
    for number in range(1, 1001):
        peers.add(("h", number), "p")
        peers.add(("h", 0), f"engine {number}")
    assert len(peers._retry_at) == 1024
    assert peers.refuse(("h", 1), "p") is None and peers.refuse(("h", 1000), "p") is not None
