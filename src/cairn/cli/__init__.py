"""The command `cairn`, and what its settings mean to the rooms."""

from cairn.cli.command import main
from cairn.cli.run import engine_config, image_options

__all__ = ["engine_config", "image_options", "main"]
