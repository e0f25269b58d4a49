"""What one layer's sizes decide beside its tensors: what a token costs in it, what is remembered of it, and how it is
cut among tensor-parallel ranks."""

from dataclasses import dataclass

from cairn.layers.memory import AttentionSpec, RecurrentSpec
from cairn.models.sharding import Run, even


class LayerSizes:
    """A kind of layer. Counts are of one layer of the whole model."""

    __slots__ = ()

    @property
    def active_weights(self) -> int:
        """Elements of the matrices that a token is multiplied with."""
        raise NotImplementedError

    @property
    def score_numbers(self) -> int:
        """Elements of a token's queries."""
        return 0

    def attention_spec(self, num_layers: int, rank: int, size: int) -> AttentionSpec | None:
        """What a rank remembers in keys and values. Raises ConfigError as `share` of the kind does."""
        return None

    def recurrent_spec(self, num_layers: int, rank: int, size: int) -> RecurrentSpec | None:
        """What a rank remembers in states. Raises ConfigError as `share` of the kind does."""
        return None

    def check_size(self, size: int) -> None:
        """Raises ConfigError naming --tensor-parallel-size and the field that does not divide."""
        self.attention_spec(1, 0, size)
        self.recurrent_spec(1, 0, size)


@dataclass(frozen=True, slots=True)
class FeedForwardSizes(LayerSizes):
    """`matrices`: of [inner, hidden], 3 with a gate and 2 without; `extra_weights`: a gate on the outcome. `field`:
    what config.json calls `inner`."""

    field: str
    hidden: int
    inner: int
    matrices: int = 3
    extra_weights: int = 0

    @property
    def active_weights(self) -> int:
        return self.matrices * self.hidden * self.inner + self.extra_weights

    def share(self, rank: int, size: int) -> Run:
        """The rank's run of the inner channels. Raises ConfigError."""
        return even(self.field, self.inner, rank, size)

    def check_size(self, size: int) -> None:
        """See `LayerSizes`."""
        self.share(0, size)


@dataclass(frozen=True, slots=True)
class ExpertSizes(LayerSizes):
    """`count` experts, of which a token goes to `chosen`. `extra_weights`: of the router and whatever else is not an
    expert's."""

    count: int
    chosen: int
    one: FeedForwardSizes
    extra_weights: int

    @property
    def active_weights(self) -> int:
        return self.chosen * self.one.active_weights + self.extra_weights

    def check_size(self, size: int) -> None:
        """See `LayerSizes`."""
        self.one.share(0, size)
