"""What recurrent states are in while they run: what --mamba-ssm-cache-dtype says, or for `auto` config.json. Without
torch."""

from typing import Literal

from cairn.errors import ConfigError
from cairn.kernels.state_encoding import STATE_DTYPES

AskedStateDtype = Literal["auto", "float32", "bfloat16", "float16"]


def check_state_dtype(asked: str, exact: bool) -> None:
    """Raises ConfigError for what is none, and for what `--exact` does not go together with."""
    if asked not in ("auto", *STATE_DTYPES):
        known = ", ".join(STATE_DTYPES)
        raise ConfigError(f"--mamba-ssm-cache-dtype must be one of auto, {known}, not {asked!r:.60}")
    if exact and asked not in ("auto", "float32"):
        raise ConfigError(
            f"--mamba-ssm-cache-dtype {asked}: not with --exact, whose states are float32: leave one of them out"
        )


def choose_state_dtype(asked: str, named: str, exact: bool = False) -> str:
    """A name of `STATE_DTYPES`. `named`: what config.json says. Raises ConfigError as `check_state_dtype`."""
    check_state_dtype(asked, exact)
    if asked != "auto":
        return asked
    return "float32" if exact else named
