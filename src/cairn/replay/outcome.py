"""What a replay comes to."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from cairn.cache.checkpoint import Kind
from cairn.cache.reasons import Reason
from cairn.replay.memory import TreeMemory


@dataclass(slots=True)
class Outcome:
    """What a replay came to, in tokens, requests, checkpoints, bytes and seconds.

    `forward_passes`: prefill chunks. `lost`: every prompt token that was not hit, under one reason; those that no
    earlier request had are `never_seen`. `refused`: requests that the budget cannot hold. `hits`: cached
    tokens, by request. `peak_bytes`: pages in use at most. `seconds`: inside the cache's door and its placement policy.
    `tree`: what the cache's books take in memory at the end.
    """

    prompt_tokens: int = 0
    hit_tokens: int = 0
    prefill_tokens: int = 0
    forward_passes: int = 0
    refused: int = 0
    peak_bytes: int = 0
    seconds: float = 0.0
    hits: list[int] = field(default_factory=list)
    lost: Counter[Reason] = field(default_factory=Counter)
    taken: Counter[Kind] = field(default_factory=Counter)
    used: Counter[Kind] = field(default_factory=Counter)
    evicted: Counter[Kind] = field(default_factory=Counter)
    tree: TreeMemory | None = None

    def lose(self, num_prompt_tokens: int, hit: int, known: int, lost: Mapping[Reason, int]) -> None:
        """A prompt of which the first `hit` tokens were not computed, and earlier requests had had the first `known`,
        whether or not the cache remembers them. `lost`: the cache's own account; what it takes for new and is not was
        forgotten."""
        self.prefill_tokens += num_prompt_tokens - hit
        known = max(hit, known)
        left = known - hit
        for reason, tokens in lost.items():
            if reason is not Reason.NEVER_SEEN:
                self.lost[reason] += min(tokens, left)
                left -= min(tokens, left)
        self.lost[Reason.EVICTED] += left
        self.lost[Reason.NEVER_SEEN] += num_prompt_tokens - known
        self.lost += Counter()  # without the reasons that have cost nothing

    @property
    def token_hit_rate(self) -> float:
        return self.hit_tokens / max(1, self.prompt_tokens)

    @property
    def microseconds_per_request(self) -> float:
        return 1e6 * self.seconds / max(1, len(self.hits))
