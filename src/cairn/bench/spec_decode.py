"""What a server's drafts have brought during a load, by its Prometheus metrics: vLLM's, which cairn has too."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import httpx

from cairn.bench.client import Endpoint

_SECONDS = 10.0
_MAX_BYTES = 16 << 20
_SAMPLE = re.compile(
    r"^vllm:spec_decode_num_(drafts|draft_tokens|accepted_tokens|accepted_tokens_per_pos)(?:_total)?"
    r"(?:\{([^}\n]*)\})? ([0-9.eE+]{1,32})",
    re.MULTILINE,
)
_POSITION = re.compile(r'(?:^|,)position="(\d{1,4})"')


@dataclass(frozen=True, slots=True)
class SpecDecodeCounts:
    """Since the server's start, of all its engines. `accepted_per_pos`: accepted drafts by their position."""

    drafts: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    accepted_per_pos: Mapping[int, int] = field(default_factory=dict)

    def since(self, earlier: "SpecDecodeCounts") -> "SpecDecodeCounts":
        """What has come to it."""
        before = earlier.accepted_per_pos
        return SpecDecodeCounts(
            self.drafts - earlier.drafts,
            self.draft_tokens - earlier.draft_tokens,
            self.accepted_tokens - earlier.accepted_tokens,
            {position: count - before.get(position, 0) for position, count in self.accepted_per_pos.items()},
        )

    def figures(self) -> dict[str, Any]:
        """By the keys of `vllm bench serve`: shares in percent, and the mean tokens of a step that has verified a
        draft. Nothing where nothing was drafted."""
        if self.drafts <= 0 or self.draft_tokens <= 0:
            return {}
        per_pos = self.accepted_per_pos
        return {
            "spec_decode_acceptance_rate": 100 * self.accepted_tokens / self.draft_tokens,
            "spec_decode_acceptance_length": 1 + self.accepted_tokens / self.drafts,
            "spec_decode_num_drafts": self.drafts,
            "spec_decode_draft_tokens": self.draft_tokens,
            "spec_decode_accepted_tokens": self.accepted_tokens,
            "spec_decode_per_position_acceptance_rates": [per_pos[at] / self.drafts for at in sorted(per_pos)],
        }


async def read_spec_decode(http: httpx.AsyncClient, endpoint: Endpoint) -> SpecDecodeCounts | None:
    """None for a server that has no such metrics, or does not show them."""
    try:
        async with http.stream(
            "GET", f"{endpoint.base_url}/metrics", headers=dict(endpoint.headers), timeout=_SECONDS
        ) as response:
            if response.status_code != 200:
                return None
            text = bytearray()
            async for part in response.aiter_bytes():
                text += part
                if len(text) > _MAX_BYTES:
                    return None
    except httpx.HTTPError:
        return None
    return parse_spec_decode(text.decode(errors="replace"))


def parse_spec_decode(text: str) -> SpecDecodeCounts | None:
    """From metrics in Prometheus' text format; None if there are none of drafts."""
    counts: dict[str, int] = {}
    per_pos: dict[int, int] = {}
    for name, labels, value in _SAMPLE.findall(text):
        try:
            number = int(float(value))
        except (ValueError, OverflowError):
            continue
        if name == "accepted_tokens_per_pos":
            if (position := _POSITION.search(labels)) is not None:
                per_pos[int(position[1])] = per_pos.get(int(position[1]), 0) + number
        else:
            counts[name] = counts.get(name, 0) + number
    return SpecDecodeCounts(**counts, accepted_per_pos=per_pos) if counts else None
