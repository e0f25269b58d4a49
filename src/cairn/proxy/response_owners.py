"""Which server has stored which response of /v1/responses."""

from collections import OrderedDict

_MAX_RESPONSES = 1 << 16


class ResponseOwners:
    """Names of servers by the ids of responses. Bounded; the least recently used go first."""

    def __init__(self, max_responses: int = _MAX_RESPONSES) -> None:
        self._max_responses = max_responses
        self._servers: OrderedDict[str, str] = OrderedDict()

    def store(self, response_id: str, server: str) -> None:
        self._servers[response_id] = server
        self._servers.move_to_end(response_id)
        while len(self._servers) > self._max_responses:
            self._servers.popitem(last=False)

    def find(self, response_id: str) -> str | None:
        """None where nothing is known of it."""
        if response_id in self._servers:
            self._servers.move_to_end(response_id)
        return self._servers.get(response_id)
