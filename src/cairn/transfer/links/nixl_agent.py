"""A NIXL agent in the making: the library loaded as late as can be, and UCX told what it has to know.

UCX reads its variables once per process, before the first agent: set UCX_NET_DEVICES (`lo` on one host).
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from cairn.errors import ConfigError

_COPIES = "UCX_CMA_TX_QUOTA"


def start_agent(name: str) -> tuple[Any, tuple[type[Exception], ...]]:
    """The agent, and what NIXL raises. Raises ConfigError when NIXL is not installed or has no UCX here."""
    agent_class, config_class, errors = _load()
    try:
        with _many_copies_a_turn():
            return agent_class(name, config_class(enable_prog_thread=False, backends=["UCX"])), errors
    except errors as error:
        raise ConfigError(f"NIXL cannot start its UCX backend: {error}") from error


@contextmanager
def _many_copies_a_turn() -> Iterator[None]:
    """For an agent in the making. With its default of 1 UCX looks for news on TCP after every descriptor that it copies
    from process to process. Of a variable that it does not need it warns, so only where all transports may be used, and
    not for child processes."""
    if _COPIES in os.environ or "UCX_TLS" in os.environ:
        yield
        return
    os.environ[_COPIES] = "64"
    try:
        yield
    finally:
        del os.environ[_COPIES]


def _load() -> tuple[Any, Any, Any]:
    """(agent class, configuration class, what NIXL raises). Slow, and needs torch: only when a link is made."""
    os.environ.setdefault("NIXL_LOG_LEVEL", "WARN")
    try:
        # An extra without type hints, installed or not. Both names are those of the wheel that fits torch here.
        from nixl import _bindings  # type: ignore[import-not-found,import-untyped,unused-ignore]
        from nixl._api import nixl_agent, nixl_agent_config  # type: ignore[import-not-found,import-untyped,unused-ignore]
    except ImportError as error:
        raise ConfigError(f"--kv-transfer-config needs NIXL: pip install 'cairn-serve[nixl]' ({error})") from error
    errors = tuple(getattr(_bindings, name) for name in dir(_bindings) if name.endswith("Error"))
    return nixl_agent, nixl_agent_config, (*errors, RuntimeError)
