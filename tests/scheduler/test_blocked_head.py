"""Who waits for pages costs each step next to nothing, and comes in when it would have come in anyhow."""

from collections import Counter
from dataclasses import fields

import numpy as np
import pytest
from driver import Driver, alone
from hypothesis import HealthCheck, given, settings
from test_random_mixes import MIX, check_mix

from cairn.cache import lookup, prefix_cache
from cairn.cache.allocator import PinnedPages
from cairn.cache.checkpoint import Lineage
from cairn.cache.lookup import PrefixLookup
from cairn.cache.prefix_cache import PrefixCache
from cairn.cache.reasons import Reason
from cairn.cache.sequence_blocks import PageTable, PageTables, PrefixMatch
from cairn.keys import KeyBuffer
from cairn.scheduler.request import Phase
from tiers import first_of

TEXT = tuple(range(1000))


def counting(monkeypatch) -> Counter:
    """How often trees were walked, held pages counted, and reasons looked for."""
    counts: Counter = Counter()

    def counted(place, name):
        inner = getattr(place, name)

        def call(*arguments, **named):
            counts[name] += 1
            return inner(*arguments, **named)

        monkeypatch.setattr(place, name, call)

    counted(lookup, "walk")
    counted(PinnedPages, "num_pages")
    counted(prefix_cache, "miss_reasons")
    return counts


def blocked(**config) -> tuple[Driver, str]:
    """A driver whose pages are all taken by one that decodes, and one that waits for some of them."""
    driver = Driver(num_pages=60, max_num_batched_tokens=1024, **config)
    driver.submit(TEXT[:640], max_tokens=200)
    while not driver.requests["r1"].output:
        driver.step()
    return driver, driver.submit((*TEXT[:100], *range(5000, 5500)), max_tokens=3)


def test_the_head_of_the_queue_is_not_looked_up_in_every_step(monkeypatch):
    counts = counting(monkeypatch)
    driver, waits = blocked()
    driver.step()
    before, version = counts.copy(), driver.cache.checkpoints.version
    for _ in range(30):  # then the answer needs a page that something has to go for
        driver.step()
    assert driver.requests[waits].phase is Phase.WAITING
    assert driver.cache.checkpoints.version == version, "the trees have changed: this tests nothing"
    assert counts == before
    driver.run()
    assert counts["miss_reasons"] == 2, "reasons are for those that begin"
    first = driver.requests[waits].stats.first_sequence
    assert (first.hit, first.lost) == (64, {Reason.NO_CHECKPOINT: 36, Reason.NEVER_SEEN: 500})
    assert driver.output(waits) == alone((*TEXT[:100], *range(5000, 5500)), False, max_tokens=3)


def test_it_is_looked_up_again_when_the_trees_have_changed(monkeypatch):
    counts = counting(monkeypatch)
    driver, waits = blocked()
    driver.step()
    version, walks = driver.cache.checkpoints.version, counts["walk"]
    # what another one leaves there makes its hit longer
    sequence = driver.requests["r1"].sequence
    driver.cache._writer.commit(sequence, sequence.committed + 1, ())
    assert driver.cache.checkpoints.version > version
    driver.step()
    assert counts["walk"] == walks + 1
    driver.run()
    assert len(driver.output(waits)) == 3


@pytest.mark.parametrize(
    ("num_pages", "exact"), first_of([(40, True), (48, False), (90, False)], (40, 48, 60, 90), (False, True))
)
def test_it_comes_in_when_it_would_have_come_in_anyhow(monkeypatch, num_pages, exact):
    """Plan by plan the same as when everything is looked up and counted anew every time."""

    def plans():
        driver = Driver(num_pages=num_pages, exact=exact, max_num_batched_tokens=300)
        for number in range(9):
            start = 1000 * (number % 4)
            driver.submit((*range(start, start + 120), *range(9000 + 500 * number, 9150 + 500 * number)), max_tokens=40)
        driver.run()
        told = [
            [(admit.slot, *(pages.tolist() for pages in admit.tables)) for admit in plan.admits]
            for plan in driver.plans
        ]
        return told, driver.cache.counters, driver.scheduler.state.counters

    kept = plans()
    forget_everything(monkeypatch)
    assert plans() == kept


def forget_everything(monkeypatch) -> None:
    find, could_free = PrefixLookup.find, PrefixCache.could_free

    def fresh_find(prefix_lookup, *arguments):
        prefix_lookup._memo.clear()
        return find(prefix_lookup, *arguments)

    def fresh_could_free(cache, *arguments):
        cache.pinned._shortages.clear()
        return could_free(cache, *arguments)

    monkeypatch.setattr(PrefixLookup, "find", fresh_find)
    monkeypatch.setattr(PrefixCache, "could_free", fresh_could_free)


def plain(value):
    """What can be compared: lists for page tables and keys."""
    if isinstance(value, tuple):
        return tuple(map(plain, value))
    if isinstance(value, PageTables):
        return plain(value.tables), value.copied
    if isinstance(value, KeyBuffer):
        return value.keys.tolist()
    if isinstance(value, PrefixMatch | Lineage):
        return [plain(getattr(value, field.name)) for field in fields(value)]
    if isinstance(value, PageTable):
        return value.pages.tolist(), value.num_shared, value.num_sent
    return value.tolist() if isinstance(value, np.ndarray) else value


@pytest.mark.more
def test_what_is_kept_is_what_would_be_found_anew(monkeypatch):
    find, could_free = PrefixLookup.find, PrefixCache.could_free
    seen = Counter()

    def checked_find(prefix_lookup, version, root, namespace, keys, request_id, resumed_from):
        sequence = find(prefix_lookup, version, root, namespace, keys, request_id, resumed_from)
        fresh = PrefixLookup(prefix_lookup._layout, prefix_lookup._exact, prefix_lookup._eviction)
        anew = find(fresh, version, root, namespace, keys, request_id, resumed_from)
        told, wanted = ([plain(getattr(one, field.name)) for field in fields(one)] for one in (sequence, anew))
        assert told == wanted
        seen["finds"] += 1
        return sequence

    def checked_could_free(cache, sequence, num_pages):
        told = could_free(cache, sequence, num_pages)
        assert told == (num_pages <= cache.pool.num_pages - cache.pinned.num_pages())
        seen[told] += 1
        return told

    @settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
    @given(**MIX)
    def check(**mix):
        check_mix(**mix)

    monkeypatch.setattr(PrefixLookup, "find", checked_find)
    monkeypatch.setattr(PrefixCache, "could_free", checked_could_free)
    check()
    assert seen["finds"] and seen[True]
