"""Words that every room uses: ids, sizes, sampling parameters, the reach of attention and the clock."""

import time
from dataclasses import dataclass
from typing import Annotated, Literal, NewType, Protocol

import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

RequestId = NewType("RequestId", str)

Count = Annotated[int, Meta(ge=0, le=1 << 24)]
Positive = Annotated[int, Meta(ge=1, le=1 << 24)]
"""A number of tokens, requests or the like; `msgspec.convert` refuses others in files, whoever has written them."""

Size = Annotated[int, Meta(ge=0, le=1 << 50)]
"""Bytes, likewise."""

ShortText = Annotated[str, Meta(max_length=64)]
"""A name, likewise."""

Keys = NDArray[np.int64]
"""Key tokens, shape [n]: vocabulary ids >= 0; negative ids are reserved for content that has no vocabulary id."""

Pages = NDArray[np.int32]
"""Page numbers of the pool, shape [k], in the order of the bytes they hold."""


def first_in_reach(position: int, reach: int | None, chunked: bool) -> int:
    """The first position that attention at `position`, 0 or more, sees: that of the last `reach` tokens with itself
    (a window) or, if `chunked`, the last multiple of `reach`; None: 0."""
    if reach is None:
        return 0
    return position // reach * reach if chunked else max(0, position - reach + 1)


BoundaryKind = Literal["system_end", "message_end", "image_end", "breakpoint"]
"""What ends at a place in a prompt; `breakpoint`: nothing but what a client has marked."""


@dataclass(frozen=True, slots=True)
class Boundary:
    """A place in a prompt that another prompt may share it up to: after `position` tokens something ends there.

    `retain_seconds`: the client asks for the state there to be retained so long, 0 when it does not.
    """

    position: int
    kind: BoundaryKind = "message_end"
    retain_seconds: int = 0


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How one token is drawn from its logits.

    `temperature` 0 takes the largest logit. `top_k` 0, `top_p` 1.0 and `min_p` 0.0 switch the filters off. The draw for
    the token at absolute position p depends on (`seed`, p) and on what came before it alone, so neither batching nor
    preemption changes it.

    `frequency_penalty` and `presence_penalty` (0.0: none) look at the answer so far, `repetition_penalty` (1.0: none)
    at prompt and answer. `logit_bias`: token ids, each once, and what is added to their logits.

    `seed`: None lets the engine choose one. `allowed_token_ids`: only these may come; None: all. `bad_words`: the
    tokens of texts that may not come in the answer; the last one of each may not follow the others.
    `logprob_token_ids`: where log-probabilities are told at all, those of these tokens instead of the likeliest ones.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = None
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed_token_ids: tuple[int, ...] | None = None
    bad_words: tuple[tuple[int, ...], ...] = ()
    logprob_token_ids: tuple[int, ...] = ()

    @property
    def has_penalties(self) -> bool:
        return bool(self.frequency_penalty or self.presence_penalty or self.repetition_penalty != 1)

    @property
    def needs_history(self) -> bool:
        """Whether the draw looks at earlier tokens: then it cannot be planned before they are known."""
        return self.has_penalties or any(len(word) > 1 for word in self.bad_words)


class Clock(Protocol):
    """Where time comes from, so that tests can hold it still."""

    def now(self) -> float:
        """Seconds since an arbitrary start, never going backwards."""


class SystemClock:
    """The machine's monotonic clock."""

    now = staticmethod(time.monotonic)


class ManualClock:
    """A clock that moves only when told to."""

    def __init__(self, start: float = 0.0) -> None:
        self._now = start

    def now(self) -> float:
        return self._now

    def advance(self, seconds: float) -> None:
        if seconds < 0:
            raise ValueError(f"time does not go backwards: {seconds}")
        self._now += seconds
