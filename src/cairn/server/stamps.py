"""Times and names of requests, which tests can hold still."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from cairn.http.middleware import random_id
from cairn.types import Clock, SystemClock


@dataclass(frozen=True, slots=True)
class Stamps:
    """`clock` measures, `wall` dates answers (seconds since 1970), `new_id` names requests."""

    clock: Clock = field(default_factory=SystemClock)
    wall: Callable[[], float] = time.time
    new_id: Callable[[], str] = random_id
