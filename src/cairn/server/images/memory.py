"""How many bytes the images of open requests may have together."""

from cairn.errors import InvalidRequest, Overloaded


class ImageMemory:
    """Counts the bytes of the images of all open requests, as they came and decoded."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self.num_bytes = 0

    def take(self, num_bytes: int) -> None:
        """Raises Overloaded when there is no room; otherwise `give` has to follow."""
        if self.num_bytes + num_bytes > self._max_bytes:
            raise Overloaded(f"the images of open requests have {self.num_bytes} bytes already: try again later")
        self.num_bytes += num_bytes

    def give(self, num_bytes: int) -> None:
        self.num_bytes -= num_bytes


class ImageAllocation:
    """One request's part of an ImageMemory. `client`: who has sent it."""

    def __init__(self, room: ImageMemory, client: str) -> None:
        self.client = client
        self._room = room
        self._num_bytes = 0
        self._num_fetched = 0

    def take_fetched(self, num_bytes: int, max_bytes: int) -> None:
        """More of the images as they come, which may have `max_bytes` together. Raises InvalidRequest, Overloaded."""
        self._num_fetched += num_bytes
        if self._num_fetched > max_bytes:
            raise InvalidRequest("the request's images have more bytes together than one request may have")
        self.take(num_bytes)

    def take(self, num_bytes: int) -> None:
        """Raises Overloaded when the room is full."""
        self._room.take(num_bytes)
        self._num_bytes += num_bytes

    def keep(self, num_bytes: int) -> None:
        """Give back all but these."""
        self._room.give(self._num_bytes - num_bytes)
        self._num_bytes = num_bytes
