"""What is to go wrong in the echoing core."""

import msgspec

from cairn.errors import ConfigError

__all__ = ["Faults"]


class Faults(msgspec.Struct, frozen=True, kw_only=True):
    """What is to go wrong. Steps count from 1; None means never.

    `refuse`, `crash`: building fails, with ModelError or a bug. `build_seconds`: building takes this long.
    `pause_after`: nothing moves while every running answer has that many tokens. `fail_at_step`: the step raises.
    `die_at_step`: the process is killed. `stall_at_step`: the step takes `stall_seconds`. `bad_audit`: `idle` raises.
    `no_lease_room`: while anything is leased, no prompt more may be, and none waits for it.
    """

    refuse: bool = False
    crash: bool = False
    build_seconds: float = 0.0
    pause_after: int | None = None
    fail_at_step: int | None = None
    die_at_step: int | None = None
    stall_at_step: int | None = None
    stall_seconds: float = 0.0
    bad_audit: bool = False
    no_lease_room: bool = False

    @classmethod
    def parse(cls, model: str) -> "Faults":
        """`echo:pause_after=3,bad_audit=true` -> faults. Raises ConfigError."""
        _, _, text = model.partition(":")
        fields = dict(part.partition("=")[::2] for part in text.split(",") if part)
        try:
            return msgspec.convert(fields, cls, strict=False)
        except msgspec.ValidationError as error:
            raise ConfigError(f"the echoing model {model!r} has a fault that cannot be read: {error}") from error
