"""The memory that the images of open requests may take together."""

from cairn.errors import InvalidRequest, Overloaded


class ImageMemory:
    """Counts the bytes of the images of all open requests, as they came and decoded."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self.num_bytes = 0

    def allocate(self, num_bytes: int) -> None:
        """Raises Overloaded if there is no room; otherwise `free` has to follow."""
        if self.num_bytes + num_bytes > self._max_bytes:
            raise Overloaded(f"the images of open requests have {self.num_bytes} bytes already: try again later")
        self.num_bytes += num_bytes

    def free(self, num_bytes: int) -> None:
        self.num_bytes -= num_bytes


class ImageAllocation:
    """One request's part of an ImageMemory. `client`: who sent it."""

    def __init__(self, memory: ImageMemory, client: str) -> None:
        self.client = client
        self._memory = memory
        self._num_bytes = 0
        self._num_fetched = 0

    def allocate_fetched(self, num_bytes: int, max_bytes: int) -> None:
        """For more of the images as they come, of which a request may have `max_bytes`. Raises InvalidRequest,
        Overloaded."""
        self._num_fetched += num_bytes
        if self._num_fetched > max_bytes:
            raise InvalidRequest("the request's images have more bytes together than one request may have")
        self.allocate(num_bytes)

    def allocate(self, num_bytes: int) -> None:
        """Raises Overloaded if the memory is full."""
        self._memory.allocate(num_bytes)
        self._num_bytes += num_bytes

    def split_off(self) -> "ImageAllocation":
        """All that is allocated, as an allocation of its own: for what outlives the request."""
        rest = ImageAllocation(self._memory, self.client)
        rest._num_bytes, self._num_bytes = self._num_bytes, 0
        return rest

    def shrink(self, num_bytes: int) -> None:
        """Free all but these."""
        self._memory.free(self._num_bytes - num_bytes)
        self._num_bytes = num_bytes
