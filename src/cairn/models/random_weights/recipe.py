"""A family's random-weight checkpoints, as data for `cairn make-model`."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal

Size = Literal["tiny", "small"]
SIZES: tuple[Size, ...] = ("tiny", "small")

LOGIT_STD = 2.0


@dataclass(frozen=True, slots=True)
class CheckpointOptions:
    """What a checkpoint of any family depends on: `dtype` by name, and the tokenizer's numbers. `tokens`: the ids of
    its control and mark tokens. `mtp`: with a head of multi-token prediction."""

    dtype: str
    vocab_size: int
    max_position_embeddings: int
    eos_token_id: int
    pad_token_id: int
    tokens: Mapping[str, int]
    mtp: bool = False


def by_size(tiny: Any, small: Any) -> Mapping[str, Any]:
    """A value of config.json that is another one in another size."""
    return MappingProxyType({"tiny": tiny, "small": small})


NOTHING: Mapping[str, Any] = MappingProxyType({})


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """How checkpoints of one family are made.

    `sizes` and `fields`: of config.json, with the names and forms of the published ones, without those that only steer
    training or a kernel's tiling; a value may be one `by_size`.
    `dtype_field`: what config.json calls the dtype. Tensors are told apart by the end of their names, the first ending
    that fits counts: `spreads` gives (mean, standard deviation), `gains` how much a matrix amplifies; others keep the
    variance of their input. `float32`: endings of tensors that are saved in float32 whatever the dtype. `tokens`:
    control tokens of the tokenizer beside those of any chat. `chat_template`: another one than any chat's. `files`:
    further JSON files of the folder, by name. `wrap`: makes config.json of these fields where they are not all of it;
    `other_tensors`: config.json -> tensors that are not the text model's, by name. `mtp_fields`: what config.json says
    besides of a checkpoint with a head of multi-token prediction; empty for a family that is published without.
    """

    architecture: str
    model_type: str
    sizes: Mapping[str, Any]
    fields: Mapping[str, Any]
    dtype_field: str = "torch_dtype"
    spreads: Mapping[str, tuple[float, float]] = field(default_factory=lambda: NOTHING)
    gains: Mapping[str, float] = field(default_factory=lambda: NOTHING)
    float32: tuple[str, ...] = ()
    tokens: tuple[str, ...] = ()
    chat_template: str | None = None
    files: Mapping[str, Mapping[str, Any]] = field(default_factory=lambda: NOTHING)
    wrap: Callable[[dict[str, Any], CheckpointOptions], dict[str, Any]] | None = None
    other_tensors: Callable[[Mapping[str, Any]], Mapping[str, tuple[int, ...]]] | None = None
    mtp_fields: Mapping[str, Any] = field(default_factory=lambda: NOTHING)

    def config(self, size: Size, options: CheckpointOptions) -> dict[str, Any]:
        """config.json."""
        raw = {
            "architectures": [self.architecture],
            "model_type": self.model_type,
            self.dtype_field: options.dtype,
            "vocab_size": options.vocab_size,
            **_of_size(self.sizes, size),
            "max_position_embeddings": options.max_position_embeddings,
            "bos_token_id": None,
            "eos_token_id": options.eos_token_id,
            "pad_token_id": options.pad_token_id,
            **_of_size(self.fields, size),
            **(self.mtp_fields if options.mtp else {}),
        }
        return raw if self.wrap is None else self.wrap(raw, options)


def _of_size(value: Any, size: Size) -> Any:
    if isinstance(value, Mapping):
        if set(value) == set(SIZES):
            return value[size]
        return {name: _of_size(each, size) for name, each in value.items()}
    return value
