"""One request inside the scheduler: its life as a table of transitions, and what it has got so far."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from types import MappingProxyType
from typing import Literal, Protocol

import numpy as np

from cairn.cache.placement import PromptFacts
from cairn.cache.sequence_blocks import MissSpan, Namespace, PagePin, SequenceBlocks
from cairn.scheduler.page_source import PageSource
from cairn.scheduler.slot_table import Column, Row, empty_row
from cairn.step import Image, Logprobs, TokenMask
from cairn.transfer.contract import Offer, TransferRole, Volume
from cairn.types import Boundary, Keys, RequestId, SamplingParams

__all__ = [
    "ARRIVALS_PER_PRIORITY",
    "TRANSITIONS",
    "Constraint",
    "Finish",
    "Phase",
    "PromptOffer",
    "PromptSpec",
    "Request",
    "RequestOutcome",
    "RequestStats",
    "RequestTransfer",
    "Spec",
]

Finish = Literal["stop", "length", "abort", "error"]

ARRIVALS_PER_PRIORITY = 4096
"""One step of priority is worth this many arrivals: no more than these can overtake a request for it."""


class Phase(Enum):
    """Where a request is in its life."""

    WAITING = "waiting"
    """In the queue; holds no slot and no pages. A preempted request is back here."""
    FETCHING = "fetching"
    """Pages are being read from elsewhere; holds pages and no slot."""
    READY = "ready"
    """What was fetched is there; holds pages and waits for a slot."""
    RUNNING = "running"
    """Has a slot and pages; some step computes it."""
    FINISHING = "finishing"
    """Its answer is complete and told; steps that name it, or the save of its last state, are still out."""
    PREEMPTING = "preempting"
    """Its state is being saved; then it waits again."""
    FINISHED = "finished"
    """Holds nothing any more."""


TRANSITIONS: Mapping[Phase, frozenset[Phase]] = MappingProxyType(
    {
        Phase.WAITING: frozenset({Phase.FETCHING, Phase.RUNNING, Phase.FINISHED}),
        Phase.FETCHING: frozenset({Phase.READY, Phase.WAITING, Phase.FINISHED}),
        Phase.READY: frozenset({Phase.RUNNING, Phase.WAITING, Phase.FINISHED}),
        Phase.RUNNING: frozenset({Phase.WAITING, Phase.FINISHING, Phase.PREEMPTING, Phase.FINISHED}),
        Phase.PREEMPTING: frozenset({Phase.WAITING, Phase.FINISHING, Phase.FINISHED}),
        Phase.FINISHING: frozenset({Phase.FINISHED}),
        Phase.FINISHED: frozenset(),
    }
)


class Constraint(Protocol):
    """What may come next in an answer that has to keep to a form. Kept by whoever makes the request; a function of the
    answer so far, so that preemption and several answers need no care."""

    def allowed(self, output: Sequence[int]) -> TokenMask | None:
        """The tokens that may follow `output`, one at least; None: all. Asked when the next draw is planned."""


def _no_tokens() -> Keys:
    return np.empty(0, np.int64)


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptSpec:
    """What the model reads, and what the client knows of it. `images`: what stands behind negative key tokens.
    `prediction`: tokens of a text that the client expects the answer to be much like; empty where it expects none."""

    prompt: Keys
    namespace: Namespace = Namespace()  # noqa: RUF009 - frozen, so one for all is right
    boundaries: tuple[Boundary, ...] = ()
    images: tuple[Image, ...] = ()
    prediction: Keys = field(default_factory=_no_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class Spec(PromptSpec):
    """What is asked for. `max_tokens` >= 1; `stop_token_ids` hold the end-of-sequence ids unless they are ignored.
    `client`: who asks, the API key's digest or the peer's address, empty when that is not known: leases are bounded per
    client. `session`: the name of the conversation that it belongs to, empty where it has none.

    `min_tokens`: no stop token comes before so many have. `logprobs`: give the log-probability of each token, and of so
    many of the most likely ones; `prompt_logprobs`: the same of the prompt, all of which is computed for it.
    `priority`: a smaller one comes before. `constraint`: which tokens may come next."""

    request_id: RequestId
    sampling: SamplingParams
    max_tokens: int
    stop_token_ids: frozenset[int] = frozenset()
    role: TransferRole = TransferRole()  # noqa: RUF009 - frozen, so one for all is right
    client: str = ""
    session: str = ""
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    priority: int = 0
    constraint: Constraint | None = None


@dataclass(frozen=True, slots=True)
class PromptOffer:
    """What a request has left for another server, and the reference that it is asked for by."""

    offer: Offer
    reference: str


@dataclass(slots=True)
class RequestStats:
    """What has happened to a request, kept over preemptions: for reports, the log and the choice of preemption victims.

    `arrival` numbers the requests in order. Times are clock readings in seconds, None until it has happened.
    `first_sequence`: its pages at the first admission, with the hit and the miss reasons. `num_prompt_computed`: prompt
    tokens that were computed here. `max_computed`: the most tokens it had computed when it gave back its pages.
    `preempted_by`: requests that have preempted this one, each once at most, and `num_preemptions` how often it was.
    `sent_back_at`: how many tokens it had when it last went back to the queue though it was the oldest, which it does
    again only when it has more. `saved_answer_end`: whether the state at the answer's end has been given pages.
    `is_parallel_sample`: another answer has brought its prompt into the counters. `num_draft_tokens`: drafts that were
    verified for it, `num_accepted_draft_tokens` of them were accepted.
    """

    arrival_time: float
    arrival: int
    scheduled_time: float | None = None
    first_token_time: float | None = None
    finished_time: float | None = None
    first_sequence: SequenceBlocks | None = None
    num_prompt_computed: int = 0
    max_computed: int = 0
    preempted_by: set[RequestId] = field(default_factory=set)
    num_preemptions: int = 0
    sent_back_at: int = 0
    saved_answer_end: bool = False
    is_parallel_sample: bool = False
    num_draft_tokens: int = 0
    num_accepted_draft_tokens: int = 0


@dataclass(slots=True)
class RequestOutcome:
    """What the client is told besides tokens. `finish_reason`: None until it has ended, at `stop_token` if at a stop
    token. `failure`: why it ended with an error; `refused`: because the server has no room for it. `prompt_logprobs`:
    those of the prompt from the second token on, one record a prefill row."""

    finish_reason: Finish | None = None
    stop_token: int | None = None
    failure: str | None = None
    refused: bool = False
    prompt_logprobs: list[Logprobs] = field(default_factory=list)


@dataclass(slots=True)
class RequestTransfer:
    """A request's part in transfers between servers; all of it default for one that has none.

    Import: `sources`, who may still be asked for its pages, `num_fetches` how many have been; `num_bypassed`: requests
    that came in before this one while it found no pages for its fetch; `fetched`: how much sources have brought,
    `fetch_seconds` how long that took; `from_tier`: it was this server's own; `remote_failed`: one had promised more
    and did not deliver; `tier_miss`: up to where this server's own had more, and why it was not brought.
    Export: `no_lease_room_since`: seconds, when the leases were found to leave no room for its prompt;
    `pinned_checkpoint`: the state at the prompt's end; `offered`: what became of it.
    """

    sources: tuple[PageSource, ...] = ()
    num_fetches: int = 0
    num_bypassed: int = 0
    fetched: Volume | None = None
    fetch_seconds: float = 0.0
    from_tier: bool = False
    remote_failed: bool = False
    tier_miss: MissSpan | None = None
    no_lease_room_since: float | None = None
    pinned_checkpoint: PagePin | None = None
    offered: PromptOffer | None = None


@dataclass(slots=True)
class QueuePlace:
    """Where a request stands in the queue. `before`: before the request with this arrival, None: where its own puts it.
    `num_bypassed`: how many that came after it have gone before it."""

    before: int | None = None
    num_bypassed: int = 0


@dataclass(slots=True, eq=False)
class Request:
    """A request and its progress, in tokens of prompt + output:

        0 ... num_computed ... num_scheduled ... num_tokens
              applied          named by steps     prompt + output so far
                               still out

    `slot`: -1 without one. `row`: the fields that are columns of the `SlotTable`. `sequence`: its pages, None without;
    `facts` go with it. `prefill_until`: tokens below it are computed by prefill rows, later ones by decode rows.
    `plain_until`: decodes of tokens below it are plain, see `PlainDecodes`. `num_in_flight`: steps that name it and are
    still out. While it runs and num_scheduled has reached num_tokens, one of them samples the next token.
    """

    spec: Spec
    stats: RequestStats
    phase: Phase = Phase.WAITING
    slot: int = -1
    row: Row = field(default_factory=empty_row)
    sequence: SequenceBlocks | None = None
    facts: PromptFacts | None = None
    output: list[int] = field(default_factory=list)
    prefill_until: int = 0
    outcome: RequestOutcome = field(default_factory=RequestOutcome)
    transfer: RequestTransfer = field(default_factory=RequestTransfer)
    place: QueuePlace = field(default_factory=QueuePlace)

    num_computed = Column("num_computed")
    num_scheduled = Column("num_scheduled")
    num_in_flight = Column("num_in_flight")
    plain_until = Column("plain_until")
    last_token = Column("last_token")
    kv_write_from = Column("kv_write_from")
    min_tokens_until = Column("min_tokens_until")

    def take_slot(self, slot: int, row: Row) -> None:
        """From now on its fields are in the slot's row."""
        row[:] = self.row
        self.slot, self.row = slot, row

    def release_slot(self) -> None:
        """Its fields go with it."""
        self.slot, self.row = -1, self.row.copy()

    @property
    def sort_key(self) -> tuple[int, int]:
        """Whose turn comes first: by priority and arrival, so that nobody waits for ever; see `cairn.scheduler.turns`
        for who may go before that."""
        arrival, before = self.stats.arrival, self.place.before
        # after all that came before that one: some of them may run, and have to stay the older ones
        place = arrival if before is None else before - 1
        return place + ARRIVALS_PER_PRIORITY * self.spec.priority, arrival

    @property
    def id(self) -> RequestId:
        return self.spec.request_id

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.spec.prompt)

    @property
    def num_tokens(self) -> int:
        return len(self.spec.prompt) + len(self.output)

    @property
    def is_to_be_leased(self) -> bool:
        """Whether its prompt is going to be leased to another server: once it is, the lease counts."""
        return self.spec.role.kv_export and self.transfer.offered is None

    @property
    def resumed(self) -> bool:
        """Whether it has been admitted before."""
        return self.stats.first_sequence is not None

    def keys(self) -> Keys:
        """Prompt and output, shape [num_tokens]."""
        if not self.output:
            return self.spec.prompt
        return np.concatenate([self.spec.prompt, np.array(self.output, np.int64)])

    def finish_with(self, token: int, num_output_tokens: int) -> Finish | None:
        """How it ends with this token, the last of so many of its answer, if it does."""
        if token in self.spec.stop_token_ids:
            self.outcome.stop_token = token
            return "stop"
        return "length" if num_output_tokens >= self.spec.max_tokens else None

    def set_phase(self, phase: Phase) -> None:
        """Go to another phase. The only place where a phase changes."""
        if phase not in TRANSITIONS[self.phase]:
            raise AssertionError(f"{self.id}: {self.phase.value} -> {phase.value} is not a transition")
        self.phase = phase
