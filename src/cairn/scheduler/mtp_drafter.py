"""Drafts that are left to the model's own head, where a lookup finds nothing: how many of them is decided here, which
tokens they are when the plan is carried out."""

import numpy as np

from cairn.scheduler.draft_cost import DraftCost, MeasuredCost, VerifyCost
from cairn.scheduler.draft_depth import BY_HEAD, DraftDepth
from cairn.scheduler.lookup_drafter import LookupDrafter, usual_count
from cairn.scheduler.request import Request
from cairn.scheduler.speculation import SpeculativeConfig
from cairn.step import DRAFTED
from cairn.types import Keys

_NOTHING: Keys = np.empty(0, np.int64)
_NOTHING.flags.writeable = False

_FIRST_COST = VerifyCost(overhead=0.1, row=0.2)
"""Of a head's drafts with their verification, before any step has shown it: each takes a layer and an output."""


_PLAIN_STEPS = 4
_MOST_STEPS = 64
"""What drafts cost is told by steps without any: so many come before the first draft, and one after so many steps with
drafts. A head could draft in every step."""


class MTPDrafter:
    """Leaves drafts to the model's head, see `Drafter`; with method `auto` only where a lookup proposes none, which
    takes less and is right for longer. Both share what a request may lose.

    `cost`, `head_cost`: of what is looked up and of what the head makes, as steps show them unless given.
    `max_decodes`: see `DraftDepth`.
    """

    def __init__(
        self,
        config: SpeculativeConfig,
        cost: DraftCost | None = None,
        head_cost: DraftCost | None = None,
        max_decodes: int = 8,
    ) -> None:
        self.max_decodes = max_decodes
        self._config = config
        self._cost = cost or MeasuredCost()
        self._head_cost = head_cost or MeasuredCost(_FIRST_COST, self._cost)
        self._depth = DraftDepth(self._cost, max_decodes, self._head_cost)
        self._lookup: LookupDrafter | None = None
        if config.method == "auto":
            self._lookup = LookupDrafter(config, self._cost, max_decodes, depth=self._depth)
        # by request, whether its last draft was the head's
        self._by_head: dict[Request, bool] = {}
        self._num_plain, self._num_since = 0, 0

    def propose(self, request: Request, most: int, num_decodes: int) -> Keys:
        """See `Drafter`. DRAFTED for each token that is left to the head."""
        self._by_head.pop(request, None)
        if most < 1 or not self._depth.may_draft(request, num_decodes):
            return _NOTHING
        if self._lookup is not None:
            drafts = self._lookup.look_up(request, most, num_decodes)
            if len(drafts):
                self._by_head[request] = False
                return drafts
        if self._num_plain < _PLAIN_STEPS or self._num_since >= _MOST_STEPS:
            return _NOTHING
        most = min(most, self._config.num_speculative_tokens)
        num_drafts = usual_count(self._depth.choose(request, BY_HEAD, most, num_decodes))
        if num_drafts:
            self._by_head[request] = True
        return np.full(num_drafts, DRAFTED, np.int64)

    def idle_tokens(self, request: Request) -> int:
        """See `Drafter`. Steps are counted here, and a head can be tried in each."""
        return 0

    def record(self, request: Request, num_draft_tokens: int, num_accepted: int) -> None:
        """See `Drafter`."""
        self._depth.record(request, num_draft_tokens, num_accepted)

    def record_step(self, num_decodes: int, num_draft_tokens: int, seconds: float, has_folds: bool = False) -> None:
        """See `Drafter`. Of a step with drafts of both kinds nothing is learned."""
        self._num_plain += not num_draft_tokens
        self._num_since = self._num_since + 1 if num_draft_tokens else 0
        kinds = {*self._by_head.values()} if num_draft_tokens else {False, True}
        if False in kinds and (True not in kinds or not num_draft_tokens):
            self._depth.record_step(self._cost.record_step(num_decodes, num_draft_tokens, seconds, has_folds))
        if True in kinds and (False not in kinds or not num_draft_tokens):
            self._depth.record_step(self._head_cost.record_step(num_decodes, num_draft_tokens, seconds, has_folds))

    def end(self, request: Request) -> None:
        """See `Drafter`."""
        self._by_head.pop(request, None)
        if self._lookup is not None:
            self._lookup.end(request)
        else:
            self._depth.end(request)
