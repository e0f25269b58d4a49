"""Images in messages: found, fetched and decoded, within the bytes that all open requests' may have."""

from cairn.server.images.connector import MediaConnector

__all__ = ["MediaConnector"]
