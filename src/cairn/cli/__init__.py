"""The command `cairn`, and what its settings mean to the rooms."""

from cairn.cli.command import main
from cairn.cli.configure import engine_config, proxy_options, server_options

__all__ = ["engine_config", "main", "proxy_options", "server_options"]
