"""Images in messages: found, fetched and decoded, within the bytes that all open requests' may have."""

from cairn.server.images.parts import ImageParts, pixels_of

__all__ = ["ImageParts", "pixels_of"]
