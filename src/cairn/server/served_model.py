"""The model as clients know it: its names, and its card at `/v1/models`."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from cairn.engine.contract import EngineInfo
from cairn.errors import NotFound


@dataclass(frozen=True, slots=True)
class ServedModel:
    """`names`: at least one, of which answers have the first; `created`: since when it is served, in seconds since
    1970."""

    names: Sequence[str]
    info: EngineInfo
    created: int

    def check_name(self, name: str | None) -> None:
        """Raises NotFound if another model is asked for; without a name, any is meant."""
        if name is not None and name not in self.names:
            raise NotFound(f"the model {name!r} is not served here; {' or '.join(map(repr, self.names))} is", "model")

    def card(self, name: str) -> dict[str, Any]:
        named = {"id": name, "object": "model", "created": self.created, "owned_by": "cairn"}
        return {**named, "root": self.info.model, "parent": None, "max_model_len": self.info.max_model_len}
