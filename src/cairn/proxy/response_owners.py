"""Which decode server has stored which response of /v1/responses."""

from collections import OrderedDict


class ResponseOwners:
    """URLs of servers by the ids of responses. Bounded; the least recently used go first."""

    def __init__(self, max_responses: int) -> None:
        self._max_responses = max_responses
        self._urls: OrderedDict[str, str] = OrderedDict()

    def store(self, response_id: str, url: str) -> None:
        self._urls[response_id] = url
        self._urls.move_to_end(response_id)
        while len(self._urls) > self._max_responses:
            self._urls.popitem(last=False)

    def find(self, response_id: str) -> str | None:
        """None where nothing is known of it."""
        if response_id in self._urls:
            self._urls.move_to_end(response_id)
        return self._urls.get(response_id)
