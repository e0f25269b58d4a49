"""How what a request has computed enters the tree: its tokens as runs, its files as checkpoints."""

from collections.abc import Iterable
from dataclasses import dataclass

from cairn.cache.checkpoint import Origin
from cairn.cache.lease import Lease
from cairn.cache.residents import Residents
from cairn.cache.tree import Node, TokenKey, common_prefix
from cairn.step import GRID


@dataclass(frozen=True, slots=True)
class TreeWriter:
    """Writes to the trees of `residents`. `exact`: what prefill has built takes the place of what decode steps have."""

    residents: Residents
    exact: bool

    def commit(self, lease: Lease, num_tokens: int, kept: Iterable[int]) -> None:
        """The first `num_tokens` tokens of `lease` and its filled files at positions `kept` are there for everybody."""
        runs = self.residents.runs
        if num_tokens > lease.committed:
            node = self._insert(lease, num_tokens)
            old, before, lease.node, lease.committed = lease.node, lease.committed, node, num_tokens
            if old is not None and old.end == before:
                runs.lock(node, below=old)
            else:
                runs.lock(node)
                if old is not None:
                    runs.unlock(old)
        positions = {*kept, *(position for position in lease.refused if position <= num_tokens)}
        at, unkept = lease.node, []
        for position in sorted(positions, reverse=True):
            at = self._node_at(lease, position, at)
            if position in lease.files:
                self._attach(lease, position, at)
            else:
                unkept.append(at)
        # their hits fall to what is above them, so that has to be there first
        for node in unkept:
            kind = lease.refused.pop(node.end)
            self.residents.ranking.remember(node, kind, _origin(lease, node.end), lease.lineage)
        if positions and lease.known is not None:
            self.residents.ranking.covered(lease.known)

    def _insert(self, lease: Lease, upto: int) -> Node:
        runs = self.residents.runs
        if lease.node is not None and lease.node.end == lease.committed:
            node = lease.node
        else:
            node = runs.root(lease.namespace)
        position = base = node.end
        new = TokenKey(lease.keys[base:upto])
        while position < upto:
            decoded = position >= lease.decode_from
            stop = upto if decoded else min(upto, lease.decode_from)
            maker = lease.request_id if decoded else None
            child = node.child(int(new.tokens[position - base]))
            if child is None:
                run = new.slice_raw(position - base, stop - base)
                node = runs.add(node, run, stop, lease.span(position, stop), maker, lease.num_prompt_tokens)
                position = stop
                continue
            end = min(stop, position + common_prefix(child.raw, child.num_tokens, new, position - base))
            if end < child.end:
                child = runs.cut(child, end)
            # while somebody has locked a run, its pages are what that lease reads
            better = self.exact and child.decode_by is not None and not decoded and not child.locks
            if child.pages is None or better:
                runs.fill(child, lease.span(position, end), maker)
            node, position = child, end
        return node

    def _node_at(self, lease: Lease, position: int, node: Node | None) -> Node:
        """The node of the committed path that ends at `position`, cut if need be; it is `node` or above it."""
        while node is not None and node.start >= position:
            node = node.parent
        assert node is not None and node.start < position <= node.end, f"{position} is not on the committed path"
        return self.residents.runs.cut(node, position) if position < node.end else node

    def _attach(self, lease: Lease, position: int, node: Node) -> None:
        """Hang the file wanted for `position` at the end of `node`."""
        file = lease.files.pop(position)
        origin = _origin(lease, position)
        if not self.residents.attach(node, file.pages, file.kind, origin, lease.request_id, lease.lineage):
            self.residents.pool.release(file.pages)
        assert node.checkpoint is not None
        if file.hold_seconds and self.residents.ranking.hold(node.checkpoint, file.hold_seconds):
            lease.held.add(position)


def _origin(lease: Lease, position: int) -> Origin:
    if position > lease.decode_from:
        return Origin.DECODE
    return Origin.TAIL if position % GRID else Origin.GRID
