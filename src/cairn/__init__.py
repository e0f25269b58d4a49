"""cairn: a serving engine for hybrid language models whose prefix cache hits at the second sighting."""

__all__ = ["__version__"]

__version__ = "0.1.0"
