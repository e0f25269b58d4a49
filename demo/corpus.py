"""Real text: sources of the Python standard library that lies on this machine."""

import sysconfig
from pathlib import Path

from demo.server import DemoError

__all__ = ["Corpus"]

LEAST_CHARACTERS = 24_000


class Corpus:
    """Passages of different source files; the same ones wherever the standard library is the same."""

    def __init__(self, folder: Path | None = None) -> None:
        """Raises DemoError when `folder` holds no long sources."""
        folder = folder or Path(sysconfig.get_paths()["stdlib"])
        # names with an underscore include generated tables, of which some systems keep several copies
        paths = sorted(folder.glob("[!_]*.py"))
        texts = (path.read_bytes().decode("utf-8", errors="ignore") for path in paths)
        self._texts = [text for text in dict.fromkeys(texts) if len(text) >= LEAST_CHARACTERS]
        if not self._texts:
            raise DemoError(f"{folder} holds no Python sources of {LEAST_CHARACTERS} characters to cut prompts from")

    def passage(self, number: int, length: int) -> str:
        """`length` characters (at most LEAST_CHARACTERS) of the file that `number` picks."""
        assert 0 < length <= LEAST_CHARACTERS
        return self._texts[number % len(self._texts)][:length]
