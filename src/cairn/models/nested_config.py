"""config.json of a model that also sees, which keeps the text model's fields apart."""

from collections.abc import Callable, Collection, Mapping
from typing import Any

from cairn.errors import ModelError
from cairn.models.config_schema import Fields, custom

INNER_EOS = "text_config.eos_token_id"
"""How answers end, as the text model's fields say it."""


def text_config(tied: bool) -> Callable[[Mapping[str, object]], Fields]:
    """A `Family.flatten`: the text model's fields; how answers end is in both places, and whether the output is tied in
    either, `tied` where it is in none. It raises ModelError where there is no text_config."""

    def flatten(raw: Mapping[str, object]) -> Fields:
        text = raw.get("text_config")
        if not isinstance(text, Mapping):
            raise ModelError(
                f"config.json: text_config is missing; {raw.get('model_type')} keeps the text model's fields there"
            )
        inner = Fields(text, path_of="text_config.{}".format)
        beside = {
            "eos_token_id": raw.get("eos_token_id"),
            INNER_EOS: text.get("eos_token_id"),
            "tie_word_embeddings": Fields(raw).boolean(
                "tie_word_embeddings", default=inner.boolean("tie_word_embeddings", default=tied)
            ),
            "vision_config": raw.get("vision_config"),
        }
        return Fields({**text, **beside}, path_of=lambda name: name if name in beside else f"text_config.{name}")

    return flatten


def is_nested() -> Any:
    """A field: whether config.json is that of a model that also sees, whose names its tensors have, too."""
    return custom(lambda fields, name, config: fields.says(INNER_EOS), fact=False)


PREFIXES = ("model", "language_model.model", "model.language_model")
"""Before the names of a text model's tensors: alone, in a published model that also sees, and as transformers writes
one."""


def text_prefix(stored: Collection[str], *, nested: bool) -> str:
    """What stands before the names of the text model's tensors in a checkpoint that has these. `nested`: of a model
    that also sees."""
    prefixes = PREFIXES[1:] if nested else PREFIXES
    return next((each for each in prefixes if f"{each}.embed_tokens.weight" in stored), prefixes[0])


def parts_beside(*names: str) -> tuple[str, ...]:
    """Beginnings of the names of tensors of what a model has beside the text model, as published and as transformers
    writes them."""
    return tuple(f"{prefix}{name}." for prefix in ("", "model.") for name in names)
