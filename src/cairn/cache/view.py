"""The records of `GET /cache`: the pool, the tree folded to a number of paths, and the lookups of recent requests.

    tree    o--64--64--70--+--30                paths    o=====198=====+==30==
                           +--12--64--9                                 +==85==

A *path* is a run of nodes without a fork, all with their pages or all without; its checkpoints stand along it. Of large
trees the heaviest paths are shown one by one, and what lies below them as sums. There are no texts, tokens or salts.
"""

from dataclasses import dataclass, field

MAX_SHOWN = 5000
"""Maximum number of paths in a view."""

MAX_WAITING_SHOWN = 50
"""Maximum number of waiting requests in a view."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolView:
    """In pages of `page_bytes` each. `held_*`: referred to by requests, by transfers, and by steps that are not applied
    yet; a page with several references counts for the first of these. `cached_pages`: referred to by the tree alone.
    With `free_pages` they add up to `pages`. `open_leases`: sequences, by the name that clients know;
    `open_holds`: pins of transfers."""

    pages: int
    page_bytes: int
    free_pages: int
    cached_pages: int
    held_by_requests: int
    held_by_transfers: int
    held_by_steps: int
    open_leases: int
    open_holds: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointView:
    """`idle`: how many times others were used or made since this one was. `value`: tokens that it is expected to save
    in the next 1,000 requests, per MiB that dropping it would free, from `saved_tokens` over the next shallower one and
    `freed_bytes`."""

    position: int
    kind: str
    bytes: int
    hits: int
    idle: int
    saved_tokens: int
    freed_bytes: int
    value: float
    held: bool
    probation: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class KindView:
    """Checkpoints of one kind. `taken`, `evicted`, `used`: so far, the last one by requests. `earned_tokens`: what
    those requests needed not to compute, over the next shallower ones. `present`: those that are there, and
    `expected_tokens` what they are expected to save in the next 1,000 requests."""

    kind: str
    taken: int
    evicted: int
    used: int
    earned_tokens: int
    present: int
    expected_tokens: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyView:
    """What is kept for what. `price`: the value of what goes next, as `CheckpointView.value`; None while nothing would
    go. `kinds`: those that there were, as `Kind` has them in order."""

    price: float | None
    kinds: list[KindView]


@dataclass(frozen=True, slots=True, kw_only=True)
class Folded:
    """Sums over what is not shown one by one."""

    paths: int = 0
    tokens: int = 0
    bytes: int = 0
    checkpoints: int = 0
    hits: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeView:
    """Sums over the whole tree, and over the paths below the roots that are not in the list. `dropped_*`: runs and
    checkpoints that are only remembered."""

    nodes: int
    paths: int
    namespaces: int
    tokens: int
    checkpoints: int
    checkpoint_bytes: int
    hits: int
    dropped_tokens: int
    dropped_checkpoints: int
    below: Folded


@dataclass(frozen=True, slots=True, kw_only=True)
class PathView:
    """Tokens [start, end) of every prompt that goes through here. `parent`: that path's place in the list, None below a
    root, and always before this one's. `checkpoints`: the best of them, ascending; `more`: the others on this path;
    `below`: the paths below that are not in the list. `users`: running requests that go through its end."""

    name: str
    parent: int | None
    namespace: int
    start: int
    end: int
    bytes: int
    resident: bool
    users: int
    children: int
    checkpoints: list[CheckpointView]
    more: Folded
    below: Folded


@dataclass(slots=True, kw_only=True)
class IntervalView:
    """Sums over requests that were admitted from `age` seconds ago on, for `seconds`, in prompt tokens."""

    age: float
    seconds: float
    requests: int = 0
    prompt: int = 0
    hit: int = 0
    received: int = 0
    lost: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class LostView:
    """At least `tokens` tokens below token `depth` of one prefix were not hit, in so many requests, the last one `age`
    seconds ago. `name`: equal for equal prefixes, and that of the path that ends there."""

    name: str
    depth: int
    namespace: int
    tokens: int
    requests: int
    age: float
    reason: str
    cure: str


@dataclass(frozen=True, slots=True, kw_only=True)
class VisitView:
    """One request as it was admitted, in tokens of its prompt. `namespace`: 0 for prompts without a salt."""

    number: int
    age: float
    namespace: int
    prompt: int
    hit: int
    received: int
    matched: int
    reason: str
    lost: dict[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class TierView:
    """A tier below the pool: `bytes` that it takes now, of `capacity`; `entries`: chunks of keys and values, and
    states. `hits`: requests that were fetched from there, and the tokens that they had not to compute. Speeds in bytes
    a second, None before anything was moved. `drops`: entries that are gone or never came, by why."""

    name: str
    bytes: int
    capacity: int
    entries: int
    hits: int
    hit_tokens: int
    read_bytes: int
    written_bytes: int
    read_speed: float | None
    write_speed: float | None
    drops: dict[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitingView:
    """A request that waits, for `age` seconds so far. `waits_for`: its turn (with slots and pages), another request
    that computes what it shares (prefix), pages from elsewhere, or room among the leases (lease). `hit`: the prompt
    tokens that it is going to hit as things are, and `kept_bytes` what dropping the checkpoint there would free;
    `endangered`: those before it would push that out. `bypassed`: how many that came later have gone before it.
    `session`: how much its session has been served: short, medium or long."""

    age: float
    prompt: int
    hit: int
    kept_bytes: int
    endangered: bool
    bypassed: int
    priority: int
    session: str
    waits_for: str


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueView:
    """Who waits. `requests`: in the order of their turns as it is, the first `MAX_WAITING_SHOWN` of `waiting`.
    `bypasses`: how often one has gone before another that had come earlier, since the start."""

    policy: str = "fcfs"
    waiting: int = 0
    bypasses: int = 0
    requests: list[WaitingView] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheView:
    """All of it. Newest first: `visits`; oldest first: `history`; costliest first: `lost`; `unlisted_tokens`: no prefix
    that is not listed has cost more. `tiers`: the fastest first. `queue`: those for whom it is kept."""

    enabled: bool
    pool: PoolView
    policy: PolicyView
    tree: TreeView
    paths: list[PathView]
    history: list[IntervalView]
    lost: list[LostView]
    unlisted_tokens: int
    visits: list[VisitView]
    tiers: list[TierView] = field(default_factory=list)
    queue: QueueView = field(default_factory=QueueView)
