"""Looking at the cache: the survey of its tree, folded, with the journal beside it.

Looking at the whole tree takes a while, so it is done in slices: whoever asks takes other work in between, and the tree
may change meanwhile. What is shown is then of several moments, and its form is right all the same.
"""

from collections.abc import Iterator

from cairn.cache.cures import Situation, cure
from cairn.cache.journal import INTERVAL_SECONDS, NAMED_TOKENS
from cairn.cache.prefix_cache import PrefixCache
from cairn.cache.survey import Columns, Numbers, Stone, Survey
from cairn.cache.tree import last_keys
from cairn.cache.view import (
    CacheView,
    CheckpointView,
    Folded,
    IntervalView,
    LostView,
    PathView,
    PoolView,
    TreeView,
    VisitView,
)

_STONES = 8
"""Most checkpoints of one path that are shown one by one."""
_MAX_LOST = 20


def look(cache: PrefixCache, max_paths: int) -> Iterator[CacheView | None]:
    """Look at the cache, a slice at each turn: None until the last item, which is the view.

    At most `max_paths` paths are shown one by one, 1 to `MAX_SHOWN`. O(nodes) in all, and O(1) nodes a turn but for
    sorting the paths once.
    """
    survey = Survey()
    for _ in survey.walk(cache):
        yield None
    columns = survey.columns()
    yield None
    shown = survey.heaviest(columns, cache.layout.pages_per_checkpoint, max_paths)
    yield None
    paths, below = _paths(cache, survey, columns, shown)
    yield None
    yield _whole(cache, _tree(cache, survey, columns, below), paths)


def _paths(cache: PrefixCache, survey: Survey, columns: Columns, shown: list[int]) -> tuple[list[PathView], Numbers]:
    """The paths `shown`, and the sums over those that are below no one of them."""
    place = {path: index for index, path in enumerate(shown)}
    stones: dict[int, list[Stone]] = {path: [] for path in shown}
    for stone in survey.stones:
        if stone.path in stones:
            stones[stone.path].append(stone)
    # what is in the list is folded into nobody
    below = [columns.of(path + 1, survey.until[path]) for path in shown]
    below.append(columns.of(0, len(survey.parent)))
    children = [0] * len(below)
    for path in shown:
        parent = place.get(survey.parent[path], -1)
        below[parent] = below[parent] - columns.of(path, survey.until[path])
        children[parent] += 1
    views = []
    for index, path in enumerate(shown):
        node, number = survey.last[path], survey.namespace[path]
        best, others = _best(stones[path])
        views.append(
            PathView(
                name=cache.journal.names.name(number, survey.end[path], last_keys(node, NAMED_TOKENS)),
                parent=place.get(survey.parent[path]),
                namespace=number,
                start=survey.start[path],
                end=survey.end[path],
                bytes=survey.pages[path] * cache.layout.page_bytes,
                resident=node.pages is not None,
                users=node.locks,
                children=children[index],
                checkpoints=[_checkpoint(cache, stone, survey.tick) for stone in best],
                more=_rest(cache, others),
                below=_folded(cache, below[index]),
            )
        )
    return views, below[-1]


