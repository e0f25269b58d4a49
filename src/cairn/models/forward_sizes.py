"""What computing one token of a prompt takes, in floating-point operations: the whole model's, however many ranks."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ForwardSizes:
    """`active_weights`: elements of all matrices that one token is multiplied with: of a mixture the router, the shared
    expert and `experts per token` of the others; no embedding, and no output matrix, which only the last token of a
    prompt meets. `score_numbers`: of all attention layers, the elements of a token's queries."""

    active_weights: int
    score_numbers: int

    def forward_flops(self, start: int, end: int) -> int:
        """Floating-point operations of computing the prompt's tokens [start, end).

        A token at position p takes 2 for each active weight, and 2 for each element of its queries with each of the
        p + 1 keys and once more with as many values (Kaplan et al., arXiv 2001.08361, table 1). Norms, activations,
        convolutions and the recurrence itself, a few hundredths, are left out.
        """
        # the sum of p + 1 over the range
        keys = (end * (end + 1) - start * (start + 1)) // 2
        return 2 * self.active_weights * (end - start) + 4 * self.score_numbers * keys
