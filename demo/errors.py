"""What can go wrong in the demo itself, as opposed to a promise that was not kept."""

__all__ = ["DemoError"]


class DemoError(Exception):
    """The demo cannot go on: a server did not start or refused a request, or sources are missing."""
