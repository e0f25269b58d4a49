"""Which peers are not worth a wait now."""

from cairn.transfer.peers import UnresponsivePeers
from cairn.types import ManualClock

A, B = ("127.0.0.1", 1), ("127.0.0.1", 2)


def test_only_the_silent_address_is_refused_and_only_for_a_while():
    clock = ManualClock()
    peers = UnresponsivePeers(clock, 10.0)
    peers.add(A)
    assert "did not answer" in peers.refuse(A) and peers.refuse(B) is None
    clock.advance(9.99)
    assert peers.refuse(A) is not None and peers.num_skipped == 2
    clock.advance(0.01)
    assert peers.refuse(A) is None, "the probe"
    assert peers.refuse(A) is not None, "no second one meanwhile"
    clock.advance(10.0)
    assert peers.refuse(A) is None, "a probe that never ended is followed by another"


def test_an_answer_ends_it():
    peers = UnresponsivePeers(ManualClock(), 10.0)
    peers.add(A)
    peers.remove(A)
    peers.remove(B)
    assert peers.refuse(A) is None and len(peers) == 0 and peers.num_skipped == 0


def test_addresses_are_bounded_and_the_oldest_goes():
    peers = UnresponsivePeers(ManualClock(), 10.0)
    for port in range(1, 2001):
        peers.add(("h", port))
    assert len(peers) == 1024
    assert peers.refuse(("h", 1)) is None and peers.refuse(("h", 2000)) is not None
