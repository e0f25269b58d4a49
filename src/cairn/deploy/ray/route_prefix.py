"""Paths below an application's route_prefix: the servers behind it have theirs at the root."""

from starlette.types import ASGIApp, Receive, Scope, Send


class RoutePrefix:
    """Takes the prefix, which Ray Serve names as ASGI's root_path and leaves where it is, off the path."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        prefix = scope.get("root_path", "")
        if scope["type"] == "http" and prefix:
            raw = scope.get("raw_path") or scope["path"].encode()
            scope = {
                **scope,
                "root_path": "",
                "path": scope["path"].removeprefix(prefix) or "/",
                "raw_path": raw.removeprefix(prefix.encode()) or b"/",
            }
        await self._app(scope, receive, send)
