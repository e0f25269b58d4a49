"""`python -m cairn` is `cairn`."""

import sys

from cairn.cli import main

__all__: list[str] = []

if __name__ == "__main__":
    sys.exit(main())
