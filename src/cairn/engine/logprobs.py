"""How likely tokens were held, on the wire: arrays as raw little-endian bytes, so that a prompt's take no parsing."""

from collections.abc import Iterator, Sequence

import msgspec
import numpy as np

from cairn.step import Logprobs


class TokenLogprobs(msgspec.Struct, frozen=True, kw_only=True):
    """Logarithms of probabilities before any transform, for n tokens. `token_ids`: int32 [n, width], the token itself
    and then the best, falling; `values`: float32, theirs; `ranks`: int32 [n], 1 for the most likely token."""

    width: int
    token_ids: bytes
    values: bytes
    ranks: bytes

    def __len__(self) -> int:
        return len(self.ranks) // 4

    def __iter__(self) -> Iterator[tuple[int, list[tuple[int, float]]]]:
        """For each token its rank and `width` pairs of token and value."""
        ids = np.frombuffer(self.token_ids, "<i4").reshape(-1, self.width).tolist()
        values = np.frombuffer(self.values, "<f4").reshape(-1, self.width).tolist()
        ranks = np.frombuffer(self.ranks, "<i4").tolist()
        for rank, own_ids, own_values in zip(ranks, ids, values, strict=True):
            yield rank, list(zip(own_ids, own_values, strict=True))

    def then(self, other: "TokenLogprobs | None") -> "TokenLogprobs":
        """These, and behind them the others, of the same width."""
        if other is None:
            return self
        return TokenLogprobs(
            width=self.width,
            token_ids=self.token_ids + other.token_ids,
            values=self.values + other.values,
            ranks=self.ranks + other.ranks,
        )


def packed(parts: Sequence[Logprobs], top: int) -> TokenLogprobs:
    """`parts` one behind the other; each tells of `top` tokens, or of a whole vocabulary that is smaller."""
    return TokenLogprobs(
        width=parts[0].token_ids.shape[1] if parts else 1 + top,
        token_ids=b"".join(part.token_ids.astype("<i4").tobytes() for part in parts),
        values=b"".join(part.values.astype("<f4").tobytes() for part in parts),
        ranks=b"".join(part.ranks.astype("<i4").tobytes() for part in parts),
    )
