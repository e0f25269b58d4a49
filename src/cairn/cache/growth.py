"""Pages for the tokens that a request is going to write: new ones, and copies of shared ones."""

from dataclasses import dataclass

from cairn.cache.layout import CacheLayout
from cairn.cache.lease import Lease, PageTable
from cairn.cache.pages import PagePool
from cairn.cache.residents import Residents
from cairn.step import PageCopy


@dataclass(frozen=True, slots=True)
class Growth:
    """Lets leases grow in the pool, at the expense of what is only cached."""

    layout: CacheLayout
    pool: PagePool
    residents: Residents

    def extend(self, lease: Lease, num_tokens: int) -> list[PageCopy] | None:
        """Hold pages for the first `num_tokens` tokens. Returns the page copies that have to be made first, or None
        when there is no room; then nothing has changed but that cached pages may have gone."""
        need, shared = lease.missing_pages(num_tokens), self._to_copy(lease, num_tokens)
        if need == 0 and lease.copied:
            return []
        if not self.residents.make_room(need + len(shared)):
            return None
        copies = [self._copy_on_write(lease, table, index) for table, index in shared]
        lease.copied = lease.copied or num_tokens > lease.matched
        for group, table in zip(self.layout.groups, lease.tables, strict=True):
            missing = group.pages_for(num_tokens) - table.length
            if missing > 0:
                table.append(self.pool.allocate(missing))
        return copies

    def missing_pages(self, lease: Lease, num_tokens: int) -> int:
        """How many pages `extend` would take."""
        return lease.missing_pages(num_tokens) + len(self._to_copy(lease, num_tokens))

    def _to_copy(self, lease: Lease, num_tokens: int) -> list[tuple[PageTable, int]]:
        """The tables whose page that holds token `matched` has to be copied before so many tokens are written."""
        if lease.copied or num_tokens <= lease.matched:
            return []
        return [
            (table, lease.matched // group.tokens_per_page)
            for group, table in zip(self.layout.groups, lease.tables, strict=True)
            if lease.matched % group.tokens_per_page
        ]

    def _copy_on_write(self, lease: Lease, table: PageTable, index: int) -> PageCopy:
        # page `index` holds tokens of the tree up to `matched`; its other tokens may be somebody's already
        assert index == table.length - 1
        source = table.pages[index : index + 1].copy()
        target = self.pool.allocate(1)
        if table.num_shared == table.length:
            self.pool.acquire(source)
        table.replace_last(int(target[0]))
        lease.transient.append(source)
        return PageCopy(int(source[0]), int(target[0]))
