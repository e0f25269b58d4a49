"""The settings of `cairn serve` about speculative decoding, in vLLM's words."""

from pydantic import BaseModel, ConfigDict

from cairn.engine.contract import SpeculativeConfig
from cairn.settings.json_flags import parse_json_flag

_FLAG = "--speculative-config"


class SpeculativeSettings(BaseModel):
    """What --speculative-config may say. Of the two lengths of what is looked up, one that is not given gives way to
    the other; the ranges are those of `SpeculativeConfig`."""

    model_config = ConfigDict(extra="forbid", strict=True)

    method: str = "auto"
    num_speculative_tokens: int | None = None
    prompt_lookup_min: int | None = None
    prompt_lookup_max: int | None = None


def speculative_config(text: str | None) -> SpeculativeConfig:
    """What --speculative-config asks for; `auto` where it is not given. Raises ConfigError."""
    if text is None:
        return SpeculativeConfig()
    asked = parse_json_flag(_FLAG, SpeculativeSettings, text, {"model": "there are no draft models; leave it out"})
    given = asked.model_dump(exclude_none=True)
    if asked.method.endswith("_mtp"):  # with the family's name before it, as vLLM had it first
        given["method"] = "mtp"
    default = SpeculativeConfig()
    least, most = asked.prompt_lookup_min, asked.prompt_lookup_max
    if least is None and most is not None:
        given["prompt_lookup_min"] = min(most, default.prompt_lookup_min)
    elif most is None and least is not None:
        given["prompt_lookup_max"] = max(least, default.prompt_lookup_max)
    return SpeculativeConfig(**given)
