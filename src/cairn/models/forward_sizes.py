"""What computing one token of a prompt takes, in floating-point operations: the whole model's, however many ranks."""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

__all__ = ["ForwardSizes"]

_VOCABULARY = re.compile(r"(?:.+\.)?(?:embed_tokens|embeddings|lm_head)\.weight")
_OF_ONE_EXPERT = re.compile(r".+\.experts\.(\d{1,6})\..+")


@dataclass(frozen=True, slots=True)
class ForwardSizes:
    """`active_weights`: elements of all matrices that one token is multiplied with: of a mixture the router, the shared
    expert and `experts per token` of the others; no embedding, and no output matrix, which only the last token of a
    prompt meets. `score_numbers`: of all attention layers, the elements of a token's queries."""

    active_weights: int
    score_numbers: int

    @classmethod
    def of(cls, tensors: Mapping[str, tuple[int, ...]], score_numbers: int, experts_per_token: int = 0) -> Self:
        """`tensors`: the shapes of all of a text model, by their published names. An expert's number follows
        `.experts.` in its tensors' names, or all of a layer are in one tensor [experts, rows, columns]."""
        active = sum(_multiplied(name, shape, experts_per_token) for name, shape in tensors.items())
        return cls(active, score_numbers)

    def forward_flops(self, start: int, end: int) -> int:
        """Floating-point operations of computing the prompt's tokens [start, end).

        A token at position p takes 2 for each active weight, and 2 for each element of its queries with each of the
        p + 1 keys and once more with as many values (Kaplan et al., arXiv 2001.08361, table 1). Norms, activations,
        convolutions and the recurrence itself, a few hundredths, are left out.
        """
        # the sum of p + 1 over the range
        keys = (end * (end + 1) - start * (start + 1)) // 2
        return 2 * self.active_weights * (end - start) + 4 * self.score_numbers * keys


def _multiplied(name: str, shape: tuple[int, ...], experts_per_token: int) -> int:
    """How many elements of the tensor a token is multiplied with."""
    expert = _OF_ONE_EXPERT.fullmatch(name)
    if _VOCABULARY.fullmatch(name) or (expert is not None and int(expert[1]) >= experts_per_token):
        return 0
    # a depthwise convolution's kernel is [channels, 1, taps]
    if len(shape) == 3 and shape[1] > 1:
        return experts_per_token * shape[1] * shape[2]
    return math.prod(shape) if len(shape) == 2 else 0
