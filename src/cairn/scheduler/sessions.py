"""How much sessions have been served lately: what `--scheduling-policy session` ranks requests by.

The least attained service goes first (Nuyens and Wierman, "The foreground-background queue", Performance Evaluation 65,
2008): short sessions do not wait behind long ones, though nobody knows how long a session is going to be. Service is
compared by powers of four, as multi-level feedback queues have it, so that sessions that are about as long as each
other go as they came.
"""

import math
from collections import OrderedDict
from typing import Literal

from cairn.scheduler.request import Request, Spec

SessionClass = Literal["short", "medium", "long"]
SESSION_CLASSES: tuple[SessionClass, ...] = ("short", "medium", "long")
"""Of a session that has been served up to 8,192 tokens lately, up to 131,072, and more."""

MAX_SESSIONS = 1 << 14
"""So many sessions are kept count of; the one that has been served longest ago is forgotten first."""

HALF_LIFE = 1 << 23
"""After so many tokens of all sessions together what one has been served counts half. Tokens and no seconds, so that a
replay of a log comes to the same."""

FIRST_LEVEL = 1 << 13
"""Sessions that have been served fewer tokens are all alike."""


class SessionService:
    """By session the tokens that were computed for it, prompts and answers, the older ones for less. Each client's
    sessions are its own, whatever it calls them. `num_requests`, `wait_seconds`: requests that were admitted, by how
    long their sessions were then, and how long these had waited."""

    def __init__(self) -> None:
        self._services: OrderedDict[tuple[str, str], tuple[float, int]] = OrderedDict()
        self._total = 0
        self.num_requests: dict[str, int] = dict.fromkeys(SESSION_CLASSES, 0)
        self.wait_seconds: dict[str, float] = dict.fromkeys(SESSION_CLASSES, 0.0)

    def __len__(self) -> int:
        return len(self._services)

    def add(self, spec: Spec, num_tokens: int) -> None:
        """So many tokens were computed for a request, or are about to be."""
        self._total += num_tokens
        if spec.session:
            key = spec.client, spec.session
            self._services[key] = (self.served(spec) + num_tokens, self._total)
            self._services.move_to_end(key)
            if len(self._services) > MAX_SESSIONS:
                self._services.popitem(last=False)

    def count(self, request: Request) -> None:
        """It is admitted for the first time, and has waited as long as it did."""
        assert request.stats.scheduled_time is not None
        name = self.class_of(request)
        self.num_requests[name] += 1
        self.wait_seconds[name] += request.stats.scheduled_time - request.stats.arrival_time

    def knows(self, spec: Spec) -> bool:
        """Whether the request's session has been served before, as far as that is remembered."""
        return (spec.client, spec.session) in self._services

    def served(self, spec: Spec) -> float:
        """Tokens that the request's session has been served lately."""
        tokens, when = self._services.get((spec.client, spec.session), (0.0, self._total))
        return tokens * math.pow(2.0, (when - self._total) / HALF_LIFE)

    def level(self, request: Request, num_endangered: int = 0) -> int:
        """The smaller, the earlier its turn. A session has been served at least what its prompt says, here or
        elsewhere; one that would lose a hit of `num_endangered` tokens if it waited counts by what it lacks."""
        if num_endangered:
            return _level(request.num_tokens - num_endangered)
        return _level(max(int(self.served(request.spec)), request.num_prompt_tokens))

    def class_of(self, request: Request) -> SessionClass:
        """How long its session is so far, in words."""
        return SESSION_CLASSES[min(2, (self.level(request) + 1) // 2)]


def _level(num_tokens: int) -> int:
    return ((num_tokens // FIRST_LEVEL).bit_length() + 1) // 2
