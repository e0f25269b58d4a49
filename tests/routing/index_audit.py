"""Whether what a prefix index has noted fits together."""

from cairn.routing.index import PrefixIndex


def audit(index: PrefixIndex) -> None:
    """Fails for what cannot be."""
    numbers, alive = list(index._numbers.values()), sum(1 << number for number in set(index._numbers.values()))
    free = sum(1 << number for number in index._free_numbers)
    assert len(set(numbers)) == len(numbers), "two replicas have one number"
    assert alive == index._alive, "the mask of replicas is not that of their numbers"
    assert set(numbers).isdisjoint(index._free_numbers), "a number that was given is free"
    assert max((*numbers, *index._free_numbers), default=-1) < index.num_numbers, "a number that is not there"
    assert len(index._stored) <= index._max_blocks, "too many announced blocks"
    assert len(index._routed) + len(index._routed_before) <= 2 * index._max_routed, "too many routed blocks"
    assert len(index._used) <= 2 * index._max_blocks, "too many used blocks"
    for masks in (index._stored, index._routed, index._routed_before):
        assert not any(block_hash & (index.sample_every - 1) for block_hash in masks), "a block that is not kept"
        assert all(0 < mask < 1 << index.num_numbers for mask in masks.values()), "a mask of nobody"
        assert not any(mask & free for mask in masks.values()), "a mask with a number that is free"
