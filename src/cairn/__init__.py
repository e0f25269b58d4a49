"""cairn: a serving engine for hybrid language models whose prefix cache hits at the second sighting."""

import os

from cairn.cpu_isa import limit_libraries

__all__ = ["__version__"]

__version__ = "0.1.0"

# Before torch and its libraries read them.
limit_libraries(os.environ)