def _best(stones: list[Stone]) -> tuple[list[Stone], list[Stone]]:
    """Those to be shown, ascending, and the others: first what was hit or is not on probation, and of the rest some all
    along the path."""
    if len(stones) <= _STONES:
        return stones, []
    earned = [stone for stone in stones if stone.hits or not stone.checkpoint.kind.on_probation]
    best = sorted(earned, key=lambda stone: (-stone.hits, -stone.saved))[:_STONES]
    room, rest = _STONES - len(best), [stone for stone in stones if stone not in earned]
    best += [rest[(2 * index + 1) * len(rest) // (2 * room)] for index in range(room)]
    shown = {id(stone) for stone in best}
    return [stone for stone in stones if id(stone) in shown], [stone for stone in stones if id(stone) not in shown]


def _checkpoint(cache: PrefixCache, stone: Stone, tick: int) -> CheckpointView:
    checkpoint, freed = stone.checkpoint, stone.freed * cache.layout.page_bytes
    reuse = checkpoint.node.reuse
    chance = cache.residents.reuse.chance(reuse) if reuse is not None else 0.0
    return CheckpointView(
        position=stone.position,
        kind=checkpoint.kind.value,
        bytes=stone.pages * cache.layout.page_bytes,
        hits=stone.hits,
        idle=max(0, tick - checkpoint.last_used),
        saved_tokens=stone.saved,
        freed_bytes=freed,
        value=round(1000 * chance * stone.saved * (1 << 20) / max(1, freed), 3),
        held=checkpoint.held_until is not None,
        probation=checkpoint.kind.on_probation and not stone.hits,
    )


def _rest(cache: PrefixCache, stones: list[Stone]) -> Folded:
    return Folded(
        checkpoints=len(stones),
        bytes=sum(stone.pages for stone in stones) * cache.layout.page_bytes,
        hits=sum(stone.hits for stone in stones),
    )


def _folded(cache: PrefixCache, sums: Numbers) -> Folded:
    paths, tokens, pages, files, checkpoints, hits = sums.tolist()
    size = (pages + files) * cache.layout.page_bytes
    return Folded(paths=paths, tokens=tokens, bytes=size, checkpoints=checkpoints, hits=hits)


def _tree(cache: PrefixCache, survey: Survey, columns: Columns, below: Numbers) -> TreeView:
    paths, tokens, _, files, checkpoints, hits = columns.of(0, len(survey.parent)).tolist()
    return TreeView(
        nodes=survey.nodes,
        paths=paths,
        namespaces=survey.namespaces,
        tokens=tokens,
        checkpoints=checkpoints,
        checkpoint_bytes=files * cache.layout.page_bytes,
        hits=hits,
        dropped_tokens=survey.dropped_tokens,
        dropped_checkpoints=survey.dropped_checkpoints,
        below=_folded(cache, below),
    )


def _whole(cache: PrefixCache, tree: TreeView, paths: list[PathView]) -> CacheView:
    journal, now = cache.journal, cache.journal.clock.now()
    situation = Situation.of(cache, tree.dropped_tokens, tree.dropped_checkpoints)
    return CacheView(
        enabled=cache.enabled,
        pool=_pool(cache),
        tree=tree,
        paths=paths,
        history=[
            IntervalView(
                age=round(now - interval.start, 3),
                seconds=INTERVAL_SECONDS,
                requests=interval.requests,
                prompt=interval.prompt,
                hit=interval.hit,
                received=interval.received,
                lost={reason.value: tokens for reason, tokens in interval.lost.items()},
            )
            for interval in journal.intervals
        ],
        lost=[
            LostView(
                name=prefix.name,
                depth=prefix.depth,
                namespace=prefix.namespace,
                tokens=prefix.tokens,
                requests=prefix.requests,
                age=round(now - prefix.at, 3),
                reason=prefix.reason.value,
                cure=cure(prefix.reason, prefix.depth, situation),
            )
            for prefix in journal.heaviest(_MAX_LOST)
        ],
        unlisted_tokens=journal.floor,
        visits=[
            VisitView(
                number=visit.number,
                age=round(now - visit.at, 3),
                namespace=visit.namespace,
                prompt=visit.prompt,
                hit=visit.hit,
                received=visit.received,
                matched=visit.matched,
                reason=visit.reason.value,
                lost={reason.value: tokens for reason, tokens in visit.lost.items()},
            )
            for visit in reversed(journal.visits)
        ],
    )


def _pool(cache: PrefixCache) -> PoolView:
    holders, pool = cache.holders, cache.pool
    lists = holders.of_requests()
    by_requests = holders.num_distinct(lists)
    lists += holders.of_others()
    with_transfers = holders.num_distinct(lists)
    held = holders.num_distinct(lists + holders.of_steps())
    return PoolView(
        pages=pool.num_pages,
        page_bytes=cache.layout.page_bytes,
        free_pages=pool.num_free,
        cached_pages=pool.num_pages - pool.num_free - held,
        held_by_requests=by_requests,
        held_by_transfers=with_transfers - by_requests,
        held_by_steps=held - with_transfers,
        open_leases=len(cache.leases),
        open_holds=sum(not hold.for_requests for hold in cache.holds.values()),
    )
