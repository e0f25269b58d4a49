"""What the log says of requests that are answered otherwise than their clients may think: each thing once."""

import logging

_MAX_SAID = 256

logger = logging.getLogger(__name__)


class Notices:
    """Requests come by the thousand, and a client may think of any number of things: at most 256 lines are said."""

    def __init__(self) -> None:
        self._said: set[str] = set()

    def say(self, text: str) -> None:
        """Log a line unless it has been logged."""
        if text not in self._said and len(self._said) < _MAX_SAID:
            self._said.add(text)
            logger.info(text)
