"""In which form checkpoints have the recurrent state: what --checkpoint-dtype says, or for `auto` what measurements
say. Without torch."""

from collections.abc import Mapping
from types import MappingProxyType

from cairn.errors import ConfigError
from cairn.kernels.state_encoding import ENCODINGS, StateEncoding, plain_encoding

FLOAT16_ERRORS: Mapping[str, float] = MappingProxyType(
    {
        "falcon_h1": 0.0037,
        "granitemoehybrid": 0.15,
        "nemotron_h": 0.0011,
        "qwen3_5": 0.026,
        "qwen3_5_moe": 0.0063,
        "qwen3_5_moe_text": 0.0063,
        "qwen3_5_text": 0.026,
    }
)
"""By model type, how far logits are off after restores from float16 states, over how far a bfloat16 forward pass has
them off: the largest of random models of the family, after one restore and in a chain of 50, by
benchmarks/state_dtypes.py. qwen3_5 and qwen3_5_moe are their text models with a vision model. What is not here was not
measured."""

MOST_ERROR = 0.25
"""Of bfloat16's own, with which `auto` still means float16."""


def check_checkpoint_dtype(asked: str, exact: bool) -> None:
    """Raises ConfigError for what is none, and for what `--exact` does not go together with."""
    if asked not in ("auto", *ENCODINGS):
        raise ConfigError(f"--checkpoint-dtype must be one of auto, {', '.join(ENCODINGS)}, not {asked!r:.60}")
    if exact and asked not in ("auto", "float32"):
        raise ConfigError(
            f"--checkpoint-dtype {asked}: not with --exact, whose answers are bit for bit those without a cache: leave "
            "one of them out"
        )


def choose_encoding(
    asked: str, model_type: str, dtype: str, exact: bool = False, state_dtype: str = "float32"
) -> StateEncoding:
    """`dtype`: what the model is served in; `state_dtype`: what its states are in while they run, of which smaller ones
    than float32 are stored as they are. Raises ConfigError as `check_checkpoint_dtype`, and for another form than that.
    """
    check_checkpoint_dtype(asked, exact)
    if state_dtype != "float32":
        if asked not in ("auto", state_dtype):
            raise ConfigError(
                f"--checkpoint-dtype {asked}: recurrent states are {state_dtype} here, and are stored as they are: "
                "leave it out, or ask for --mamba-ssm-cache-dtype float32"
            )
        return plain_encoding(state_dtype)
    if asked != "auto":
        return ENCODINGS[asked]
    is_small = FLOAT16_ERRORS.get(model_type, 1.0) < MOST_ERROR
    return ENCODINGS["float16" if dtype == "bfloat16" and is_small and not exact else "float32"]
