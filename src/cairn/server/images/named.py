"""Files of images that clients have given a name (vLLM's `uuid`), so that they need not send them again."""

import hashlib
from collections import OrderedDict
from typing import TypeAlias

Owner: TypeAlias = tuple[str, str]
"""The client that has sent an image, and the `cache_salt` that it was sent with."""

_ENTRY_BYTES = 512
"""What an entry takes beside its file."""


class NamedImages:
    """The files by owner and name, at most `max_bytes` of them: those that were not used for the longest time go first.
    What has another owner is not found. A name that comes with another file is that file's from then on."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._files: OrderedDict[bytes, bytes] = OrderedDict()
        self.num_bytes = 0

    def put(self, owner: Owner, name: str, file: bytes) -> None:
        key, size = _key(owner, name), len(file) + _ENTRY_BYTES
        self._drop(key)
        if size > self._max_bytes:
            return
        while self.num_bytes + size > self._max_bytes:
            self._drop(next(iter(self._files)))
        self._files[key] = file
        self.num_bytes += size

    def get(self, owner: Owner, name: str) -> bytes | None:
        key = _key(owner, name)
        file = self._files.get(key)
        if file is not None:
            self._files.move_to_end(key)
        return file

    def _drop(self, key: bytes) -> None:
        file = self._files.pop(key, None)
        if file is not None:
            self.num_bytes -= len(file) + _ENTRY_BYTES


def _key(owner: Owner, name: str) -> bytes:
    """As long for every name: clients may take a URL, or a whole data URI."""
    digest = hashlib.sha256()
    for text in (*owner, name):
        encoded = text.encode()
        digest.update(len(encoded).to_bytes(8, "little") + encoded)
    return digest.digest()
