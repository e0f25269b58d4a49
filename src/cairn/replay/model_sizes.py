"""What a model remembers and what a token costs, in bytes and floating-point operations, without torch or the models.

The sums are those of `cairn.models`, for one rank:

    page         attention layers x kv heads x 2 x head_dim numbers a token, of the dtype
    checkpoint   hidden state + recurrent layers x ((kernel - 1) x channels of the convolution + state)
    weights      elements of all matrices that one token is multiplied with: of a mixture the router, the shared expert
                 and `experts per token` of the others; no embedding, and no output matrix, which only the last token of
                 a prompt meets
"""

from dataclasses import dataclass

from cairn.cache.layout import AttentionGroup, CacheLayout

__all__ = ["ModelSizes", "Recurrent"]

PAGE_BYTES_WITHOUT_ATTENTION = 65536


@dataclass(frozen=True, slots=True)
class Recurrent:
    """Each of `layers` remembers the last `conv_rows` inputs of `conv_channels` channels, and `state_numbers` of
    recurrent state."""

    layers: int
    conv_rows: int
    conv_channels: int
    state_numbers: int


@dataclass(frozen=True, slots=True)
class ModelSizes:
    """`token_numbers`: keys and values that a token leaves; `score_numbers`: of all attention layers, the elements of a
    token's queries; `active_weights`: see above. `recurrent` None: keys and values are all that is remembered."""

    hidden_size: int
    token_numbers: int
    score_numbers: int
    active_weights: int
    recurrent: Recurrent | None = None

    def layout(self, block_size: int, state_bytes: int, dtype_bytes: int) -> CacheLayout:
        """Bytes of pages and checkpoints; a number of recurrent state takes `state_bytes`, and one of keys, values,
        convolution and hidden state `dtype_bytes`."""
        own = self.recurrent
        recurrent = 0
        if own is not None:
            conv = own.conv_rows * own.conv_channels * dtype_bytes
            recurrent = own.layers * (conv + own.state_numbers * state_bytes)
        return CacheLayout(
            block_size=block_size,
            page_bytes=self.token_numbers * dtype_bytes * block_size or PAGE_BYTES_WITHOUT_ATTENTION,
            page_units=1,
            groups=(AttentionGroup("full", block_size),) if self.token_numbers else (),
            header_bytes=self.hidden_size * dtype_bytes,
            state_bytes=recurrent,
            state_units=1,
        )

    def forward_flops(self, start: int, end: int) -> int:
        """Floating-point operations of computing the prompt's tokens [start, end).

        A token at position p takes 2 for each active weight, and 2 for each element of its queries with each of the
        p + 1 keys and once more with as many values (Kaplan et al., arXiv 2001.08361, table 1). Norms, activations,
        convolutions and the recurrence itself, a few hundredths, are left out.
        """
        # the sum of p + 1 over the range
        keys = (end * (end + 1) - start * (start + 1)) // 2
        return 2 * self.active_weights * (end - start) + 4 * self.score_numbers * keys
